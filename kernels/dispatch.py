"""Which kernel runs a call: the list of kernels, and the choice among them.

`choose` says which kernel and why, from device, dtype, shape and options alone, so that the same call gives the same
bits each time. A kernel joins by standing in KERNELS, in order of preference, with functions that say what it refuses.

    choose("cuda", torch.bfloat16, 2048, 5632, n=8192)  # Choice(kernel="hopper", reason="it multiplies over …")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twell.kernels.backends import cpu, cuda, hopper, reference
from twell.kernels.layout import TwELL
from twell.kernels.params import NO_REQUIREMENTS, FFNParams, Requirements, not_sparse
from twell.kernels.stats import RunAgain, Stats


@dataclass(frozen=True)
class Choice:
    """The kernel that takes a call, and the reason, for a manifest or a log."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class Kernel:
    """A way to run the op.

    run(params):    runs checked parameters: y [..., d_model] and its Stats
    refuses(device, dtype, d_model, d_ff, n, requirements): why it cannot take such a call of n rows, or None
    reason:         why it is preferred to those after it in KERNELS
    lacks(requirements): the first option of a call that it does not support, or None
    down_by_neuron: it reads the rows of w_down.t(), so modules hold w_down in that order
    prepare(params): returns what runs checked parameters again, on another x of the same shape, in less time on the
                    host; None: nothing does
    stage_runs(params, packed): for benchmarks, the gate product ("gate") and all that follows it ("up_down"), each to
                    be run alone; "up_down" on `packed` instead of what the gate emits, if it is given. None: it cannot
    """

    run: Callable[[FFNParams], tuple[Tensor, Stats]]
    refuses: Callable[..., str | None]
    reason: str
    lacks: Callable[[Requirements | FFNParams], str | None] = lambda _: None
    down_by_neuron: bool = False
    prepare: Callable[[FFNParams], RunAgain | None] = lambda _: None
    stage_runs: Callable[[FFNParams, TwELL | None], dict[str, Callable[[], Any]]] | None = None


KERNELS: dict[str, Kernel] = {  # fastest first; the last one takes everything
    "hopper": Kernel(
        hopper.run,
        hopper.refuses,
        "it multiplies over the neurons that blocks of rows fire, with Hopper's tensor cores",
        hopper.lacks,
        down_by_neuron=True,
        prepare=hopper.prepare,
        stage_runs=hopper.stage_runs,
    ),
    "cuda": Kernel(
        cuda.run,
        cuda.refuses,
        "it multiplies over the neurons that blocks of rows fire, on the tensor cores of any NVIDIA GPU",
        not_sparse,
        down_by_neuron=True,
    ),
    "cpu": Kernel(
        cpu.run,
        cpu.refuses,
        "it computes up and down only where neurons fire, with the processor's vector units",
        not_sparse,
        down_by_neuron=True,
    ),
    "reference": Kernel(reference.run, lambda *_: None, "it runs in torch on any device and takes every shape"),
}


def choose(
    device: torch.device | str,
    dtype: torch.dtype,
    d_model: int,
    d_ff: int,
    n: int,
    kernel: str = "auto",
    requirements: Requirements = NO_REQUIREMENTS,
) -> Choice:
    """Return the kernel for n rows of this shape; a named one that refuses it gives way, and the reason says so.

    kernel: auto, or the name of one
    A kernel that is not compiled yet is compiled here, the first time.
    Raises ValueError for a name that this build does not have.
    """
    name, refusals = _first(torch.device(device), dtype, d_model, d_ff, n, kernel, requirements)
    if name == kernel:
        return Choice(name, "asked for by name")
    return Choice(name, "; ".join([KERNELS[name].reason, *refusals]))


def run(params: FFNParams, kernel: str) -> tuple[Tensor, Stats]:
    """Check the parameters of a call and run it: y [..., d_model] and its Stats. kernel: as in `choose`."""
    try:
        x, (d_ff, d_model) = params.checked().x, params.w_gate.shape
        name, _ = _first(x.device, x.dtype, d_model, d_ff, params.n, kernel, params)
        return KERNELS[name].run(params)
    except RuntimeError:  # tensors of other layouts lack a shape, strides or memory
        params.refuse_other_layouts()
        raise


def prepare(params: FFNParams, kernel: str) -> RunAgain | None:
    """Return what runs a call that `run` has taken again, on another x of the same shape, in less time on the host.

    None where nothing does, and for calls that count more than nnz. kernel: as in `choose`
    """
    if params.probes == "neurons" or params.layout is not None or params.want_packed:
        return None
    x, (d_ff, d_model) = params.x, params.w_gate.shape
    name, _ = _first(x.device, x.dtype, d_model, d_ff, params.n, kernel, params)
    return KERNELS[name].prepare(params)


def _first(
    device: torch.device,
    dtype: torch.dtype,
    d_model: int,
    d_ff: int,
    n: int,
    kernel: str,
    requirements: Requirements | FFNParams,
) -> tuple[str, list[str]]:
    """Return the name of the first kernel that takes the call, and why those before it do not."""
    if kernel != "auto" and not (isinstance(kernel, str) and kernel in KERNELS):
        raise ValueError(f"kernel: expected one of {', '.join(('auto', *KERNELS))}, got {kernel!r}")
    refusals = []
    for name in KERNELS if kernel == "auto" else dict.fromkeys((kernel, *KERNELS)):
        candidate = KERNELS[name]
        refusal = candidate.lacks(requirements)
        refusal = refusal or candidate.refuses(device, dtype, d_model, d_ff, n, requirements)
        if refusal is None:
            break
        refusals.append(f"{name}: {refusal}")
    return name, refusals
