"""The FFN op in numpy float64, with a bound on each number's rounding: what any kernel's results must lie within.

Nothing here is taken from `kernels`. Where all sums are exact (small whole numbers) the bounds are zero, and every
count must be equal; elsewhere a neuron within rounding of its bound may fire or not, and so may what depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray
ERRORS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
SLOPE = 1.2  # at least the steepest slope of SiLU and GELU


@dataclass(frozen=True)
class Bounded:
    """Numbers and how far each may be off: value, error [rows, columns]; past: which may overflow on the way."""

    value: Array
    error: Array
    past: Array


@dataclass(frozen=True)
class Expected:
    """What a call must give, of n rows and d_ff neurons; fires, may_fire: bool [n, d_ff], surely and perhaps.

    finite, doubtful: bool [n]; a doubtful row may be finite or not. used, may_use: as fires, of nnz_used.
    """

    y: Bounded
    value: Bounded
    fires: Array
    may_fire: Array
    used: Array
    may_use: Array
    finite: Array
    doubtful: Array


def expect(tensors: dict[str, torch.Tensor | None], options: dict[str, Any], exact: bool) -> Expected:
    """Return what a call must give. tensors: by gated_ffn's names, w_up None in a plain FFN; x [n, d_model].

    exact: whether every sum and product is a whole number that float32 holds
    """
    with np.errstate(all="ignore"):
        return _expect(tensors, options, exact)


def _expect(tensors: dict[str, torch.Tensor | None], options: dict[str, Any], exact: bool) -> Expected:
    dtype = tensors["x"].dtype  # type: ignore[union-attr]
    a = {name: None if tensor is None else tensor.double().numpy() for name, tensor in tensors.items()}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gate = _product(a["x"], a["w_gate"], a["b_gate"], wide, exact)
    up = None if a["w_up"] is None else _product(a["x"], a["w_up"], a["b_up"], wide, exact)
    if up is not None and options["up_relu"]:
        up = Bounded(np.where(up.value > 0, up.value, np.where(np.isnan(up.value), np.nan, 0)), up.error, up.past)
    value = _narrow(_activated(options["activation"], gate, wide), dtype, wide, exact, options["activation"])
    hidden = value if up is None else _times(value, up, wide)
    narrow = rounded(hidden, dtype, exact)
    above, may_be_above = gate.value - gate.error > 0, gate.value + gate.error > 0
    everything = np.ones_like(above)
    keeps, may_keep = (above, may_be_above) if "relu" in options["activation"] else (everything, everything)
    fires, may_fire, of_value = above, may_be_above, value
    if options["threshold"] is not None:
        size, bound = np.abs(hidden.value), options["threshold"]
        fires = keeps & (size - hidden.error > bound)
        may_fire = may_keep & ~(size + hidden.error <= bound)
        of_value = Bounded(size, hidden.error, hidden.past)
    finite, doubtful = _finite(gate, narrow, keeps, may_keep, dtype)
    rows = finite[:, None] | doubtful[:, None]
    kept = rows & may_keep
    shown = Bounded(np.where(kept, narrow.value, 0), np.where(kept, narrow.error, 0), kept & False)
    down = _product(shown.value, a["w_down"], a["b_down"], wide, exact)
    carried = down.error + shown.error @ np.abs(a["w_down"]).T * (1 + fires.shape[1] * ERRORS[wide])
    y = rounded(Bounded(down.value, carried, down.past | ~np.isfinite(carried)), dtype, exact and not carried.any())
    positive = everything if up is None else up.value - up.error > 0
    may_be = everything if up is None else ~(up.value + up.error <= 0)
    fires, may_fire = fires & finite[:, None], may_fire & rows
    return Expected(y, of_value, fires, may_fire, fires & positive, may_fire & may_be, finite, doubtful)


def _product(x: Any, weight: Any, bias: Any, wide: torch.dtype, exact: bool) -> Bounded:
    """Return x [n, k] weight [m, k]^T + bias, summed in `wide` in any order."""
    value = x @ weight.T + (0 if bias is None else bias)
    terms = np.abs(x) @ np.abs(weight).T + (0 if bias is None else np.abs(bias))
    k, exact = x.shape[1], exact and terms.max(initial=0) < 2**24
    error = np.zeros_like(value) if exact else (k + 2) * ERRORS[wide] * terms + (k + 2) * TINY[wide]
    return Bounded(value, error, ~(terms < 0.999 * torch.finfo(wide).max))


def _activated(name: str, gate: Bounded, wide: torch.dtype) -> Bounded:
    """Return the activation of the gate."""
    z, error = gate.value, gate.error
    if name == "relu":
        return Bounded(np.where(z > 0, z, 0), error, gate.past)
    if name == "relu2":
        squared = np.where(z > 0, z * z, 0)
        off = np.where(error > 0, 2 * np.abs(z) * error + error**2 + 2 * ERRORS[wide] * squared + TINY[wide], 0)
        return Bounded(squared, off, gate.past)
    if name == "silu":
        value = z / (1 + np.exp(-z))
    elif name == "gelu":
        value = 0.5 * z * (1 + torch.erf(torch.from_numpy(z / np.sqrt(2))).numpy())
    else:
        value = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    past = gate.past | (np.abs(z) > float(torch.finfo(wide).max) / 4)  # torch's GELU doubles z on the way
    return Bounded(value, SLOPE * error + 64 * ERRORS[wide] * (np.abs(z) + 1), past)


def _narrow(value: Bounded, dtype: torch.dtype, wide: torch.dtype, exact: bool, activation: str) -> Bounded:
    """Return the value as the op hands it on: rounded to the dtype of x after a ReLU; infinite past the dtype's end."""
    kept = dtype if "relu" in activation else wide
    most = float(torch.finfo(kept).max)
    number = rounded(value, kept, exact)
    over = np.abs(number.value) - number.error > most * (1 + ERRORS[kept] / 2) * (1 + 2.0**-20)
    past = number.past | ~(np.abs(number.value) + number.error < most * (1 - 2.0**-20))
    return Bounded(
        np.where(over, np.copysign(np.inf, number.value), number.value), np.where(over, 0, number.error), past
    )


def rounded(number: Bounded, dtype: torch.dtype, exact: bool) -> Bounded:
    """Return numbers rounded to a dtype: to the same ones where they are exact."""
    if exact:
        return Bounded(torch.from_numpy(number.value).to(dtype).double().numpy(), number.error, number.past)
    if dtype.itemsize > 2:
        return number
    off = number.error + ERRORS[dtype] * (np.abs(number.value) + number.error) + TINY[dtype]
    return Bounded(number.value, off, number.past)


def _times(a: Bounded, b: Bounded, wide: torch.dtype) -> Bounded:
    """Return the product of two matrices, element by element."""
    value = a.value * b.value
    error = a.error * np.abs(b.value) + np.abs(a.value) * b.error + a.error * b.error
    inexact = (a.error > 0) | (b.error > 0)
    error = error + np.where(inexact, 2 * ERRORS[wide] * np.abs(value) + TINY[wide], 0)
    return Bounded(value, error, a.past | b.past)


def _finite(gate: Bounded, hidden: Bounded, keeps: Array, may_keep: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Return which rows are surely finite, and which may be either. keeps: hidden values that are not left out."""
    most = float(torch.finfo(dtype).max)
    edge = most * (1 + ERRORS[dtype] / 2) if dtype.itemsize < 8 else most
    wide_most = float(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max)
    surely_not = ~(np.abs(gate.value) - gate.error <= wide_most).all(1)
    surely_not |= (keeps & ~(np.abs(hidden.value) - hidden.error <= edge * (1 + 2.0**-20))).any(1)
    perhaps_not = gate.past.any(1)
    perhaps_not |= (may_keep & (hidden.past | ~(np.abs(hidden.value) + hidden.error < most * (1 - 2.0**-20)))).any(1)
    return ~(surely_not | perhaps_not), perhaps_not & ~surely_not
