"""The FFN op: gated `down(act(x Wg) * (x Wu))`, plain `down(act(x W1))`, and the counts of what fired.

One signature, whichever kernel runs; `dispatch.choose` says which one and why.

    y, stats = gated_ffn(x, w_gate, w_up, w_down, probes="counts")
    stats.nnz  # int32 [rows]: neurons whose gate pre-activation is > 0 in float32
"""

from __future__ import annotations

from torch import Tensor

from twell.kernels.dispatch import Choice, choose, run
from twell.kernels.layout import Layout
from twell.kernels.params import FFNParams
from twell.kernels.stats import NeuronSums, Stats, TileCounts

__all__ = ["Choice", "NeuronSums", "Stats", "TileCounts", "choose", "gated_ffn", "plain_ffn"]


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
    """Compute y [..., d_model] = act(x Wg + bg) * (x Wu + bu) Wd + bd, and count what fired.

    x: [..., d_model] of bfloat16, float16, float32 or float64, n rows in all, n from 0 up, contiguous
    w_gate, w_up: [d_ff, d_model]; w_down: [d_model, d_ff], as nn.Linear has them; both sizes multiples of 8;
    all contiguous, or w_down the transpose of a contiguous one, which some kernels read without a copy
    b_gate, b_up: [d_ff]; b_down: [d_model]
    rows: uint8 [n]; a row with 0 is computed, and counted in its own nnz, but in no other statistic
    tokens, sequences: int32 [n], token id and sequence number, both from 0 up (-1 stands for none); read by
    probes="neurons" alone
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
    params = FFNParams(
        x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, b_gate=b_gate, b_up=b_up, b_down=b_down,
        rows=rows, tokens=tokens, sequences=sequences, activation=activation, up_relu=up_relu, threshold=threshold,
        probes=probes, layout=layout, want_packed=want_packed,
    )  # fmt: skip
    return run(params, kernel)


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
    """Compute y [..., d_model] = act(x W1 + b1) W2 + b2, and count what fired.

    w_in: [d_ff, d_model]; w_out: [d_model, d_ff]; b_in: [d_ff]; b_out: [d_model]

    Everything else is as in `gated_ffn`, with the hidden pre-activation in place of the gate's.
    """
    params = FFNParams(
        x=x, w_gate=w_in, w_up=None, w_down=w_out, b_gate=b_in, b_down=b_out,
        rows=rows, tokens=tokens, sequences=sequences, activation=activation, threshold=threshold,
        probes=probes, layout=layout, want_packed=want_packed,
    )  # fmt: skip
    return run(params, kernel)
