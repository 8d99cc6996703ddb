"""Patterns of what fires: made ones, recorded ones, and inputs by which an FFN of random gate weights fires them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from twell.kernels.benchmark.synthetic import Pattern
from twell.workbench.bench.cases import read_patterns

MARGIN, MOST_STEPS = 0.2, 200


def pattern_of(rows: int, d_ff: int) -> tuple[Pattern, Tensor]:
    """Make a pattern whose rows fire none to nine in ten of d_ff neurons; return it, and it as bool [rows, d_ff]."""
    fired = torch.rand(rows, d_ff, generator=torch.Generator().manual_seed(1)) < torch.linspace(0, 0.9, rows)[:, None]
    return Pattern(fired.sum(1), fired.nonzero()[:, 1]), fired


def fired_by(pattern: Tensor, d_model: int) -> tuple[Tensor, Tensor]:
    """Return x [n, d_model] and gate weights [d_ff, d_model], of bfloat16, by which the pattern fires.

    pattern: bool [n, d_ff]. Weights are random unit rows, and -1 for a column of x that is 1 everywhere, which keeps
    what does not fire below 0; x is moved along each row of weights by what it lacks of a margin, again and again. A
    row that fires so many that no x is found, some 1 000 of 5 632, may end without finite values; it fires nothing.
    """
    generator = torch.Generator(pattern.device).manual_seed(0)
    directions = torch.randn(pattern.shape[1], d_model - 1, generator=generator, device=pattern.device)
    directions = (directions / directions.norm(dim=1, keepdim=True)).bfloat16()
    x = torch.zeros(len(pattern), d_model - 1, device=pattern.device)
    wanted = torch.where(pattern, 1 + MARGIN, 1 - MARGIN)
    for _ in range(MOST_STEPS):
        lacks = wanted - x.bfloat16() @ directions.t()
        lacks = torch.where(pattern, lacks.clamp(min=0), lacks.clamp(max=0))
        if not lacks.any():
            break
        x += (lacks.bfloat16() @ directions).float()
    one = torch.ones(len(x), 1, device=pattern.device)
    return torch.cat([one, x], 1).bfloat16(), torch.cat([-torch.ones_like(directions[:, :1]), directions], 1)


def patterns(path: Path, d_ff: int, device: str = "cuda") -> Iterator[Tensor]:
    """Yield the pattern of each layer of a file, bool [n, d_ff]."""
    for layer in read_patterns(path).values():
        row = torch.arange(len(layer.nnz)).repeat_interleave(layer.nnz)
        pattern = torch.zeros(len(layer.nnz), d_ff, dtype=torch.bool, device=device)
        pattern[row.to(device), layer.neurons.to(device)] = True
        yield pattern
