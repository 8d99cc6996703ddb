"""Time operations in turns on any device. Every time that the project reports is measured here.

Each turn runs the operations in an order of its own, which is the same in every run: the operation before decides how
warm the device and its caches are, and on a GPU at its power limit that changes a time by several percent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

K = TypeVar("K")
SECONDS = {"cpu": 0.3, "cuda": 1.0}  # total time of the turns by default
TimedCall = Callable[[], Any]
ReadTime = Callable[[], float]  # returns microseconds, and on a GPU waits until they are known


def time_in_turns(
    operations: Mapping[K, TimedCall],
    device: torch.device,
    repeats: int,
    *,
    warm_up: bool = True,
    rng: random.Random | None = None,
) -> dict[K, list[float]]:
    """Time each operation once in each of `repeats` turns; return microseconds by name, turn by turn.

    warm_up: whether a turn that is not timed comes first
    rng: the source of the orders, for callers that take a few turns at a time; default a new one with a fixed seed
    """
    if warm_up:
        for operation in operations.values():
            operation()
    readings: dict[K, list[ReadTime]] = {name: [] for name in operations}
    order, rng = list(operations), rng or random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            readings[name].append(_timed(operations[name], device))
    return {name: [read() for read in reads] for name, reads in readings.items()}


def _timed(operation: TimedCall, device: torch.device) -> ReadTime:
    stop = start_timer(device)
    operation()
    return stop()


def start_timer(device: torch.device) -> Callable[[], ReadTime]:
    """Start a timer and return the function that stops it; that one returns the function that reads it.

    On a GPU stopping does not wait for the device, but reading does.
    """
    if device.type != "cuda":
        began = time.perf_counter()

        def stop() -> ReadTime:
            microseconds = (time.perf_counter() - began) * 1e6
            return lambda: microseconds

        return stop
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(torch.cuda.current_stream(device))  # of this device, which need not be the current one

    def read() -> float:
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def record() -> ReadTime:
        end.record(torch.cuda.current_stream(device))
        return read

    return record


def graphed(operation: TimedCall, device: torch.device, pool: Any = None) -> TimedCall:
    """Capture an operation on this GPU as a CUDA graph and return its replay, whose time has no launches in it.

    pool: memory for what it allocates, a handle of torch.cuda.graph_pool_handle(), which graphs share that are replayed
    one after another; default memory of its own
    """
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # first calls allocate and compile
            operation()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            operation()
    return graph.replay
