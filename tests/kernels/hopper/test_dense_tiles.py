"""The Hopper kernel with a plan: tiles that lie whole, whose up product the gate's kernel goes on with.

Which of them it takes hangs on time, but not that it takes some: a cluster asks once the loads of its last tile are
issued. When the last one asks, all have packed their tiles but the last few, so what the first windows have is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.dense_tile_checks import (
    PAIR,
    QUIET,
    TILE,
    blocks_in_place,
    check,
    check_whole,
    panels_left,
    run,
    taken_tiles,
)
from support.gpu_checks import (
    CUDA,
    apart,
    assert_same,
    make,
    normal_ffn,
    on_two_streams,
    uneven,
)
from torch import Tensor

from twell.kernels.backends import hopper, reference
from twell.kernels.backends.gpu import Stage, results
from twell.kernels.params import FFNParams

pytestmark = pytest.mark.usefixtures("gpu")


def silence(params: FFNParams, hundredths: int) -> None:
    """So many of its neurons never fire."""
    neuron = torch.arange(len(params.w_gate), device=CUDA)
    params.x[:, 1], params.w_gate[:, 1] = 1, torch.where(neuron * 37 % 100 < hundredths, -256, 0)


OPTIONS = ({}, {"bias": True}, {"dtype": torch.float16})


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("n", "d_model", "d_ff"), [(6000, 8, 2600), (5889, 136, 2816), (2400, 600, 5640), (8064, 72, 5640)], ids=str
)
def test_all_fires(n: int, d_model: int, d_ff: int, options: dict[str, object]) -> None:
    """An odd number of blocks, partial blocks, tiles, panels and steps; less than one step, and many; up to eleven
    tiles that a cluster goes on with."""
    params = make(n, d_model, d_ff, -4 * int(d_model**0.5), **options)
    taken, workspace = check(params)
    assert d_model == 8 or bool(taken.any())  # there, loads run several tiles ahead
    tasks = workspace.tensor("tasks")[: int(workspace.tensor("row_sums")[n])]
    assert int((tasks[:, 1] % 8).sum()) == panels_left(taken, n, d_ff)
    assert (workspace.tensor("union_sizes") == -d_ff).all()
    check_whole(params)


@pytest.mark.gpu
@pytest.mark.parametrize("quiet", [20, 13, 10, 7, 3, 0, -8, -25])
def test_some_of_all_values_fire(quiet: int) -> None:
    """A tenth to nearly all, row by row at random."""
    for options in OPTIONS:
        params = make(4500, 520, 2904, quiet, **options)
        taken, _ = check(params)
        check_whole(params)
        assert quiet > 0 or bool(taken.any())


@pytest.mark.gpu
@pytest.mark.parametrize(("silent", "quiet"), [(12, 7), (38, 7), (42, 7), (38, 16)])
def test_neurons_that_never_fire(silent: int, quiet: int) -> None:
    """So many in a hundred: tiles lie whole though not all of them fires, as long as most does, and enough: 20 in a
    hundred here, or 9, where tiles differ in it."""
    for options in OPTIONS:
        params = make(4500, 520, 2904, quiet, **options)
        silence(params, silent)
        taken, _ = check(params)
        counted = check_whole(params)
        assert bool((counted % QUIET == PAIR).any()) == (silent < 40)
        assert quiet == 7 or bool((counted == 0).any())
        assert bool(taken.any()) == (silent < 40 and quiet == 7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("silent", "silent_tiles", "quiet", "goes_on"),
    [(38, 0, 14, False), (38, 0, 12, True), (0, 0, 20, True), (0, 1, 20, True), (0, 2, 20, False)],
)
def test_which_windows_are_gone_on_with(silent: int, silent_tiles: int, quiet: int, goes_on: bool) -> None:
    """Nearly all tiles lie whole. A window is loud by what fires, 10.5 and 12.7 in a hundred here; where every neuron
    fires in some row, or all but those of one tile in twenty, 9 are enough."""
    for options in OPTIONS:
        d_ff = 20 * TILE if silent_tiles else 2816
        params = make(4500, 520, d_ff, quiet, **options)
        silence(params, silent)
        params.w_gate[: silent_tiles * TILE, 1] = -256
        taken, workspace = check(params)
        assert bool(taken.any()) == goes_on
        assert (workspace.tensor("union_sizes")[:-1] == -d_ff).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("quiet", "silent", "dense"), [(30, 0, True), (33, 0, True), (35, 0, False), (33, 7, False)])
def test_even_tiles_that_lie_both_whole_and_as_words(quiet: int, silent: int, dense: bool) -> None:
    """Of each 128 rows 0.94, 0.83, 0.71, 0.78 of the neurons fire, of a row a few hundredths. They run dense from about
    0.72 on, unless many rows are silent, here every seventh: then tiles are on no list, though they lie whole."""
    for options in OPTIONS:
        params = make(4500, 520, 2904, quiet, **options)
        params.x[:: silent or 4500, 0] = 3
        taken, workspace = check(params)
        counted = check_whole(params)
        assert bool((counted % QUIET == PAIR).any()) and bool(taken.any()) == dense
        stages = run(params, Stage.GATE, hopper.ALL_STAGES - Stage.GATE)[2]
        for sizes in (each.tensor("union_sizes")[:32] for each in (workspace, stages)):
            assert bool((sizes == -2904).all()) if dense else bool((sizes > 0).all() and (sizes < 2904).all())


@pytest.mark.gpu
def test_uneven_tiles_of_which_most_fires_are_words_alone() -> None:
    """Three quarters of their neurons fire, but in one row of eleven each, which is not little."""
    params = make(4500, 520, 2904, 20)
    silence(params, 25)
    assert not bool(check_whole(params)[:-1, :-1].any())


@pytest.mark.gpu
def test_even_windows_each_by_itself() -> None:
    """Every other one of even tiles goes by its words, though the clusters go on with those of the others."""
    params, row = make(6000, 520, 2904, 33), torch.arange(6000, device=CUDA)
    params.x[:, 1], params.w_gate[:, 1] = (row // 1024 % 2).to(params.x.dtype), -2
    taken, workspace = check(params)
    words = torch.arange(len(taken), device=CUDA) // 4 % 2 == 1
    assert bool(taken[~words].any()) and not bool(taken[words].any())
    sizes = workspace.tensor("union_sizes")[:40].view(5, 8)
    assert bool((sizes[::2] == -2904).all() and (sizes[1::2] > 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_windows_are_loud_each_by_itself(options: dict[str, object]) -> None:
    """Every other one is, and stays in place though some of its rows are silent, as some of the others' are."""
    n = 6000
    params, row = make(n, 520, 2816, 14, **options), torch.arange(n, device=CUDA)
    silence(params, 38)
    params.x[row // 1024 % 2 == 1, 0] = 0
    params.x[row % 1024 < 120, 0] = 128
    taken, workspace = check(params)
    assert blocks_in_place(workspace, n) == [False, True] * 3
    loud = torch.arange(len(taken), device=CUDA) // 4 % 2 == 1
    assert bool(taken[loud].any()) and not bool(taken[~loud].any())


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_uneven_windows_whose_tiles_are_dense_stay_in_place_and_run_dense(options: dict[str, object]) -> None:
    """One row in seven fires nearly all, the others one neuron in eight: rows deviate by more than their mean, but in
    order of nnz the up products that clusters have made already would be made again."""
    params = make(4500, 520, 2816, 18, **options)
    params.x[3::7, 0] = -1
    nnz = (params.x.float() @ params.w_gate.float().t() > 0).sum(1).float()
    assert float(nnz.std()) > float(nnz.mean()) > 2816 * 14 / 128
    taken, workspace = check(params)
    assert bool(taken.any()) and all(blocks_in_place(workspace, 4500))
    assert (workspace.tensor("union_sizes") == -2816).all()


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_uneven_windows_of_which_nearly_all_fires_stay_in_place(options: dict[str, object]) -> None:
    """Though each neuron fires seldom, and a row in ten hardly any."""
    params = make(4500, 520, 2816, 20, **options)
    params.x[::10, 0] = 2
    taken, workspace = check(params)
    assert bool(taken.any()) and all(blocks_in_place(workspace, 4500))


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tiles_whole_in_some_blocks(options: dict[str, object]) -> None:
    """A silent tile, one that is silent in every third block, and one with a silent row in every fifth."""
    n, d_ff = 6000, 2600
    params = make(n, 520, d_ff, -128, **options)
    block, row = torch.arange(n, device=CUDA) // 128, torch.arange(n, device=CUDA)
    params.x[:, 1:4], params.w_gate[:, 1:4] = 0, 0
    params.x[:, 1], params.w_gate[256:512, 1] = 1, -256
    params.x[:, 2], params.w_gate[512:768, 2] = (block % 3 == 1).to(params.x.dtype), -256
    params.x[:, 3], params.w_gate[1024:1280, 3] = (row % 640 == 130).to(params.x.dtype), -256
    taken, _ = check(params)
    pair = torch.arange(len(taken), device=CUDA)
    assert not bool(taken[:, 1].any()) and not bool(taken[pair % 3 != 1, 2].any())
    assert bool(taken.any())
    check_whole(params)


@pytest.mark.gpu
def test_a_silent_tile_past_the_thirty_second() -> None:
    """What is known of a block's tiles is more than a word of bits."""
    params = make(2400, 136, 9000, -128)
    params.w_gate[34 * TILE : 35 * TILE], params.w_gate[34 * TILE : 35 * TILE, 0] = 0, -1
    taken, workspace = check(params)
    assert bool(taken.any()) and not bool(taken[:, 34].any())
    assert (workspace.tensor("union_sizes") == -9000).all()


@pytest.mark.gpu
@pytest.mark.parametrize("loud", [True, False])
def test_nothing_beside_the_workspace_is_written(loud: bool) -> None:
    """Though the last pair has no second block, and tiles, panels and windows are not full."""
    n = 5889
    params = make(n, 136, 2600, -128) if loud else uneven(n, 136, 2600, 25)
    (y, stats), workspace, wall = results(params), hopper.HopperWorkspace(n, 2600, params.x.dtype, CUDA), 2**20  # bytes
    walled = []

    def between_walls(part: Tensor) -> Tensor:
        walled.append(torch.full((part.nbytes + 2 * wall,), 119, dtype=torch.uint8, device=CUDA))
        return walled[-1][wall:-wall].view(part.dtype).view(part.shape)

    apart(workspace, between_walls)
    hopper.launch(params, slice(0, n), workspace, y, stats)
    assert_same("y", y, reference.run(params)[0])
    assert bool(taken_tiles(workspace, n).any()) == loud
    for name, bits in zip(workspace.names, walled, strict=True):
        assert bool((bits[:wall] == 119).all() and (bits[-wall:] == 119).all()), f"written beside {name}"


@pytest.mark.gpu
@pytest.mark.parametrize(("silent", "in_place"), [(0, True), (200, True), (300, False), (700, False)])
def test_windows_with_silent_rows(silent: int, in_place: bool) -> None:
    """A loud window stays as it is if its rows are not too uneven; else its blocks are laid anew, whatever is taken."""
    for options in OPTIONS:
        params = make(6000, 520, 2816, -128, **options)
        params.x[torch.arange(6000, device=CUDA) % 1024 < silent, 0] = -1  # as many as make a window uneven
        taken, workspace = check(params)
        assert bool(taken.any())
        assert blocks_in_place(workspace, 6000)[:5] == [in_place] * 5
        assert not bool(taken[1::4].any()) or silent != 300  # a sixth of these rows is silent


def spoilt() -> Iterator[FFNParams]:
    """float16, gate values that are finite and up products that are not, in whole tiles and in others."""
    for n, d_model, d_ff in ((6000, 520, 2600), (2300, 64, 264)):
        params = make(n, d_model, d_ff, -d_model // 4 - 48, dtype=torch.float16)
        params.x[:, 1], params.w_gate[:40, 1] = 0, -512
        params.x[::7, 1] = 1  # fire a little less: what is spoilt must not have rows put in order
        for row in (5, 300, 2047, n - 1):
            params.x[row] *= 200
        yield params
        yield replace(params, probes="counts", layout=None, want_packed=False)


@pytest.mark.gpu
def test_rows_that_only_the_up_product_finds_not_finite() -> None:
    for params in spoilt():
        n = params.x.shape[0]
        for stages in ((), (Stage.GATE, hopper.ALL_STAGES - Stage.GATE)):
            y, stats, workspace = run(params, *stages)
            expected, counted = reference.run(params)
            assert (~stats.finite).nonzero().flatten().tolist() == [5, 300, 2047, n - 1]
            assert int(stats.nnz[[5, 300, 2047, n - 1]].sum()) == 0
            assert_same("y", y, expected)
            assert_same("stats", replace(stats, packed=None), replace(counted, packed=None))
            assert blocks_in_place(workspace, n) == [True] * -(-n // 1024)
    params.x[7, 3], params.x[1000, 3], params.x[2000] = float("nan"), float("inf"), float("-inf")
    check(replace(params, probes="neurons", layout=hopper.LAYOUT, want_packed=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d_model"), [(2560, 2048), (4736, 72)])
def test_same_bits_whoever_makes_the_product(n: int, d_model: int) -> None:
    """Sums that rounding tells apart: again and again, on two streams, and by stages of their own."""
    x, w_gate, w_up, w_down = normal_ffn(n, d_model, 5632, seed=4)
    x.abs_(), w_gate.abs_()
    params = FFNParams(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, probes="none")
    y, _, workspace = run(params.checked())
    assert bool(taken_tiles(workspace, n).any())
    assert_same("by stages", run(params, Stage.GATE, Stage.PLAN, Stage.UP, Stage.DOWN)[0], y)
    for other, _, _ in on_two_streams(lambda: run(params)):
        assert torch.equal(other, y)
