"""What a call on a GPU asks of the host: few tensors, one of them its workspace; at any addresses, in any passes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.gpu_checks import apart, assert_same, make, poison, skip_without
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twell.kernels.backends import cuda, gpu, hopper, reference
from twell.kernels.dispatch import Kernel
from twell.kernels.layout import Layout
from twell.kernels.modules import Probe, SparseFFN
from twell.kernels.ops import gated_ffn
from twell.kernels.params import FFNParams

BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture(params=[hopper, cuda], ids=["hopper", "cuda"])
def on(request: pytest.FixtureRequest) -> ModuleType:
    skip_without(request.param)
    poison()
    return request.param


@pytest.mark.parametrize("n", [1, 129, 2049, 5000])
@pytest.mark.parametrize("d_ff", [8, 264, 5632])
def test_parts_of_a_workspace_lie_apart(n: int, d_ff: int) -> None:
    for workspace in (hopper.HopperWorkspace(n, d_ff, BF16, CPU), cuda.CudaWorkspace(n, d_ff, None, BF16, CPU)):
        begin, past = workspace.memory.data_ptr(), 0
        for name, place in zip(workspace.names, workspace.offsets, strict=True):
            part = workspace.tensor(name)
            assert place % 256 == 0 and place >= past, name
            assert part.data_ptr() == begin + place or not part.numel(), name
            past = place + part.nbytes
        assert past <= workspace.memory.nbytes
    assert workspace.tensor("hidden").dtype == BF16 and workspace.tensor("hidden").shape[1] == d_ff
    with pytest.raises(KeyError, match="words_of_another"):
        workspace.tensor("words_of_another")


def test_parts_can_be_moved_apart() -> None:
    workspace = hopper.HopperWorkspace(300, 264, BF16, CPU)
    apart(workspace, lambda part: torch.full_like(part, 3))
    begin = workspace.memory.data_ptr()
    for name, place in zip(workspace.names, workspace.offsets, strict=True):
        part = workspace.tensor(name)
        assert part.data_ptr() == begin + place and bool((part == 3).all()), name


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 128, 1000])
def test_passes_are_all_rows_in_order_and_fit(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, tall in ((640_000, 64_000), (64_000, 6400), (6400, 640), (7000, 640), (1, 64)):
        monkeypatch.setattr(gpu, "MAX_WORKSPACE", limit)
        passes = list(gpu.passes(n, 10, 64))  # 10 bytes a row
        assert [row for rows in passes for row in range(rows.start, rows.stop)] == list(range(n))
        assert all(rows.stop - rows.start <= tall for rows in passes)
        assert len(passes) == -(-n // tall)


def test_torch_compile_traces_what_is_remembered_without_a_warning() -> None:
    def places(x: Tensor) -> Tensor:
        return x.new_zeros(hopper.regions(len(x), 264, BF16, False).nbytes)

    traced = torch.compile(places, fullgraph=True, dynamic=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (70, 300):
            assert traced(torch.zeros(n)).shape == places(torch.zeros(n)).shape


class Seen(TorchDispatchMode):
    """The names of the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("probes", ["none", "counts"])
@pytest.mark.parametrize("planned", [False, True], ids=["without a plan", "with a plan"])
def test_a_call_makes_four_tensors_and_asks_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, probes: str, planned: bool
) -> None:
    """y, what is finite, nnz and the workspace: all else would keep the host longer than the GPU."""
    monkeypatch.setattr(hopper, "has_plan", lambda *_: planned)
    given: list[tuple[Any, ...]] = []

    def op(*arguments: Any) -> None:
        given.append(arguments)

    def begin(*arguments: Any) -> Tensor:
        given.append(arguments)
        return prepared

    def again(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given.append(arguments)
        return arguments[0], arguments[0], arguments[0]

    prepared = torch.zeros(0)
    ops = SimpleNamespace(
        hopper_ffn=op,
        hopper_ffn_prepare=SimpleNamespace(default=begin),
        hopper_ffn_again=SimpleNamespace(default=again),
    )
    monkeypatch.setattr(hopper, "loaded_op", lambda *_: "hopper_ffn")
    monkeypatch.setattr(torch.ops, "twell", ops)
    kernels = {"hopper": Kernel(hopper.run, lambda *_: None, "a test", down_by_neuron=True, prepare=hopper.prepare)}
    monkeypatch.setattr("twell.kernels.dispatch.KERNELS", kernels)
    monkeypatch.setattr("twell.kernels.modules.KERNELS", kernels)
    weights = torch.zeros(264, 64, dtype=BF16), torch.zeros(264, 64, dtype=BF16), torch.zeros(64, 264, dtype=BF16)
    module = SparseFFN(*weights, kernel="hopper", probe=Probe(probes=probes))
    x = torch.zeros(1, 5, 64, dtype=BF16)
    with torch.inference_mode(), Seen() as seen:
        y = module(x)
    assert y.shape == x.shape
    assert sorted(seen.names) == ["empty"] * 4
    arguments, begun = given
    assert len(arguments) == 18, "what is not asked for is not handed over"
    assert arguments[9] is y and arguments[1] is module.w_gate
    assert (arguments[-1] is None) == (probes == "none")
    assert begun[:7] == arguments[:7] and begun[7] == arguments[8]
    assert begun[8:] == (arguments[7].nbytes, 5, probes == "counts", planned)
    with torch.inference_mode(), Seen() as seen:
        again_y = module(x)  # one op that makes all four
    assert seen.names == [] and given[2] == (x, prepared) and again_y is x


def test_plain_calls_have_a_plan_where_they_need_words_or_neurons_are_very_many() -> None:
    n = 128 * hopper.FEW_TILES  # of one tile
    words = {"want_packed": True}, {"probes": "neurons"}, {"layout": hopper.LAYOUT}
    for options in ({}, {"probes": "none"}, {"probes": "none", "layout": hopper.LAYOUT}, *words):
        for gated in (True, False):
            weight = torch.zeros(256, 8, dtype=BF16)
            params = FFNParams(weight, weight, weight if gated else None, weight.t(), **options)  # type: ignore[arg-type]
            assert [hopper.plans(params, rows) for rows in (n, n + 1)] == [False, gated or options in words], options
    for d_ff in (hopper.PLAIN_NEURONS, hopper.PLAIN_NEURONS + 1):
        weight = torch.zeros(d_ff, 8, dtype=BF16)
        assert hopper.plans(FFNParams(weight, weight, None, weight.t()), n) == (d_ff > hopper.PLAIN_NEURONS)


def test_calls_in_several_passes_are_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has a workspace of its own."""
    monkeypatch.setattr(hopper, "loaded_op", lambda *_: "hopper_ffn")
    either = SimpleNamespace(default=lambda *_: torch.zeros(0))
    monkeypatch.setattr(torch.ops, "twell", SimpleNamespace(hopper_ffn_prepare=either, hopper_ffn_again=either))
    weight = torch.zeros(5632, 64, dtype=BF16)
    params = FFNParams(torch.zeros(5000, 64, dtype=BF16), weight, weight, weight.t())
    assert hopper.prepare(params) is not None
    monkeypatch.setattr(gpu, "MAX_WORKSPACE", 4000 * 5632 * 37 // 8)
    assert hopper.prepare(params) is None
    assert hopper.prepare(replace(params, w_up=None)) is None


def test_weights_that_the_kernels_would_copy_are_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared call keeps addresses alone."""
    monkeypatch.setattr(hopper, "loaded_op", lambda *_: "hopper_ffn")
    either = SimpleNamespace(default=lambda *_: torch.zeros(0))
    monkeypatch.setattr(torch.ops, "twell", SimpleNamespace(hopper_ffn_prepare=either, hopper_ffn_again=either))
    weight, odd = torch.zeros(264, 64, dtype=BF16), torch.zeros(264 * 64 + 1, dtype=BF16)[1:].view(264, 64)
    params = FFNParams(torch.zeros(5, 64, dtype=BF16), weight, weight, weight.t())
    assert hopper.prepare(params) is not None and hopper.prepare(replace(params, w_up=None)) is not None
    assert hopper.prepare(replace(params, w_down=weight.t().contiguous())) is None
    for name, tensor in (("w_gate", odd), ("w_up", odd), ("w_down", odd.t())):
        assert hopper.prepare(replace(params, **{name: tensor})) is None, name


@pytest.mark.gpu
def test_passes_add_up_to_what_up_relu_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other passes do, in the tests of each kernel."""
    skip_without(cuda)
    params = make(700, 72, 264, 9, up_relu=True)
    expected = reference.run(params)
    monkeypatch.setattr(gpu, "MAX_WORKSPACE", 1)
    poison()
    y, stats = cuda.run(params)
    assert_same("y", y, expected[0])
    assert_same("stats", stats, expected[1], spill=False)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 40, 300, 2500])
def test_tensors_may_lie_anywhere(on: ModuleType, n: int) -> None:
    """At addresses that copies of 16 bytes do not take, and w_down in either order."""
    params = make(n, 72, 264, 9, probes="counts", layout=None, want_packed=False)
    expected, stats = reference.run(params)

    def shifted(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    moved = replace(params, x=shifted(params.x), w_gate=shifted(params.w_gate), w_up=shifted(params.w_up))
    by_neuron = shifted(params.w_down.t().contiguous()).t()
    for w_down in (by_neuron, params.w_down.contiguous(), shifted(params.w_down.contiguous())):
        assert moved.x.data_ptr() % 16 and moved.w_gate.data_ptr() % 16
        poison()
        y, counted = on.run(replace(moved, w_down=w_down))
        assert_same("y", y, expected)
        assert_same("nnz", counted.nnz, stats.nnz)


@pytest.mark.gpu
def test_one_trace_takes_any_number_of_rows(on: ModuleType) -> None:
    name = on.__name__.rpartition(".")[2]
    calls = [make(n, 64, 512, 8, probes="counts", layout=None, want_packed=False) for n in (200, 90, 250)]
    weights = calls[0].w_gate, calls[0].w_up, calls[0].w_down

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        y, stats = gated_ffn(x, *weights, kernel=name)
        return y * 2, stats.nnz

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for params in calls:
        y, nnz = compiled(params.x)
        expected, stats = reference.run(replace(params, w_gate=weights[0], w_up=weights[1], w_down=weights[2]))
        assert_same("y", y, expected * 2)
        assert_same("nnz", nnz, stats.nnz)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_a_module_compiles_whole(on: ModuleType) -> None:
    """As a model's own code would have it compiled: its parameters are the graph's inputs."""
    params = make(200, 64, 512, 8, layout=Layout())
    module = SparseFFN(params.w_gate, params.w_up, params.w_down, kernel=on.__name__.rpartition(".")[2])
    with torch.inference_mode():
        y = torch.compile(module, fullgraph=True)(params.x[None])
    assert_same("y", y[0], reference.run(params)[0])
