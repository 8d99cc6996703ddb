"""How long each layer's FFN takes, sparse and dense, on the input that the capture just gave it.

The idea: every so many batches, each layer is timed where it stands in the forward pass: the sparse and the dense FFN
in turns on the same input, medians over repetitions, with device events on a GPU. Now and then the whole model is timed
in the same way, so that the FFN's share in it can be told. Timed calls run with probes off and are heard by nobody, so
they change no count.

Cost: at most SHARE of the capture's time. The first batch is always timed; after that, one is passed over when timing
another would spend more. On a CPU the first ROWS rows of a batch are timed, which is enough to fill it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twell.kernels.call import Stats
from twell.kernels.module import Probe
from twell.workbench.forward import Batch, Inputs, forward, probing
from twell.workbench.models import LoadedModel
from twell.workbench.schema import PREFILL

SHARE = 0.15
ROWS = {"cpu": 1024, "cuda": 2**31}  # rows of a batch that are timed
REPEATS = 5
MODEL_EVERY = 4  # timed batches between two timings of the whole model


class Timings:
    """Collects the rows of the run's `timings` table as batches go by; `rows` holds those not yet fetched."""

    def __init__(self, loaded: LoadedModel, every: int, loss: bool) -> None:
        """`every`: batches from one timed batch to the next, 0 for none; `loss`: as the capture computes it."""
        self.loaded, self.every, self.loss = loaded, every, loss
        self.rows: list[dict[str, Any]] = []
        self._gauge = Gauge(loaded.device)
        self._kind = loaded.device.type
        self._started, self._spent, self._cost, self._timed = time.perf_counter(), 0.0, 0.0, 0

    def wants(self, batch: Batch) -> bool:
        """Whether this batch is due, and can be afforded."""
        if not self.every or batch.number % self.every:
            return False
        return not self._timed or self._spent + self._cost <= SHARE * (time.perf_counter() - self._started)

    def layer(self, batch: Batch) -> Callable[[int, Tensor, Stats], None]:
        """What the forward pass of a timed batch tells of each layer."""

        def on_layer(layer: int, x: Tensor, stats: Stats) -> None:
            began = time.perf_counter()
            ffn, x = self.loaded.ffns[layer], x[: ROWS[self._kind]]
            with probing(self.loaded.probe, Probe()):
                took = self._take({"ffn_dense": partial(ffn.dense, x), "ffn_sparse": partial(ffn, x)})
            mean = float(stats.nnz[: len(x)].double().mean())
            self._add(batch, layer, len(x), mean, took)
            self._cost += time.perf_counter() - began

        self._cost = 0.0
        return on_layer

    def close(self, batch: Batch) -> None:
        """After the forward pass of a timed batch: the whole model, when it is its turn, and the books."""
        if self._timed % MODEL_EVERY == 0:
            began = time.perf_counter()
            part = batch.head(ROWS[self._kind])
            inputs = Inputs.of(part, self.loaded.device)
            run = partial(forward, self.loaded, inputs, loss=self.loss)

            def run_dense() -> None:
                with dense(self.loaded):
                    run()

            self._add(batch, -1, part.padded, None, self._take({"model_dense": run_dense, "model_sparse": run}))
            self._spent += time.perf_counter() - began
        self._spent, self._timed = self._spent + self._cost, self._timed + 1

    def _take(self, operations: dict[str, Callable[[], Any]]) -> dict[str, float]:
        return medians(operations, self.loaded.device, REPEATS)

    def _add(self, batch: Batch, layer: int, rows: int, nnz_mean: float | None, took: dict[str, float]) -> None:
        mhz, watts = self._gauge.read()
        for op, microseconds in took.items():
            kernel = "dense" if op.endswith("dense") else self.loaded.choice(rows).kernel
            about = {"batch": batch.number, "layer": layer, "op": op, "phase": PREFILL, "tokens": rows}
            found = {"nnz_mean": nnz_mean, "microseconds": microseconds, "kernel": kernel}
            self.rows.append(about | found | {"sm_mhz": mhz, "watts": watts})


def medians(operations: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median microseconds of each operation by name, taken in turns after one untimed turn."""
    for operation in operations.values():
        operation()
    took: dict[str, list[Callable[[], float]]] = {name: [] for name in operations}
    for _ in range(repeats):
        for name, operation in operations.items():
            took[name].append(_timed(operation, device))
    return {name: statistics.median(read() for read in reads) for name, reads in took.items()}


def _timed(operation: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Runs an operation; what comes back gives its microseconds, and on a GPU waits for it first."""
    if device.type != "cuda":
        began = time.perf_counter()
        operation()
        took = (time.perf_counter() - began) * 1e6
        return lambda: took
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    operation()
    end.record()

    def read() -> float:
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    return read


@contextmanager
def dense(loaded: LoadedModel) -> Iterator[None]:
    """The model with every FFN run densely, as the checkpoint's own code would."""
    with ExitStack() as stack:
        for ffn in loaded.ffns:
            ffn.forward = ffn.dense  # type: ignore[method-assign]
            stack.callback(ffn.__dict__.pop, "forward")
        yield


class Gauge:
    """A GPU's clock and power, where NVIDIA's library tells them."""

    def __init__(self, device: torch.device) -> None:
        self._handle = None
        if device.type == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self._handle, self._nvml = pynvml.nvmlDeviceGetHandleByUUID(uuid), pynvml
            except Exception:  # not installed, not permitted, or a GPU that it does not know: the columns stay empty
                self._handle = None

    def read(self) -> tuple[float | None, float | None]:
        """SM clock in MHz and power in W, None where unknown."""
        if self._handle is None:
            return None, None
        nvml = self._nvml
        found: list[float | None] = []
        for read in (
            lambda: float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
            lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
        ):
            try:
                found.append(read())
            except nvml.NVMLError:
                found.append(None)
        return found[0], found[1]
