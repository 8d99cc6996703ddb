"""The Hopper kernel without a plan: counts of rows against the reference, and launches that overlap with others."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.gpu_checks import CUDA, assert_same_results, make
from torch import Tensor

from twell.kernels.backends import hopper, reference
from twell.kernels.layout import Layout
from twell.kernels.ops import gated_ffn
from twell.kernels.stats import Stats

pytestmark = pytest.mark.usefixtures("gpu_without_plans")
call = partial(make, probes="counts", layout=None, want_packed=False)
ROWS = [1, 2, 7, 8, 9, 16, 17, 40, 63, 64, 65, 127, 128, 129, 200, 256, 257, 384, 513, 560, 641, 768, 1000,
        1025, 1280, 1400, 2047, 2048, 2049]  # fmt: skip
SHAPES = [  # d_model, d_ff, quiet: rows that fire hardly, nearly all, not at all; one past and one short of tiles
    (64, 8, 4),
    (192, 1000, 12),
    (2048, 5632, 90),
    (1000, 392, -40),
    (320, 3080, 400),
    (264, 5640, -40),
    (136, 16384, 10),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_count_of_rows_equals_the_reference(shape: tuple[int, int, float], dtype: torch.dtype) -> None:
    everything = {"probes": "neurons", "layout": Layout(), "want_packed": True}
    words_alone = {"probes": "neurons"}  # nothing counts nnz from them
    for n in ROWS:
        for options in (
            {},
            {"gated": False},
            {"bias": True},
            everything,
            {"bias": True, "gated": False} | everything,
            words_alone,
            {"gated": False, "want_packed": True},
        ):
            one = call(n, *shape, dtype=dtype, **options)
            assert_same_results(hopper.run(one), reference.run(one), (n, options))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "d_model", "d_ff", "quiet"), [(45_056, 64, 256, 9), (5505, 512, 2040, 24), (3700, 768, 3072, -40)], ids=str
)
def test_many_rows_of_few_neurons(n: int, d_model: int, d_ff: int, quiet: float) -> None:
    everything = {"probes": "neurons", "layout": Layout(), "want_packed": True}
    for options in ({}, {"gated": False, "bias": True}, everything, {"want_packed": True}):
        one = call(n, d_model, d_ff, quiet, **options)
        one.x[n // 2, 3] = float("nan")
        assert_same_results(hopper.run(one), reference.run(one), (n, options))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 3, 40, 100, 128, 250, 700, 1000])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_that_are_not_finite_are_nan_and_alone(n: int, gated: bool) -> None:
    for d_ff, quiet in ((512, 12), (5000, -40)):
        one = call(n, 128, d_ff, quiet, gated=gated, rows=None)
        one.x[n // 2, 3], one.x[n - 1, 1] = float("nan"), float("-inf")
        got = hopper.run(one)
        assert_same_results(got, reference.run(one), n)
        assert not bool(got[1].finite[n // 2])
    half = call(n, 64, 5000, 0, dtype=torch.float16, gated=gated, rows=None)
    half.x[n // 3] *= 2000 if gated else 20000  # the products fit a half, what comes of them does not
    got = hopper.run(half)
    assert_same_results(got, reference.run(half), n)
    assert not bool(got[1].finite[n // 3])


@pytest.mark.gpu
def test_waits_for_what_was_launched_before() -> None:
    """x and weights that the stream writes just before each call, and a workspace that the call before still reads."""
    calls = [call(n, 512, 2816, 20, seed=n) for n in (1, 64, 5, 128, 17, 256, 3, 700)]
    expected = [reference.run(one) for one in calls]
    sources = [[tensor.clone() for tensor in (one.x, one.w_gate, one.w_up, one.w_down)] for one in calls]

    def run_all() -> list[tuple[Tensor, Stats]]:
        out = []
        for one, source in zip(calls, sources, strict=True):
            for tensor, true in zip((one.x, one.w_gate, one.w_up, one.w_down), source, strict=True):
                tensor.fill_(float("nan"))
                tensor.copy_(true)
            out.append(hopper.run(one))
            out.append(hopper.run(one))
        return out

    graph = torch.cuda.CUDAGraph()
    eager = run_all()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run_all()
    graph.replay()
    for y, _ in captured:
        y.fill_(float("nan"))
    for got in (eager, captured):
        for again in range(10 if got is captured else 1):
            if got is captured:
                graph.replay()
            for i, result in enumerate(got):
                assert_same_results(result, expected[i // 2], (i, again))


@pytest.mark.gpu
def test_the_same_bits_on_two_streams() -> None:
    generator = torch.Generator(device=CUDA).manual_seed(1)
    weights = [torch.randn(5632, 1024, device=CUDA, generator=generator).bfloat16() / 32 for _ in range(3)]
    weights[0][:, 0] = -2
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for n in (1, 16, 64, 100, 250, 600):
        x = torch.randn(n, 1024, device=CUDA, generator=generator).bfloat16()
        x[:, 0] = 1
        expected = gated_ffn(x, weights[0], weights[1], weights[2].t(), kernel="hopper")
        torch.cuda.synchronize()
        others = []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    others.append(gated_ffn(x, weights[0], weights[1], weights[2].t(), kernel="hopper"))
        torch.cuda.synchronize()
        for other in others:
            assert_same_results(other, expected, n)
