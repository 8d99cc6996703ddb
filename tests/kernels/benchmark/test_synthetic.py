"""Inputs of benchmarks: made ones and recorded patterns fire what they are asked to."""

from __future__ import annotations

import pytest
import torch
from support.fired_patterns import pattern_of
from torch import Tensor

from twell.kernels.benchmark.synthetic import ffn_firing, packed_pattern, synthetic_ffn
from twell.kernels.layout import Layout, unpack
from twell.kernels.modules import SparseFFN
from twell.kernels.ops import gated_ffn


def nnz_of(ffn: SparseFFN, x: Tensor) -> Tensor:
    """Counted in float64, without any of the kernels."""
    return (x.double() @ ffn.w_gate.double().t() > 0).sum(1).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "nnz"), [("even", 7), ("even", 90), ("heavy", 15), ("heavy", 100)])
def test_made_inputs_fire_what_they_are_asked_to(kind: str, nnz: int, dtype: torch.dtype) -> None:
    ffn, x = synthetic_ffn(kind, 2000, 256, 512, nnz=nnz, dtype=dtype)
    result = nnz_of(ffn, x)
    assert result.mean() == pytest.approx(nnz, rel=0.02)
    assert (x[:, 0] == 1).all() and x.dtype == ffn.w_down.dtype == dtype
    fires = (x.double() @ ffn.w_gate.double().t() > 0).sum(0)
    if kind == "heavy":  # 30 % never fire, and rows and neurons differ far more than by chance
        assert 0.25 < (fires < 3).double().mean() < 0.5
        assert result.std() > 1.5 * nnz**0.5
        assert fires.topk(51).values.sum() > 0.3 * fires.sum()
    else:
        assert (fires < 3).sum() < 10
        assert result.std() < 1.3 * nnz**0.5


def test_dense_inputs_fire_everything_and_plain_has_no_up() -> None:
    ffn, x = synthetic_ffn("dense", 100, 64, 128, plain=True)
    assert ffn.w_up is None
    assert (nnz_of(ffn, x) == 128).all()
    assert torch.equal(synthetic_ffn("dense", 100, 64, 128)[1], x)  # the same seed


@pytest.mark.parametrize(("kind", "nnz"), [("sparse", 5), ("even", None), ("even", 0), ("heavy", 100)])
def test_inputs_that_cannot_be_made_are_refused(kind: str, nnz: int | None) -> None:
    with pytest.raises(ValueError, match=r"kind: expected|nnz: expected"):
        synthetic_ffn(kind, 10, 64, 128, nnz=nnz)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_patterns_fire_exactly(dtype: torch.dtype) -> None:
    pattern, fired = pattern_of(32, 200)
    ffn, x = ffn_firing(pattern, 64, 200, dtype=dtype, device="cpu")
    assert torch.equal(x.double() @ ffn.w_gate.double().t() > 0, fired)
    _, stats = gated_ffn(x, ffn.w_gate, ffn.w_up, ffn.w_down, want_packed=True)
    assert torch.equal(stats.nnz.long(), pattern.nnz)
    with pytest.raises(ValueError, match="at most d_model / 2 = 32 rows, got 33"):
        ffn_firing(pattern_of(33, 200)[0], 64, 200, dtype=dtype, device="cpu")


def test_patterns_are_repeated_cut_and_packed() -> None:
    pattern, fired = pattern_of(30, 300)
    for rows in (1, 7, 30, 75):
        cut = pattern.rows(rows)
        expected = fired.repeat(3, 1)[-rows:]
        assert torch.equal(cut.mask(300, "cpu"), expected)
        assert torch.equal(unpack(packed_pattern(cut, 300, Layout(), dtype=torch.bfloat16, device="cpu")) > 0, expected)
