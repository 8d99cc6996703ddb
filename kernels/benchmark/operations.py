"""What a benchmark runs: the FFN by each kernel, and the dense forms that they are held against.

Every operation is a function without arguments, on an input that is given when it is made, so that whoever times it
times nothing else.
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
from twell.kernels.benchmark.timing import Run
from twell.kernels.dispatch import KERNELS
from twell.kernels.layout import Layout, TwELL
from twell.kernels.modules import Probe, SparseFFN
from twell.kernels.params import FFNParams, Requirements

LAST = "reference"  # of KERNELS: it runs anything, slowly
PROBES: dict[str, dict[str, Any]] = {
    "ffn_counts": {"probes": "counts"},
    "ffn_neurons": {"probes": "neurons"},
    "ffn_packed": {"want_packed": True},
}


@dataclass(frozen=True)
class Operation:
    """What is timed. op: as the column dictionary has it; compression: 0 for dense operations."""

    op: str
    kernel: str = "torch"
    compression: int = 0


DENSE, COMPILED, FUSED = Operation("ffn_dense"), Operation("ffn_compiled"), Operation("ffn_fused")
GATE, UP_DOWN = Operation("gate"), Operation("up_down")


@dataclass(frozen=True)
class BenchRequest:
    """What to compare, and how long to take over it.

    kernels: default all that can take a case; layouts: what they are to emit; a kernel that cannot is left out. The
    reference is slow enough to let a GPU cool for the others, so there it runs where it is named or alone
    compiled: torch.compile's FFN too; probes: the kernels' probes too; seconds: of turns; None: as SECONDS has it
    cold: weights rotated; on_timed(operation, run): told of each operation after the turns
    """

    kernels: Sequence[str] | None = None
    layouts: Sequence[Layout] = (Layout(),)
    compiled: bool = True
    probes: bool = False
    cold: bool = False
    seconds: float | None = None
    on_timed: Callable[[Operation, Run], None] | None = None


def operations(ffn: SparseFFN, x: Tensor, asked: BenchRequest, left_out: dict[str, str]) -> dict[Operation, Run]:
    """Every operation on x, each giving y or nothing; why a kernel is not among them goes into `left_out`."""
    dense = sibling(ffn, "reference")
    runs = dense_operations(dense, x)
    if asked.compiled:
        compiled = _compiled(x.shape, x.dtype, x.device, dense.w_gate.shape, dense.w_up is None)
        runs = {DENSE: runs.pop(DENSE), COMPILED: partial(compiled, dense, x), **runs}
    numbers = torch.arange(len(x), dtype=torch.int32, device=x.device)
    for name in candidates(ffn, x, asked, left_out):
        for layout in asked.layouts:
            reason = refusal(name, ffn, x, layout)
            if reason is not None:
                left_out[f"{name} at compression {layout.compression}" if len(asked.layouts) > 1 else name] = reason
                continue
            module = sibling(ffn, name, probe=Probe(layout=layout))
            runs[Operation("ffn_sparse", name, layout.compression)] = partial(module, x)
            for op, about in PROBES.items() if asked.probes else ():
                probe = Probe(layout=layout, tokens=numbers, sequences=numbers // 1024, **about)
                runs[Operation(op, name, layout.compression)] = partial(sibling(module, name, probe=probe), x)
            for op, run in stages(name, module, x).items():
                runs[Operation(op, name, layout.compression)] = run
    return runs


def dense_operations(ffn: SparseFFN, x: Tensor) -> dict[Operation, Run]:
    """The dense FFN as it is, with gate and up as one product, and the gate product alone."""
    runs: dict[Operation, Run] = {DENSE: partial(ffn.dense, x)}
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
    """The dense FFN by torch.compile, for one shape: it would give up after some of them."""
    torch.compiler.reset()
    return torch.compile(SparseFFN.dense, dynamic=False)


def candidates(ffn: SparseFFN, x: Tensor, asked: BenchRequest, left_out: dict[str, str]) -> list[str]:
    """The names of the kernels to try."""
    if asked.kernels is not None:
        return list(asked.kernels)
    names = [name for name in KERNELS if name != LAST]
    if x.is_cuda and any(refusal(name, ffn, x, asked.layouts[0]) is None for name in names):
        left_out[LAST] = "it would let the GPU cool between the others' turns; --kernel reference times it"
        return names
    return list(KERNELS)


def refusal(kernel: str, ffn: SparseFFN, x: Tensor, layout: Layout) -> str | None:
    """Why a kernel cannot run this FFN on x and emit this layout; None if it can."""
    requirements = Requirements(ffn.activation, ffn.up_relu, ffn.threshold, layout, want_packed=True)
    shape = (x.device, x.dtype, ffn.d_model, ffn.d_ff, len(x))
    return KERNELS[kernel].refuses(*shape) or KERNELS[kernel].lacks(requirements)


def stages(kernel: str, ffn: SparseFFN, x: Tensor, packed: TwELL | None = None) -> dict[str, Run]:
    """A kernel's own gate product and what follows it, where it lets them be run alone."""
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
    """The same FFN for another kernel or dtype, with the weights it shares or a copy of them."""
    down = ffn.w_down if KERNELS[kernel].down_by_neuron else ffn.w_down.contiguous()
    tensors = [ffn.w_gate, ffn.w_up, down, ffn.b_gate, ffn.b_up, ffn.b_down]
    tensors = [None if t is None else t.to(dtype or t.dtype, copy=copy) for t in tensors]
    about = {"layer": ffn.layer, "activation": ffn.activation, "up_relu": ffn.up_relu, "threshold": ffn.threshold}
    return SparseFFN(*tensors, **about, kernel=kernel, probe=probe)  # type: ignore[arg-type]
