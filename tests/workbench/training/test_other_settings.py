"""What is said to a command that would go on with a training as it did not begin: the first difference, as options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from twell.workbench.errors import UserError
from twell.workbench.training.folder import TrainingFolder
from twell.workbench.training.recipes import RECIPES

BEGAN = RECIPES["demo"].override(steps=40)
MODEL = {"name": "silu", "weights": "0123456789abcdef", "activation": "silu"}


def recipe(**changes: Any) -> dict[str, Any]:
    return {"recipe": dataclasses.replace(BEGAN, **changes).as_dict()}


def text(name: str, sha256: str = "0123456789abcdef") -> dict[str, Any]:
    return {"corpus": {"vocab": 300, "sources": [{"source": name, "sha256": sha256}]}}


@pytest.mark.parametrize(
    ("began", "given", "expected", "got"),
    [
        (recipe(), recipe(steps=60), "--steps 40", "--steps 60"),
        (recipe(), recipe(steps=None, minutes=3.0), "--steps 40", "--minutes 3.0"),
        (recipe(), recipe(steps=None, tokens=330_000_000), "--steps 40", "--tokens 330000000"),
        (recipe(), recipe(rate=1e-4), "--rate 0.003", "--rate 0.0001"),
        (recipe(), recipe(name="mine"), "--config demo", "--config mine"),
        (recipe(), recipe(d_ff=512), "--config with d_ff 768", "--config with d_ff 512"),
        (recipe(), recipe(warmup_share=0.1), "--config with warmup_share None", "--config with warmup_share 0.1"),
        ({"holdout": 0.02}, {"holdout": 0.5}, "--holdout 0.02", "--holdout 0.5"),
        ({"origin": MODEL}, {"origin": {}}, "--from silu", "no --from"),
        ({"origin": MODEL}, {"origin": MODEL | {"name": "relu"}}, "--from silu", "--from relu"),
        (
            {"teacher": MODEL},
            {"teacher": MODEL | {"weights": "fedcba9876543210"}},
            "--teacher silu with weights 01234567",
            "--teacher silu with weights fedcba98",
        ),
        (
            text("a.txt"),
            text("a.txt", "fedcba9876543210"),
            "--text a.txt (sha256 01234567)",
            "--text a.txt (sha256 fedcba98)",
        ),
    ],
)
def test_other_settings(tmp_path: Path, began: dict[str, Any], given: dict[str, Any], expected: str, got: str) -> None:
    TrainingFolder(tmp_path / "out").claim(**began)
    with pytest.raises(UserError) as error:
        TrainingFolder(tmp_path / "out").claim(**given)
    assert str(error.value) == (
        f"Expected {expected}, with which the training in {tmp_path / 'out'} began, got {got}: give what it began "
        "with, or name another --out."
    )
