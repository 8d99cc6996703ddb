"""The kernels for NVIDIA GPUs at the edges of numbers and of memory, against the reference: what one neuron alone
spoils, sums of the least and the greatest values, and what lies beside the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from support.gpu_checks import CUDA, assert_right, make, plan_small_calls, poison, skip_without, spoilt, uneven
from torch import Tensor

from twell.kernels.backends import cuda, gpu, hopper
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats

COUNTS: dict[str, Any] = {"rows": None, "probes": "counts", "layout": None, "want_packed": False}


@pytest.fixture(params=[hopper, cuda], ids=["hopper", "cuda"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A kernel; skips without a GPU that it takes. The memory that workspaces will come from is poisoned."""
    skip_without(request.param)
    plan_small_calls(monkeypatch)
    poison()
    return request.param


# ---- numbers


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 12, 40, 64, 70, 300, 1000, 2300])
@pytest.mark.parametrize("how", ["inf", "-inf", "rounds to inf", "up", "hidden"])
def test_one_neuron_alone_spoils_a_row(on: ModuleType, n: int, how: str) -> None:
    """And nothing else, wherever among many the neuron lies: y, what is finite, and nnz are those of the reference."""
    for dtype in (torch.bfloat16, torch.float16):
        for gated in (True, False):
            if (how in ("up", "hidden") and not gated) or (how == "-inf" and dtype == torch.float16):
                continue  # there is no such thing: a float16's products stay finite in float32
            params, rows = spoilt(make(n, 64, 16_384, 14, dtype=dtype, gated=gated, **COUNTS), how)
            stats = assert_right(on, params, (dtype, gated), spill=False)
            assert (~stats.finite).nonzero().flatten().tolist() == rows


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 16, 50, 300, 5000])
def test_sums_of_the_least_and_the_greatest_values(on: ModuleType, n: int) -> None:
    """A value counts in steps of 2^-20, rounded to even ones, and as 2^20 at most; sums of many are exact."""
    params = make(n, 64, 264, 0, gated=False)
    params.x.zero_(), params.w_gate.zero_(), params.w_down.zero_()
    values = [2.0**-21, 3 * 2.0**-21, 1023, 1024, 6144, 2.0**20, 2.0**21, 2.0**127]
    scale = 0.5 ** (torch.arange(n, device=CUDA) % 3)
    for column, value in enumerate(values):
        params.x[:, column], params.w_gate[33 * column, column] = (value * scale).bfloat16(), 1
    assert_right(on, params, "relu", spill=False)
    if on is cuda:
        params.x[:, 7] = 0  # its square is no number
        assert_right(on, replace(params, activation="relu2"), "relu2", spill=False)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [7, 130, 600])
def test_squares_and_relu_on_the_up_branch_at_the_edges(n: int) -> None:
    skip_without(cuda)
    poison()
    for dtype, z in ((torch.bfloat16, 2.0**70), (torch.float16, 2.0**8)):
        for gated in (True, False):
            params = make(n, 64, 328, 14, dtype=dtype, gated=gated, activation="relu2", up_relu=gated, **COUNTS)
            params.x[:, 5], params.w_gate[:, 5], params.w_gate[200, :] = 0, 0, 0
            params.x[n // 2, 5], params.w_gate[200, 5] = z, 1  # whose square is not finite
            assert (~assert_right(cuda, params, dtype, spill=False).finite).nonzero().flatten().tolist() == [n // 2]

    both: dict[str, Any] = {"activation": "relu2", "up_relu": True}
    params = make(n, 64, 328, 14, **COUNTS, **both)
    for tensor in (params.x, params.w_gate, params.w_up):
        tensor[:, 5], tensor[:, 60] = 0, 0  # two steps of any product's sum
    params.w_gate[200, 1:], params.w_gate[200, 0], params.w_up[200] = 0, 1, 0
    params.x[1, 5], params.x[1:3, 60] = 2.0**100, 2.0**100
    params.w_up[200, 5], params.w_up[200, 60] = 2.0**100, -(2.0**100)  # inf - inf; -inf alone, of which ReLU makes 0
    assert (~assert_right(cuda, params, "up", spill=False).finite).nonzero().flatten().tolist() == [1]

    params = make(n, 64, 328, 400, **COUNTS, **both)
    params.w_gate[200], params.w_up[200] = 0, 0
    params.w_down.zero_()
    params.x[:, 5], params.w_gate[200, 5], params.w_up[200, 0] = 2.0**-80, 1, 1  # fires, though its square rounds to 0
    stats = assert_right(cuda, params, "0", spill=False)
    assert stats.nnz.tolist() == [1] * n
    assert stats.nnz_used is not None and stats.nnz_used.tolist() == [1] * n


# ---- memory

WALL, FILL = 2**14, 119  # values on either side; what integers are there


def walled(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The same between two walls, of NaN where it has numbers with a point, and all of it."""
    fill = float("nan") if tensor.is_floating_point() else FILL
    whole = torch.full((tensor.numel() + 2 * WALL,), fill, dtype=tensor.dtype, device=tensor.device)
    inside = whole[WALL:-WALL].view(tensor.shape)
    return inside.copy_(tensor), whole


def between_walls(params: FFNParams) -> FFNParams:
    """The same call, each of whose tensors has a wall on either side."""
    tensors = {field.name: getattr(params, field.name) for field in fields(params)}
    moved = {name: walled(tensor)[0] for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    moved["w_down"] = walled(params.down_by_neuron)[0].t()
    return replace(params, **moved)


def behind(workspace: Any) -> Any:
    """The same kind of workspace, whose numbers of neurons beforehand are that of the first past the last."""

    class Behind(workspace):  # type: ignore[misc, valid-type]
        def __init__(self, n: int, d_ff: int, *about: Any) -> None:
            super().__init__(n, d_ff, *about)
            for tensor in self.tensors():
                if tensor.element_size() == 2 or tensor.dtype == torch.int32:
                    tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).fill_(d_ff)

    return Behind


@pytest.fixture
def walls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Results get walls too, and workspaces numbers of what lies in one; these are all of them."""
    made: list[Tensor] = []
    results = gpu.results

    def moved(tensor: Tensor) -> Tensor:
        inside, whole = walled(tensor)
        made.append(whole)
        return inside

    def results_between_walls(params: FFNParams, *, in_full: bool = False) -> tuple[Tensor, Stats]:
        y, stats = results(params, in_full=in_full)
        y.fill_(float("nan")), stats.nnz.fill_(FILL)  # unwritten: initcheck reports copies of them
        if in_full:
            stats.finite.view(torch.uint8).fill_(FILL)
        stats.nnz, stats.finite = moved(stats.nnz), moved(stats.finite.view(torch.uint8)).view(torch.bool)
        if stats.neurons is not None:
            for field in fields(stats.neurons):
                setattr(stats.neurons, field.name, moved(getattr(stats.neurons, field.name)))
        return moved(y), stats

    monkeypatch.setattr(gpu, "results", results_between_walls)
    monkeypatch.setattr(hopper, "HopperWorkspace", behind(hopper.HopperWorkspace))
    monkeypatch.setattr(cuda, "CudaWorkspace", behind(cuda.CudaWorkspace))
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 5, 13, 40, 64, 100, 300, 700, 2047, 2300])
@pytest.mark.parametrize(("d_model", "d_ff"), [(72, 264), (328, 1016), (136, 40)])
def test_nothing_beside_the_tensors_is_read_or_written(
    on: ModuleType, walls: list[Tensor], n: int, d_model: int, d_ff: int
) -> None:
    """Though rows, neurons and outputs fill no tile, and rows that are not finite fire neurons past the last."""
    for quiet, options in ((9, {}), (-40, {"bias": True}), (5, {"gated": False, "bias": True}), (120, {})):
        for made in (make, uneven):
            params = between_walls(made(n, d_model, d_ff, quiet, **options))
            params.w_gate[:, 4] = -1
            if n > 4:  # fires nothing but what there is past the last neuron: -inf is silent, 0 times inf is NaN
                params.x[n - 1, 4] = float("inf")
            if n > 4 and quiet < 120:
                params.x[n // 2, 3], params.x[n // 3] = float("nan"), float("inf")
            walls.clear()
            assert_right(on, params, (quiet, options), spill=False)
            for whole in walls:
                for wall in (whole[:WALL], whole[-WALL:]):
                    untouched = wall.isnan() if wall.is_floating_point() else wall == FILL
                    assert bool(untouched.all()), f"written beside a result of {whole.dtype}"
