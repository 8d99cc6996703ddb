"""Captures and trainings in processes of their own, forked from one that has imported everything and run nothing.

Importing torch and transformers takes a process 5 s, a fork some milliseconds. The first fork of a test process starts
the one that all others are forked from; where the test process was forked itself and has begun no thread yet, it is the
fork of that one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.processes import OWN, other_threads

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "twell.workbench.capturing.command",
        "twell.workbench.training.command",
        "twell.workbench.cli",
        "transformers.models.llama.modeling_llama",
    ]
)


_spawned = util.spawnv_passfds


def _begun(path: Any, words: Any, kept: list[int]) -> int:
    """Begin a process for a command line of Python: a fork of this one, which has imported what is asked for, if it
    may be; return its id. kept: its open files"""
    if OWN not in os.environ or other_threads() or "multiprocessing.forkserver" not in words[-1]:
        return _spawned(path, words, kept)
    if child := os.fork():
        return child
    try:
        atexit._clear()
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with suppress(OSError):
                    os.close(int(name))
        sys.stdout, sys.stderr = (os.fdopen(at, "w", 1, closefd=False) for at in (1, 2))  # not pytest's files, closed
        exec(words[-1], {})
    finally:
        os._exit(0)


util.spawnv_passfds = _begun  # by which `multiprocessing` starts the process that others are forked from


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call a function, with one thread of torch, in a process that is forked for it."""
    process = FORKED.Process(target=_with_one_thread, args=(target, *arguments))
    process.start()
    return process


def _with_one_thread(target: Callable[..., None], *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    target(*arguments)


def as_rank(target: Callable[..., None], rank: int, port: int, *arguments: Any) -> BaseProcess:
    """Call a function in a process of its own as one of two ranks, which meet at a port of this host."""
    return start(_as_rank, target, rank, port, *arguments)


def _as_rank(target: Callable[..., None], rank: int, port: int, *arguments: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    target(*arguments)


def command_line(words: list[str], errors: Path, part_seconds: float) -> None:
    """Run `twell` with these words, standard error in a file, parts of so many seconds."""
    from twell.workbench.cli import main
    from twell.workbench.run import writer

    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    writer.PART_SECONDS = part_seconds
    sys.argv = ["twell", *words]
    main()


def capture_in_small_parts(options: Any) -> None:
    """Capture with parts of 1 000 tokens."""
    from twell.workbench.capturing.command import capture
    from twell.workbench.run import writer

    writer.PART_TOKENS = 1000
    capture(options)


def capture_until_a_timing(options: Any) -> None:
    """Capture with parts of 1 000 tokens; die where the gate is timed and two parts of timings are written."""
    from twell.workbench.capturing.timing import timings

    take = timings.Timings._take

    def dying(self: Any, times: Any, operations: Any, *given: Any) -> Any:
        if "gate" in operations and len([*options.out.glob("timings/*.parquet")]) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, times, operations, *given)

    timings.Timings._take = dying  # type: ignore[method-assign]
    capture_in_small_parts(options)
