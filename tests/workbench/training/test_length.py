"""How long a training lasts: minutes, steps that suit a CPU, rows of a short log, and one that is stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twell.workbench.capturing.progress import time_left
from twell.workbench.options import TrainOptions
from twell.workbench.run.store import open_run
from twell.workbench.training import log as logs
from twell.workbench.training.command import _for_device, train
from twell.workbench.training.folder import TrainingFolder
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.optimizer import Clock, rate_factor
from twell.workbench.training.recipes import RECIPES, Recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STEP = TrainingLoop.one_step


@pytest.fixture
def given(tmp_path: Path, text: Path, tiny_recipe: Recipe) -> TrainOptions:
    """Return the options of a training of 20 steps that a log row of 100 steps is no curve for."""
    recipe = dataclasses.replace(tiny_recipe, steps=20, log_every=100)
    (tmp_path / "short.json").write_text(json.dumps(recipe.as_dict()))
    return TrainOptions(
        config=str(tmp_path / "short.json"), text=(str(text),), out=tmp_path / "out", device="cpu",
        prepared=tmp_path / "corpus", holdout=0.1,
    )  # fmt: skip


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in open_run(folder).arrow("training").to_pylist()]


@pytest.mark.alone
def test_slow_steps_keep_to_the_minutes_and_are_told(
    given: TrainOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TrainingLoop, "one_step", lambda self: (STEP(self), time.sleep(0.3)))
    monkeypatch.setattr(logs, "FIRST_LINE", 0.5)
    train(dataclasses.replace(given, minutes=0.03))
    rows = open_run(given.out).arrow("training").to_pylist()
    assert 2 <= len(rows) == rows[-1]["step"] == rows[-1]["total_steps"] <= 7
    assert 1.0 < rows[-1]["seconds"] < 2.6  # of 1.8, and a step's
    assert re.search(r"step \d of \d · about [01] s left · loss .* tokens/s\n", capsys.readouterr().out)


def planned(seconds_a_step: float, steps: int, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return the number of steps in all that a GPU's clock gives after each step."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock, total, totals = Clock(recipe, CUDA, lambda value: value), None, []
    for step in range(1, steps + 1):
        now[0] += seconds_a_step
        total = clock.plan(step, total, step % recipe.log_every == 0)
        totals.append(total)
    return totals


def test_a_gpu_is_measured_at_some_steps_and_before_them_only_if_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["demo"].override(minutes=1.0)
    totals = planned(0.25, 100, recipe, monkeypatch)
    assert totals == [None] * 29 + [240] * 71
    totals = planned(5.0, 12, recipe, monkeypatch)
    assert totals == [None] * 3 + [12] * 9
    assert planned(5.0, 40, RECIPES["demo"], monkeypatch) == [None] * 40


def test_a_short_log_is_a_curve_and_a_long_one_has_the_recipe_s_rows() -> None:
    demo = RECIPES["demo"]
    assert [demo.row_every(total) for total in (None, 10_000, 600, 599, 40, 5)] == [100, 100, 100, 29, 2, 1]
    assert dataclasses.replace(demo, restart_every=100).row_every(40) == 100


@pytest.mark.parametrize(("device", "steps"), [(CPU, [1, 27, 30]), (CUDA, [*range(1, 31)])])
def test_held_out_losses_of_a_number_of_steps_take_a_tenth_of_a_cpu_by_tokens(
    device: torch.device, steps: list[int]
) -> None:
    """The first and the last aside. A step is of 2 048 tokens, a loss of 16 384 at a third of a step's cost."""
    recipe = RECIPES["demo"].override(steps=30).on_cpu(1)
    loop: Any = SimpleNamespace(recipe=recipe, device=device, corpus=SimpleNamespace(heldout=range(10**6)))
    evaluated: list[int] = []
    for step in range(1, 31):
        loop.state = SimpleNamespace(step=step, total=30)
        if TrainingLoop._has_time_to_evaluate(loop, len(evaluated)):
            evaluated.append(step)
    assert evaluated == steps


def test_steps_are_small_on_a_cpu_unless_told_or_begun(
    tmp_path: Path, given: TrainOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    demo, options = RECIPES["demo"], dataclasses.replace(given, config="demo")

    def rows(device: torch.device, wanted: TrainOptions = options) -> tuple[int, int]:
        recipe = _for_device(demo, wanted, device, 1, TrainingFolder(wanted.out))
        return recipe.rows, recipe.log_every

    assert rows(CPU) == (4, 10)
    assert "4 rows in place of 64, so that it takes seconds; --rows 64 trains as" in capsys.readouterr().out
    assert rows(CUDA) == rows(CPU, dataclasses.replace(options, rows=64)) == rows(CPU, given) == (64, 100)
    for begun, expected in ((64, (64, 100)), (4, (4, 10))):  # where it goes on, it does as it began
        given.out.mkdir(exist_ok=True)
        (given.out / "training.json").write_text(json.dumps({"recipe": {"rows": begun}}))
        assert rows(CPU) == rows(CUDA) == expected
        assert _for_device(demo, options, CPU, 1, TrainingFolder(given.out)).warmup_share is None


def test_the_rate_comes_to_its_peak_in_a_short_training_of_a_cpu_and_is_else_the_recipe_s() -> None:
    demo = RECIPES["demo"]
    small = demo.on_cpu(1)
    assert [rate_factor(small, step, 20) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rate_factor(small, 0, 1) == rate_factor(small, 0, 3) == 1
    for recipe, total in ((small, 1000), (small, 5000), (small, None), (demo, 20), (demo, 1000)):
        for step in (0, 10):
            assert rate_factor(recipe, step, total) == (step + 1) / 200


def test_a_stopped_training_keeps_its_last_step(
    given: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare, compared = TrainingLoop.compare, []

    def noted(self: TrainingLoop) -> Any:
        compared.append(self.state.step)
        return compare(self)

    def stopped_at_13(self: TrainingLoop) -> None:
        if self.state.step == 12:
            os.kill(os.getpid(), signal.SIGINT)
        STEP(self)

    given = dataclasses.replace(given, steps=130)
    whole = train(dataclasses.replace(given, out=tmp_path / "whole"))
    monkeypatch.setattr(TrainingLoop, "one_step", stopped_at_13)
    monkeypatch.setattr(TrainingLoop, "compare", noted)
    with pytest.raises(KeyboardInterrupt):
        train(given)
    monkeypatch.undo()
    assert open_run(given.out).manifest.status == "interrupted"
    assert steps_of(given.out) == [6, 12, 13]
    assert compared == [6, 12], "who stops a training waits for no measurement"
    assert "out was interrupted and keeps 13 steps: give the same command again to go on" in capsys.readouterr().err
    train(given)
    assert f"Continuing {given.out} from step 13." in capsys.readouterr().out
    assert steps_of(given.out) == sorted({*steps_of(whole), 13})
    assert (given.out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0 s"), (7199, "7,199 s"), (7200, "2 hours"), (172_799, "48 hours"), (844_368, "10 days")],
)
def test_what_is_left_is_told_in_a_unit_that_fits(seconds: float, said: str) -> None:
    assert time_left(seconds) == f"about {said} left"
