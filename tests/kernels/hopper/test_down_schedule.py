"""The Hopper kernel with a plan: tasks of up and down, cut and whole, right, and the same again."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.dense_tile_checks import blocks_in_place, run
from support.gpu_checks import CUDA, assert_same, make, normal_ffn

from twell.kernels.backends import hopper, reference
from twell.kernels.backends.gpu import results
from twell.kernels.ops import gated_ffn

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "d_model"), [*product([2049, 2176, 2700, 4096, 9000], [8, 264, 1000]), (32_700, 264)], ids=str
)
def test_tasks_of_the_down_product_cut_anywhere(n: int, d_model: int) -> None:
    """Fewer tasks than multiprocessors to over twice as many, of unions of one length, of many, and of none; as many
    blocks as are shared out at most."""
    for d_ff in (328, 1016, 2824, 5640):
        for quiet in (-40, 12):
            call = make(n, d_model, d_ff, quiet, probes="none", layout=None, want_packed=False)
            silent = torch.arange(n, device=CUDA) // 128 % 5 == 3
            call.x[silent, 0], call.x[silent, 1:] = 1 if quiet > 0 else -1, 0
            y, _ = hopper.run(call)
            assert_same(f"y {d_ff} {quiet}", y, reference.run(call)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "d_model"),
    [
        *product([2049, 2176], [8, 264, 520, 1032]),
        *[(2400, 2048), (8448, 1000), (9000, 1032), (9000, 1800), (17_000, 1544)],
    ],
)
def test_tasks_alike_of_which_whole_ones_go_first(n: int, d_model: int) -> None:
    """Of all neurons, from few to more than two to a multiprocessor; those that are shared begin in a block or with
    one. Of an odd number of blocks the last has outputs in pairs, and of an odd number of these the last has none."""
    for d_ff in (328, 1016):
        call = make(n, d_model, d_ff, 4 * int(d_model**0.5), probes="none", layout=None, want_packed=False)
        call.x[:, 0] = -2
        y, _ = hopper.run(call)
        assert_same(f"y {d_ff}", y, reference.run(call)[0])
        assert all(torch.equal(hopper.run(call)[0], y) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8280, 8320])
def test_an_odd_number_of_dense_blocks_of_rows_in_another_order(n: int) -> None:
    """Of three outputs, so that a CTA of the last block's cluster has none; rows are sent one by one. So many blocks
    have no dense tiles, which would keep rows in place."""
    d_ff = 1016
    params = make(n, 520, d_ff, 13, probes="none", layout=None, want_packed=False)
    params.x[:, 0] = 1 + (torch.arange(n, device=CUDA) % 10 > 2)  # a fifth of the neurons fires, or a twentieth
    y, _, workspace = run(params)
    assert not any(blocks_in_place(workspace, n))
    assert (workspace.tensor("union_sizes").abs() == d_ff).all()
    assert_same("y", y, reference.run(params)[0])


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


@pytest.mark.gpu
@pytest.mark.parametrize("d_model", [256, 512, 768, 1032])
@pytest.mark.parametrize(
    ("n", "loud"),
    [
        (2176, (1024, 1024, 128)),
        (2700, (1024, 1024, 652)),
        (2700, (1024, 0, 100)),
        (2700, (0, 200, 0)),
        (3072, (1024, 300, 700)),
    ],
    ids=str,
)
def test_dense_blocks_beside_others(n: int, loud: tuple[int, ...], d_model: int) -> None:
    """As many rows of each window as `loud` says fire everything: in place and in another order, in tasks of one to
    four panels and in cut ones."""
    row = torch.arange(n, device=CUDA)
    dense = row % 1024 < torch.tensor(loud, device=CUDA)[row // 1024]
    for d_ff in (328, 600, 1080, 5632):
        call = make(n, d_model, d_ff, 4 * int(d_model**0.5), probes="none", layout=None, want_packed=False)
        call.w_gate[::9, 0] = -int(d_model**0.5)  # of the others some fire, not the same ones
        call.x[dense, 0] = -2
        (y, _), expected = hopper.run(call), reference.run(call)[0]
        assert_same(f"y {d_ff}", y, expected)
        assert all(torch.equal(hopper.run(call)[0], y) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("quiet", [-40, 12])
def test_the_up_product_counts_where_the_gate_fires(quiet: int) -> None:
    """Past every number it is nothing where a neuron is silent; where one fires, what rounds to inf spoils its row."""
    call = make(2300, 64, 600, quiet, probes="counts", layout=None, want_packed=False)
    for column in (1, 2, 3):
        call.x[:, column], call.w_gate[:, column], call.w_up[:, column] = 0, 0, 0
    call.w_gate[7], call.w_gate[7, 5], call.x[:, 5] = 0, 1, 1  # fires in every row
    call.x[130, 5], call.x[130, 3], call.w_up[7, 3] = -1, 2.0**20, 2.0**120  # but this one, whose product is 2^140
    call.w_gate[9], call.w_gate[9, 0], call.w_up[9] = 0, 1, 0  # fires 1 in every row
    call.w_up[9, 1], call.w_up[9, 2] = 255 * 2.0**120, 2.0**119  # the greatest bfloat16; half of its last bit
    call.x[131, 1], call.x[131, 2], call.x[132, 1] = 1, 1, 1
    (y, stats), (expected, other) = hopper.run(call), reference.run(call)
    assert (~other.finite).nonzero().flatten().tolist() == [131]
    assert_same("finite", stats.finite, other.finite)
    assert_same("nnz", stats.nnz, other.nnz)
    assert_same("y", y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2049, 2304])
def test_a_part_is_taken_once_every_warp_has_left_its_share(n: int) -> None:
    """The flags of all warps but one are up beforehand, over parts of NaN: whoever does not wait for that one's takes
    them, as it comes to a part before the sums of those that take as many steps are there."""
    call = make(n, 64, 5640, -40, probes="none", layout=None, want_packed=False)
    expected, workspace = reference.run(call)[0], hopper.HopperWorkspace(n, 5640, call.x.dtype, CUDA)
    y, stats = results(call)
    hopper.launch(call, slice(0, n), workspace, y, stats)
    assert_same("y", y, expected)
    flags = workspace.tensor("partial_ready")
    left = flags.any(1)
    assert 100 < int(left.sum()) < len(flags), "all multiprocessors take a share of so few tasks"
    warp_of_row = torch.arange(n, device=CUDA) % 128 // 16
    for warp in range(flags.shape[1]):
        y.fill_(float("nan")), workspace.tensor("partial_sums").fill_(float("nan"))
        flags.fill_(1)
        flags[:, warp] = 0
        hopper.launch(call, slice(0, n), workspace, y, stats, hopper.Stage.DOWN)
        rows = warp_of_row == warp
        assert_same(f"y of warp {warp}", y[rows], expected[rows])
