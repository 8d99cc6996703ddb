"""TwellCallback in Hugging Face's Trainer: its numbers are counts taken by hand, and training computes what it did."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.watched import first_map
from transformers import Trainer, TrainerCallback, TrainingArguments

from twell.analysis.training import training_layers, training_steps
from twell.workbench import TwellCallback, capture, open_run, watch
from twell.workbench.errors import UserError

pytest.importorskip("accelerate")

STEPS, EVERY = 6, 2
SLOW = 0.5  # seconds that a reporter's evaluation takes at least


class Reporter(TrainerCallback):
    """What sends logs elsewhere: it stands before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(SLOW)


class Stop(TrainerCallback):
    """Ends a training after a step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer_of(
    model: Any, folder: Path, *callbacks: TrainerCallback, padding: int | None = None, save_steps: int | None = None
) -> Trainer:
    """Return a trainer of STEPS steps of two sequences, which logs every EVERY steps and evaluates in between.

    padding: how many columns at the end of each sequence are padding, by an attention mask; None: no mask
    """
    rows = torch.randint(3, 319, (STEPS * 2, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    if padding is not None:
        data = [{**one, "attention_mask": (torch.arange(12) < 12 - padding).long()} for one in data]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=EVERY,
        save_strategy="no" if save_steps is None else "steps", save_steps=save_steps or 500,
        eval_strategy="steps", eval_steps=3, report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    return Trainer(model, args, train_dataset=data, eval_dataset=data[:2], callbacks=list(callbacks))


@pytest.fixture
def trained(tiny: Path, load_object: Callable[..., Any], tmp_path: Path) -> tuple[Any, list[torch.Tensor]]:
    """Train a model without the callback; return it and its gates' firings by hooks, [step][layer] bool [n, d_ff]."""
    model = load_object(tiny, torch.float32)
    fired: list[torch.Tensor] = []
    for layer in model.model.layers:
        first_map(layer).register_forward_hook(
            lambda _m, _x, gate: fired.append((gate.detach() > 0)[:, 1:].flatten(0, 1)) if gate.requires_grad else None
        )
    trainer_of(model, tmp_path / "plain").train()
    return model, fired


def test_its_numbers(
    trained: tuple[Any, list[torch.Tensor]], tiny: Path, load_object: Callable[..., Any], tmp_path: Path
) -> None:
    """In the logs, those of callbacks that stand before it included, and in the run; weights are trained alike."""
    plain, fired = trained
    model, reporter = load_object(tiny, torch.float32), Reporter()
    before = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
    trainer_of(model, tmp_path / "ours", reporter, TwellCallback(every=1, out=tmp_path / "run")).train()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert before == [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
    logged = [logs for logs in reporter.logs if "twell/nnz" in logs]
    assert len(logged) == STEPS // EVERY
    for number, logs in enumerate(logged):
        for layer in range(3):
            steps = [fired[step * 3 + layer] for step in range(number * EVERY, (number + 1) * EVERY)]
            both = torch.cat(steps)
            assert logs[f"twell/nnz/layer_{layer:02}"] == pytest.approx(float(both.sum(1).double().mean()))
            assert logs[f"twell/dead/layer_{layer:02}"] == pytest.approx(float((~both.any(0)).double().mean()))
    run = open_run(tmp_path / "run")
    assert run.manifest.status == "complete"
    steps, layers = training_steps(run), training_layers(run)
    assert steps["step"].tolist() == [2, 4, 6]
    assert steps["tokens"].tolist() == [48, 96, 144]  # of 12 each; the evaluation after step 3 is no training
    assert steps["tokens_per_second"][1] > 48 / SLOW
    np.testing.assert_allclose(steps["loss"], [logs["loss"] for logs in logged])
    after_3, after_6 = (logs["eval_loss"] for logs in reporter.logs if "eval_loss" in logs)
    np.testing.assert_allclose(steps["heldout_loss"].astype(float), [after_3, np.nan, after_6])
    np.testing.assert_allclose(
        layers["nnz"][layers["step"] == 6], [logged[-1][f"twell/nnz/layer_{n:02}"] for n in range(3)]
    )


def test_a_step_in_several(tiny: Path, load_object: Callable[..., Any], tmp_path: Path) -> None:
    """Of one step in three the tokens are counted; no evaluation is, and a training that raises can be closed."""
    model, reporter = load_object(tiny, torch.float32), Reporter()
    before = [(name, id(p), p.data_ptr(), p.stride()) for name, p in model.named_parameters()]
    callback = TwellCallback(every=3)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, tmp_path, reporter, callback, Stop(5)).train()
    assert [logs["twell/tokens"] for logs in reporter.logs if "twell/tokens" in logs] == [2 * 11, 2 * 11]
    callback.close()
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert before == [(name, id(p), p.data_ptr(), p.stride()) for name, p in model.named_parameters()]


@pytest.mark.parametrize("padding", [0, 5])
def test_padding_is_no_token(tiny: Path, load_object: Callable[..., Any], tmp_path: Path, padding: int) -> None:
    """Neither among the tokens trained on, nor among those counted, whose first of each sequence are not."""
    reporter = Reporter()
    callbacks = (reporter, TwellCallback(every=1, out=tmp_path / "run"))
    trainer_of(load_object(tiny, torch.float32), tmp_path, *callbacks, padding=padding).train()
    each = 12 - padding
    assert training_steps(open_run(tmp_path / "run"))["tokens"].tolist() == [4 * each, 8 * each, 12 * each]
    assert [logs["twell/tokens"] for logs in reporter.logs if "twell/tokens" in logs] == [4 * (each - 1)] * 3


def test_every_log_has_its_row(tiny: Path, load_object: Callable[..., Any], tmp_path: Path) -> None:
    """Also where no step would be counted between two logs: the last one before the log is."""
    reporter = Reporter()
    trainer_of(
        load_object(tiny, torch.float32), tmp_path, reporter, TwellCallback(every=5, out=tmp_path / "run")
    ).train()
    steps = training_steps(open_run(tmp_path / "run"))
    assert steps["step"].tolist() == [2, 4, 6] and steps["nnz"].notna().all()
    assert steps["tokens"].tolist() == [48, 96, 144]
    assert [logs["twell/tokens"] for logs in reporter.logs if "twell/tokens" in logs] == [2 * 11] * 3


@pytest.mark.parametrize("save_steps", [2, 3])
def test_a_resumed_training_goes_on_in_its_run(
    tiny: Path, load_object: Callable[..., Any], tmp_path: Path, save_steps: int
) -> None:
    """From a checkpoint that a log's row belongs to, or from one between two: as if it had never stopped."""

    def trainer(folder: str, *others: TrainerCallback) -> Trainer:
        callback = TwellCallback(every=1, out=tmp_path / f"{folder}-run")
        model = load_object(tiny, torch.float32)
        return trainer_of(model, tmp_path / folder, callback, *others, save_steps=save_steps)

    trainer("whole").train()
    with pytest.raises(KeyboardInterrupt):
        trainer("stopped", Stop(5)).train()
    gc.collect()  # the callback gives the folder back
    before = training_steps(open_run(tmp_path / "stopped-run"))["seconds"]
    trainer("stopped").train(resume_from_checkpoint=str(tmp_path / f"stopped/checkpoint-{4 if save_steps == 2 else 3}"))
    whole, resumed = (open_run(tmp_path / f"{name}-run") for name in ("whole", "stopped"))
    assert resumed.manifest.status == "complete"
    steps, expected = training_steps(resumed), training_steps(whole)
    assert steps["step"].tolist() == [2, 4, 6] and steps["tokens"].tolist() == [48, 96, 144]
    assert steps["seconds"].is_monotonic_increasing and steps["seconds"][0] == before[0]
    alike = [0, 1, 2] if save_steps == 2 else [0, 2]  # the row of step 4 is of what came after the checkpoint alone
    np.testing.assert_allclose(steps["nnz"][alike], expected["nnz"][alike])
    with pytest.raises(UserError, match="already holds a run"):
        trainer("stopped").train()


def test_a_training_of_another_model_is_not_gone_on_with(small: Any, tiny: Path, tmp_path: Path) -> None:
    state = SimpleNamespace(is_world_process_zero=True, global_step=4)
    callback = TwellCallback(out=tmp_path / "run")
    callback.on_train_begin(None, SimpleNamespace(**vars(state) | {"global_step": 0}), None, model=small)
    callback.close()
    other = type(small)(type(small.config)(**{**small.config.to_dict(), "intermediate_size": 40}))
    with pytest.raises(UserError, match=r"Expected the model of .*, got .* of 40: choose another folder"):
        TwellCallback(out=tmp_path / "run").on_train_begin(None, state, None, model=other)
    assert not any(module._forward_hooks for module in other.modules())
    callback.on_train_begin(None, state, None, model=small)  # its own it goes on with
    callback.close()


def test_a_trainer_that_looks_for_a_batch_that_fits_begins_anew(small: Any, tmp_path: Path) -> None:
    """It calls `on_train_begin` again after running out of memory; no other training may take the folder."""
    state, callback = SimpleNamespace(is_world_process_zero=True, global_step=0), TwellCallback(out=tmp_path / "run")
    looks, other = (SimpleNamespace(auto_find_batch_size=finds) for finds in (True, False))
    callback.on_train_begin(looks, state, None, model=small)
    callback.on_train_begin(looks, state, None, model=small)
    with pytest.raises(UserError, match="already holds a run"):
        callback.on_train_begin(other, state, None, model=small)
    with pytest.raises(UserError, match="already holds a run"):
        TwellCallback(out=tmp_path / "run").on_train_begin(looks, state, None, model=small)


def test_one_process_writes_the_run(small: Any, tmp_path: Path) -> None:
    for is_first in (False, True):
        callback = TwellCallback(out=tmp_path / "run")
        state = SimpleNamespace(is_world_process_zero=is_first, global_step=0)
        callback.on_train_begin(None, state, None, model=small)
        assert (tmp_path / "run").exists() is is_first
        callback.close()


def test_a_refused_callback_leaves_nothing_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls `__del__` of an object whose arguments were refused, and prints what that raises."""
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    with pytest.raises(UserError, match="every= of at least 1 step, got 0"):
        TwellCallback(every=0)
    for door in (TwellCallback, partial(watch, None), partial(capture, None, ["a text"])):
        with pytest.raises(UserError, match=r"^Expected a folder for out=, got 3: give its path, as 'runs/mine'\.$"):
            door(out=3)
    gc.collect()
    assert not raised


def test_copies_of_the_model(tiny: Path, load_object: Callable[..., Any], tmp_path: Path) -> None:
    """As an average of the weights takes them, at whatever point of a step, counted or not: they are no part of it."""

    class Average(TrainerCallback):
        def __init__(self) -> None:
            self.copies: list[Any] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.copies.append(deepcopy(model))

        on_step_end = on_pre_optimizer_step = on_step_begin

    model, average = load_object(tiny, torch.float32), Average()
    trainer_of(model, tmp_path, TwellCallback(every=2), average).train()
    assert len(average.copies) == 3 * STEPS
    for copied in average.copies:
        for module in copied.modules():
            assert not {"forward", "generate", "__deepcopy__"} & set(vars(module))
            assert not module._forward_hooks and not module._forward_pre_hooks
