"""Make FFNs and inputs of a stated sparsity for benchmarks, at random or from recorded patterns of firings.

Inputs are normal with a constant 1 in column 0, whose gate weight is each neuron's bias. The bias is chosen by
bisection on the rounded inputs, so that the mean nnz is the requested one. `even`: every neuron is equally likely to
fire. `heavy`: rows and neurons differ widely, and 30 % of the neurons never fire. `dense`: every neuron fires on every
row.

A recorded pattern of up to d_model / 2 rows is reproduced exactly: gate weights that give each row and neuron a
pre-activation of the right sign are the least-norm solution of a linear system. Cost: one gate product on a sample of
rows for a random case; a system of rows x rows for a pattern.

    ffn, x = synthetic_ffn("heavy", 8192, 2048, 5632, nnz=29, dtype=torch.bfloat16, device="cuda")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twell.kernels.layout import Layout, TwELL, pack
from twell.kernels.modules import SparseFFN

KINDS = ("heavy", "even", "dense")
ROW_SPREAD, NEURON_SPREAD = 0.35, 1.5  # sd of the logarithm of a row's size and of a neuron's probability to fire
LIKELIEST, DEAD = 0.6, 0.3  # greatest probability to fire; share of neurons that never fire
NEVER = 1e-9  # probability of those
SAMPLE = 4096  # rows on which the bias is chosen
STEPS = 40  # of the bisection
PACKED_ROWS = 16384  # rows that are packed at a time


def synthetic_ffn(
    kind: str,
    rows: int,
    d_model: int,
    d_ff: int,
    *,
    nnz: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    plain: bool = False,
    seed: int = 0,
) -> tuple[SparseFFN, Tensor]:
    """Make a random FFN and x [rows, d_model] that fires a mean of `nnz` neurons a row (dense: all of them).

    kind: heavy | even | dense; plain: without up weights. The same seed gives the same bits on one kind of device.
    Raises ValueError for an unknown kind, and for an nnz that the kind cannot have.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    source = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device=device)

    x, gate = normal(rows, d_model), normal(d_ff, d_model) * d_model**-0.5
    if kind == "dense":
        x, gate = x.abs_().to(dtype), gate.abs_().to(dtype)
    else:
        if nnz is None or not 0 < nnz <= max_nnz(d_ff):
            raise ValueError(f"nnz: expected more than 0 and at most {max_nnz(d_ff):.0f} of {d_ff} neurons, got {nnz}")
        if kind == "heavy":
            x *= torch.exp(ROW_SPREAD * normal(rows, 1))
            chance = torch.exp(NEURON_SPREAD * normal(d_ff))
            chance = (chance * (nnz / d_ff / chance.mean())).clamp_(max=LIKELIEST) / (1 - DEAD)
            chance[torch.rand(d_ff, generator=source, device=device) < DEAD] = NEVER
        else:
            chance = torch.full((d_ff,), nnz / d_ff, device=device)
        x[:, 0], gate[:, 0] = 1, 0
        x, gate = x.to(dtype), gate.to(dtype)
        gate[:, 0] = _bias(x, gate, torch.special.ndtri(1 - chance.double()).float(), nnz)
    up = None if plain else (normal(d_ff, d_model) * d_model**-0.5).to(dtype)
    down = (normal(d_model, d_ff) * d_ff**-0.5).to(dtype)
    return SparseFFN(gate, up, down, kernel="reference"), x


def max_nnz(d_ff: int) -> float:
    """Return the greatest mean nnz that a synthetic FFN of d_ff neurons can have."""
    return LIKELIEST * (1 - DEAD) * d_ff


def _bias(x: Tensor, gate: Tensor, threshold: Tensor, nnz: float) -> Tensor:
    """Return the bias -(threshold + s) of each neuron, rounded to the gate's dtype, with s by bisection.

    x [rows, d_model], gate [d_ff, d_model]; threshold [d_ff]: the pre-activation that a neuron exceeds as often as it
    should fire. s makes a mean of `nnz` neurons a row fire.
    """
    sample = x[:: max(1, len(x) // SAMPLE)].float()
    z = sample @ gate.float().t()
    low, high = -8.0, 8.0
    for _ in range(STEPS):
        s = (low + high) / 2
        fired = float((z + (-(threshold + s)).to(gate.dtype).float() > 0).sum()) / len(z)
        low, high = (s, high) if fired > nnz else (low, s)
    return (-(threshold + s)).to(gate.dtype)


@dataclass(frozen=True)
class Pattern:
    """The neurons that each row fired. nnz: int64 [rows]; neurons: int64 [sum of nnz], row after row."""

    nnz: Tensor
    neurons: Tensor

    def rows(self, number: int) -> Pattern:
        """Return this many rows: the last ones, or all of them repeated."""
        times = -(-number // len(self.nnz))
        nnz = self.nnz.repeat(times)[-number:]
        return Pattern(nnz, self.neurons.repeat(times)[times * len(self.neurons) - int(nnz.sum()) :])

    def mask(self, d_ff: int, device: torch.device | str) -> Tensor:
        """Return where a neuron fired, bool [rows, d_ff]."""
        fired = torch.zeros(len(self.nnz), d_ff, dtype=torch.bool, device=device)
        row = torch.repeat_interleave(torch.arange(len(self.nnz)), self.nnz)
        fired[row.to(device), self.neurons.to(device)] = True
        return fired


def ffn_firing(
    pattern: Pattern, d_model: int, d_ff: int, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> tuple[SparseFFN, Tensor]:
    """Make an FFN and x [rows, d_model] of which each row fires exactly the neurons of the pattern.

    Raises ValueError for more than d_model / 2 rows, for which such weights may not exist.
    """
    rows = len(pattern.nnz)
    if rows > d_model // 2:
        raise ValueError(f"pattern: expected at most d_model / 2 = {d_model // 2} rows, got {rows}")
    source = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, d_model, generator=source, device=device).to(dtype)
    size = 0.5 + torch.rand(rows, d_ff, generator=source, device=device, dtype=torch.float64)
    pre_activations = torch.where(pattern.mask(d_ff, device), size, -size)
    exact = x.double()
    gate = torch.linalg.solve(exact @ exact.t(), pre_activations).t() @ exact
    up = torch.randn(d_ff, d_model, generator=source, device=device) * d_model**-0.5
    down = torch.randn(d_model, d_ff, generator=source, device=device) * d_ff**-0.5
    return SparseFFN(gate.to(dtype), up.to(dtype), down.to(dtype), kernel="reference"), x


def packed_pattern(
    pattern: Pattern, d_ff: int, layout: Layout, *, dtype: torch.dtype, device: torch.device | str
) -> TwELL:
    """Return the pattern as TwELL, as a gate product would emit it, with random values."""
    source = torch.Generator(device).manual_seed(0)
    states = []
    for start in range(0, len(pattern.nnz), PACKED_ROWS):
        first, nnz = int(pattern.nnz[:start].sum()), pattern.nnz[start : start + PACKED_ROWS]
        fired = Pattern(nnz, pattern.neurons[first : first + int(nnz.sum())]).mask(d_ff, device)
        value = 0.1 + torch.rand(fired.shape, generator=source, device=device)
        states.append(pack(value.to(dtype), fired, layout))
    return TwELL.cat(states)
