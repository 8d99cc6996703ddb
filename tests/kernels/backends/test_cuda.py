"""The CUDA kernel against the reference: integer-valued inputs, where every sum is exact and all bits must agree."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import gpu_checks
from support.gpu_checks import (
    CUDA,
    assert_as_exact_as_dense,
    assert_probes_change_nothing_else,
    assert_same,
    assert_same_in_a_graph,
    assert_same_results,
    make,
    normal_ffn,
    skip_without,
)
from torch import Tensor

from twell.kernels.backends import cuda, gpu, reference
from twell.kernels.dispatch import choose
from twell.kernels.layout import Layout
from twell.kernels.ops import gated_ffn
from twell.kernels.params import FFNParams, Requirements, not_sparse
from twell.kernels.stats import Stats

Make = Callable[..., FFNParams]


@pytest.fixture
def ffn() -> Make:
    """Makes calls; skips without a GPU that the kernel takes."""
    skip_without(cuda)
    return make


assert_right = partial(gpu_checks.assert_right, cuda, spill=False)
ROWS = (1, 2, 16, 17, 32, 33, 127, 128, 129, 256, 257, 1000, 1025, 4097)
SIZES = [  # d_model, d_ff, quiet: one past every tile and one short of it, few neurons fired and many
    (8, 8, 0),
    (64, 264, 9),
    (72, 248, 12),
    (136, 1000, 14),
    (200, 328, 6),
    (320, 2824, 34),
    (1032, 520, 40),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_reference(ffn: Make, size: tuple[int, int, float], dtype: torch.dtype) -> None:
    variants: tuple[dict[str, Any], ...] = ({}, {"bias": True}, {"gated": False}, {"bias": True, "gated": False})
    for at, n in enumerate(ROWS):
        options = variants[at % len(variants)]
        assert_right(ffn(n, *size, dtype=dtype, **options), (n, options))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 100, 700])
@pytest.mark.parametrize("size", [(16384, 136, 150), (136, 16384, 24), (2056, 5640, 90), (5000, 11008, 160)], ids=str)
def test_equals_the_reference_in_large_layers(ffn: Make, size: tuple[int, int, float], n: int) -> None:
    assert_right(ffn(n, *size))


@pytest.mark.gpu
@pytest.mark.parametrize("quiet", [-100, 400], ids=["every neuron", "no neuron"])
def test_rows_that_fire_everything_or_nothing(ffn: Make, quiet: float) -> None:
    for n in (1, 90, 600):
        stats = assert_right(ffn(n, 72, 1000, quiet, bias=True))
        assert stats.nnz.unique().tolist() == [1000 if quiet < 0 else 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [7, 130, 1029])
def test_relu_squared_and_a_relu_on_the_up_branch(ffn: Make, n: int, dtype: torch.dtype) -> None:
    for options in ({"activation": "relu2"}, {"up_relu": True}, {"activation": "relu2", "up_relu": True, "bias": True}):
        stats = assert_right(ffn(n, 72, 328, 14, dtype=dtype, **options), options)
        if stats.nnz_used is not None:
            assert 0 < int(stats.nnz_used.sum()) < int(stats.nnz.sum())
    assert_right(ffn(n, 72, 328, 14, dtype=dtype, gated=False, activation="relu2"))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [32, 64, 128, 256, 512])
def test_every_layout(ffn: Make, tile: int) -> None:
    for n, compression in ((5, 2), (200, 4), (600, 8), (131, 16)):
        for quiet in (5, 14):
            stats = assert_right(ffn(n, 72, 1096, quiet, layout=Layout(tile, compression)), (n, compression))
        packed = stats.packed
        assert packed is not None
        assert bool((packed.counts > packed.layout.slots).any()) == bool((packed.spill_index >= 0).any())


@pytest.mark.gpu
@pytest.mark.parametrize("n", [12, 300, 1300])
def test_rows_that_are_not_finite_are_nan_and_alone(ffn: Make, n: int) -> None:
    for options in ({}, {"up_relu": True}, {"gated": False}):
        params = ffn(n, 128, 512, 12, **options)
        bad = sorted({2, n // 2, n - 1})
        params.x[bad[0], 3], params.x[bad[1]], params.x[bad[2], 1] = float("nan"), float("inf"), float("-inf")
        stats = assert_right(params, options)
        assert (~stats.finite).nonzero().flatten().tolist() == bad
    half = ffn(n, 64, 128, 0, dtype=torch.float16)
    half.x[5] *= 60000  # the gate's product is finite in float32 and no longer in float16
    assert not bool(assert_right(half).finite[5])


@pytest.mark.gpu
def test_firing_is_decided_before_rounding(ffn: Make) -> None:
    for n in (1, 100, 600):
        params = ffn(n, 64, 128, 0, dtype=torch.float16, layout=None, want_packed=False)
        params.x.zero_(), params.w_gate.zero_()
        params.x[:, 0], params.w_gate[3, 0] = 2.0**-14, 2.0**-12  # the pre-activation 2^-26 is 0 in float16
        _, stats = cuda.run(params)
        assert stats.nnz.tolist() == [1] * n


@pytest.mark.gpu
def test_probes_change_nothing_else(ffn: Make) -> None:
    for n in (9, 500, 600):
        assert_probes_change_nothing_else(cuda.run, ffn(n, 256, 1024, 20, up_relu=True))


@pytest.mark.gpu
def test_passes_of_a_small_workspace_add_up(ffn: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    params = ffn(1500, 64, 512, 8)
    whole = cuda.run(params)
    monkeypatch.setattr(gpu, "MAX_WORKSPACE", 1)
    assert_same_results(cuda.run(params), whole, spill=False)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 200, 3000])
def test_same_bits_again_on_other_streams_from_two_threads_and_in_graphs(ffn: Make, n: int) -> None:
    run = partial(gated_ffn, *normal_ffn(n, 256, 1024, seed=1), layout=Layout(), kernel="cuda")

    def on_a_stream(_: int) -> list[tuple[Tensor, Stats]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            out = [run() for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        return out

    alone = run()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as threads:
        for outcomes in threads.map(on_a_stream, range(2)):
            for other in outcomes:
                assert_same_results(other, alone, spill=False)
    assert_same_in_a_graph(run, *alone)


@pytest.mark.gpu
def test_compiles_into_one_graph(ffn: Make) -> None:
    params = ffn(200, 64, 512, 8)

    def layer(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        y, stats = gated_ffn(x, params.w_gate, params.w_up, params.w_down, up_relu=True, kernel="cuda")
        return y * 2, stats.nnz, stats.nnz_used

    y, nnz, used = torch.compile(layer, fullgraph=True)(params.x)
    expected, stats = reference.run(replace(params, up_relu=True))
    assert_same("y", y, expected * 2)
    assert_same("nnz", nnz, stats.nnz)
    assert_same("nnz_used", used, stats.nnz_used)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16, 500, 1000])
def test_is_as_exact_as_the_dense_product(ffn: Make, n: int) -> None:
    assert_as_exact_as_dense("cuda", n)


def test_refuses_with_the_reason() -> None:
    bf16 = torch.bfloat16
    assert cuda.refuses(torch.device("cpu"), bf16, 64, 64, 1) == "expected device cuda, got cpu"
    assert cuda.refuses(CUDA, torch.float32, 64, 64, 1) == "expected bfloat16 or float16, got float32"
    assert cuda.refuses(CUDA, bf16, 64, 2**18 + 8, 1) == (
        "expected d_ff up to 262144, as a union lies in shared memory, got 262152"
    )
    assert cuda.refuses(CUDA, bf16, 2**17, 2**18, 1) == (
        "expected weights of less than 2^35 values, got 262144 x 131072"
    )
    assert cuda.refuses(CUDA, bf16, 64, 64, 0) == "expected at least 1 row, got 0"
    if not torch.cuda.is_available():
        assert cuda.refuses(CUDA, bf16, 64, 64, 1) == "expected a CUDA device that torch can use, found none"
    for asks in (
        Requirements(),
        Requirements("relu2"),
        Requirements(up_relu=True),
        Requirements(layout=Layout(32, 16), want_packed=True),
    ):
        assert not_sparse(asks) is None
    assert not_sparse(Requirements("silu", threshold=0.5)) == (
        "expected relu or relu2 and no threshold, got silu with threshold 0.5"
    )
    assert "cuda: expected device cuda, got cpu" in choose("cpu", bf16, 64, 64, 1).reason


def test_its_library_is_for_the_gpus_that_are_there() -> None:
    made = cuda.library(((8, 0), (9, 0)))
    for source in made.sources:
        if source.path.endswith(".cu"):
            assert source.flags[:2] == (
                "-gencode=arch=compute_80,code=sm_80",
                "-gencode=arch=compute_90,code=sm_90",
            )
    assert cuda.library(((8, 0),)) is not made
