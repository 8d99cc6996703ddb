"""What a training run leaves behind: the model, its log and card; a killed run, and what is refused. Cost: 40 s."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from support.durable import Durable
from support.forked import start
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from twell.workbench.errors import UserError
from twell.workbench.options import TrainOptions
from twell.workbench.run.schema import TRAINING, expand
from twell.workbench.run.store import open_run
from twell.workbench.training.command import train
from twell.workbench.training.corpus import in_order
from twell.workbench.training.folder import TrainingFolder
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.recipes import Recipe


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Recipe) -> Path:
    """Make a folder with a text of 400 KB and the tiny recipe, for the runs."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "topics.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    (folder / "tiny.json").write_text(json.dumps(tiny_recipe.as_dict()))
    return folder


def options(home: Path, out: str, **changes: object) -> TrainOptions:
    given = TrainOptions(
        config=str(home / "tiny.json"),
        text=(str(home / "topics.txt"),),
        out=home / out,
        licences="Python Software Foundation License",
        device="cpu",
        prepared=home / "prepared",
    )
    return dataclasses.replace(given, **changes)


@pytest.fixture(scope="module")
def sparse(home: Path) -> Path:
    return train(options(home, "sparse", valid=("builtin:passages",)))


def log(folder: Path) -> list[dict[str, float]]:
    return open_run(folder).arrow("training").to_pylist()


def test_loss_falls_and_l1_makes_it_sparse(home: Path, sparse: Path, tiny_recipe: Recipe) -> None:
    dense = train(options(home, "dense", l1=0.0))
    first, last = log(sparse)[0], log(sparse)[-1]
    assert last["loss"] < first["loss"] - 0.3
    nnz = {out: sum(log(out)[-1][f"nnz_{i:02}"] for i in range(tiny_recipe.layers)) for out in (sparse, dense)}
    assert nnz[sparse] < 0.7 * nnz[dense]
    assert log(sparse)[-1]["l1"] < log(dense)[-1]["l1"]


def test_plain_transformers_loads_it_and_agrees_with_the_record(home: Path, sparse: Path, tiny_recipe: Recipe) -> None:
    record = json.loads((sparse / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    assert record["status"] == "complete"
    assert AutoModelForCausalLM.from_pretrained(sparse).dtype == torch.bfloat16
    assert [path.name for path in sparse.glob("*.safetensors")] == ["model.safetensors"]
    assert not (sparse / "work").exists()

    tail = (home / "topics.txt").read_bytes()[record["corpus"]["sources"][0]["heldout_from"] :].decode()
    ids = tokenizer(tail)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    fired = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _m, _x, y: fired.append((y > 0).sum().item()))
    losses = []
    with torch.no_grad():
        for rows in in_order(np.array(ids[1:]), tiny_recipe.seq_len, 1):
            losses.append(F.cross_entropy(model(rows[:, :-1]).logits[0], rows[0, 1:]).item())
    assert record["heldout"]["tokens"] == len(losses) * tiny_recipe.seq_len
    assert record["heldout"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert sum(fired) == pytest.approx(sum(record["heldout"]["nnz"]) * record["heldout"]["tokens"], rel=1e-4)


def test_log_and_card_say_what_was_done(sparse: Path, tiny_recipe: Recipe) -> None:
    run = open_run(sparse)
    assert run.manifest.status == "complete"
    assert run.manifest.training["recipe"] == tiny_recipe.as_dict()
    table = run.arrow("training")
    assert table.column_names == [column.name for column in expand(TRAINING, tiny_recipe.layers, tiny_recipe.d_ff)]
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == list(range(10, 61, 10))
    assert [row["tokens"] for row in rows] == [step * 8 * 32 for step in range(10, 61, 10)]
    assert [row["step"] for row in rows if row["heldout_loss"] is not None] == [20, 60], "at 40 it has used its tenth"
    assert all(0 <= row["dead_00"] <= 1 and 0 < row["nnz_00"] < tiny_recipe.d_ff for row in rows)

    card, record = (sparse / "README.md").read_text(), json.loads((sparse / "training.json").read_text())
    assert "twell train --config tiny.json --text topics.txt --out sparse --valid builtin:passages" in card
    for words in (
        "Licences of the text: Python Software Foundation License.",
        f"{record['heldout']['loss']:.3f} nats",
        f"is {record['unigram_loss']:.3f})",
        f"{record['valid']['builtin:passages']['loss']:.3f}",
        "15,360 tokens",
        "| `l1` | 0.03 |",
    ):
        assert words in card
    curves = card.split("## Curves")[1].split("## Text")[0]
    assert [line.split(" | ")[0] for line in curves.splitlines() if line[:3].strip("| ").isdigit()] == [
        f"| {step}" for step in (10, 20, 60)
    ]
    assert str(sparse.parent) not in card


def train_slowly(wanted: TrainOptions, threads: int) -> None:
    """Train with steps that are long enough for a signal to come in the middle of the training."""
    torch.set_num_threads(threads)
    step = TrainingLoop.one_step
    TrainingLoop.one_step = lambda self: (step(self), time.sleep(0.05))  # type: ignore[assignment, func-returns-value]
    train(wanted)


def test_a_killed_run_continues_to_the_same_bits(
    home: Path, sparse: Path, capsys: pytest.CaptureFixture[str], tiny_recipe: Recipe
) -> None:
    wanted = options(home, "killed", checkpoint_minutes=0.0, valid=("builtin:passages",))
    process = start(train_slowly, wanted, torch.get_num_threads())
    checkpoint = wanted.out / "work" / "checkpoint.safetensors"
    limit = time.monotonic() + 120
    while not checkpoint.exists() and process.is_alive() and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.2)  # some steps past the checkpoint, which are done again
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert json.loads((wanted.out / "training.json").read_text())["status"] == "training"
    assert open_run(wanted.out).manifest.status == "recording"
    assert log(wanted.out)[0]["step"] == 10

    with pytest.raises(UserError, match=r"Expected --rate 0\.003, with .* got --rate 0\.001: give"):
        train(dataclasses.replace(wanted, rate=1e-3))
    assert checkpoint.exists()
    train(wanted)
    line = re.search(r"Continuing .*killed from step (\d+)\.", capsys.readouterr().out)
    assert line
    assert 0 < int(line[1]) < tiny_recipe.steps
    assert (wanted.out / "model.safetensors").read_bytes() == (sparse / "model.safetensors").read_bytes()
    clock = ("seconds", "tokens_per_second")
    assert [{k: v for k, v in row.items() if k not in clock} for row in log(wanted.out)] == [
        {k: v for k, v in row.items() if k not in clock} for row in log(sparse)
    ]


def killed_before_a_step(wanted: TrainOptions) -> None:
    """Train, but be killed where the first step would be made."""
    TrainingLoop.one_step = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    train(wanted)


def test_a_training_killed_before_its_first_step_refuses_no_corrected_command(home: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text((home / "topics.txt").read_text()[:200_000])
    first = options(home, "stillborn", prepared=None)
    process = start(killed_before_a_step, first)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert json.loads((first.out / "training.json").read_text())["status"] == "training"
    other = TrainingFolder(first.out)
    other.claim()  # as another process that is about to make its first step
    with pytest.raises(UserError, match="no other training writes to, one is at"):
        train(dataclasses.replace(first, rate=1e-3))
    del other
    text = str(tmp_path / "other.txt")
    train(dataclasses.replace(first, rate=1e-3, text=(text,), holdout=0.05, tokens=2000))
    record = json.loads((first.out / "training.json").read_text())
    assert (record["status"], record["recipe"]["rate"], record["holdout"]) == ("complete", 1e-3, 0.05)
    assert [source["source"] for source in record["corpus"]["sources"]] == ["other.txt"]
    assert open_run(first.out).manifest.status == "complete"


@pytest.mark.alone
def test_a_limit_in_minutes_becomes_a_number_of_steps(home: Path, tiny_recipe: Recipe) -> None:
    begun = time.monotonic()
    out = train(options(home, "timed", minutes=0.05))
    rows, record = log(out), json.loads((out / "training.json").read_text())
    assert record["steps"] == rows[-1]["step"] == rows[-1]["total_steps"] > 30
    assert 1.0 < rows[-1]["seconds"] < 9.0
    assert time.monotonic() - begun < 30
    assert rows[-1]["rate"] < 0.2 * tiny_recipe.rate  # the decay was reached


def test_a_complete_run_is_left_alone_and_a_foreign_folder_refused(home: Path, sparse: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sparse.iterdir()}
    assert train(options(home, "sparse")) == sparse
    with pytest.raises(
        UserError, match=r"Expected --holdout 0\.02, with .*, got --holdout 0\.5: give what it began with"
    ):
        train(options(home, "sparse", holdout=0.5))
    with pytest.raises(UserError, match=r"Expected --steps 60, with which .*/sparse began, got --minutes 3: give"):
        train(options(home, "sparse", minutes=3))
    assert {path: path.stat().st_mtime_ns for path in sparse.iterdir()} == before
    (home / "foreign").mkdir()
    (home / "foreign" / "letter.txt").write_text("Dear reader")
    with pytest.raises(UserError, match="name another"):
        train(options(home, "foreign"))


def test_a_record_that_cannot_be_read_is_refused(home: Path) -> None:
    for number, text in enumerate(("{", "[1]", "\udcff")):
        out = home / f"broken-{number}"
        out.mkdir()
        (out / "training.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(
            UserError, match=r"Expected a training's record at .*name another folder, or remove"
        ) as error:
            train(options(home, out.name))
        assert "\n" not in str(error.value)
        assert [path.name for path in out.iterdir()] == ["training.json"]


def test_a_folder_is_one_training_s_at_a_time(home: Path) -> None:
    first, second = (TrainingFolder(home / "twice") for _ in range(2))  # of which neither finds a record yet
    first.claim(holdout=0.02)
    with pytest.raises(UserError, match="no other training writes to, one is at"):
        second.claim(holdout=0.5)
    assert json.loads((home / "twice" / "training.json").read_text())["holdout"] == 0.02, "the first one's, untouched"
    with pytest.raises(UserError, match="no other training writes to, one is at"):
        TrainingFolder(home / "twice").claim(holdout=0.02)
    del first  # as its process may be
    TrainingFolder(home / "twice").claim(holdout=0.02)


def test_a_training_that_ended_since_the_command_began_is_not_begun_anew(home: Path) -> None:
    """The second one found no record; by the time it has the lock, the first one's lies there, complete."""
    first, second = (TrainingFolder(home / "overtaken") for _ in range(2))
    first.claim(holdout=0.02, status="complete")
    before = (home / "overtaken" / "training.json").read_bytes()
    del first
    with pytest.raises(UserError, match="another training has changed it since: give the same command again"):
        second.claim(holdout=0.02)
    assert (home / "overtaken" / "training.json").read_bytes() == before
    TrainingFolder(home / "overtaken").claim(holdout=0.02)  # the lock was given back


def test_the_record_is_on_disk_before_it_takes_its_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one after a power cut would refuse the checkpoint beside it."""
    disk = Durable(monkeypatch)
    TrainingFolder(home / "synced").claim(holdout=0.02)
    assert disk.renamed == ["training.json"] and disk.holds(home / "synced")


def test_a_name_that_the_record_could_not_hold_is_refused_before_the_training(home: Path) -> None:
    with pytest.raises(UserError, match="Expected a name in UTF-8"):
        train(options(home, "caf\udce9"))


def test_text_that_is_not_there_leaves_no_folder(home: Path) -> None:
    for given in ({"text": ("nowhere.txt",)}, {"valid": ("nowhere.txt",)}):
        with pytest.raises(UserError, match=r"Expected a text file at nowhere\.txt"):
            train(options(home, "unborn", **given))
        assert not (home / "unborn").exists()


def test_too_little_text_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A few words.\n" * 3)
    short = options(home, "short", text=(str(tmp_path / "short.txt"),), prepared=None)
    with pytest.raises(UserError, match=r"Expected training text for a vocabulary of [\d,]+ tokens, got enough for"):
        train(short)
    assert not short.out.exists()  # a corrected command finds nothing in its way
    short.out.mkdir()
    with pytest.raises(UserError, match=r"Expected training text for a step of 100,000 rows of .*fewer --rows"):
        train(options(home, "short", rows=100_000))
    assert not any(short.out.iterdir())
    with pytest.raises(UserError, match=r"short\.txt must fill a row"):
        train(options(home, "short-valid", valid=(str(tmp_path / "short.txt"),)))
