"""The Hopper kernel with a plan: the gate's tiles, cut or whole, the order of rows, and stages by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.dense_tile_checks import blocks_in_place, run
from support.gpu_checks import CUDA, assert_right, assert_same, make, uneven
from support.gpu_training import firing

from twell.kernels.backends import hopper, reference
from twell.kernels.backends.gpu import Stage, results

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.gpu
def test_windows_are_in_order_of_nnz_unless_alike() -> None:
    n, alike = 2300, slice(1024, 2048)
    params = replace(uneven(n, 136, 2816, 6), probes="counts", layout=None, want_packed=False)
    params.x[alike, 0] = 1
    params.x[2048:, 0] = (
        2 + torch.arange(n - 2048, device=CUDA) % 2
    )  # few neurons, but some rows several times as many as others
    params.x[7, 3] = float("nan")  # fires nothing
    workspace, (y, stats) = hopper.HopperWorkspace(n, 2816, params.x.dtype, CUDA), results(params)
    hopper.launch(params, slice(0, n), workspace, y, stats)
    expected = torch.arange(n, device=CUDA)
    for window in (slice(0, 1024), slice(2048, n)):
        expected[window] = stats.nnz[window].sort(descending=True, stable=True).indices + window.start
    assert_same("order", workspace.tensor("order")[:n], expected.int())
    assert not torch.equal(expected[:1024], torch.arange(1024, device=CUDA))
    sizes, bit = workspace.tensor("union_sizes").abs().tolist(), torch.arange(32, device=CUDA)
    for block in (*range(8), 16, 17):  # whose rows are put in order: no neuron is listed that none of them fires
        rows = expected[block * 128 : (block + 1) * 128]
        words = workspace.tensor("masks")[rows[stats.finite[rows]]].flatten(1)
        union = int((words[:, :, None] >> bit & 1).any(0).sum())
        assert sizes[block] in (union, 2816), f"block {block}: expected {union} neurons, got {sizes[block]}"
    assert min(sizes) < 2816


@pytest.mark.gpu
def test_windows_of_few_firings_are_in_order_where_rows_differ_much() -> None:
    """Deviations of 4 at a mean of 8, of 11.6 at 5 and of 4.6 at 2.2, where 5.5 and 22 are shares of the neurons."""
    row = torch.arange(3072)
    loud = row % 16 == 9
    many = torch.where(row < 1024, 4 + 8 * (row % 2), torch.where(row < 2048, 2 + 48 * loud, 1 + 19 * loud))
    call = make(len(row), 136, 5632, 0, probes="counts", layout=None, want_packed=False)
    x, w_gate = (tensor.detach() for tensor in firing(many, 136, 5632)[:2])
    _, stats, workspace = run(replace(call, x=x, w_gate=w_gate))
    assert_same("nnz", stats.nnz, many.int().to(CUDA))
    assert blocks_in_place(workspace, len(row)) == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2300, 3300, 13_000, 51_000])
def test_values_find_their_places_in_unions_of_some_neurons(n: int) -> None:
    """From words and from tiles past their slots, as four neurons in ten never fire: where CTAs share every block,
    and where only the loud ones."""
    for d_ff, options in ((1336, {}), (5640, {"dtype": torch.float16}), (264, {"gated": False})):
        params = replace(uneven(n, 64, d_ff, 6, **options), probes="none", layout=None, want_packed=False)
        params.x[:, 1], params.w_gate[:, 1] = 1, torch.where(torch.arange(d_ff, device=CUDA) * 7 % 10 < 4, -64, 0)
        params.x[n - 3, 5] = float("nan")
        assert_right(hopper, params, d_ff)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [41, 47, 55])
def test_values_find_their_places_in_unions_of_few_neurons(tiles: int) -> None:
    """Of so many tiles that a quotient of floats, rounded down, may be one short."""
    params = replace(uneven(2300, 64, 256 * tiles, 19), probes="none", layout=None, want_packed=False)
    workspace, (y, stats) = hopper.HopperWorkspace(2300, 256 * tiles, params.x.dtype, CUDA), results(params)
    hopper.launch(params, slice(0, 2300), workspace, y, stats)
    assert_same("y", y, reference.run(params)[0])
    assert bool(((workspace.tensor("union_sizes") > tiles) & (workspace.tensor("union_sizes") <= 256)).any())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}, {"gated": False}], ids=str)
def test_values_find_their_places_in_groups_of_many_tiles(options: dict[str, Any]) -> None:
    """More than places are found of at once. Rows lie past their slots, or whole, in the tenth tile of one group and in
    the first and the twelfth of the next."""
    n, d_ff = 2300, 5888
    params = replace(uneven(n, 64, d_ff, 6, **options), probes="none", layout=None, want_packed=False)
    tile, column = torch.arange(d_ff, device=CUDA) // 256, torch.arange(d_ff, device=CUDA) % 256
    params.x[:, 1], params.w_gate[:, 1] = 1, torch.where((column < 6) | (tile == 9) | (tile == 20), 0, -64)
    assert_right(hopper, params)


@pytest.mark.gpu
@pytest.mark.parametrize(("d_ff", "quiet", "dense"), [(2816, 0, True), (2816, 1, True), (600, 1, False)], ids=str)
def test_tiles_that_nearly_all_fire_stay_whole(d_ff: int, quiet: int, dense: bool) -> None:
    """Though no row is past its slots; the others' rows join them where the block runs dense, and are gathered else."""
    n = 2300
    for options in ({}, {"bias": True}, {"gated": False}, {"dtype": torch.float16}):
        params, gated = make(n, 64, d_ff, 9, **options), options.get("gated", True)
        params.w_gate[256 : 256 + 256 * quiet, 0] = -17
        params.x[2290, 5] = float("nan")
        assert_right(hopper, params, options)
        workspace, unprobed = hopper.HopperWorkspace(n, d_ff, params.x.dtype, CUDA), replace(params, probes="none")
        hopper.launch(unprobed, slice(0, n), workspace, *results(unprobed))
        first, sizes = workspace.tensor("heads")[:2048, :, 0], workspace.tensor("union_sizes")[:16]
        assert int((first & 0xFFFF).max()) <= hopper.LAYOUT.slots
        whole = [gated and not 1 <= tile <= quiet for tile in range(first.shape[1])]
        assert (first >> 16 == torch.tensor(whole, device=CUDA)).all()
        if dense:
            assert sizes.tolist() == [-d_ff if gated else d_ff] * 16
        else:
            assert ((sizes > 0) & (sizes < d_ff)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d_ff"), [(2300, 2816), (2241, 600), (2305, 5632)], ids=str)
def test_the_gates_last_tiles_are_cut_in_two(n: int, d_ff: int) -> None:
    """Of what is left after whole rounds. Both halves together say what 128 rows fire, and whether they stay whole."""
    for options in ({}, {"bias": True}, {"gated": False}, {"dtype": torch.float16}):
        for quiet in (
            -9,
            2,
            10,
            14,
        ):  # nearly all fires; most tiles are past their slots; 128 rows fire nearly all; few
            params = make(n, 64, d_ff, quiet, **options)
            params.x[n - 64 :: 9, 0] = -1  # of the last block, in both halves
            for row in (n - 1, n - 70, 2048, 2048 + 64):
                params.x[row, 7] = float("nan")
            assert_right(hopper, params, (quiet, options))
            if quiet != 10 or options:
                continue
            workspace, unprobed = hopper.HopperWorkspace(n, d_ff, params.x.dtype, CUDA), replace(params, probes="none")
            hopper.launch(unprobed, slice(0, n), workspace, *results(unprobed))
            tiles = d_ff // 256
            fired = params.x[:2048].nan_to_num() @ params.w_gate[: 256 * tiles].t() > 0
            alone = fired.view(32, 64, tiles, 256).any(1).sum(-1) >= 0.85 * 256
            assert float(alone.float().mean()) < 0.1
            assert (workspace.tensor("heads")[:2048, :, 0] >> 16 == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("quiet", [60, -90], ids=["few fire", "nearly all fire"])
def test_weights_larger_than_what_stays_in_the_l2(quiet: int) -> None:
    """Eight pairs of blocks take each tile before the next one; then the last pair, of which one block exists."""
    assert_right(hopper, make(2100, 1000, 13_112, quiet, probes="counts", layout=None, want_packed=False), quiet)


@pytest.mark.gpu
def test_halves_of_a_cut_tile_wait_for_each_other() -> None:
    """Those of a cluster's second CTA come late: it packs full words of the tile before, the first one empty ones."""
    n, d_ff = 2300, 2816
    params = replace(make(n, 64, d_ff, 10), probes="none", layout=None, want_packed=False)
    block = torch.arange(n, device=CUDA) // 128
    params.x[(block < 12) & (block % 2 == 0)] = 0
    params.x[(block < 12) & (block % 2 == 1), 0] = 0.75
    workspace, silent = (
        hopper.HopperWorkspace(n, d_ff, params.x.dtype, CUDA),
        replace(params, x=torch.zeros_like(params.x)),
    )
    for some in (silent, params):  # so what is not waited for says that nothing fires
        hopper.launch(some, slice(0, n), workspace, *results(some), Stage.GATE)
    assert bool((workspace.tensor("heads")[12 * 128 : 16 * 128, :, 0] >> 16 == 1).all())


@pytest.mark.gpu
def test_stages_by_themselves_and_again_give_the_same() -> None:
    params = replace(uneven(2300, 136, 2816, 6), probes="none", layout=None, want_packed=False)
    y, _ = hopper.run(params)
    stages = hopper.stage_runs(params)
    for name in ("gate", "gate", "up_down", "up_down", "gate", "up_down"):
        again = stages[name]()
    assert_same("y", again, y)
    filled = hopper.stage_runs(params, hopper.run(replace(params, want_packed=True))[1].packed)["up_down"]
    filled()
    assert_same("y of what was filled in", filled(), y)
