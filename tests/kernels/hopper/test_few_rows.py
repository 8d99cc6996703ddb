"""Up to 64 rows on Hopper: every way that 48 neurons take their up and down products, against the reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from threading import Barrier

import pytest
import torch
from support.gpu_checks import (
    CUDA,
    LAUNCHES,
    assert_same,
    assert_same_in_a_graph,
    assert_same_results,
    make,
    poison,
    spoilt,
)
from torch import Tensor

from twell.kernels.backends import hopper, reference
from twell.kernels.backends.gpu import Stage, results
from twell.kernels.dispatch import prepare
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats

pytestmark = pytest.mark.usefixtures("gpu_without_plans")
ROWS = [1, 3, 8, 9, 16, 17, 32, 33, 64]  # one and two tiles of rows, then both cuts of the other kernels


def turned(one: FFNParams, stages: int, workspace: hopper.HopperWorkspace | None = None) -> tuple[Tensor, Stats]:
    """Run a call with some of its choices turned around."""
    n, d_ff = len(one.x), len(one.w_gate)
    y, stats = results(one, in_full=True)
    workspace = hopper.HopperWorkspace(n, d_ff, one.x.dtype, CUDA) if workspace is None else workspace
    hopper.launch(one, slice(0, n), workspace, y, stats, hopper.ALL_STAGES | stages)
    return y, stats


@pytest.mark.gpu
@pytest.mark.parametrize("n", ROWS, ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_as_many_neurons_of_a_group_as_each_way_takes_and_one_more(n: int, gated: bool) -> None:
    """So many of the second group fire, each in one row; of the others none, but all of the last, which is not full."""
    one = make(n, 200, 1016, 0, gated=gated)
    one.x[:] = torch.eye(200, device=CUDA, dtype=one.x.dtype)[:n]
    for fired in (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48):
        one.w_gate[:] = -1
        neuron = torch.cat([torch.arange(48, 48 + fired), torch.arange(1008, 1016)]).to(CUDA)
        one.w_gate[neuron, neuron % n] = (1 + neuron % 3).to(one.w_gate.dtype)
        got = hopper.run(one)
        assert int(got[1].nnz.sum()) == fired + 8
        assert_same_results(got, reference.run(one), f"{fired} fired")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 16], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("d_model", [136, 4168], ids=lambda k: f"{k} wide")
@pytest.mark.parametrize("d_ff", [1016, 8200], ids=["48 to a group", "64"])
def test_single_pairs_of_neurons_and_rows(n: int, d_model: int, d_ff: int) -> None:
    """As many pairs of a group as are multiplied one by one, and one more: of a neuron and rows, or of several."""
    group = 48 if d_ff == 1016 else 64
    one = make(n, d_model, d_ff, 0, bias=True, probes="counts", layout=None, want_packed=False)
    one.b_gate.zero_()  # type: ignore[union-attr]
    one.x[:, :n] = torch.eye(n, device=CUDA, dtype=one.x.dtype)
    for pairs in [(3, 7), (3, 8), (3, n), (1, 8), (2, 4), (2, 5), (8, 1), (9, 1)]:
        neurons, rows = pairs
        one.w_gate.zero_()
        one.w_gate[:, :n] = -1
        for neuron in range(group, group + neurons):
            which = torch.arange(neuron, neuron + rows, device=CUDA) % n
            one.w_gate[5 * neuron % group + group, which] = 2
        got = hopper.run(one)
        assert int(got[1].nnz.sum()) == neurons * rows
        assert_same_results(got, reference.run(one), f"{pairs}")


@pytest.mark.gpu
@pytest.mark.parametrize("n", ROWS, ids=lambda n: f"{n} rows")
@pytest.mark.parametrize(("d_model", "d_ff"), [(136, 5000), (2056, 5000), (136, 12_008), (136, 16_384)])
def test_groups_of_every_density_side_by_side(n: int, d_model: int, d_ff: int) -> None:
    """More groups than a cluster's warps take at once, or than multiprocessors; outputs for clusters of six, and of
    three; a row that is not finite is alone."""
    one = make(n, d_model, d_ff, 0, bias=True, probes="counts", layout=None, want_packed=False)
    one.w_gate[:, 0] = torch.linspace(60, -40, d_ff, device=CUDA).round().neg()
    whole = reference.run(one)
    assert_same_results(hopper.run(one), whole, "finite")
    one.x[n // 2, 5] = float("nan")
    y, stats = hopper.run(one)
    assert bool(y[n // 2].isnan().all())
    assert not bool(stats.finite[n // 2])
    others = torch.arange(n, device=CUDA) != n // 2
    assert_same("y beside it", y[others], whole[0][others])
    assert_same("nnz beside it", stats.nnz[others], whole[1].nnz[others])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 12, 40, 64])
@pytest.mark.parametrize("d_ff", [5640, 8200])
@pytest.mark.parametrize("how", ["inf", "-inf", "rounds to inf", "up", "hidden"])
def test_one_neuron_alone_spoils_a_row(n: int, d_ff: int, how: str) -> None:
    """Of a group that fires little, or of one that is taken whole."""
    for quiet, dtype, gated in product((14, 60, -200), (torch.bfloat16, torch.float16), (True, False)):
        if (how in ("up", "hidden") and not gated) or (how == "-inf" and dtype == torch.float16):
            continue  # there is no such thing: a float16's products stay finite in float32
        one = make(n, 64, d_ff, quiet, dtype=dtype, gated=gated, probes="counts", layout=None, want_packed=False)
        one, rows = spoilt(one, how)
        got = hopper.run(one)
        assert (~got[1].finite).nonzero().flatten().tolist() == rows
        assert_same_results(got, reference.run(one), f"{how}, {quiet}, {dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 40])
def test_few_rows_of_many_neurons_leave_the_rest_of_the_workspace_alone(n: int) -> None:
    """Counts of a tile's rows lie where bits of what these rows fire would: of one row there is little room."""
    one = make(n, 136, 16_384, 0, probes="none", layout=None, want_packed=False)
    (y, stats), workspace = results(one), hopper.HopperWorkspace(n, 16_384, one.x.dtype, CUDA)
    rest = [
        workspace.tensor("heads"),
        workspace.tensor("tails"),
        workspace.tensor("spill"),
        workspace.tensor("fired"),
        workspace.tensor("row_sums"),
        workspace.tensor("order"),
    ]
    for part in rest:
        part.fill_(-7)
    hopper.launch(one, slice(0, n), workspace, y, stats)
    assert_same("y", y, reference.run(one)[0])
    for part in rest:
        assert bool((part == -7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("n", ROWS, ids=lambda n: f"{n} rows")
def test_the_same_bits_again_and_again(n: int) -> None:
    """Sums that are not exact: their order shows. Calls that overlap, then a graph of them."""
    one = make(n, 1096, 2816, 20, probes="counts", layout=None, want_packed=False)
    for tensor in (one.x[:, 1:], one.w_gate[:, 1:], one.w_up, one.w_down):
        tensor.copy_(torch.randn(tensor.shape, device=CUDA, generator=torch.Generator(device=CUDA).manual_seed(n)))
    y, stats = hopper.run(one)
    assert 0 < int(stats.nnz.sum()) < n * 2816
    for again in [hopper.run(one) for _ in range(20)]:
        assert_same_results(again, (y, stats), "again")
    assert_same_in_a_graph(lambda: hopper.run(one), y, stats)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 16, 64], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("d_ff", [1016, 12_008])
def test_calls_in_turns_in_one_workspace(n: int, d_ff: int) -> None:
    """Of which all fire, some or none, without a wait: none takes for its own what another has handed on there."""
    calls = [
        make(n, 136, d_ff, quiet, probes="counts", layout=None, want_packed=False) for quiet in (-200, 14, 40, 400)
    ]
    calls[2].x[n // 2, 5] = float("nan")
    expected = [reference.run(one) for one in calls]
    workspace = hopper.HopperWorkspace(n, d_ff, calls[0].x.dtype, CUDA)
    order = [at for _ in range(25) for at in (0, 1, 2, 3, 1, 0, 3, 2, 0)]
    for at, got in [(at, turned(calls[at], 0, workspace)) for at in order]:
        assert_same_results(got, expected[at], f"call {at}")


@pytest.mark.gpu
def test_threads_whose_calls_differ_in_size_do_not_take_shared_memory_from_each_other() -> None:
    """What a kernel may have is set before its launch, and hangs on rows and neurons. Launches alone, on results and
    workspaces that are there: around whole calls threads wait for each other, and hardly two launch at once."""
    sizes = ((20, 512), (30, 2048)) * 4
    calls = [make(n, 136, d_ff, 9, probes="none", layout=None, want_packed=False) for n, d_ff in sizes]
    together = Barrier(len(calls))

    def again(one: FFNParams) -> tuple[Tensor, Stats]:
        n, d_ff = len(one.x), len(one.w_gate)
        y, stats = results(one, in_full=True)
        workspace = hopper.HopperWorkspace(n, d_ff, one.x.dtype, CUDA)
        torch.cuda.synchronize()  # the stream that the memory comes from is another
        together.wait()
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(LAUNCHES):
                hopper.launch(one, slice(0, n), workspace, y, stats)
            torch.cuda.current_stream().synchronize()
        return y, stats

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(calls)) as pool:
        from_threads = list(pool.map(again, calls))
    for one, result in zip(calls, from_threads, strict=True):
        assert_same_results(result, reference.run(one), f"{len(one.x)} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [17, 33, 64])
def test_gathered_weights_that_come_last(n: int) -> None:
    """Of each group a few fire, and their weights lie in memory alone: after the rows, which the gate has read."""
    one = make(n, 2048, 5632, 90, probes="counts", layout=None, want_packed=False)
    expected = reference.run(one)
    away = torch.empty(2**28, dtype=torch.uint8, device=CUDA)
    for _ in range(5):
        away.fill_(1)
        assert_same_results(hopper.run(one), expected, "cold")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 64, 65, 500, 12_000], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("probes", ["none", "counts"])
def test_a_prepared_call_gives_the_same_bits(n: int, gated: bool, probes: str) -> None:
    """The call without checks beside the one with them; also replayed from a graph."""
    one = make(n, 200, 1016, 0, gated=gated, bias=True, probes=probes, layout=None, want_packed=False)
    assert hopper.has_plan(n, 1016) == (n == 12_000)
    y, stats = hopper.run(one)
    run_again = hopper.prepare(one)
    assert run_again is not None
    for _ in range(2):
        poison()
        again, nnz, finite = run_again(one.x)
        assert again.equal(y) and finite.equal(stats.finite)
        assert nnz.equal(stats.nnz) and len(nnz) == (n if probes == "counts" else 0)
    odd = torch.empty(one.x.numel() + 1, dtype=one.x.dtype, device=CUDA)[1:].view(one.x.shape).copy_(one.x)
    assert odd.data_ptr() % 16 and run_again(odd)[0].equal(y)
    deep = one.x.view(1, n, -1)
    run_deep = hopper.prepare(replace(one, x=deep))
    assert run_deep is not None and run_deep(deep)[0].equal(y.view(1, n, -1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed, nnz, _ = run_again(one.x)
    graphed.fill_(float("nan"))
    graph.replay()
    assert graphed.equal(y) and nnz.equal(stats.nnz)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16], ids=["1 row", "16 rows"])
@pytest.mark.parametrize("quiet", [-200, 0, 60], ids=["all fire", "half fires", "few fire"])
def test_hints_change_no_bit(n: int, quiet: float) -> None:
    """More groups than multiprocessors; what is prefetched, beside and into a workspace that calls share."""
    one = make(n, 2048, 8192, quiet, probes="counts", layout=None, want_packed=False)
    one.w_down.copy_(torch.randn(one.w_down.shape, device=CUDA, generator=torch.Generator(device=CUDA).manual_seed(n)))
    expected = hopper.run(one)
    assert_same("nnz", expected[1].nnz, reference.run(one)[1].nnz)
    workspace = hopper.HopperWorkspace(n, 8192, one.x.dtype, CUDA)
    for hints in (0, Stage.LEAVE_DENSE, Stage.NEXT_WAVE, Stage.LEAVE_DENSE | Stage.NEXT_WAVE) * 3:
        assert_same_results(turned(one, hints, workspace), expected, f"hints {int(hints)}")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 9, 16], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_wide_groups_as_each_way_takes_and_one_more(n: int, gated: bool) -> None:
    """As the first test of this file does, in groups of 64, of which 129 are less than a wave."""
    one = make(n, 200, 8200, 0, gated=gated, bias=True, probes="counts", layout=None, want_packed=False)
    one.x[:] = torch.eye(200, device=CUDA, dtype=one.x.dtype)[:n]
    one.b_gate.zero_()  # type: ignore[union-attr]
    for fired in (0, 1, 8, 9, 16, 17, 32, 33, 48, 63, 64):
        one.w_gate[:] = -1
        neuron = torch.cat([torch.arange(64, 64 + fired), torch.arange(8192, 8200)]).to(CUDA)
        one.w_gate[neuron, neuron % n] = (1 + neuron % 3).to(one.w_gate.dtype)
        got = hopper.run(one)
        assert int(got[1].nnz.sum()) == fired + 8
        assert_same_results(got, reference.run(one), f"{fired} fired")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 9, 16], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("d_ff", [6344, 8192])
def test_wide_groups_of_every_density_side_by_side(n: int, d_ff: int) -> None:
    """Exact sums against the reference, with a row that is not finite too; then sums that show their order."""
    one = make(n, 1096, d_ff, 0, bias=True, probes="counts", layout=None, want_packed=False)
    one.w_gate[:, 0] = torch.linspace(60, -40, d_ff, device=CUDA).round().neg()
    whole = reference.run(one)
    assert_same_results(hopper.run(one), whole, "finite")
    one.x[n // 2, 5] = float("nan")
    y, stats = hopper.run(one)
    others = torch.arange(n, device=CUDA) != n // 2
    assert bool(y[n // 2].isnan().all()) and stats.finite.equal(others)
    assert_same("y beside it", y[others], whole[0][others])
    one.x[:, 5], source = 0, torch.Generator(device=CUDA).manual_seed(n)
    one.w_down.copy_(torch.randn(one.w_down.shape, device=CUDA, generator=source))
    first = hopper.run(one)
    for _ in range(20):
        assert_same_results(hopper.run(one), first, "again")
    assert float((first[0] - turned(one, Stage.WIDE_GROUPS)[0]).abs().max()) <= 2**-6 * float(first[0].abs().max())


@pytest.mark.gpu
def test_what_is_not_prepared() -> None:
    one = make(8, 200, 1016, 0)
    with pytest.raises(RuntimeError, match="prepared: expected what the op _prepare returns"):
        torch.ops.twell.hopper_ffn_again(one.x, torch.zeros(8, dtype=torch.uint8))
    one = make(8, 200, 1016, 0, probes="counts", layout=None, want_packed=False)
    assert prepare(one, "hopper") is not None
    assert prepare(replace(one, want_packed=True), "hopper") is None
    assert prepare(replace(one, layout=hopper.LAYOUT), "hopper") is None
