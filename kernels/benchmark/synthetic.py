"""FFNs and inputs of a stated sparsity, for benchmarks: made up, or made so that recorded patterns fire.

Inputs are normal with a constant 1 in column 0, which lends each neuron a bias through its gate weight; the bias is
found by bisection on the inputs as they are rounded, so that the mean nnz is as asked. `even`: every neuron is equally
likely to fire. `heavy`: rows and neurons differ widely, and 30 % of the neurons never fire. `dense`: all fire, always.

A recorded pattern of up to d_model / 2 rows is brought about exactly: gate weights that give every row and neuron a
pre-activation of the right sign are the least solution of a linear system. Cost: one gate product on a sample of rows
a made case; a system of rows x rows unknowns a pattern.

    ffn, x = synthetic_ffn("heavy", 8192, 2048, 5632, nnz=29, dtype=torch.bfloat16, device="cuda")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twell.kernels.layout import Layout, TwELL, pack
from twell.kernels.modules import SparseFFN

KINDS = ("heavy", "even", "dense")
ROW_SPREAD, NEURON_SPREAD = 0.35, 1.5  # of the logarithm of a row's size and of a neuron's chance to fire
LIKELIEST, DEAD = 0.6, 0.3  # greatest chance to fire; share of neurons that never do
NEVER = 1e-9
SAMPLE = 4096  # rows that the bias is found on
STEPS = 40  # of the bisection
PACKED_ROWS = 16384  # packed at a time


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
    """A made FFN with x [rows, d_model] that fires a mean of `nnz` neurons a row (dense: all of them).

    kind: heavy | even | dense; plain: without up weights. The same seed gives the same on one kind of device.
    Raises ValueError for an unknown kind, and for an nnz that the kind cannot give.
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
        if nnz is None or not 0 < nnz <= most_nnz(d_ff):
            raise ValueError(f"nnz: expected more than 0 and at most {most_nnz(d_ff):.0f} of {d_ff} neurons, got {nnz}")
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


def most_nnz(d_ff: int) -> float:
    """The greatest mean nnz that is made for so many neurons."""
    return LIKELIEST * (1 - DEAD) * d_ff


def _bias(x: Tensor, gate: Tensor, threshold: Tensor, nnz: float) -> Tensor:
    """-(threshold + s), as the dtype rounds it, with s by bisection so that `nnz` neurons fire in the mean."""
    some = x[:: max(1, len(x) // SAMPLE)].float()
    z = some @ gate.float().t()
    low, high = -8.0, 8.0
    for _ in range(STEPS):
        s = (low + high) / 2
        found = float((z + (-(threshold + s)).to(gate.dtype).float() > 0).sum()) / len(z)
        low, high = (s, high) if found > nnz else (low, s)
    return (-(threshold + s)).to(gate.dtype)


@dataclass(frozen=True)
class Pattern:
    """Which neurons each row of a layer fired: nnz int64 [rows]; neurons int64, row after row."""

    nnz: Tensor
    neurons: Tensor

    def rows(self, wanted: int) -> Pattern:
        """So many rows: the last ones, or all of them again and again."""
        times = -(-wanted // len(self.nnz))
        nnz = self.nnz.repeat(times)[-wanted:]
        return Pattern(nnz, self.neurons.repeat(times)[times * len(self.neurons) - int(nnz.sum()) :])

    def mask(self, d_ff: int, device: torch.device | str) -> Tensor:
        """bool [rows, d_ff], true where a neuron fired."""
        fired = torch.zeros(len(self.nnz), d_ff, dtype=torch.bool, device=device)
        row = torch.repeat_interleave(torch.arange(len(self.nnz)), self.nnz)
        fired[row.to(device), self.neurons.to(device)] = True
        return fired


def ffn_firing(
    pattern: Pattern, d_model: int, d_ff: int, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> tuple[SparseFFN, Tensor]:
    """An FFN, and x, of which each row fires exactly the neurons that the pattern says.

    Raises ValueError for more than d_model / 2 rows, where such weights need not exist.
    """
    rows = len(pattern.nnz)
    if rows > d_model // 2:
        raise ValueError(f"pattern: expected at most d_model / 2 = {d_model // 2} rows, got {rows}")
    source = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, d_model, generator=source, device=device).to(dtype)
    size = 0.5 + torch.rand(rows, d_ff, generator=source, device=device, dtype=torch.float64)
    wanted = torch.where(pattern.mask(d_ff, device), size, -size)
    wide = x.double()
    gate = torch.linalg.solve(wide @ wide.t(), wanted).t() @ wide
    up = torch.randn(d_ff, d_model, generator=source, device=device) * d_model**-0.5
    down = torch.randn(d_model, d_ff, generator=source, device=device) * d_ff**-0.5
    return SparseFFN(gate.to(dtype), up.to(dtype), down.to(dtype), kernel="reference"), x


def packed_pattern(
    pattern: Pattern, d_ff: int, layout: Layout, *, dtype: torch.dtype, device: torch.device | str
) -> TwELL:
    """The pattern as the TwELL that a gate product would have emitted, with random values."""
    source = torch.Generator(device).manual_seed(0)
    parts = []
    for at in range(0, len(pattern.nnz), PACKED_ROWS):
        begin, some = int(pattern.nnz[:at].sum()), pattern.nnz[at : at + PACKED_ROWS]
        fired = Pattern(some, pattern.neurons[begin : begin + int(some.sum())]).mask(d_ff, device)
        value = 0.1 + torch.rand(fired.shape, generator=source, device=device)
        parts.append(pack(value.to(dtype), fired, layout))
    return TwELL.cat(parts)
