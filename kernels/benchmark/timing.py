"""Timing operations in turns, on any device: what every figure of time comes from.

Each turn has an order of its own, the same in every run: what runs before an operation decides how warm the device and
its caches are, and on a GPU at its power limit that is several percent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

K = TypeVar("K")
Run = Callable[[], Any]
Read = Callable[[], float]  # gives microseconds, and on a GPU waits for them


def time_in_turns(
    operations: Mapping[K, Run],
    device: torch.device,
    repeats: int,
    *,
    warm_up: bool = True,
    rng: random.Random | None = None,
) -> dict[K, list[float]]:
    """Microseconds of each operation by name, turn by turn.

    warm_up: whether a turn that is not timed comes first
    rng: what draws the orders, where turns are taken a few at a time; default one that begins anew
    """
    if warm_up:
        for operation in operations.values():
            operation()
    took: dict[K, list[Read]] = {name: [] for name in operations}
    order, rng = list(operations), rng or random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            took[name].append(_timed(operations[name], device))
    return {name: [read() for read in reads] for name, reads in took.items()}


def _timed(operation: Run, device: torch.device) -> Read:
    stop = start_timer(device)
    operation()
    return stop()


def start_timer(device: torch.device) -> Callable[[], Read]:
    """A watch that runs from now until what comes back is called, which gives what reads it."""
    if device.type != "cuda":
        began = time.perf_counter()

        def stop() -> Read:
            took = (time.perf_counter() - began) * 1e6
            return lambda: took

        return stop
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(torch.cuda.current_stream(device))  # of this device, which need not be the current one

    def read() -> float:
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def record() -> Read:
        end.record(torch.cuda.current_stream(device))
        return read

    return record


def graphed(operation: Run, device: torch.device) -> Run:
    """The operation, which runs on this GPU, as a replay of a CUDA graph: launching takes no part in its time."""
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # first calls allocate and compile
            operation()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operation()
    return graph.replay
