"""The operations of a benchmark: the FFN by each kernel, and the dense forms that they are compared with.

Each is a function without arguments that has its input bound, so that timing it times nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from twell.kernels.backends.reference import ACTIVATION
from twell.kernels.benchmark.timing import TimedCall
from twell.kernels.dispatch import KERNELS
from twell.kernels.layout import Layout, TwELL
from twell.kernels.modules import Probe, SparseFFN
from twell.kernels.params import FFNParams, Requirements

LAST = "reference"  # the kernel that takes any case, slowly
PROBES: dict[str, dict[str, Any]] = {
    "ffn_counts": {"probes": "counts"},
    "ffn_neurons": {"probes": "neurons"},
    "ffn_packed": {"want_packed": True},
}


@dataclass(frozen=True)
class Operation:
    """An operation that is timed.

    op: its name, one of the column `op` of the table `bench`; compression: of its TwELL layout, 0 for dense operations
    """

    op: str
    kernel: str = "torch"
    compression: int = 0


DENSE, COMPILED, FUSED = Operation("ffn_dense"), Operation("ffn_compiled"), Operation("ffn_fused")
GATE, UP_DOWN = Operation("gate"), Operation("up_down")


@dataclass(frozen=True)
class BenchRequest:
    """The operations to compare, and how long to time them.

    kernels: by name; None: every kernel that can take a case. The reference is so slow that a GPU would cool during
    its turns, so on a GPU it runs only if it is named or no other kernel can.
    layouts: those that kernels emit; a kernel that cannot emit a layout is left out
    compiled: whether the FFN by torch.compile is timed too
    probes: whether each kernel is timed with its probes too
    cold: whether weights are rotated through more than the cache holds
    seconds: total time of the turns; None: that of `timing.SECONDS`
    on_timed: is called with each operation and its function after the turns
    """

    kernels: Sequence[str] | None = None
    layouts: Sequence[Layout] = (Layout(),)
    compiled: bool = True
    probes: bool = False
    cold: bool = False
    seconds: float | None = None
    on_timed: Callable[[Operation, TimedCall], None] | None = None


def operations(
    ffn: SparseFFN, x: Tensor, request: BenchRequest, left_out: dict[str, str]
) -> dict[Operation, TimedCall]:
    """Return every operation on x [rows, d_model], as functions that return y or nothing.

    left_out: gets the reason for each kernel that is not among them, by name
    """
    dense = sibling(ffn, "reference")
    runs = dense_operations(dense, x)
    if request.compiled:
        compiled = _compiled(x.shape, x.dtype, x.device, dense.w_gate.shape, dense.w_up is None)
        runs = {DENSE: runs.pop(DENSE), COMPILED: partial(compiled, dense, x), **runs}
    numbers = torch.arange(len(x), dtype=torch.int32, device=x.device)
    for name in candidates(ffn, x, request, left_out):
        for layout in request.layouts:
            reason = refusal(name, ffn, x, layout)
            if reason is not None:
                left_out[f"{name} at compression {layout.compression}" if len(request.layouts) > 1 else name] = reason
                continue
            module = sibling(ffn, name, probe=Probe(layout=layout))
            runs[Operation("ffn_sparse", name, layout.compression)] = partial(module, x)
            for op, arguments in PROBES.items() if request.probes else ():
                probe = Probe(layout=layout, tokens=numbers, sequences=numbers // 1024, **arguments)
                runs[Operation(op, name, layout.compression)] = partial(sibling(module, name, probe=probe), x)
            for op, run in stages(name, module, x).items():
                runs[Operation(op, name, layout.compression)] = run
    return runs


def dense_operations(ffn: SparseFFN, x: Tensor) -> dict[Operation, TimedCall]:
    """Return the dense forms of an FFN on x: the FFN itself, with gate and up as one product, and the gate product."""
    runs: dict[Operation, TimedCall] = {DENSE: partial(ffn.dense, x)}
    if ffn.w_up is not None:
        weight = torch.cat([ffn.w_gate, ffn.w_up])
        biases = [ffn.b_gate, ffn.b_up]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([weight.new_zeros(ffn.d_ff) if b is None else b for b in biases])

        def fused() -> Tensor:
            gate, up = linear(x, weight, bias).chunk(2, -1)
            hidden = ACTIVATION[ffn.activation](gate) * (up.relu() if ffn.up_relu else up)
            return linear(hidden, ffn.w_down, ffn.b_down)

        runs[FUSED] = fused
    return runs | {GATE: partial(linear, x, ffn.w_gate, ffn.b_gate)}


@lru_cache(maxsize=1)
def _compiled(*_shape: Any) -> Callable[[SparseFFN, Tensor], Tensor]:
    """Return the dense FFN by torch.compile for one shape. Without the reset it would give up after several shapes."""
    torch.compiler.reset()
    return torch.compile(SparseFFN.dense, dynamic=False)


def candidates(ffn: SparseFFN, x: Tensor, request: BenchRequest, left_out: dict[str, str]) -> list[str]:
    """Return the names of the kernels to try on x; left_out: gets the reason if the reference is not among them."""
    if request.kernels is not None:
        return list(request.kernels)
    names = [name for name in KERNELS if name != LAST]
    if x.is_cuda and any(refusal(name, ffn, x, request.layouts[0]) is None for name in names):
        left_out[LAST] = "it would let the GPU cool between the others' turns; --kernel reference times it"
        return names
    return list(KERNELS)


def refusal(kernel: str, ffn: SparseFFN, x: Tensor, layout: Layout) -> str | None:
    """Return why a kernel cannot run this FFN on x and emit this layout; None if it can."""
    requirements = Requirements(ffn.activation, ffn.up_relu, ffn.threshold, layout, want_packed=True)
    shape = (x.device, x.dtype, ffn.d_model, ffn.d_ff, len(x))
    return KERNELS[kernel].refuses(*shape, requirements) or KERNELS[kernel].lacks(requirements)


def stages(kernel: str, ffn: SparseFFN, x: Tensor, packed: TwELL | None = None) -> dict[str, TimedCall]:
    """Return a kernel's gate product and what follows it as operations of their own; none where it has no such stages.

    packed: the gate's TwELL that the second one reads; default that of the gate product
    """
    stage_runs = KERNELS[kernel].stage_runs
    if stage_runs is None:
        return {}
    params = FFNParams(
        x=x, w_gate=ffn.w_gate, w_up=ffn.w_up, w_down=ffn.w_down, b_gate=ffn.b_gate, b_up=ffn.b_up, b_down=ffn.b_down,
        activation=ffn.activation, up_relu=ffn.up_relu, probes="none",
    )  # fmt: skip
    return stage_runs(params.checked(), packed)


def sibling(
    ffn: SparseFFN, kernel: str, dtype: torch.dtype | None = None, *, probe: Probe | None = None, copy: bool = False
) -> SparseFFN:
    """Return the same FFN for another kernel or dtype. It shares weights where it can; with `copy` it has its own."""
    down = ffn.w_down if KERNELS[kernel].down_by_neuron else ffn.w_down.contiguous()
    tensors = [ffn.w_gate, ffn.w_up, down, ffn.b_gate, ffn.b_up, ffn.b_down]
    tensors = [None if t is None else t.to(dtype or t.dtype, copy=copy) for t in tensors]
    options = {"layer": ffn.layer, "activation": ffn.activation, "up_relu": ffn.up_relu, "threshold": ffn.threshold}
    return SparseFFN(*tensors, **options, kernel=kernel, probe=probe)  # type: ignore[arg-type]
