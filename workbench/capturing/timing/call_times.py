"""Mark when the calls of one batch begin and end, in the device's own time.

The idea: marks are events on a GPU and readings of the clock elsewhere. Putting them costs a few microseconds and waits
for nothing; they are read when the batch's counts are fetched, and events are then used again. With each sparse call
goes the nnz of its rows, padding included, added up on the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twell.workbench.power import PowerReading
from twell.workbench.run.schema import PREFILL

MODEL = -1  # in place of a layer: the whole model


class Marks:
    """Moments in a device's own time, and the events that are free to be used again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[Any]()

    def mark(self) -> Any:
        """Return a mark of the moment at which the device has done what it was given so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # of this device, which need not be the current one
        return event

    def wait(self, mark: Any) -> None:
        """Wait until the device has passed a mark."""
        if self._device.type == "cuda":
            mark.synchronize()

    def microseconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks that the device has passed."""
        return (end - begin) * 1e6 if self._device.type != "cuda" else begin.elapsed_time(end) * 1e3

    def free(self, *marks: Any) -> None:
        """Use marks again; they are not read any more."""
        if self._device.type == "cuda":
            self._free += marks


@dataclass
class Call:
    """One timed call: op, layer and phase as in `timings`; rows that it ran on; begin, end: marks.

    reading: clock and power of a window of this operation alone; None without one
    """

    op: str
    layer: int
    phase: int
    rows: int
    begin: Any
    end: Any
    reading: PowerReading | None = None


@dataclass
class BatchTimes:
    """The marks of one batch; the forward pass calls `begin` and `end` around each sparse call.

    calibrate(layer, x, phase): called after each layer with its input x [n, d_model]
    calls: all that was timed; aside: (begin, end) marks of what ran beside the capture's own pass
    whole: the call of the pass itself, once it has ended
    """

    marks: Marks
    calibrate: Callable[[int, Tensor, int], None]
    calls: list[Call] = field(default_factory=list)
    aside: list[tuple[Any, Any]] = field(default_factory=list)
    inside: list[tuple[Any, Any]] = field(default_factory=list)  # those of `aside` that ran before the pass had ended
    _open: dict[str, Any] = field(default_factory=dict)
    _nnz: list[tuple[int, int, Tensor]] = field(default_factory=list)  # layer, phase, nnz of the call's rows
    # the keys (layer, phase) of calls of as many rows, these rows, and their sums of nnz on the way to the host
    _sums: list[tuple[list[tuple[int, int]], int, Tensor]] = field(default_factory=list)

    def begin(self, layer: int) -> None:
        """Mark that a layer's sparse FFN begins."""
        self.open("ffn_sparse")

    def end(self, layer: int, nnz: Tensor, phase: int = PREFILL) -> None:
        """Mark that it has ended; nnz: int32 [n], of its rows."""
        if self.close("ffn_sparse", layer, len(nnz), phase) is not None:
            self._nnz.append((layer, phase, nnz))

    def open(self, op: str) -> None:
        """Mark that an operation begins."""
        self._open[op] = self.marks.mark()

    def close(self, op: str, layer: int, rows: int, phase: int = PREFILL) -> Call | None:
        """Mark that an operation has ended, and return its call; None if it had not begun."""
        begin = self._open.pop(op, None)
        if begin is None:
            return None
        self.calls.append(Call(op, layer, phase, rows, begin, self.marks.mark()))
        return self.calls[-1]

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Mark the beginning and the end of the capture's own pass, and send its nnz to the host."""
        self.open("pass")
        yield
        self.close("pass", MODEL, 0)
        self.inside = list(self.aside)
        by_rows = defaultdict[int, list[tuple[int, int, Tensor]]](list)
        for layer, phase, nnz in self._nnz:
            by_rows[len(nnz)].append((layer, phase, nnz))
        for many, group in by_rows.items():
            sums = torch.stack([nnz for _, _, nnz in group]).sum(1, dtype=torch.int64)
            keys = [(layer, phase) for layer, phase, _ in group]
            self._sums.append((keys, many, sums.to("cpu", non_blocking=True)))
        self._nnz = []

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Mark what runs inside as no part of the capture's own pass."""
        begin = self.marks.mark()
        yield
        self.aside.append((begin, self.marks.mark()))

    @property
    def whole(self) -> Call:
        return next(call for call in self.calls if call.op == "pass")

    def nnz_means(self) -> dict[tuple[int, int], float]:
        """Return the mean nnz of the sparse calls' rows, by layer and phase; wait for the batch's counts first."""
        sums, rows = defaultdict[tuple[int, int], int](int), defaultdict[tuple[int, int], int](int)
        for keys, many, values in self._sums:
            for key, value in zip(keys, values.tolist(), strict=True):
                sums[key] += value
                rows[key] += many
        return {key: value / max(1, rows[key]) for key, value in sums.items()}

    def free(self) -> None:
        """Give all marks back."""
        for begin, end in [*self.aside, *((call.begin, call.end) for call in self.calls)]:
            self.marks.free(begin, end)
