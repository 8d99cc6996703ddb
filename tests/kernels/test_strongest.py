"""What is left of each row's firings, against plain Python; every way leaves the same. Cost: 1 s."""

from __future__ import annotations

import math

import pytest
import torch

from twell.kernels.strongest import bits_of, by_bits, by_topk, strongest, takes

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
        kept = strongest(hidden, share, threshold)
        rows = zip(kept.flatten(0, 1).tolist(), hidden.flatten(0, 1).tolist(), strict=True)
        assert all(ours == strongest_of(row, share, threshold) for ours, row in rows)


@pytest.mark.parametrize("dtype", [*DTYPES[:2], torch.float16], ids=str)
@pytest.mark.parametrize("firing", [0.0, 0.05, 0.6])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_bits_find_the_same(dtype: torch.dtype, firing: float, threshold: float) -> None:
    hidden = hidden_values(firing, dtype) if firing else torch.zeros(3, 8, dtype=dtype)
    for share in (0.0, 0.1, 0.4, 1.0):
        assert torch.equal(by_bits(hidden, share, threshold), by_topk(hidden, share, threshold))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits_tell_what_torch_says_is_above_a_threshold(dtype: torch.dtype) -> None:
    bits = torch.arange(2**15 - 1, dtype=torch.int16)
    values = bits.view(dtype)
    numbers = ~values.isnan()
    for threshold in (0.0, 1e-9, 0.1, 0.3, 0.5, 1.0, 3.14159, 1e4, 1e30):
        above = bits > bits_of(threshold, dtype)
        assert torch.equal(above[numbers], (values > threshold)[numbers]), threshold


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("firing", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("columns", [8, 200, 203, 5632])
def test_a_gpu_leaves_the_same(dtype: torch.dtype, firing: float, columns: int) -> None:
    """By its kernel where that takes the values; few values that many are equal to, and many."""
    generator = torch.Generator().manual_seed(columns)
    few = torch.randint(-6, 7, (5, 31, columns), generator=generator) / 4 + 0.125
    many = torch.randn(5, 31, columns, generator=generator)
    for values in (few, many):
        hidden = (values * (torch.rand(values.shape, generator=generator) < firing)).to(dtype)
        hidden[0, 0], hidden[2, 6] = 0, 1.5
        on_gpu = hidden.cuda()
        assert takes(on_gpu) == (dtype.itemsize == 2 and columns != 203)
        for share, threshold in ((0.0, 0.0), (0.1, 0.0), (0.4, 0.5), (0.75, 0.1), (1.0, 0.0), (0.5, 100.0)):
            assert torch.equal(strongest(on_gpu, share, threshold).cpu(), by_topk(hidden, share, threshold))
