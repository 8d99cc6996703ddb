"""Data and Code of every figure and table, on every page: what Code makes in a notebook is what Data holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.copied_runs import copy_run

from twell.analysis import by_token
from twell.analysis.exports.pages import RECORDED
from twell.workbench.run.store import open_run
from twell.workbench.run.summary_only import copy_without_activity

Show = Callable[..., AppTest]
Notebook = Callable[[str], pd.DataFrame]
# An address, and the figures and tables that stand there, by the keys of their Data.
PAGES: tuple[tuple[str, dict[str, str], tuple[str, ...]], ...] = (
    ("overview", {}, ("layer-by-layer",)),
    ("text", {"sequence": "3"}, ("passage", "highest-values-in-the-run")),
    ("text", {"sequence": "2", "shade": "surprisal"}, ("passage", "highest-values-in-the-run")),
    ("text", {"shade": "L1", "from": "20"}, ("passage", "highest-values-in-the-run")),
    ("text", {"neuron": "L1/N3"}, ("passage", "highest-values-in-the-run")),
    (
        "tokens",
        {"view": "tokens"},
        (
            "ranked",
            "most-and-least-active-tokens",
            "every-token",
            "how-much-the-token-itself-decides",
            "what-the-z-of-a-token-goes-with",
        ),
    ),
    (
        "tokens",
        {"view": "tokens", "find": "ING", "least": "5"},
        ("ranked", "most-and-least-active-tokens", "every-token"),
    ),
    ("tokens", {"view": "tokens", "rank": "z_position"}, ("ranked", "most-and-least-active-tokens", "every-token")),
    ("tokens", {"view": "words", "find": "e", "least": "3"}, ("ranked", "most-and-least-active-words", "every-word")),
    ("tokens", {"view": "classes"}, ("classes-of-tokens",)),
    (
        "token",
        {"token": "{token}", "order": "quietest"},
        ("over-the-layers", "neurons-with-an-example-at-this-token", "in-the-text"),
    ),
    (
        "layers",
        {},
        (
            "activity-by-layer",
            "activity-and-surprise",
            "activity-and-surprise-within-tokens",
            "layers-that-are-busy-on-the-same-tokens",
            "activity-by-source-of-the-text",
        ),
    ),
    ("layers", {"of": "own"}, ("activity-by-layer", "activity-and-surprise")),
    (
        "positions",
        {},
        (
            "mean-nnz-by-position,-relative-to-the-layer's-mean",
            "how-fast-it-falls-off",
            "position-0-against-later-positions",
        ),
    ),
    (
        "positions",
        {"run": "benched"},
        ("firings-in-common-with-earlier-tokens", "what-a-cache-of-neurons-would-serve"),
    ),
    ("neurons", {}, ("density-by-layer", "selective-and-strong")),
    ("neurons", {"kind": "rare", "layer": "L2"}, ("density-by-layer", "rarest")),
    ("neurons", {"kind": "strong"}, ("density-by-layer", "strongest")),
    ("neurons", {"run": "benched", "kind": "one"}, ("density-by-layer", "one-token-only")),
    ("neurons", {"kind": "dead"}, ("density-by-layer", "dead-neurons")),
    (
        "neuron",
        {"neuron": "L1/N3"},
        ("rank-in-its-layer", "values-when-it-fires", "direct-effect-on-the-logits", "in-the-text"),
    ),
    ("kernels", {}, ("time-by-layer", "speedup-and-activity", "where-the-time-goes", "tile-audit")),
    ("kernels", {"run": "recorded"}, ("measured-side-by-side", "where-it-breaks-even", "over-the-capture")),
    ("kernels", {"run": "benched", "layer": "L2"}, ("over-the-capture", "fastest-safe-compression")),
    ("neuron", {"run": "benched", "neuron": "L1/N5"}, ("rank-in-its-layer", "values-when-it-fires", "in-the-text")),
    ("findings", {}, ("claims", "what-sparsity-costs,-and-what-it-gains", "every-training-of-the-studies")),
    (
        "compare",
        {"with": "other"},
        (
            "loss,-nnz-and-speed",
            "layer-by-layer",
            "the-difference-by-layer",
            "the-ratio-by-position",
            "tokens-with-the-largest-difference",
        ),
    ),
    ("export", {"table": "by_position"}, ("by_position",)),
)


def below(block: Any, kind: str) -> Iterator[Any]:
    """Every element or block of a kind under a block."""
    for child in block.children.values():
        if child.type == kind:
            yield child
        if hasattr(child, "children"):
            yield from below(child, kind)


def figures(block: Any) -> Iterator[tuple[str, Any, str]]:
    """Of each figure below a block: its key, its Data (None while it is shut) and its Code."""
    popovers = {}
    for child in getattr(block, "children", {}).values():
        key = re.fullmatch(r"\$\$ID-[0-9a-f]+-(.+)-(data|code)", child.proto.id) if child.type == "popover" else None
        if key is None:
            yield from figures(child)
        else:
            popovers[key[2]] = child, key[1]
    if popovers:
        (data, key), (code, same) = popovers["data"], popovers["code"]
        assert key == same
        tables = [table.value for table in below(data, "dataframe")]
        (lines,) = below(code, "code")
        yield key, tables[0] if tables else None, lines.value


@pytest.fixture(scope="module")
def every(demo: Path, made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the demo run and of its copy without single tokens, of the package's recorded run, and of a made one
    with a bench of several compressions and with what some tokens fired."""
    recorded = Path(str(resources.files("twell.data"))) / "recorded" / RECORDED
    folder = tmp_path_factory.mktemp("every")
    copy_run(demo, folder / "demo")
    copy_run(recorded, folder / "recorded")
    copy_without_activity(open_run(demo).path, folder / "other")
    made.make(folder / "benched", layers=5, sequences=60, fired=True, bench=True)
    return folder


@pytest.mark.parametrize(("page", "address", "keys"), PAGES)
def test_code_makes_what_data_holds(
    show: Show, notebook: Notebook, every: Path, page: str, address: dict[str, str], keys: tuple[str, ...]
) -> None:
    token = str(by_token(open_run(every / "demo"))["token_id"].iloc[0])
    given = {name: value.format(token=token) for name, value in address.items()}
    test = show(every, page, **{"run": "demo", **given})
    there = [key for key, *_ in figures(test.main)]
    assert set(keys) <= set(there)
    for key in there:
        test.session_state[f"{key}-data"] = True
    test.run()
    assert not test.exception
    opened = list(figures(test.main))
    assert [key for key, *_ in opened] == there
    for key, data, code in opened:
        assert data is not None, key
        assert len(data) or key == "answers", key  # L1/N3 answers to nothing that stands out
        pd.testing.assert_frame_equal(
            notebook(code).reset_index(drop=True), data, check_dtype=False, check_column_type=False, obj=key
        )
