"""What an action leaves of hidden values, against plain Python. Cost: 1 s."""

from __future__ import annotations

import math

import pytest
import torch

from twell.workbench.ablations.actions import Strongest, apply, by_bits, by_sort, by_topk

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def hidden_values(firing: float, dtype: torch.dtype) -> torch.Tensor:
    """Return [3, 7, 200] values of which a share is not 0, many of them equal; a row of zeros and a full one."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-6, 7, (3, 7, 200), generator=generator) / 4 + 0.125
    hidden = hidden * (torch.rand(hidden.shape, generator=generator) < firing)
    hidden[0, 0], hidden[2, 6] = 0, 1.5
    hidden[1, 3, :3] = torch.tensor([3.0, -3.0, 2.0])
    return hidden.to(dtype)


def strongest_of(row: list[float], share: float, threshold: float) -> list[float]:
    """Return a row without what is weaker than the strongest share of what fires."""
    fired = sorted((abs(value) for value in row if abs(value) > threshold), reverse=True)
    least = fired[math.ceil(share * len(fired)) - 1] if fired else math.inf
    return [value if abs(value) >= least else 0.0 for value in row]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("firing", [0.05, 0.6])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_strongest_share_stays(firing: float, threshold: float, dtype: torch.dtype) -> None:
    hidden = hidden_values(firing, dtype)
    for share in (0.1, 0.5, 0.75):
        kept = apply(Strongest(share, threshold), hidden)
        rows = zip(kept.flatten(0, 1).tolist(), hidden.flatten(0, 1).tolist(), strict=True)
        assert all(ours == strongest_of(row, share, threshold) for ours, row in rows)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("firing", [0.0, 0.05, 0.6])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_every_way_leaves_the_same(dtype: torch.dtype, firing: float, threshold: float) -> None:
    """By the greatest of each row, by a sort of what fired, and by bits, as on a GPU."""
    hidden = hidden_values(firing, dtype) if firing else torch.zeros(3, 8, dtype=dtype)
    for share in (0.1, 0.4, 1.0):
        expected = by_topk(hidden, share, threshold)
        places = (hidden.abs() > threshold).flatten().nonzero()[:, 0]
        assert torch.equal(by_sort(hidden, share, places), expected)
        assert torch.equal(by_bits(hidden, share, threshold), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("firing", [0.05, 0.6])
def test_a_gpu_leaves_what_a_cpu_does(dtype: torch.dtype, firing: float) -> None:
    hidden = hidden_values(firing, dtype)
    for share, threshold in ((0.1, 0.0), (0.4, 0.5)):
        action = Strongest(share, threshold)
        assert torch.equal(apply(action, hidden.cuda()).cpu(), apply(action, hidden))


def test_a_sort_tells_many_rows_apart() -> None:
    """Rows past those whose number fits beside a value in 32 bits, and the last that does."""
    for rows in (2**16, 2**16 + 1):
        size = (torch.arange(2 * rows).view(rows, 2) % 97 + 1).to(torch.bfloat16)
        expected = size.masked_fill(size < size.amax(1, keepdim=True), 0)
        assert torch.equal(by_sort(size, 0.5, torch.arange(2 * rows)), expected)
