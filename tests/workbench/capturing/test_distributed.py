"""Two ranks on the CPU: one run between them, and what is left when one of them dies. Cost: 25 s."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support.forked import as_rank
from support.same_runs import assert_nothing_else, assert_same_tables
from support.servers import free_port

from twell.workbench.capturing.distributed import Ranks
from twell.workbench.capturing.progress import nnz_sum
from twell.workbench.errors import UserError
from twell.workbench.options import CaptureOptions
from twell.workbench.run.manifest import Part
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run
from twell.workbench.text.batches import WINDOW

Start = Callable[..., tuple[list[BaseProcess], Path]]


def rank_of_two(slowly: bool, small: bool, options: CaptureOptions, errors: Path) -> None:
    """Capture as one of two ranks; write an error to a file of the folder `errors`, named by the rank, and what is
    printed to one beside that folder."""
    from twell.workbench.capturing.command import capture
    from twell.workbench.capturing.recorder import Recorder
    from twell.workbench.run import writer
    from twell.workbench.text import batches

    with printed_by(int(os.environ["RANK"]), errors).open("wb") as file:
        os.dup2(file.fileno(), 1)
    if small:
        writer.PART_TOKENS, batches.WINDOW = 200, 2
    if slowly:
        step = Recorder.step
        Recorder.step = lambda *given: (time.sleep(0.06), step(*given))[1]  # type: ignore[method-assign]
    try:
        capture(options)
    except (UserError, KeyboardInterrupt) as error:
        (errors / os.environ["RANK"]).write_text(str(error))


def printed_by(rank: int, errors: Path) -> Path:
    """Return the file of what a rank prints."""
    return errors.with_name(f"{errors.name}-printed-{rank}.txt")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text("Where the river bends, the ferry waits for nobody. " * 120, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def start(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    def run(out: Path, slow: bool = False, small: bool = True, **given: Any) -> tuple[list[BaseProcess], Path]:
        errors, port = tmp_path_factory.mktemp("errors"), free_port()
        fields: dict[str, Any] = {"batch_tokens": 48, "examples": 2, "fired": "1:0.3", "text": (str(text),), **given}
        options = CaptureOptions(
            model=str(tiny), out=out, seq_len=24, timings=0, kernel="reference", device="cpu", **fields
        )
        return [as_rank(rank_of_two, rank, port, slow, small, options, errors) for rank in (0, 1)], errors

    return run


@pytest.fixture(scope="module")
def whole(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("whole") / "run"
    processes, errors = start(out)
    end(processes)
    assert not any(errors.iterdir())
    return open_run(out)


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(240)
        assert process.exitcode is not None, "a rank did not end"


def assert_whole(run: Run) -> None:
    assert run.manifest.status == "complete"
    assert_nothing_else(run)


def test_two_ranks_make_the_run_that_one_makes(
    whole: Run, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twell.workbench.capturing.command import capture

    monkeypatch.setattr("twell.workbench.text.batches.WINDOW", 2)
    options = CaptureOptions(
        model=str(tiny), text=(str(text),), out=tmp_path / "one", batch_tokens=48, seq_len=24, timings=0,
        device="cpu", kernel="reference", examples=2, fired="1:0.3",
    )  # fmt: skip
    one = capture(options)
    assert_whole(whole)
    assert_same_tables(whole, one, in_order=False)
    ours, theirs = whole.manifest, one.manifest
    assert (ours.tokens, ours.sequences, ours.loss_tokens) == (theirs.tokens, theirs.sequences, theirs.loss_tokens)
    assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-12)
    assert ours.text == theirs.text
    assert {part.rank for part in ours.parts if part.table == "activity"} == {0, 1}
    assert [part.rank for part in ours.parts] == sorted(part.rank for part in ours.parts)
    shares = [rank["tokens"] for rank in ours.ranks]
    assert sum(shares) == ours.tokens and min(shares) > 0.4 * ours.tokens
    rows = whole.activity().query("flags == 0")
    assert nnz_sum(whole) == (len(rows), rows[nnz_columns(whole.layers)].to_numpy().sum()) and len(rows)


def test_a_rank_without_text_ends_before_the_first_part_is_written(start: Start, tmp_path: Path) -> None:
    """All of the text is one batch, which rank 0 takes."""
    (tmp_path / "short.txt").write_text("Where the river bends, the ferry waits for nobody.")
    given = {"text": (str(tmp_path / "short.txt"),), "examples": 0}
    processes, errors = start(tmp_path / "run", slow=True, small=False, **given)
    end(processes)
    assert [error.read_text() for error in errors.iterdir()] == []
    assert [process.exitcode for process in processes] == [0, 0]
    run = open_run(tmp_path / "run")
    assert_whole(run)
    assert [rank["tokens"] for rank in run.manifest.ranks] == [run.manifest.tokens, 0]
    assert run.manifest.text[0]["tokens"] == run.manifest.tokens
    assert "mean nnz" in printed_by(0, errors).read_text() and not printed_by(1, errors).read_text()


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_dies_is_named_and_the_run_goes_on(victim: int, whole: Run, start: Start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    processes, errors = start(out, slow=True)
    deadline = time.monotonic() + 240
    while not ((out / "run.json").exists() and open_run(out).manifest.ranks[victim]["tokens"] > 0):
        assert time.monotonic() < deadline and processes[victim].is_alive()
        time.sleep(0.02)
    os.kill(processes[victim].pid or 0, signal.SIGKILL)
    end(processes)
    (survivor,) = errors.iterdir()
    assert survivor.name == str(1 - victim)
    message = survivor.read_text()
    assert f"rank {victim} died after" in message and "--resume" in message
    run = open_run(out)
    assert run.manifest.status == "interrupted"
    assert 0 < run.manifest.tokens < whole.manifest.tokens
    assert len(run.activity()) == run.manifest.tokens
    processes, errors = start(out, resume=True)
    end(processes)
    assert not any(errors.iterdir())
    run = open_run(out)
    assert_whole(run)
    assert_same_tables(run, whole)
    assert run.manifest.loss_sum == whole.manifest.loss_sum
    assert run.manifest.text == whole.manifest.text


def test_another_number_of_ranks_is_refused(whole: Run, tiny: Path, text: Path) -> None:
    from dataclasses import replace

    from twell.workbench.capturing.command import capture
    from twell.workbench.run import manifest as manifests

    before = (whole.path / "run.json").read_bytes()
    manifests.write(whole.path, replace(whole.manifest, status="interrupted"))
    options = CaptureOptions(
        model=str(tiny), text=(str(text),), out=whole.path, batch_tokens=48, seq_len=24, timings=0, device="cpu",
        kernel="reference", examples=2, fired="1:0.3", resume=True,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"another number of ranks \(1 now, 2 then\)"):
        capture(options)
    (whole.path / "run.json").write_bytes(before)


def test_ranks_of_several_hosts_are_refused(tiny: Path, text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from twell.workbench.capturing.command import capture

    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"Expected all ranks on one host, .*, got 2 of 4 here: launch with one node"):
        capture(CaptureOptions(model=str(tiny), text=(str(text),), out=tmp_path / "run", device="cpu"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"WORLD_SIZE": "4"}, "environment variable RANK expected"),
        ({"WORLD_SIZE": "many", "RANK": "0"}, "invalid literal for int"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "first"}, "invalid literal for int"),
    ],
)
def test_variables_that_no_launcher_sets(variables: dict[str, str], fault: str, monkeypatch: Any) -> None:
    """As a cluster's job may have them lying about."""
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"that torchrun sets beside WORLD_SIZE.*{fault}.*or unset WORLD_SIZE") as error:
        Ranks.from_environment("cpu")
    assert "\n" not in str(error.value)


def test_whose_part_it_is() -> None:
    assert Part("activity", "activity/rank-12-00003.parquet", 1, 1, "").rank == 12
    assert Part("activity", "activity/rank-12-00003.parquet", 1, 1, "").number == 3
    assert Part("activity", "activity/part-00003.parquet", 1, 1, "").rank == 0
    assert Part("vocab", "vocab.parquet", 1, 1, "").rank == 0


def launched(folder: Path, text: Path, out: Path) -> subprocess.Popen[str]:
    """Start two ranks by torchrun itself, as the README has it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    capture = ["-m", "twell.workbench", "capture", str(folder), "--text", str(text), "--out", str(out)]
    given = ["--device", "cpu", "--kernel", "reference", "--timings", "0", "--seq-len", "24", "--batch-tokens", "480"]
    return subprocess.Popen(
        [*launch, *capture, *given], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def rank_process(launcher: subprocess.Popen[str], rank: int) -> int:
    """Return the id of a rank's process, found by the environment that its launcher gave it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid and f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
    raise AssertionError("no such rank is running")


def words_by_window(windows: int) -> Iterator[str]:
    """Yield a word a sequence, of 24 tokens in batches of 480: one where rank 0 reads, the other where rank 1 does."""
    yield from "7" * 20  # the first window is of one batch
    for window in range(1, windows):
        yield from "7Z"[window % 2] * (20 * WINDOW)


def closing_mean(run: Run) -> str:
    """Return the mean nnz as the last line of a capture has it."""
    tokens, total = nnz_sum(run)
    return f"mean nnz {total / tokens / run.layers:.1f} of {run.d_ff}"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank by /proc")
def test_torchrun(start: Start, tiny: Path, tmp_path: Path) -> None:
    """Launched, one rank killed, resumed by two ranks: the killed one is named, nothing is lost, and the mean nnz at
    the end is that of both ranks, which read different words."""
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"text": word * 23}) + "\n" for word in words_by_window(25)), encoding="utf-8")
    out = tmp_path / "run"
    with launched(tiny, long, out) as process:
        try:
            deadline = time.monotonic() + 120
            while not any(out.glob("vocab.parquet*")):  # rank 0 has begun to count: from then on it hears of an end
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(rank_process(process, 1), signal.SIGKILL)
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "twell: Expected 2 ranks to finish run, rank 1 died after" in printed
    broken = open_run(out)
    assert broken.manifest.status == "interrupted" and broken.damaged() == []
    assert nnz_sum(broken)[0] == (broken.activity()["flags"] == 0).sum()
    assert closing_mean(broken) in printed
    processes, errors = start(
        out, text=(str(long),), small=False, batch_tokens=480, examples=0, fired=None, resume=True
    )
    end(processes)
    assert not any(errors.iterdir())
    run = open_run(out)
    assert_whole(run)
    assert broken.manifest.tokens < run.manifest.tokens == run.frame("sequences")["tokens"].sum()
    assert {part.rank for part in run.manifest.parts if part.table == "activity"} == {0, 1}
    rows = run.activity().query("flags == 0")
    by_word = rows[nnz_columns(run.layers)].mean(axis=1).groupby(rows["token_id"]).mean()
    assert len(by_word) == 2 and abs(by_word.diff().iloc[1]) > 1, "a word a rank, each with a mean of its own"
    assert closing_mean(run) in printed_by(0, errors).read_text()
