"""Ranks that train together: what they wrap around the model, what they do as one process does, what they refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.forked import as_rank
from support.servers import free_port
from torch.testing._internal.distributed.fake_pg import FakeStore

from twell.workbench.errors import UserError
from twell.workbench.options import TrainOptions
from twell.workbench.run.store import open_run
from twell.workbench.training.checkpoint import TrainingState
from twell.workbench.training.command import train
from twell.workbench.training.corpus import Corpus
from twell.workbench.training.folder import TrainingFolder
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.ranks import TrainingRanks
from twell.workbench.training.recipes import Recipe
from twell.workbench.training.sparse_llama import Objective, build

CPU = torch.device("cpu")


def test_a_compiled_layer_stays_whole_though_gradients_are_sent_in_buckets(tiny_recipe: Recipe) -> None:
    """Cut in two, as dynamo does where a bucket ends, each piece keeps its inputs for the backward pass."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = build(dataclasses.replace(tiny_recipe, d_ff=2**14), 0, torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        wrapped = TrainingRanks(0, 2).wrap(Objective(model, compiled=True, backend=backend))
        wrapped(torch.zeros(1, 9, dtype=torch.int64))
    finally:
        dist.destroy_process_group()
    assert len(graphs) == 2, "a layer, whose code all share, and the head"


@pytest.fixture(scope="module")
def one(text: Path, tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """Train 30 steps in a single process; return the options."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "tiny.json").write_text(json.dumps(tiny_recipe.as_dict() | {"steps": 30, "restart_every": 10}))
    options = TrainOptions(
        config=str(folder / "tiny.json"), text=(str(text),), out=folder / "one", device="cpu",
        prepared=folder / "prepared",
    )  # fmt: skip
    train(options)
    return options


@pytest.fixture(scope="module")
def begun(one: TrainOptions) -> TrainOptions:
    """Train in a single process until the first checkpoint; return the options."""
    options = dataclasses.replace(one, out=one.out.parent / "begun", checkpoint_minutes=0.0)
    save = TrainingFolder.save

    def save_and_stop(self: TrainingFolder, state: TrainingState) -> None:
        save(self, state)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingFolder, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(options)
    return options


def in_two_ranks(folder: Path, *given: tuple[TrainOptions, int]) -> tuple[list[int | None], list[str]]:
    """Train with two processes, each by its options until a step; return exit codes and what each said on its end."""
    port = free_port()
    errors = [folder / f"error-{port}-{rank}" for rank in range(2)]
    processes = [as_rank(train_until, rank, port, *given[rank], errors[rank]) for rank in range(2)]
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes], [path.read_text() if path.exists() else "" for path in errors]


def train_until(options: TrainOptions, until: int, error_file: Path) -> None:
    """Train, but be killed once a step is done; write an error to a file, and exit with 2."""
    step = TrainingLoop.one_step

    def one_step(training: TrainingLoop) -> None:
        if training.state.step == until:
            os.kill(os.getpid(), signal.SIGKILL)
        step(training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "one_step", one_step)
        try:
            train(options)
        except Exception as error:
            error_file.write_text(f"{type(error).__name__}: {error}")
            sys.exit(2)


def assert_same_log(out: Path, expected: Path) -> None:
    log, expected = (open_run(path).frame("training") for path in (out, expected))
    assert len(log) == len(expected) == 3
    for name in ("step", "tokens", "loss", "l1", "gradient_norm", "nnz_00", "nnz_01"):
        assert log[name].tolist() == pytest.approx(expected[name].tolist(), rel=2e-3), name


def test_two_ranks_train_what_one_does(one: TrainOptions) -> None:
    """Losses and counts by step are equal up to rounding; the folder is written once, and is a run."""
    two = dataclasses.replace(one, out=one.out.parent / "two")
    assert in_two_ranks(one.out.parent, (two, -1), (two, -1)) == ([0, 0], ["", ""])
    assert_same_log(two.out, one.out)


def test_a_training_goes_on_divided_over_ranks_and_back(one: TrainOptions, begun: TrainOptions) -> None:
    """Begun by one process; two divide its weights until one of them is killed; then they end it, as does one alone."""
    folder = one.out.parent
    first = dataclasses.replace(begun, out=folder / "divided")
    shutil.copytree(begun.out, first.out)
    sharded = dataclasses.replace(first, shard=True)
    codes, errors = in_two_ranks(folder, (sharded, -1), (sharded, 25))
    assert codes == [2, -signal.SIGKILL]
    assert errors[0].startswith("UserError: Expected 2 ranks to train, rank 1 died: give the same command again")
    shutil.copytree(first.out, folder / "back")
    assert in_two_ranks(folder, (sharded, -1), (sharded, -1)) == ([0, 0], ["", ""])
    back = dataclasses.replace(first, out=folder / "back")
    train(back)
    expected = load_file(one.out / "model.safetensors")
    for out in (first.out, back.out):
        assert_same_log(out, one.out)
        weights = load_file(out / "model.safetensors")
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"rows": 7}, {"rows": 7}, "Expected rows that divide into 2 ranks of 1 micro-batches, got 7"),
        ({"rows": 8}, {"rows": 16}, ".*, got --rows 8 in rank 0 and --rows 16 in rank 1: let"),
        ({}, {"prepared": "elsewhere", "text": "other.txt"}, r".*same corpus in all ranks, got --text \w+\.txt \("),
        ({"out": "begun"}, {}, r".*same checkpoint in all ranks, got step \d+ in rank 0 and"),
    ],
    ids=["rows", "recipes", "texts", "checkpoints"],
)
def test_what_ranks_cannot_do_is_said_once(
    one: TrainOptions, begun: TrainOptions, text: Path, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    """The last two as on two hosts with files of their own: another text, and a checkpoint that one of them lacks."""
    folder = one.out.parent
    (folder / "other.txt").write_text(text.read_text().upper())
    given = []
    for changes in (first, second):
        paths = {name: folder / value for name, value in changes.items() if name in ("out", "prepared")}
        texts = {"text": (str(folder / changes["text"]),)} if "text" in changes else {}
        given.append((dataclasses.replace(one, **{"out": folder / "refused", **changes, **paths, **texts}), -1))
    codes, errors = in_two_ranks(folder, *given)
    assert sorted(map(str, codes)) == ["0", "2"]
    assert "" in errors and re.match(f"UserError: {message}", max(errors)), errors
    assert not (folder / "refused" / "run.json").exists()


def test_a_rank_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    store = torch.distributed.HashStore()
    store.set("rank/1", "0 1 host")
    with pytest.raises(UserError, match="Expected a GPU for each of 2 ranks, got none for rank 1: launch fewer"):
        TrainingRanks(0, 2, store=store).join("auto")


def test_rows_that_ranks_cannot_share_are_refused(corpus: Corpus, tiny_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="Expected rows that divide into 3 ranks of 1 micro-batches, got 8"):
        TrainingLoop(tiny_recipe, corpus, CPU, compiled=False, ranks=TrainingRanks(0, 3))


def test_a_single_process_has_nothing_to_divide(one: TrainOptions) -> None:
    with pytest.raises(UserError, match="Expected several processes for --shard, got one: launch with torchrun"):
        train(dataclasses.replace(one, out=one.out.parent / "alone", shard=True))
