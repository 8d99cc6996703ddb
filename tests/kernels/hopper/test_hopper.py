"""The Hopper kernel against the reference: integer-valued inputs, where every sum is exact and all bits must agree."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

import pytest
import torch
from support import gpu_checks
from support.gpu_checks import (
    CUDA,
    assert_as_exact_as_dense,
    assert_probes_change_nothing_else,
    assert_same,
    assert_same_on_streams,
    assert_same_results,
    make,
    normal_ffn,
    uneven,
)
from torch import Tensor

from twell.kernels import build
from twell.kernels.backends import hopper, hopper_libraries, reference
from twell.kernels.backends.gpu import results
from twell.kernels.dispatch import choose
from twell.kernels.layout import Layout, pack, tile_view
from twell.kernels.ops import gated_ffn
from twell.kernels.params import FFNParams, Requirements
from twell.kernels.stats import Stats

assert_right = partial(gpu_checks.assert_right, hopper)
SHAPES = [  # n, d_model, d_ff, quiet: one past every tile and one short of it, empty unions, full ones
    (1, 64, 64, 0),
    (2, 8, 8, 0),
    (8, 200, 136, 6),
    (9, 2048, 5632, 90),
    (16, 512, 1408, 20),
    (17, 64, 264, 9),
    (127, 72, 264, 12),
    (128, 256, 1000, 24),
    (129, 512, 1408, 40),
    (1000, 320, 5632, 34),
    (4097, 136, 328, 9),
    (300, 192, 704, 400),
    (640, 1024, 2816, 60),
    (200, 64, 1000, -9),
    (2049, 320, 5632, 34),
    (2177, 72, 264, 12),
    (2300, 1024, 2816, 60),
    (3000, 64, 1000, -9),
    (2050, 192, 704, 400),
    (32769, 72, 328, 12),
    (33000, 264, 264, -9),
    (3, 16384, 136, 150),
    (70, 16384, 264, 150),
    (2100, 16384, 264, 150),
    (600, 5000, 11008, 160),
    (2100, 5000, 11008, 160),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(gpu: None, shape: tuple[int, int, int, float], dtype: torch.dtype) -> None:
    for options in ({}, {"bias": True}, {"gated": False}):
        assert_right(make(*shape, dtype=dtype, **options), options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(129, 64, 264, 9), (1025, 256, 1408, 11), (2300, 136, 2816, 6)], ids=str)
def test_rows_in_another_order_come_back_in_theirs(gpu: None, shape: tuple[int, int, int, float]) -> None:
    for options in ({}, {"bias": True}, {"gated": False}, {"dtype": torch.float16}):
        params = uneven(*shape, **options)
        params.x[5, 3], params.x[shape[0] - 1, 3] = float("nan"), float("inf")
        assert_right(params, options)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [300, 2300])
@pytest.mark.parametrize("quiet", [12, 2])
def test_rows_that_are_not_finite_are_nan_and_alone(gpu: None, n: int, quiet: int) -> None:
    params = make(n, 128, 512, quiet, rows=None)
    params.x[7, 3], params.x[130], params.x[299, 1] = float("nan"), float("inf"), float("-inf")
    assert (~assert_right(params).finite).nonzero().flatten().tolist() == [7, 130, 299]
    half = replace(make(n - 100, 64, 128, 0, dtype=torch.float16), rows=None)
    half.x[5] *= 60000  # the gate's product is finite in float32 and no longer in float16
    assert not bool(assert_right(half).finite[5])
    half = replace(make(n, 64, 128, 0, dtype=torch.float16), rows=None)
    half.x[[5, n - 1]] *= 300  # the gate's values are finite in float16, the hidden state is not
    assert (~assert_right(half).finite).nonzero().flatten().tolist() == [5, n - 1]
    stats = assert_right(replace(half, probes="counts", layout=None, want_packed=False), "counts alone")
    assert int(stats.nnz[5]) == 0, "of a row that only the up product finds not finite"


@pytest.mark.gpu
@pytest.mark.parametrize("n", [500, 2500])
def test_probes_change_nothing_else(gpu: None, n: int) -> None:
    assert_probes_change_nothing_else(hopper.run, make(n, 256, 1024, 20))


@pytest.mark.gpu
def test_passes_of_a_small_workspace_add_up(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make(5000, 64, 512, 8)
    whole = hopper.run(params)
    for most in (1, 2304 * 512 * 37 // 8):  # passes of 256 rows and of 2304
        monkeypatch.setattr("twell.kernels.backends.gpu.MAX_WORKSPACE", most)
        assert_same_results(hopper.run(params), whole)


@pytest.mark.gpu
def test_same_bits_again_on_other_streams_and_in_graphs(gpu: None) -> None:
    tensors = normal_ffn(3000, 256, 1024, seed=1)
    assert_same_on_streams(partial(gated_ffn, *tensors, layout=Layout(), kernel="hopper"))


@pytest.mark.gpu
def test_same_bits_from_two_threads_at_once(gpu: None) -> None:
    calls = [uneven(2300, 136, 2816, 6), uneven(1025, 256, 1408, 11)]
    expected = [hopper.run(params) for params in calls]
    torch.cuda.synchronize()
    together = Barrier(len(calls))

    def again(params: FFNParams) -> list[tuple[Tensor, Stats]]:
        together.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [hopper.run(params) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(len(calls)) as pool:
        from_threads = list(pool.map(again, calls))
    for again_and_again, alone in zip(from_threads, expected, strict=True):
        for other in again_and_again:
            assert_same_results(other, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 20, 300, 2500])
def test_may_be_a_threads_first_cuda_call(gpu: None, n: int) -> None:
    """Where all memory is there, nothing before it has given the thread a context."""
    params = make(n, 136, 520, 9)
    y, stats = results(params, in_full=True)
    workspace = hopper.HopperWorkspace(n, 520, params.x.dtype, CUDA)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(hopper.launch, params, slice(0, n), workspace, y, stats).result()
    expected, counted = reference.run(params)
    assert_same("y", y, expected)
    assert_same("nnz", stats.nnz, counted.nnz)


@pytest.mark.gpu
def test_compiles_into_one_graph(gpu: None) -> None:
    params = make(200, 64, 512, 8)

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        y, stats = gated_ffn(x, params.w_gate, params.w_up, params.w_down, kernel="hopper")
        return y * 2, stats.nnz

    y, nnz = torch.compile(layer, fullgraph=True)(params.x)
    expected, stats = reference.run(params)
    assert_same("y", y, expected * 2)
    assert_same("nnz", nnz, stats.nnz)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1000, 2500])
def test_is_as_exact_as_the_dense_product(gpu: None, n: int) -> None:
    assert_as_exact_as_dense("hopper", n)


def test_a_workspace_is_read_as_it_was_filled() -> None:
    """As the gate product fills one: with tiles past their slots, and with tiles that lie whole though they are not."""
    n, d_ff, source = 20, 600, torch.Generator().manual_seed(0)
    fired = torch.rand(n, d_ff, generator=source) < torch.tensor([0.02, 0.1, 0.2]).repeat_interleave(256)[:d_ff]
    hidden = torch.rand(n, d_ff, generator=source).bfloat16() + 0.1
    packed, finite = pack(hidden, fired, hopper.LAYOUT), torch.ones(n, dtype=torch.bool)
    workspace = hopper.HopperWorkspace(n, d_ff, torch.bfloat16, torch.device("cpu"))
    for tensor in (
        workspace.tensor("heads"),
        workspace.tensor("tails"),
        workspace.tensor("masks"),
        workspace.tensor("fired"),
        workspace.tensor("spill"),
    ):
        tensor.fill_(-7)
    workspace.fill(packed)
    assert_same("packed", workspace.packed(d_ff, finite), packed)

    assert workspace.tensor("row_sums")[:n].tolist() == fired.sum(1).tolist()
    bits = tile_view(fired, hopper.LAYOUT).view(n, -1, 8, 32).long() << torch.arange(32)
    assert_same("what fired", workspace.tensor("masks").long() & 0xFFFFFFFF, bits.sum(-1))
    together = tile_view(fired.any(0, keepdim=True), hopper.LAYOUT).view(-1, 8, 32).long() << torch.arange(32)
    assert_same("what fired together", workspace.tensor("fired")[0].long() & 0xFFFFFFFF, together.sum(-1))
    assert 0 < int((packed.spill_index >= 0).sum()) < packed.spill_index.numel()

    row, chunk = torch.arange(n)[:, None], torch.arange(32)
    dense = tile_view(hidden * fired, hopper.LAYOUT)[:, 1].reshape(n, 32, 8)
    workspace.tensor("spill")[:, 1] = dense[row, chunk ^ row % 8].flatten(1)
    workspace.tensor("heads")[:, 1, 0] |= 1 << 16
    workspace.tensor("heads")[:, 1, 1:], workspace.tensor("tails")[:, 1] = -7, -7
    assert_same("whole", workspace.packed(d_ff, finite), packed)
    finite[3] = False
    assert int(workspace.packed(d_ff, finite).words[3].count_nonzero()) == 0


def test_a_plan_is_made_of_more_than_so_many_tiles() -> None:
    most = {8: 45_056, 256: 45_056, 257: 22_528, 2048: 5632, 5632: 2048, 14_336: 768, 65_528: 128}  # rows, by d_ff
    for d_ff, n in most.items():
        assert not hopper.has_plan(n, d_ff)
        assert hopper.has_plan(n + 1, d_ff)


def test_each_activation_has_an_op_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = (build.CSRC / "hopper/bindings.cpp").read_text(encoding="utf-8")
    names = [hopper_libraries.library(*flags).name for flags in itertools.product((False, True), repeat=2)]
    assert len(set(names)) == 4 and all(f'#define TWELL_OP "{name}_ffn"' in bindings for name in names)
    monkeypatch.setattr(build, "failure", lambda library: f"no {library.name} here")
    with pytest.raises(build.BuildError, match="no hopper_relu2_up_relu here"):
        hopper_libraries.loaded_op.__wrapped__(True, True)  # type: ignore[attr-defined]


def test_refuses_with_the_reason() -> None:
    bf16 = torch.bfloat16
    assert hopper.refuses(torch.device("cpu"), bf16, 64, 64, 1) == "expected device cuda, got cpu"
    assert hopper.refuses(CUDA, torch.float32, 64, 64, 1) == "expected bfloat16 or float16, got float32"
    assert hopper.refuses(CUDA, bf16, 2**15, 2**16, 1) == (
        "expected d_ff up to 65528, as a union holds 16-bit numbers, got 65536"
    )
    assert hopper.refuses(CUDA, bf16, 2**16, 2**15, 1) == (
        "expected weights of less than 2^31 values, as offsets are 32 bits of bytes, got 32768 x 65536"
    )
    if not torch.cuda.is_available():
        assert hopper.refuses(CUDA, bf16, 64, 64, 1) == "expected a CUDA device that torch can use, found none"
    assert hopper.lacks(Requirements("relu2")) is None
    assert hopper.lacks(Requirements("relu2", up_relu=True)) is None
    assert hopper.lacks(Requirements("silu", threshold=0.5)) == (
        "expected relu or relu2 and no threshold, got silu with threshold 0.5"
    )
    assert hopper.lacks(Requirements(layout=Layout(64, 8))) == (
        "expected tiles of 256 at compression 8, got Layout(tile=64, compression=8)"
    )
    assert hopper.lacks(Requirements(layout=Layout(256, 16))) is None
    assert hopper.lacks(Requirements(layout=Layout(256, 16), want_packed=True)) is not None
    assert "hopper: expected device cuda, got cpu" in choose("cpu", bf16, 64, 64, 1).reason
