"""The Hopper kernel from 2 049 rows on, where tasks of the down product are cut: right, and the same again."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import CUDA, assert_same, make, normal_ffn, poison, skip_without

from twell.kernels import hopper, reference
from twell.kernels.ops import gated_ffn


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skips without a Hopper GPU; poisons the memory that workspaces will come from."""
    skip_without(hopper)
    poison()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2049, 2176, 2700, 4096])
@pytest.mark.parametrize("d_model", [8, 264, 1000])
def test_tasks_of_the_down_product_cut_anywhere(n: int, d_model: int) -> None:
    """Fewer and more tasks than multiprocessors, of unions of one length, of many lengths, and of none."""
    for d_ff in (328, 1016, 2824, 5640):
        for quiet in (-40, 12):
            call = make(n, d_model, d_ff, quiet, probes="none", layout=None, want_packed=False)
            silent = torch.arange(n, device=CUDA) // 128 % 5 == 3
            call.x[silent, 0], call.x[silent, 1:] = 1 if quiet > 0 else -1, 0
            y, _ = hopper.run(call)
            assert_same(f"y {d_ff} {quiet}", y, reference.run(call)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d_model"), [(2176, 640), (3000, 2048), (4096, 72)])
def test_same_bits_fifty_times(n: int, d_model: int) -> None:
    """Though tasks are cut, and their parts come when they come."""
    tensors = normal_ffn(n, d_model, 5632, seed=3)
    for loud in (False, True):
        if loud:
            tensors[0].abs_(), tensors[1].abs_()
        y, _ = gated_ffn(*tensors, kernel="hopper")
        assert bool(y.isfinite().all())
        others = [gated_ffn(*tensors, kernel="hopper")[0] for _ in range(50)]
        assert all(torch.equal(other, y) for other in others)
