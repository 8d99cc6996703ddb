"""The middle rows: how a CTA takes its tile, shares of the down product, and the CTAs of plain FFNs that stay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from support import gpu_checks
from support.gpu_checks import CUDA, NEIGHBOURS, assert_same_results, make, poison

from twell.kernels.backends import hopper, reference
from twell.kernels.layout import Layout

pytestmark = pytest.mark.usefixtures("gpu_without_plans")
call = partial(make, probes="counts", layout=None, want_packed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "d_model", "d_ff", "quiet"),
    [(8197, 768, 3072, -40), (8197, 768, 3072, 30), (70_001, 64, 520, 3), (5889, 200, 2024, 400), (45_056, 8, 256, 2)],
    ids=str,
)
def test_plain_narrow_calls_of_many_rows_without_a_plan(
    monkeypatch: pytest.MonkeyPatch, n: int, d_model: int, d_ff: int, quiet: float, dtype: torch.dtype
) -> None:
    """CTAs that take tile after tile; if words were needed without a plan, one for each tile."""
    monkeypatch.setattr(hopper, "plans", lambda *_: False)
    everything = {"probes": "neurons", "layout": Layout(), "want_packed": True}
    for options in ({}, {"bias": True}, {"activation": "relu2"}, {"bias": True} | everything):
        one = call(n, d_model, d_ff, quiet, gated=False, dtype=dtype, **options)
        one.x[n // 2, 3], one.x[n - 1, 2] = float("nan"), -float("inf")
        assert_same_results(hopper.run(one), reference.run(one), (n, options))


@pytest.mark.gpu
def test_plain_narrow_calls_add_up_in_streams_and_graphs() -> None:
    """The last pair of blocks has one; the call in a workspace that holds another call's marks; the same bits."""
    one, other = (call(11_001, 136, 1016, quiet, gated=False, activation="relu2") for quiet in (20, -40))
    assert not hopper.plans(one, len(one.x))
    gpu_checks.assert_same_on_streams(partial(hopper.run, one))
    hopper.run(other)
    assert_same_results(hopper.run(one), reference.run(one), "after another")


@pytest.mark.gpu
def test_rows_that_one_tile_breaks_in_plain_narrow_calls() -> None:
    """In the first of two tiles, of which the last is cut: marks of one are not written by the other."""
    one = call(45_000, 64, 328, 14, gated=False, activation="relu2")
    one.x[:, 5], one.w_gate[:, 5], one.w_gate[200] = 0, 0, 0
    one.x[::100, 5], one.w_gate[200, 5] = 2.0**70, 1  # whose square is not finite
    got = hopper.run(one)
    assert_same_results(got, reference.run(one), "broken")
    assert int((~got[1].finite).sum()) == 450


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 100, 190, 250, 500, 700, 1000, 1100, 3000])
def test_every_density_in_one_call(n: int) -> None:
    """From neurons that none fires to neurons that all do: each way that a CTA takes its up product, side by side."""
    for options in ({"bias": True}, {"gated": False}, {"probes": "neurons", "layout": Layout(), "want_packed": True}):
        one = call(n, 256, 4096, 0, **options)
        one.w_gate[:, 0] = torch.linspace(60, -40, 4096, device=CUDA).round().neg()
        got = hopper.run(one)
        assert_same_results(got, reference.run(one), (n, options))
        unions = (one.x[:128].float() @ one.w_gate.float().t() > 0).any(0).view(-1, 64).sum(1)
        assert int(unions.min()) == 0 and int(unions.max()) == 64 and len(unions.unique()) > 10


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d_ff"), [(70, 1000), (200, 1000), (1000, 5640), (8197, 3080)], ids=str)
def test_nothing_is_read_past_the_last_neuron(n: int, d_ff: int) -> None:
    """Where nearly all of a tile fires, all of it is taken: of the last tile, what there is, if it was computed. Of the
    last eight neurons all fire, or all but one."""
    for gated, silent in product((False, True), (0, 1)):
        one = call(n, 256, d_ff, 19, gated=gated)
        one.w_gate[d_ff - 8 :, 0] = 100
        one.w_gate[d_ff - silent :, 0] = -100
        behind = torch.full((d_ff + 64, 256), float("nan"), dtype=one.x.dtype, device=CUDA)
        behind[:d_ff] = one.w_down.t()
        got = hopper.run(replace(one, w_down=behind[:d_ff].t()))
        assert_same_results(got, reference.run(one), (n, gated, silent))
        fired = (one.x[:100].float() @ one.w_gate.float().t() > 0).any(0)
        assert 7 / 8 < fired.float().mean() < 1 and int(fired[-8:].sum()) == 8 - silent


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "tile", "d_ff"), [case for case in NEIGHBOURS if 0 < case[2] % case[1] <= 32])
def test_last_tiles_of_which_all_but_one_fire(n: int, tile: int, d_ff: int) -> None:
    """So few that their products are gathered: the one that does not fire has no hidden state to be read."""
    one = call(n, 128, d_ff, 0)
    one.w_gate[:] = 0
    one.w_gate[:, 0] = -1
    one.w_gate[d_ff - d_ff % tile + 1 :, 0] = 1
    poison()
    got = hopper.run(one)
    assert int(got[1].nnz.max()) == d_ff % tile - 1
    assert_same_results(got, reference.run(one), (n, tile))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 16, 40, 64, 100, 500, 1000, 3000])
def test_silent_neurons_whose_up_value_is_infinite(n: int) -> None:
    """0 times it is 0, also where a product is made of a whole tile, as its other neurons fire."""
    one = call(n, 128, 5632, -40)
    one.x[:, 5], one.w_gate[:, 5], one.w_up[:, 5] = 0, 0, 0
    one.x[::3, 5] = 2.0**100
    one.w_gate[40::97], one.w_up[40::97, 5] = 0, 2.0**100
    one.w_gate[40::97, 0] = -1
    got = hopper.run(one)
    assert bool(got[1].finite.all()) and 0.8 * 5632 < int(got[1].nnz.min()) <= int(got[1].nnz.max()) <= 5632 - 58
    assert_same_results(got, reference.run(one), n)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "d_ff"),
    [
        (64, 5640),
        (100, 5640),
        (190, 5640),
        (250, 5640),
        (384, 5640),
        (500, 5640),
        (640, 5640),
        (700, 5504),
        (1000, 5640),
    ],
    ids=str,
)
def test_as_many_neurons_as_each_width_takes_and_one_more(n: int, d_ff: int) -> None:
    """So many of the first tile fire, each in one row of every 128; of further tiles none, of the last one eight."""
    one = call(n, 128, d_ff, 0, rows=None)
    one.x[:] = torch.eye(128, device=CUDA, dtype=one.x.dtype)[torch.arange(n, device=CUDA) % 128]
    for fired in (1, 15, 16, 17, 30, 31, 32, 33, 40, 41, 48, 49, 55, 56, 64, 65, 96, 97, 128, 129):
        one.w_gate[:] = -1
        neuron = torch.cat([torch.arange(fired), torch.arange(d_ff - 8, d_ff)]).to(CUDA)
        one.w_gate[neuron, neuron % 50] = (1 + neuron % 3).to(one.w_gate.dtype)
        got = hopper.run(one)
        assert int(got[1].nnz[:50].sum()) == fired + 8
        assert_same_results(got, reference.run(one), (n, fired))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, 190, 384, 500, 640, 768, 1000])
def test_rows_that_fire_as_many_neurons_as_are_gathered_and_one_more(n: int) -> None:
    """Every other neuron of the first tiles, by 16 rows: the warp that has them knows alone how weights come."""
    one = call(n, 128, 5632, 0, rows=None)
    one.x[:] = torch.eye(128, device=CUDA, dtype=one.x.dtype)[torch.arange(n, device=CUDA) % 128]
    for fired in (16, 17, 30, 31, 40, 41, 48, 49, 64, 65, 1000):
        one.w_gate[:] = 0
        one.w_gate[: 2 * fired : 2, :16] = 2
        got = hopper.run(one)
        assert got[1].nnz.tolist() == [fired if row % 128 < 16 else 0 for row in range(n)]
        assert_same_results(got, reference.run(one), (n, fired))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "tile", "d_ff"), NEIGHBOURS)
def test_neighbouring_tiles_that_take_their_up_product_otherwise(n: int, tile: int, d_ff: int) -> None:
    """So many neurons of one tile fire and so many of the next, each in one row of every 128: the two share rows."""
    one = call(n, 128, d_ff, 0, rows=None)
    one.x[:] = torch.eye(128, device=CUDA, dtype=one.x.dtype)[torch.arange(n, device=CUDA) % 128]
    for some, others in product(sorted({0, 1, 17, 40, min(90, tile), tile}), repeat=2):
        one.w_gate[:] = -1
        neuron = torch.cat([torch.arange(some), torch.arange(tile, tile + others)]).to(CUDA)
        one.w_gate[neuron, neuron % min(n, 50)] = (1 + neuron % 3).to(one.w_gate.dtype)
        got = hopper.run(one)
        assert int(got[1].nnz[:50].sum()) == some + others
        assert_same_results(got, reference.run(one), (n, some, others))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "d_model", "d_ff", "loud"),
    [
        (100, 192, 5632, 120),
        (200, 2048, 1280, 360),
        (560, 2080, 3328, 360),
        (640, 4096, 1088, 520),
        (1000, 264, 2880, 120),
    ],
    ids=str,
)
def test_shares_that_begin_elsewhere_than_if_all_fired(n: int, d_model: int, d_ff: int, loud: int) -> None:
    """`down` asks for the first neurons of an even share where they fire: right in all CTAs, in some, or amiss."""
    one = call(n, d_model, d_ff, -loud, bias=True)
    gate = one.w_gate.clone()
    for silent in ([], [0], [600], [d_ff // 2 - 3], [d_ff - 1], list(range(600, 664)), list(range(600, d_ff))):
        one.w_gate.copy_(gate)
        one.w_gate[silent] = 0
        one.w_gate[silent, 0] = -1
        got = hopper.run(one)
        assert int(got[1].nnz.max()) == int(got[1].nnz.min()) == d_ff - len(silent)
        assert_same_results(got, reference.run(one), (n, silent[:1], len(silent)))


@pytest.mark.gpu
@pytest.mark.parametrize("loud", [0, 1, 2, 7])
@pytest.mark.parametrize("quiet", [20, -20])
def test_blocks_of_a_tile_that_fire_otherwise(loud: int, quiet: float) -> None:
    """Of eight blocks one fires hardly, or nearly all, the others nothing: two share a tile, but not their unions."""
    for gated in (True, False):
        one = call(1000, 128, 5632, quiet, gated=gated, rows=None)
        one.x[: loud * 128], one.x[(loud + 1) * 128 :] = 0, 0
        got = hopper.run(one)
        assert_same_results(got, reference.run(one), (loud, quiet))
        assert bool((got[0][: loud * 128] == 0).all()) and bool(got[0][loud * 128 : (loud + 1) * 128].any())


@pytest.mark.gpu
def test_a_union_whose_list_leaves_room_for_three_stages() -> None:
    """All of 34 752 neurons, 256 outputs at a time: fewer stages than warps that fill them in turns."""
    one = call(129, 6352, 34752, -48)
    one.w_gate[:, 64:], one.w_up[:, 64:] = 0, 0  # sums stay below 2^24
    assert_same_results(hopper.run(one), reference.run(one), "three stages")
    assert bool((hopper.run(one)[1].nnz == 34752).all())


@pytest.mark.gpu
@pytest.mark.parametrize("quiet", [60, -90], ids=["few fire", "nearly all fire"])
def test_weights_of_a_plain_ffn_larger_than_what_stays_in_the_l2(quiet: int) -> None:
    """Eight pairs of blocks take each tile before the next one; then the last pair, of which one block exists."""
    one = call(2100, 1000, 13_112, quiet, gated=False, rows=None)
    assert_same_results(hopper.run(one), reference.run(one), quiet)
