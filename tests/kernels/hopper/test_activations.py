"""The Hopper kernel for ReLU squared and for a ReLU on the up branch: the results of ReLU's tests, on every path.

Integers, where all sums are exact: y, counts and TwELL have the bits of the reference. Then normal numbers beside
float64, values at the edges of the types, rows that are not finite, streams and graphs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import gpu_checks
from support.dense_tile_checks import TILE, run, taken_tiles
from support.gpu_checks import CUDA, assert_same, assert_same_on_streams, assert_same_results, make, normal_ffn, uneven
from torch import Tensor
from torch.nn.functional import linear

from twell.kernels.backends import gpu, hopper, reference
from twell.kernels.dispatch import choose
from twell.kernels.layout import Layout
from twell.kernels.ops import gated_ffn, plain_ffn
from twell.kernels.params import Requirements

pytestmark = pytest.mark.usefixtures("gpu")

RELU2, UP, BOTH = {"activation": "relu2"}, {"up_relu": True}, {"activation": "relu2", "up_relu": True}
PLAIN2 = {"activation": "relu2", "gated": False}
ACTIVATIONS: tuple[dict[str, Any], ...] = (RELU2, UP, BOTH, PLAIN2)
COUNTS: dict[str, Any] = {"rows": None, "probes": "counts", "layout": None, "want_packed": False}
ROWS = (1, 8, 9, 16, 17, 33, 64, 65, 129, 300, 641, 1025, 2048, 2049, 2177, 4100)  # every path, ragged
SHAPES = ((64, 264, 9), (136, 1000, 14), (72, 520, -40), (264, 1016, 400))  # some fires, some more, all, nothing


assert_right = partial(gpu_checks.assert_right, hopper, spill=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, int, float], activation: dict[str, Any], dtype: torch.dtype) -> None:
    for at, n in enumerate(ROWS):
        options = activation | ({"bias": True} if at % 3 == 1 else COUNTS if at % 3 == 2 else {})
        for made in (make, uneven) if n > 2048 else (make,):
            stats = assert_right(made(n, *shape, dtype=dtype, **options), (n, options))
            if n > 300 and shape[2] == 9 and stats.nnz_used is not None:
                assert 0 < int(stats.nnz_used.sum()) < int(stats.nnz.sum())


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_dense_tiles_and_many_rows(activation: dict[str, Any]) -> None:
    """Tiles whose up product the gate's kernel makes; rows in place that run dense, some of them not finite; wide
    tiles; blocks whose tasks are not cut."""
    for params in (
        make(3800, 264, 2904, -70, **activation, **COUNTS),
        make(4500, 520, 2904, 7, **activation, **COUNTS),
        make(2500, 136, 1016, -30, bias=True, **activation),
        make(1000, 128, 5632, 9, **activation, **COUNTS),
        make(40_000, 8, 72, 2, **activation, **COUNTS),
    ):
        params.x[len(params.x) // 3, 3] = float("nan")
        assert_right(params, (*params.x.shape, len(params.w_gate)))


@pytest.mark.gpu
@pytest.mark.parametrize(("quiet", "silent"), [(-8, 11), (0, 11), (7, 11), (-8, 6), (-8, 4)])
def test_used_products_are_counted_once(quiet: int, silent: int) -> None:
    """Where so many of 20 tiles are silent and the others lie whole: the gate's kernel goes on with these, and
    where they are too few, `up` makes all products again."""
    params = make(4500, 520, 20 * TILE, quiet, up_relu=True)
    params.x[:, 1], params.w_gate[:, 1] = 1, 0
    params.w_gate[: silent * TILE, 1] = -256
    assert_right(params, (quiet, silent))
    uncounted = replace(params, probes="none", layout=None, want_packed=False)
    assert bool(taken_tiles(run(uncounted)[2], 4500).any())


@pytest.mark.gpu
@pytest.mark.parametrize("n", [7, 12, 40, 130, 600, 2300, 22_700])
def test_values_at_the_edges(n: int) -> None:
    """Squares that are not finite, and those that round to 0; an up product of which ReLU makes 0, and one of inf and
    -inf; a row that the up product alone finds not finite has no firings, and none that are used."""
    for dtype, z in ((torch.bfloat16, 2.0**70), (torch.float16, 2.0**8)):
        for gated in (True, False):
            params = make(n, 64, 328, 14, dtype=dtype, gated=gated, activation="relu2", up_relu=gated, **COUNTS)
            params.x[:, 5], params.w_gate[:, 5], params.w_gate[200, :] = 0, 0, 0
            params.x[n // 2, 5], params.w_gate[200, 5] = z, 1
            assert (~assert_right(params, dtype).finite).nonzero().flatten().tolist() == [n // 2]
            params.w_gate[200, 5] = -1  # whose square is not finite either, but it does not fire
            assert bool(assert_right(params, dtype).finite.all())

    params = make(n, 64, 328, 14, **BOTH, **COUNTS)
    for tensor in (params.x, params.w_gate, params.w_up):
        assert tensor is not None
        tensor[:, 5], tensor[:, 60] = 0, 0
    assert params.w_up is not None
    params.w_gate[200, 1:], params.w_gate[200, 0], params.w_up[200] = 0, 1, 0
    params.x[1, 5], params.x[1:3, 60] = 2.0**100, 2.0**100
    params.w_up[200, 5], params.w_up[200, 60] = 2.0**100, -(2.0**100)
    stats = assert_right(params, "up")
    assert (~stats.finite).nonzero().flatten().tolist() == [1]
    assert stats.nnz_used is not None and int(stats.nnz[1]) == int(stats.nnz_used[1]) == 0

    for dtype, least in ((torch.bfloat16, 2.0**-80), (torch.float16, 2.0**-14)):
        params = make(n, 64, 328, 400, dtype=dtype, **BOTH, **COUNTS)
        assert params.w_up is not None
        params.w_gate[200], params.w_up[200] = 0, 0
        params.w_down.zero_()
        params.x[:, 5], params.w_gate[200, 5], params.w_up[200, 0] = least, 1, 1  # fires, though its square rounds to 0
        stats = assert_right(params, "least")
        assert stats.nnz.tolist() == [1] * n
        assert stats.nnz_used is not None and stats.nnz_used.tolist() == [1] * n


def dense(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, how: str) -> Tensor:
    gate = linear(x, w_gate).relu()
    hidden = gate if how == "up" else gate.square()
    if how != "plain":
        up = linear(x, w_up)
        hidden = hidden * (up if how == "square" else up.relu())
    return linear(hidden, w_down)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 50, 700, 4100])
@pytest.mark.parametrize("how", ["plain", "square", "up", "both"])
def test_is_as_exact_as_the_dense_product(how: str, n: int) -> None:
    """Rows' errors relative to float64, in the mean and at most; counts are those of float64 but for sums near 0."""
    for shift in (-2.0, -1.0, 40.0):
        x, w_gate, w_up, w_down = normal_ffn(n, 512, 2048, seed=n)
        w_gate[:, 0] = shift
        options: dict[str, Any] = {"activation": "relu" if how == "up" else "relu2", "kernel": "hopper"}
        if how == "plain":
            y, stats = plain_ffn(x, w_gate, w_down, **options)
        else:
            y, stats = gated_ffn(x, w_gate, w_up, w_down, up_relu=how in ("up", "both"), **options)
        exact = dense(*(tensor.double() for tensor in (x, w_gate, w_up, w_down)), how)  # type: ignore[call-arg]
        theirs = dense(x, w_gate, w_up, w_down, how)
        ours, others = ((t.double() - exact).norm(dim=1) / exact.norm(dim=1) for t in (y, theirs))
        assert ours.mean() <= 1.25 * others.mean()
        assert ours.max() <= 1.25 * others.max()
        fired = linear(x.double(), w_gate.double()) > 0
        assert int((stats.nnz - fired.sum(1)).abs().max()) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("n", [12, 60, 300, 3000])
def test_same_bits_on_two_streams_and_in_graphs(n: int, activation: dict[str, Any]) -> None:
    assert_same_on_streams(partial(hopper.run, make(n, 136, 1016, 20, **activation, **COUNTS)))


@pytest.mark.gpu
def test_passes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (700, 5000):
        params = make(n, 64, 512, 8, **BOTH)
        whole = hopper.run(params)
        for most in (1, 2304 * 512 * 37 // 8):  # passes of 256 rows and of 2304
            monkeypatch.setattr(gpu, "MAX_WORKSPACE", most)
            assert_same_results(hopper.run(params), whole, spill=False)


@pytest.mark.gpu
def test_is_chosen_and_compiles_into_one_graph() -> None:
    for requirements in (Requirements("relu2"), Requirements(up_relu=True), Requirements("relu2", True)):
        assert choose(CUDA, torch.bfloat16, 64, 512, 200, requirements=requirements).kernel == "hopper"
    params = make(200, 64, 512, 8, **BOTH)

    def layer(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        assert params.w_up is not None
        y, stats = gated_ffn(
            x, params.w_gate, params.w_up, params.w_down, activation="relu2", up_relu=True, kernel="hopper"
        )
        return y * 2, stats.nnz, stats.nnz_used

    y, nnz, used = torch.compile(layer, fullgraph=True)(params.x)
    expected, stats = reference.run(params)
    assert_same("y", y, expected * 2)
    assert_same("nnz", nnz, stats.nnz)
    assert_same("nnz_used", used, stats.nnz_used)


@pytest.mark.gpu
def test_counts_of_other_compressions() -> None:
    for n in (40, 700, 2300):
        for activation in ACTIVATIONS:
            options: dict[str, Any] = {"layout": Layout(256, 4), "want_packed": False}
            assert_right(make(n, 72, 1096, 14, **activation, **options), (n, activation))
