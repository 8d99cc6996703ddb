"""The FFN op with a backward pass: gated `down(act(x Wg) * (x Wu))` or plain `down(act(x W1))`, with l1.

`l1`, the mean over rows of sum |h|, is an output with a gradient of its own, for a loss to add.
Counts come with it at no further cost.
One call runs forward and backward by one backend, which `choose` names from device, dtype and shape, with the reason.

    out = train_gated_ffn(x, w_gate, w_up, w_down)
    (loss(out.y) + 1e-4 * out.l1).backward()
    out.fires  # int64 [d_ff]: rows on which each neuron fired; 0 in this call's dead neurons

Weights may be float32 masters beside 16-bit x: the op casts them, and returns float32 gradients that were never rounded
to 16 bits. Under autocast x is cast to its dtype. Without gradients to follow (`torch.no_grad`), nothing is kept. One
backward pass makes all gradients: those of tensors that need none, as frozen weights or data as x, are dropped.

Cost: `reference` runs six dense products backward and keeps two dense matrices; see `backends/` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twell.kernels.autograd import ffn_forward
from twell.kernels.backends import hopper_backward, hopper_compact
from twell.kernels.calls import whole_calls
from twell.kernels.dispatch import Choice
from twell.kernels.params import DIFFERENTIABLE, DTYPES, PLAIN_NAMES, SPARSE_ACTIVATIONS, check_size

SPARSE = (
    "its backward pass multiplies over the neurons that blocks of rows fire, and the rows that fire groups of neurons"
)
DEFAULT_SHARE = 8  # one neuron in so many has room in what is kept, where there is none for g and h whole
CAPACITY_SHARES = (32, 8, 4)  # those that `capacity_for` chooses from; torch.compile makes code for each one used
CAPACITY_MARGIN = 1.5  # times the mean of recent calls
LEAST_CAPACITY = 16  # of those with which something is to be kept
SPARSE_SHARE = 1 / 10  # of d_ff; 1.25 x dense at 330 of 5632, 0.96 to 1.05 x at 700, 0.84 x at 1 200
DENSE = "the backward pass is dense, in torch, as no sparse one takes this call"


@dataclass(frozen=True)
class Trained:
    """Results of a training call of n rows.

    y: [..., d_model], as x; l1: [], float32 (float64 for float64), the sum of |h| over counted rows by their number
    nnz: int32 [n], neurons that a row fired; fires: int64 [d_ff], counted rows that fired a neuron; finite: bool [n]
    """

    y: Tensor
    l1: Tensor
    nnz: Tensor
    fires: Tensor
    finite: Tensor


def train_gated_ffn(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, b_gate: Tensor | None = None, b_up: Tensor | None = None,
    b_down: Tensor | None = None, *, rows: Tensor | None = None, activation: str = "relu", kernel: str = "auto",
    capacity: int | None = None, sums: Sequence[Tensor] | None = None,
) -> Trained:  # fmt: skip
    """Compute y = (act(x Wg + bg) * (x Wu + bu)) Wd + bd, l1 and counts, with gradients for all arguments.

    x: [..., d_model] of bfloat16, float16, float32 or float64, contiguous; n rows in all
    w_gate, w_up: [d_ff, d_model]; w_down: [d_model, d_ff], contiguous or the transpose of a contiguous matrix
    b_gate, b_up: [d_ff]; b_down: [d_model]; parameters have the dtype of x, or float32 beside a 16-bit x
    rows: uint8 [n]; a row with 0 has y and gradients, but is not in l1 or `fires`
    activation: relu | relu2 (ReLU squared); kernel: auto, or the name of a backend
    capacity: neurons a row, in the mean, for which `hopper` has room to keep what the backward pass reads, six bytes
    each; where more fire, it computes them again. From two thirds of d_ff on (one in a plain FFN), the default, that is
    room for g and h whole, four bytes times d_ff a row (two), and they are kept if the first rows fire much: then
    nothing is computed again. See `capacity_for`
    sums: tensors like w_gate, w_up and w_down, of their dtype or float32, to which the backward pass adds their
    gradients. Autograd then gets none of these weights: their `grad` stays as it is, and hooks on them, as those of
    DDP, are not called. What is rounded to 16 bits is each call's gradient, and each sum

    A row with inf or nan among its gate or hidden values is NaN in y and dx, and adds nothing to other gradients.
    Raises TypeError or ValueError, before anything runs, that names the argument, what was expected, what came.
    """
    if w_up is None:
        raise TypeError("w_up: expected a tensor, got NoneType")
    return _train(x, (w_gate, w_up, w_down, b_gate, b_up, b_down), rows, activation, kernel, capacity, sums)


def train_plain_ffn(
    x: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None = None, b_out: Tensor | None = None,
    *, rows: Tensor | None = None, activation: str = "relu", kernel: str = "auto", capacity: int | None = None,
    sums: Sequence[Tensor] | None = None,
) -> Trained:  # fmt: skip
    """Compute y = act(x W1 + b1) W2 + b2, l1 and counts, as `train_gated_ffn` does without an up branch."""
    return _train(x, (w_in, None, w_out, b_in, None, b_out), rows, activation, kernel, capacity, sums)


def choose(
    device: torch.device | str, dtype: torch.dtype, d_model: int, d_ff: int, n: int, kernel: str = "auto",
    *, gated: bool = True, activation: str = "relu",
) -> Choice:  # fmt: skip
    """Name the backend for n rows of this shape; a named one that refuses gives way, and the reason says so."""
    if kernel not in ("auto", "hopper", "reference"):
        raise ValueError(f"kernel: expected one of auto, hopper, reference, got {kernel!r}")
    if kernel == "reference":
        return Choice("reference", "asked for by name")
    refusal = hopper_backward.refuses(torch.device(device), dtype, d_model, d_ff, n, gated, activation)
    if refusal is not None:
        return Choice("reference", f"{DENSE}; hopper: {refusal}")
    return Choice("hopper", "asked for by name" if kernel == "hopper" else SPARSE)


def sparse_pays(mean_nnz: float, d_ff: int) -> bool:
    """Return whether the sparse passes beat dense ones on Hopper: measured to do so up to a tenth of all neurons.

    mean_nnz: of recent calls, such as `Trained.nnz` a few steps ago. A trainer asks, as a count that is still on the
    device cannot decide on the host; early in training, where half of all neurons fire, dense layers are faster.
    """
    return mean_nnz <= SPARSE_SHARE * d_ff


def capacity_for(mean_nnz: float, d_ff: int) -> int:
    """Return a capacity with room for half as many again as recent calls fired a row, up to a quarter of d_ff.

    Where they fired more than the share of d_ff from which dense products are faster, room for g and h whole: two
    thirds of what dense autograd keeps.
    """
    if hopper_compact.ENABLED and mean_nnz > hopper_compact.WHOLE_FROM * d_ff:
        return hopper_compact.whole_capacity(d_ff)
    shares = (*CAPACITY_SHARES, *(hopper_compact.SHARES if hopper_compact.ENABLED else ()))
    fits = [share for share in shares if d_ff // share >= CAPACITY_MARGIN * mean_nnz]
    return max(min(LEAST_CAPACITY, d_ff), d_ff // max(fits, default=min(CAPACITY_SHARES)))


def _default_capacity(n: int, d_ff: int) -> int:
    """Return the capacity of a call of n rows that is not told one."""
    return hopper_compact.whole_capacity(d_ff) if hopper_compact.keeps_whole(n, d_ff) else max(1, d_ff // DEFAULT_SHARE)


def _train(
    x: Tensor, weights: tuple[Tensor | None, ...], rows: Tensor | None, activation: str, kernel: str,
    capacity: int | None, sums: Sequence[Tensor] | None,
) -> Trained:  # fmt: skip
    """Check a call, choose a backend, and run it."""
    if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
        raise ValueError(f"capacity: expected at least 1 neuron a row, or None, got {capacity!r}")
    if activation not in SPARSE_ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(SPARSE_ACTIVATIONS)}, got {activation!r}")
    if isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    key = whole_calls.key_of(x, weights, rows, activation, kernel, capacity) if sums is None else None
    if (results := whole_calls.run_again(key, x, weights, rows)) is not None:
        return Trained(*results)
    save = _check(x, weights, rows)
    into = _check_sums(weights, sums)
    d_ff, d_model = weights[0].shape  # type: ignore[union-attr]
    flat = x.view(x.numel() // d_model, d_model)
    biased = any(bias is not None for bias in weights[3:])
    choice = choose(
        x.device, x.dtype, d_model, d_ff, len(flat), kernel,
        gated=weights[1] is not None, activation=activation,
    )  # fmt: skip
    capacity = capacity or _default_capacity(len(flat), d_ff)
    if key is not None and save and choice.kernel == "hopper" and not biased:
        return Trained(*whole_calls.run_first(key, x, weights, rows, capacity, activation))
    y, l1, nnz, fires, finite, *_ = ffn_forward(flat, *weights, rows, activation, choice.kernel, capacity, save, *into)
    return Trained(y.view(x.shape), l1, nnz, fires, finite)


def _check(x: Tensor, weights: tuple[Tensor | None, ...], rows: Tensor | None) -> bool:
    """Raise for a call that no backend takes; return whether gradients are to be followed."""
    own = PLAIN_NAMES if weights[1] is None else {}
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    d_model = check_size("d_model", x.shape[-1])
    w_gate = weights[0]
    d_ff = w_gate.shape[0] if isinstance(w_gate, Tensor) and w_gate.dim() == 2 else 0
    shapes = ((d_ff, d_model), (d_ff, d_model), (d_model, d_ff), (d_ff,), (d_ff,), (d_model,))
    names = DIFFERENTIABLE[1:]
    tensors = {"x": x} | {own.get(name, name): t for name, t in zip(names, weights, strict=True)}
    _check_tensor("x", x, x, tuple(x.shape), (x.dtype,))
    dtype = w_gate.dtype if isinstance(w_gate, Tensor) else x.dtype
    allowed = (x.dtype, torch.float32) if x.element_size() == 2 else (x.dtype,)
    for name, shape, tensor in zip(names, shapes, weights, strict=True):
        if name in ("w_gate", "w_down") or tensor is not None:
            known = own.get(name, name)
            _check_tensor(known, tensor, x, shape, allowed if name == "w_gate" else (dtype,), name == "w_down")
            if name == "w_gate":
                check_size("d_ff", d_ff)
    if rows is not None:
        _check_tensor("rows", rows, x, (x.numel() // d_model,), (torch.uint8,))
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors.values())


def _check_sums(weights: tuple[Tensor | None, ...], sums: Sequence[Tensor] | None) -> tuple[Tensor | None, ...]:
    """Return the sums of w_gate, w_up and w_down, or None three times; raise for those that are unlike the weights."""
    if sums is None:
        return None, None, None
    matrices = [weight for weight in weights[:3] if weight is not None]
    if not isinstance(sums, (tuple, list)) or len(sums) != len(matrices):
        got = f"{len(sums)}" if isinstance(sums, (tuple, list)) else type(sums).__name__
        raise ValueError(f"sums: expected a tensor for each of the {len(matrices)} weight matrices, got {got}")
    for at, (tensor, weight) in enumerate(zip(sums, matrices, strict=True)):
        name, down = f"sums[{at}]", at == len(matrices) - 1
        _check_tensor(name, tensor, weight, tuple(weight.shape), (weight.dtype, torch.float32), down)
        if tensor.requires_grad:
            raise ValueError(f"{name}: expected requires_grad=False, as gradients are added to it, got True")
    return (*sums,) if weights[1] is not None else (sums[0], None, sums[1])


def _check_tensor(
    name: str, tensor: Tensor | None, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...],
    by_neuron: bool = False,
) -> None:  # fmt: skip
    """Raise unless a tensor fits: device, dtype, shape, contiguity. by_neuron: its transpose may be contiguous."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device != x.device:
        raise ValueError(f"{name}: expected device {x.device}, that of x, got {tensor.device}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if not (tensor.is_contiguous() or (by_neuron and tensor.t().is_contiguous())):
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
