"""How long each layer's FFN takes, sparse and dense, on the input that the capture just gave it.

The idea: every so many batches, each layer is timed where it stands in the forward pass: its attention, then the dense
FFN, the sparse FFN and the dense gate product in turns on the same input, medians over repetitions, with device events
on a GPU. The gate product is what no sparse kernel is spared. Now and then the whole model is timed in the same way, so
that each share in it can be told. Timed calls run with probes off and are heard by nobody, so they change no count.

Cost: ALLOWANCE seconds and a share of the capture's time. The first batch is always timed; after that, one is passed
over when timing another would spend more. On a GPU that reports its power, 12 s once for the power that the whole model
draws, dense and sparse: as soon as they can be afforded too, with a share of 1 at the first batch. On a CPU the first
ROWS rows of a batch are timed, which is enough to fill it, and of the attention's sequences as many as come to that,
but one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from twell.kernels.call import Stats
from twell.kernels.module import Probe
from twell.kernels.turns import turns
from twell.workbench.batches import Batch
from twell.workbench.forward import Inputs, OnLayer, forward, probing
from twell.workbench.gauge import WINDOW_SECONDS, Gauge, Reading
from twell.workbench.models import LoadedModel
from twell.workbench.schema import PREFILL

ALLOWANCE = 4.0  # seconds that may go into timings whatever the length of the capture
ROWS = {"cpu": 1024, "cuda": 2**31}  # rows of a batch that are timed
REPEATS = 5
SPARSE = ("ffn_sparse", "model_sparse")  # what the sparse kernel runs; the rest is dense
MODEL_EVERY = 4  # timed batches between two timings of the whole model


class Timings:
    """Collects the rows of the run's `timings` table as batches go by; `rows` holds those not yet fetched."""

    def __init__(self, loaded: LoadedModel, every: int, share: float, loss: bool, generates: bool = False) -> None:
        """`every`: batches from one timed batch to the next, 0 for none; `share`: of the capture's time that they may
        take beside ALLOWANCE; `loss`: as the capture computes it; `generates`: attention, whose cache a repetition
        would spoil, is then not timed, and each layer's FFN in the prompts' pass and in the one after it."""
        self.generates = generates
        self.loaded, self.share, self.loss = loaded, share, loss
        self.every = every if loaded.ffns else 0  # what only counts has no faster form
        self.rows: list[dict[str, Any]] = []
        self._gauge = Gauge(loaded.device)
        self._kind = loaded.device.type
        self.spent = 0.0  # seconds, of the batches timed so far
        self._started, self._cost, self._timed = time.perf_counter(), 0.0, 0
        self._powered = not self._gauge.reads  # whether nothing is left to ask of the device's power
        self._rows = 0  # timed of the largest batch so far

    @contextmanager
    def of(self, batch: Batch) -> Iterator[OnLayer | None]:
        """Around the batch's forward pass, which is to tell each layer to what comes out, if anything does."""
        if not self._wants(batch):
            yield None
            return
        self._cost = 0.0
        with ExitStack() as stack:
            for number, layer in enumerate([] if self.generates else self.loaded.blocks):
                attention = getattr(layer, "self_attn", None)
                if attention is not None:
                    hear = partial(self._attention, batch, number)
                    stack.callback(attention.register_forward_pre_hook(hear, with_kwargs=True).remove)
            yield partial(self._ffn, batch)
        self._close(batch)

    def _wants(self, batch: Batch) -> bool:
        """Whether this batch is due, can be afforded, and is no remainder, whose times would stand for no other's."""
        rows = min(batch.padded, ROWS[self._kind])
        self._rows = max(self._rows, rows)
        if not self.every or batch.number % self.every or 2 * rows < self._rows:
            return False
        return not self._timed or self._affords(self._cost)

    def _affords(self, seconds: float) -> bool:
        return self.spent + seconds <= ALLOWANCE + self.share * (time.perf_counter() - self._started)

    def _ffn(self, batch: Batch, layer: int, x: Tensor, stats: Stats, phase: int = PREFILL) -> None:
        began = self._now()
        ffn, x = self.loaded.ffns[layer], x[: ROWS[self._kind]]
        gate = partial(linear, x, ffn.w_gate, ffn.b_gate)
        with probing(self.loaded.probe, Probe()):
            took = self._take({"ffn_dense": partial(ffn.dense, x), "ffn_sparse": partial(ffn, x), "gate": gate})
        mean = float(stats.nnz[: len(x)].double().mean())
        self._add(batch, layer, len(x), mean, took, phase=phase)
        self._cost += time.perf_counter() - began

    def _attention(self, batch: Batch, layer: int, module: nn.Module, args: tuple[Any, ...], given: Any) -> None:
        began = self._now()
        hidden = given["hidden_states"] if "hidden_states" in given else args[0]  # [sequences, positions, d_model]
        held, longest = hidden.shape[:2]
        kept = min(held, max(1, ROWS[self._kind] // longest))

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[:kept] if value.dim() and len(value) == held else value
            return tuple(map(cut, value)) if isinstance(value, tuple) else value

        attend = partial(module.forward, *cut(args), **{name: cut(value) for name, value in given.items()})
        self._add(batch, layer, kept * longest, None, self._take({"attention": attend}))
        self._cost += time.perf_counter() - began

    def _close(self, batch: Batch) -> None:
        """After the forward pass of a timed batch: the whole model, when it is its turn, and the books."""
        if self._timed % MODEL_EVERY == 0:
            began = self._now()
            part = batch.head(ROWS[self._kind])
            inputs = Inputs.of(part, self.loaded.device)
            run = partial(forward, self.loaded, inputs, loss=self.loss)

            def run_dense() -> None:
                with dense(self.loaded):
                    run()

            operations: dict[str, Callable[[], Any]] = {"model_dense": run_dense, "model_sparse": run}
            took, power = self._take(operations), dict[str, Reading]()
            if not self._powered and (self.share >= 1 or self._affords(self._cost + len(operations) * WINDOW_SECONDS)):
                power = {op: self._gauge.window(operation) for op, operation in operations.items()}
                self._powered = True
            self._add(batch, -1, part.padded, None, took, power)
            self.spent += time.perf_counter() - began
        self.spent, self._timed = self.spent + self._cost, self._timed + 1

    def _now(self) -> float:
        """Once the device has done what it was given, so that no work of the capture counts as spent on timings."""
        if self._kind == "cuda":
            torch.cuda.synchronize(self.loaded.device)
        return time.perf_counter()

    def _take(self, operations: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        return turns(operations, self.loaded.device, REPEATS)

    def _add(
        self,
        batch: Batch,
        layer: int,
        rows: int,
        nnz_mean: float | None,
        took: dict[str, list[float]],
        power: dict[str, Reading] | None = None,
        phase: int = PREFILL,
    ) -> None:
        """`power`: by operation, from windows of it alone; without one, what the device reports now."""
        now = self._gauge.read()
        for op, times in took.items():
            kernel = self.loaded.choice(rows).kernel if op in SPARSE else "dense"
            about = {"batch": batch.number, "layer": layer, "op": op, "phase": phase, "tokens": rows}
            found = {"nnz_mean": nnz_mean, "microseconds": statistics.median(times), "kernel": kernel}
            mhz, watts = now if power is None else power.get(op, (now[0], None))
            self.rows.append(about | found | {"sm_mhz": mhz, "watts": watts})


@contextmanager
def dense(loaded: LoadedModel) -> Iterator[None]:
    """The model with every FFN run densely, as the checkpoint's own code would."""
    with ExitStack() as stack:
        for ffn in loaded.ffns:
            ffn.forward = ffn.dense  # type: ignore[method-assign]
            stack.callback(ffn.__dict__.pop, "forward")
        yield
