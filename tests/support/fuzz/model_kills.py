"""Processes that are killed, or that may write no more, while they train, watch or capture a model.

A case does one of these in a child that is disturbed in one of the ways of `kills`. Nothing half-written is read. What
a training leaves is refused or is read as it was logged, and the same command goes on to the same weights and the same
log, to the bit. What a watch leaves is a run whose rows are the first of those of a whole watch; what a capture leaves,
too, and it is resumed to all of them. Of two captures into one folder, one is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pandas as pd
from support.fuzz import FAILED, REFUSED, SAME, Outcome, generator
from support.fuzz.kills import ENDED, HOW, REFUSAL, Limits, disturbed, ended, in_child
from support.fuzz.small_disk import mounted

from twell.workbench.options import TrainOptions

LIMITS = {  # of one that is not disturbed, some more than it takes
    "train": Limits(events=160, seconds=3.0, size=400_000, room=1_500_000),
    "watch": Limits(events=175, seconds=1.0, size=20_000, room=300_000),
    "capture": Limits(events=200, seconds=1.0, size=20_000, room=300_000),
}
TIMES = ["seconds", "tokens_per_second", "dense_step", "sparse_step", "peak_bytes"]  # these differ from run to run
RECIPE = {
    "name": "tiny", "layers": 2, "d_model": 32, "d_ff": 96, "head_size": 16, "kv_heads": 1, "vocab": 400, "seq_len": 32,
    "steps": 12, "rows": 4, "warmup": 2, "l1": 0.03, "l1_warmup": 4, "log_every": 3, "evaluations": 2,
}  # fmt: skip
CALLS, LENGTH = 12, 24  # of the model that is watched, and tokens of each


def one_thread() -> None:
    """Let this process compute on one thread, so that sums are the same."""
    import torch

    torch.set_num_threads(1)


def train(folder: Path, out: Path) -> None:
    """Train a small model with a checkpoint at every row of the log."""
    from twell.workbench.training import log
    from twell.workbench.training.command import train as run

    one_thread()
    log.PACE = 0.0
    run(
        TrainOptions(
            config=str(folder / "recipe.json"),
            text=(str(folder / "text.txt"),),
            out=out,
            device="cpu",
            prepared=folder / "prepared",
            checkpoint_minutes=0.0,
        )
    )


def watch(folder: Path, out: Path) -> None:
    """Watch a small model whose weights are drawn anew, the same each time; each part of the run has a few rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from twell.workbench import watch as watched
    from twell.workbench.run import writer

    one_thread()
    writer.PART_TOKENS = 2 * LENGTH
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, hidden_act="relu", bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad(), watched(model, out=out, fired=True, kernel="reference"):
        for _ in range(CALLS):
            model(input_ids=torch.randint(3, 400, (1, LENGTH)), use_cache=False)


def capture(folder: Path, out: Path, resume: bool = False) -> None:
    """Capture the trained model on the text, in parts of some sequences."""
    from twell.workbench.capturing.command import capture as run
    from twell.workbench.options import CaptureOptions
    from twell.workbench.run import writer

    one_thread()
    writer.PART_TOKENS = 200
    model, text = str(folder / "whole" / "train"), (str(folder / "text.txt"),)
    limits: dict[str, Any] = {"tokens": 1500, "seq_len": 32, "batch_tokens": 128, "timings": 0}
    run(CaptureOptions(model=model, text=text, out=out, kernel="reference", fired="0", resume=resume, **limits))


WORK: dict[str, Callable[[Path, Path], None]] = {"train": train, "watch": watch, "capture": capture}
TWO = "two at once"  # of captures into one folder, which are killed elsewhere (`test_resume`)


def log_of(out: Path) -> pd.DataFrame:
    """Return a training's log without its times."""
    from twell.workbench.run.store import open_run

    return open_run(out).frame("training").drop(columns=TIMES)


def rows_of(out: Path) -> dict[str, pd.DataFrame]:
    """Return the tables of a watch's run that have a row a token, after a question about them all."""
    from twell.analysis import by_layer
    from twell.workbench.run.store import open_run

    run = open_run(out)
    tables = {name: run.frame(name) for name in ("activity", "sequences", "fired")}
    with contextlib.redirect_stdout(io.StringIO()):
        assert by_layer(run)["tokens"].iloc[0] == (tables["activity"]["flags"] == 0).sum()
    return tables


def hashes(out: Path) -> dict[str, str]:
    """Return the sha256 of the files of a trained model."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.iterdir()
        if path.suffix in (".safetensors", ".json") and path.name not in ("run.json", "training.json")
    }


def write(value: Callable[[], Any], path: Path) -> None:
    """Write down what a function returns."""
    path.write_bytes(pickle.dumps(value()))


def prepare(folder: Path) -> None:
    """Write the text and the recipe, train and watch undisturbed, and write down what came of it."""
    (folder / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)[:12]), encoding="utf-8")
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    for name, work in WORK.items():
        work(folder, folder / "whole" / name)
    trained = folder / "whole" / "train"
    results = {name: rows_of(folder / "whole" / name) for name in ("watch", "capture")}
    write(lambda: results | {"train": (log_of(trained), hashes(trained))}, folder / "results")


def cases(folder: Path, seed: int) -> Callable[[int], list[Outcome]]:
    """Prepare in a child, since one that has run threads cannot be forked from, and return the function of a case."""
    for name in ("training.command", "watching.session", "capturing.command"):
        importlib.import_module(f"twell.workbench.{name}")  # once, not in every child
    importlib.import_module("twell.analysis")
    if ended(in_child(lambda: prepare(folder))) != ENDED:
        raise RuntimeError("nothing could be trained or watched")
    small = folder / "disk"
    disk = small if mounted(small) else None
    expected = pickle.loads((folder / "results").read_bytes())

    def case(number: int) -> list[Outcome]:
        rng, place = generator(seed, number), small / "case"
        name, how = tuple(WORK)[number % 3], HOW[number // 3 % len(HOW)]
        how = TWO if name == "capture" and how == "killed in time" else how
        where, work = f"{name}, {how}", partial(WORK[name], folder, place / "out")
        try:
            code = two_at_once(work) if how == TWO else disturbed(work, how, rng, LIMITS[name], disk)
            bad = [] if code in (ENDED, REFUSAL, -9) else [Outcome(FAILED, where, f"exit {code}")]
            after = {"train": _after_train, "watch": _after_watch, "capture": _after_capture}[name]
            bad += after(where, folder, place, expected[name])
            return bad or [Outcome(SAME if code == ENDED else REFUSED, where)]
        finally:
            shutil.rmtree(place, ignore_errors=True)

    return case


def two_at_once(work: Callable[[], None]) -> int:
    """Do the same work in two children; return ENDED if one ended and the other was refused, else another code."""
    codes = sorted(ended(child) for child in [in_child(work), in_child(work)])
    return ENDED if codes == [ENDED, REFUSAL] else max(codes) or 1


def _read(place: Path, read: Callable[[Path], Any]) -> tuple[int, Any]:
    """Return the exit code of a child that reads what was left, and what it read."""
    code = ended(in_child(lambda: write(lambda: read(place / "out"), place / "read")))
    return code, pickle.loads((place / "read").read_bytes()) if code == ENDED else None


def _after_train(where: str, folder: Path, place: Path, expected: Any) -> list[Outcome]:
    """Return whether what is there is whole, and the same command ends with the same model and log."""
    place.mkdir(exist_ok=True)
    bad, (log, files) = [], expected
    code, left = _read(place, log_of)
    if code not in (ENDED, REFUSAL):
        bad.append(Outcome(FAILED, where, f"what was left: exit {code}"))
    elif code == ENDED and not left.equals(log.head(len(left))):
        bad.append(Outcome(FAILED, where, "the log that was left differs"))
    wrong = [name for name, digest in (hashes(place / "out") if (place / "out").exists() else {}).items()
        if files.get(name) != digest]  # fmt: skip
    bad += [Outcome(FAILED, where, f"half-written: {', '.join(wrong)}")] if wrong else []
    if ended(in_child(lambda: train(folder, place / "out"))) != ENDED:
        return [*bad, Outcome(FAILED, where, "the same command does not succeed")]
    code, left = _read(place, lambda out: (log_of(out), hashes(out)))
    if code != ENDED or not left[0].equals(log) or left[1] != files:
        bad.append(Outcome(FAILED, where, f"another log or model: exit {code}"))
    return bad


def _after_watch(where: str, folder: Path, place: Path, expected: dict[str, pd.DataFrame]) -> list[Outcome]:
    """Return whether the rows that are there are the first of the whole watch's."""
    place.mkdir(exist_ok=True)
    code, left = _read(place, rows_of)
    if code not in (ENDED, REFUSAL):
        return [Outcome(FAILED, where, f"what was left: exit {code}")]
    differ = [name for name, rows in (left or {}).items() if not rows.equals(expected[name].head(len(rows)))]
    return [Outcome(FAILED, where, f"other rows in {', '.join(differ)}")] if differ else []


def _after_capture(where: str, folder: Path, place: Path, expected: dict[str, pd.DataFrame]) -> list[Outcome]:
    """Return whether the rows that are there are the first ones, and all are there once the capture is resumed."""
    bad = _after_watch(where, folder, place, expected)
    if ended(in_child(lambda: capture(folder, place / "out", resume=True))) != ENDED:
        return [*bad, Outcome(FAILED, where, "it cannot be resumed")]
    code, left = _read(place, rows_of)
    whole = code == ENDED and all(rows.equals(expected[name]) for name, rows in left.items())
    return bad if whole else [*bad, Outcome(FAILED, where, f"other rows when resumed: exit {code}")]
