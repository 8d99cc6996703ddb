"""The FFN op: gated `down(act(x Wg) * (x Wu))`, plain `down(act(x W1))`, and the counts of what fired.

One signature, whichever kernel runs; `choose` says which one and why, from device, dtype and shape alone. A
kernel joins by standing in KERNELS, in order of preference, with a function that says which shapes it refuses.

    y, stats = gated_ffn(x, w_gate, w_up, w_down, probes="counts")
    stats.nnz  # int32 [rows]: neurons whose gate pre-activation is > 0 in float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twell.kernels.backends import cpu, cuda, hopper, reference
from twell.kernels.layout import Layout
from twell.kernels.params import FFNParams, NeuronSums, Requirements, Stats, TileCounts, not_sparse

__all__ = ["Choice", "Kernel", "NeuronSums", "Stats", "TileCounts", "choose", "gated_ffn", "plain_ffn"]


@dataclass(frozen=True)
class Choice:
    """The kernel that takes a call, and the reason, for the manifest."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class Kernel:
    """A way to run the op. `refuses(device, dtype, d_model, d_ff, n)` gives the reason it cannot, or None.

    lacks(asks):    what it does not have of what a call asks for beside its shape, or None
    down_by_neuron: it reads the rows of w_down.t(), so modules hold w_down in that order
    """

    run: Callable[[FFNParams], tuple[Tensor, Stats]]
    refuses: Callable[[torch.device, torch.dtype, int, int, int], str | None]
    reason: str
    lacks: Callable[[Requirements | FFNParams], str | None] = lambda _: None
    down_by_neuron: bool = False


KERNELS: dict[str, Kernel] = {  # fastest first; the last one takes everything
    "hopper": Kernel(
        hopper.run,
        hopper.refuses,
        "it multiplies over the neurons that blocks of rows fire, with Hopper's tensor cores",
        hopper.lacks,
        down_by_neuron=True,
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


NOTHING = Requirements()


def choose(
    device: torch.device | str,
    dtype: torch.dtype,
    d_model: int,
    d_ff: int,
    n: int,
    kernel: str = "auto",
    asks: Requirements = NOTHING,
) -> Choice:
    """The kernel for n rows of this shape; a named one that refuses it gives way, and the reason says so.

    A kernel that is not compiled yet is compiled here, the first time.
    Raises ValueError for a name that this build does not have.
    """
    name, refusals = _first(torch.device(device), dtype, d_model, d_ff, n, kernel, asks)
    if name == kernel:
        return Choice(name, "asked for by name")
    return Choice(name, "; ".join([KERNELS[name].reason, *refusals]))


def _first(
    device: torch.device,
    dtype: torch.dtype,
    d_model: int,
    d_ff: int,
    n: int,
    kernel: str,
    asks: Requirements | FFNParams,
) -> tuple[str, list[str]]:
    """The name of the kernel that is chosen, and why those before it are not."""
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(('auto', *KERNELS))}, got {kernel!r}")
    refusals = []
    for name in KERNELS if kernel == "auto" else dict.fromkeys((kernel, *KERNELS)):
        candidate = KERNELS[name]
        refusal = candidate.lacks(asks) or candidate.refuses(device, dtype, d_model, d_ff, n)
        if refusal is None:
            break
        refusals.append(f"{name}: {refusal}")
    return name, refusals


def gated_ffn(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    tokens: Tensor | None = None,
    sequences: Tensor | None = None,
    activation: str = "relu",
    up_relu: bool = False,
    threshold: float | None = None,
    probes: str = "counts",
    layout: Layout | None = None,
    want_packed: bool = False,
    kernel: str = "auto",
) -> tuple[Tensor, Stats]:
    """y [..., d_model] = act(x Wg + bg) * (x Wu + bu) Wd + bd, and its counts.

    x: [..., d_model] of bfloat16, float16, float32 or float64, n rows in all, n from 0 up, contiguous
    w_gate, w_up: [d_ff, d_model]; w_down: [d_model, d_ff], as nn.Linear has them; both sizes multiples of 8;
    all contiguous, or w_down the transpose of a contiguous one, which some kernels read without a copy
    b_gate, b_up: [d_ff]; b_down: [d_model]
    rows: uint8 [n]; a row with 0 is computed, and counted in its own nnz, but in no other statistic
    tokens, sequences: int32 [n], token id and sequence number (from 0 up); read by probes="neurons" alone
    activation: relu | relu2 (ReLU squared); silu | gelu | gelu_tanh need a threshold
    up_relu: a ReLU on the up branch too; stats.nnz_used then counts the products that are not zero
    threshold: run densely, and count a neuron as fired where |hidden| > threshold
    probes: none | counts | neurons; layout: asks for the tile histogram, and is the layout of `packed`
    want_packed: stats.packed holds the values in TwELL (default Layout() if none is given)
    kernel: auto, or the name of one

    A neuron fires where its gate pre-activation is > 0 in the product's float32 accumulator (float64 for
    float64), before any conversion; what did not fire is left out of the hidden state, never multiplied by zero.
    A row with inf or nan among its gate pre-activations or hidden values comes out NaN throughout, is False in
    stats.finite, has nnz 0, and is in no other statistic. Everything is for inference: no gradient is followed.
    Raises TypeError or ValueError, before anything runs, that names the argument, what was expected, what came.
    """
    if w_up is None:  # in FFNParams, the mark of a plain FFN
        raise TypeError("w_up: expected a tensor, got NoneType")
    call = FFNParams(
        x, w_gate, w_up, w_down, b_gate, b_up, b_down, rows, tokens, sequences,
        activation, up_relu, threshold, probes, layout, want_packed,
    )  # fmt: skip
    return run(call, kernel)


def plain_ffn(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    tokens: Tensor | None = None,
    sequences: Tensor | None = None,
    activation: str = "relu",
    threshold: float | None = None,
    probes: str = "counts",
    layout: Layout | None = None,
    want_packed: bool = False,
    kernel: str = "auto",
) -> tuple[Tensor, Stats]:
    """y [..., d_model] = act(x W1 + b1) W2 + b2, and its counts; w_in [d_ff, d_model], w_out [d_model, d_ff].

    Everything else is as in `gated_ffn`, with the hidden pre-activation in the gate's place.
    """
    call = FFNParams(
        x, w_in, None, w_out, b_in, None, b_out, rows, tokens, sequences,
        activation, False, threshold, probes, layout, want_packed,
    )  # fmt: skip
    return run(call, kernel)


def run(call: FFNParams, kernel: str) -> tuple[Tensor, Stats]:
    """y [..., d_model] and its counts of a call that is checked here, by the kernel that is chosen for it."""
    x, (d_ff, d_model) = call.checked().x, call.w_gate.shape
    name, _ = _first(x.device, x.dtype, d_model, d_ff, call.n, kernel, call)
    return KERNELS[name].run(call)
