"""Two ranks on the CPU: one run between them, and what is left when one of them dies. Cost: 40 s."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from twell.workbench.capturing.distributed import Ranks
from twell.workbench.errors import UserError
from twell.workbench.options import CaptureOptions
from twell.workbench.run.manifest import Part
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run

EXTREMES = {"value_max": "max", "token_min": "min", "token_max": "max", "first_sequence": "min"}
KEYS = ("layer", "neuron", "tile", "occupancy", "block", "neurons")
SPAWN = multiprocessing.get_context("forkserver")  # forks a process that has imported everything, and run nothing


def rank_of_two(rank: int, port: int, slowly: bool, options: CaptureOptions, said: Any) -> None:
    """A rank in a process of its own, as torchrun starts it; says what a person would read."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from twell.workbench.capturing.command import capture
    from twell.workbench.capturing.recorder import Recorder
    from twell.workbench.run import writer
    from twell.workbench.text import batches

    torch.set_num_threads(1)
    writer.PART_TOKENS, batches.WINDOW = 200, 2
    if slowly:
        step = Recorder.step
        Recorder.step = lambda *given: (time.sleep(0.06), step(*given))[1]  # type: ignore[method-assign]
    try:
        capture(options)
    except (UserError, KeyboardInterrupt) as error:
        said.put((rank, str(error)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text("Where the river bends, the ferry waits for nobody. " * 120, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def start(tiny: Path, text: Path) -> Callable[..., tuple[list[BaseProcess], Any]]:
    SPAWN.set_forkserver_preload(["twell.workbench.capturing.command", "transformers.models.llama.modeling_llama"])

    def run(out: Path, slow: bool = False, **given: Any) -> tuple[list[BaseProcess], Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        fields: dict[str, Any] = {
            "batch_tokens": 48,
            "seq_len": 24,
            "timings": 0,
            "kernel": "reference",
            "device": "cpu",
        }
        options = CaptureOptions(
            model=str(tiny), text=(str(text),), out=out, examples=2, fired="1:0.3", **{**fields, **given}
        )
        said = SPAWN.Queue()
        processes = [SPAWN.Process(target=rank_of_two, args=(rank, port, slow, options, said)) for rank in (0, 1)]
        for process in processes:
            process.start()
        return processes, said

    return run


@pytest.fixture(scope="module")
def whole(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("whole") / "run"
    processes, said = start(out)
    end(processes)
    assert said.empty()
    return open_run(out)


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "a rank did not end"


def added_up(run: Run, table: str) -> pd.DataFrame:
    frame = run.frame(table)
    keys = [name for name in KEYS if name in frame]
    return frame.groupby(keys).agg({name: EXTREMES.get(name, "sum") for name in frame.columns.drop(keys)})


def assert_same(run: Run, other: Run, order: list[str] | None = None) -> None:
    """Row for row, once in the given order, and in all sums."""
    for table in ("activity", "sequences", "vocab", "examples", "fired"):
        ours, theirs = (one.arrow(table) for one in (run, other))
        if order and table != "vocab":
            by = [(name, "ascending") for name in ("kind", "layer", "neuron", "sequence", "position") if name in
                  ours.column_names and not (name == "neuron" and table == "fired")]  # fmt: skip
            ours, theirs = (rows.sort_by(by) for rows in (ours, theirs))
        for name in ours.column_names:
            one, two = (rows[name].combine_chunks() for rows in (ours, theirs))
            if name == "window":  # NaN equals NaN here
                np.testing.assert_array_equal(one.flatten().to_numpy(), two.flatten().to_numpy())
            else:
                assert one.equals(two), (table, name)
    for table in ("neurons", "tiles", "unions"):
        one, two = added_up(run, table), added_up(other, table)
        pd.testing.assert_frame_equal(one, two)


def assert_whole(run: Run) -> None:
    assert run.manifest.status == "complete"
    assert run.damaged() == []
    listed = {run.path / part.file for part in run.manifest.parts} | {run.path / "run.json"}
    assert {path for path in run.path.rglob("*") if path.is_file()} == listed


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
    assert_same(whole, one, order=["sequence", "position"])
    ours, theirs = whole.manifest, one.manifest
    assert (ours.tokens, ours.sequences, ours.loss_tokens) == (theirs.tokens, theirs.sequences, theirs.loss_tokens)
    assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-12)
    assert ours.text == theirs.text
    assert {part.rank for part in ours.parts if part.table == "activity"} == {0, 1}
    shares = [rank["tokens"] for rank in ours.ranks]
    assert sum(shares) == ours.tokens and min(shares) > 0.4 * ours.tokens
    assert whole.activity()[nnz_columns(whole.layers)].to_numpy().any()


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_dies_is_named_and_the_run_goes_on(
    victim: int, whole: Run, start: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    processes, said = start(out, slow=True)
    deadline = time.monotonic() + 60
    while not ((out / "run.json").exists() and open_run(out).manifest.ranks[victim]["tokens"] > 0):
        assert time.monotonic() < deadline and processes[victim].is_alive()
        time.sleep(0.02)
    os.kill(processes[victim].pid or 0, signal.SIGKILL)
    end(processes)
    rank, message = said.get(timeout=10)
    assert rank == 1 - victim
    assert f"rank {victim} died after" in message and "--resume" in message
    run = open_run(out)
    assert run.manifest.status == "interrupted"
    assert 0 < run.manifest.tokens < whole.manifest.tokens
    assert len(run.activity()) == run.manifest.tokens
    processes, said = start(out, resume=True)
    end(processes)
    assert said.empty()
    run = open_run(out)
    assert_whole(run)
    assert_same(run, whole)
    assert run.manifest.loss_sum == whole.manifest.loss_sum


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


def launched(folder: Path, text: Path, out: Path, *words: str) -> subprocess.Popen[str]:
    """Two ranks by torchrun itself, as the README has it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    capture = ["-m", "twell.workbench", "capture", str(folder), "--text", str(text), "--out", str(out)]
    given = ["--device", "cpu", "--kernel", "reference", "--timings", "0", "--seq-len", "24", *words]
    return subprocess.Popen(
        [*launch, *capture, *given], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def rank_process(launcher: subprocess.Popen[str], rank: int) -> int:
    """The number of a rank's process, by the environment that its launcher gave it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid and f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
    raise AssertionError("no such rank is running")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank by /proc")
def test_torchrun(tiny: Path, text: Path, tmp_path: Path) -> None:
    """Launched, one rank killed, launched again with --resume: the killed one is named, nothing is lost."""
    long = tmp_path / "long.txt"
    long.write_text(text.read_text(encoding="utf-8") * 24, encoding="utf-8")
    out, words = tmp_path / "run", ("--batch-tokens", "480")
    with launched(tiny, long, out, *words) as process:
        try:
            deadline = time.monotonic() + 120
            while not any(out.glob("vocab.parquet*")):  # rank 0 has begun to count: from then on it hears of an end
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(rank_process(process, 1), signal.SIGKILL)
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "twell: Expected 2 ranks to finish run, rank 1 died after" in said
    broken = open_run(out)
    assert broken.manifest.status == "interrupted" and broken.damaged() == []
    with launched(tiny, long, out, *words, "--resume") as process:
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    run = open_run(out)
    assert_whole(run)
    assert broken.manifest.tokens < run.manifest.tokens == run.frame("sequences")["tokens"].sum()
    assert {part.rank for part in run.manifest.parts if part.table == "activity"} == {0, 1}
