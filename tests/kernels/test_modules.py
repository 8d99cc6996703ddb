"""SparseFFN against the modules it is made from; CountedMap, which reports its input and passes it on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from twell.kernels.dispatch import KERNELS, Kernel
from twell.kernels.layout import Layout
from twell.kernels.modules import CountedMap, Probe, SparseFFN
from twell.kernels.ops import gated_ffn
from twell.kernels.stats import Stats

D_MODEL, D_FF = 32, 88
MAP_D_MODEL, MAP_D_FF, THRESHOLD = 16, 72, 0.5  # of the CountedMap


@pytest.fixture
def linears() -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(D_MODEL, D_FF), nn.Linear(D_MODEL, D_FF, bias=False), nn.Linear(D_FF, D_MODEL)


@torch.no_grad()
def test_it_computes_what_its_modules_did(linears) -> None:
    gate, up, down = linears
    x = torch.randn(3, 7, D_MODEL)
    gated = SparseFFN.gated(gate, up, down, kernel="reference")
    expected = down(gate(x).relu() * up(x))
    assert torch.equal(gated(x), expected)
    assert torch.equal(gated.dense(x), expected)
    assert gated.w_gate.data_ptr() == gate.weight.data_ptr(), "weights are shared, not copied"
    plain = SparseFFN.plain(gate, down, kernel="reference")
    assert torch.equal(plain(x), down(gate(x).relu()))
    assert torch.equal(plain.dense(x), down(gate(x).relu()))
    bare = SparseFFN.gated(gate.weight, up.weight, down.weight, kernel="reference")
    assert torch.equal(bare(x), functional.linear(functional.linear(x, gate.weight).relu() * up(x), down.weight))


@torch.no_grad()
def test_w_down_is_held_once_in_the_order_that_the_kernel_reads(linears, monkeypatch) -> None:
    seen = []

    def run(params: Any) -> Any:
        seen.append(params.down_by_neuron)
        return KERNELS["reference"].run(params)

    kernels = {"by_neuron": Kernel(run, lambda *_: None, "a test", down_by_neuron=True), **KERNELS}
    monkeypatch.setattr("twell.kernels.dispatch.KERNELS", kernels)
    monkeypatch.setattr("twell.kernels.modules.KERNELS", kernels)
    x, down = torch.randn(5, D_MODEL), linears[2].weight
    for options, by_neuron in (({}, True), ({"kernel": "reference"}, False)):
        module = SparseFFN.gated(*linears, **options)
        torch.testing.assert_close(module(x), module.dense(x))
        moved = copy.deepcopy(module).to(torch.bfloat16)
        for held in (module.w_down, moved.w_down, module.state_dict()["w_down"]):
            assert held.shape == (D_MODEL, D_FF)
            assert held.t().is_contiguous() == by_neuron
        assert torch.equal(module.w_down.contiguous(), down), "the original, on request"
        assert (module.w_down.data_ptr() == down.data_ptr()) != by_neuron
        if by_neuron:
            assert seen[-1].shape == (D_FF, D_MODEL)
            assert seen[-1].data_ptr() == module.w_down.data_ptr(), "read without a copy"


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"activation": "relu2"}, {"up_relu": True}, {"activation": "silu", "threshold": 0.1}]
)
def test_dense_is_the_same_function(linears, options) -> None:
    module = SparseFFN.gated(*linears, **options)
    x = torch.randn(50, D_MODEL)
    torch.testing.assert_close(module(x), module.dense(x))


@torch.no_grad()
def test_layers_share_a_probe(linears) -> None:
    reports = []
    probe = Probe(probes="neurons", layout=Layout(64, 8), want_packed=True, on_stats=lambda *seen: reports.append(seen))
    layers = nn.Sequential(*(SparseFFN.gated(*linears, layer=index, probe=probe) for index in range(3)))
    numbers = torch.arange(10, dtype=torch.int32)
    probe.rows, probe.tokens, probe.sequences = (numbers > 0).byte(), numbers, numbers // 5
    x = torch.randn(2, 5, D_MODEL)
    layers(x)
    assert [layer for layer, _, _ in reports] == [0, 1, 2]
    for layer, seen, stats in reports:
        assert seen.shape == (10, D_MODEL)
        module = layers[layer]
        weights = (module.w_gate, module.w_up, module.w_down, module.b_gate, module.b_up, module.b_down)
        info = {"rows": probe.rows, "tokens": probe.tokens, "sequences": probe.sequences}
        _, direct = gated_ffn(seen, *weights, **info, probes="neurons", layout=Layout(64, 8))
        assert torch.equal(stats.nnz, direct.nnz)
        assert torch.equal(stats.neurons.fires, direct.neurons.fires)
        assert stats.packed.words.shape == (10, 2, 8)
    assert torch.equal(reports[0][1], x.view(10, D_MODEL))
    torch.testing.assert_close(reports[1][1], layers[0].dense(x).view(10, D_MODEL))


@torch.no_grad()
def test_row_information_of_another_pass_is_refused(linears) -> None:
    probe = Probe(probes="counts", rows=torch.ones(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"rows: expected shape \[5\], got \[4\]"):
        SparseFFN.gated(*linears, probe=probe)(torch.zeros(5, D_MODEL))


@torch.no_grad()
def test_any_strides_and_gradients_off(linears) -> None:
    module = SparseFFN.gated(*linears)
    x = torch.randn(D_MODEL, 9).t()
    torch.testing.assert_close(module(x), module.dense(x.contiguous()))
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_weights_must_be_finite(linears) -> None:
    gate, up, down = linears
    with torch.no_grad():
        up.weight[3, 4], up.weight[5, 0] = torch.nan, -torch.inf
    with pytest.raises(ValueError, match="w_up: expected finite weights, got 2 inf or nan in layer 5"):
        SparseFFN.gated(gate, up, down, layer=5)


def test_what_is_no_weight_is_refused(linears) -> None:
    with pytest.raises(TypeError, match="expected a linear module or its weight, got ReLU"):
        SparseFFN.plain(linears[0], nn.ReLU())


def test_the_choice_comes_with_its_reason(linears) -> None:
    module = SparseFFN.gated(*linears)
    assert module.choice(7).kernel == "cpu"
    assert module.choice(7).reason
    assert SparseFFN.gated(*linears, activation="silu", threshold=0.1).choice(7).kernel == "reference"
    with pytest.raises(ValueError, match="kernel: expected one of auto, hopper, cuda, cpu, reference, got 'fast'"):
        SparseFFN.gated(*linears, kernel="fast")
    assert "cuda: expected device cuda, got cpu" in SparseFFN.gated(*linears, kernel="cuda").choice(7).reason


@pytest.fixture
def down() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(MAP_D_FF, MAP_D_MODEL)


@pytest.mark.parametrize("probes", ["none", "counts", "neurons"])
@torch.no_grad()
def test_it_reports_and_passes_on(probes: str, down: nn.Linear) -> None:
    heard: list[tuple[int, torch.Tensor, Stats]] = []
    hidden = torch.randn(MAP_D_FF, 3, 5).permute(1, 2, 0)  # [3, 5, d_ff], of strides of its own
    numbers = torch.arange(15, dtype=torch.int32)
    rows = (numbers % 4 != 0).to(torch.uint8)
    probe = Probe(probes, Layout(32, 8), rows=rows, tokens=numbers, sequences=numbers // 5)
    probe.on_stats = lambda *report: heard.append(report)
    counted = CountedMap(down, MAP_D_MODEL, MAP_D_FF, threshold=THRESHOLD, layer=2, probe=probe)
    assert torch.equal(counted(hidden), down(hidden))
    [(layer, x, stats)] = heard
    flat = hidden.reshape(15, MAP_D_FF)
    fired = flat.abs() > THRESHOLD
    assert layer == 2 and torch.equal(x, flat)
    assert stats.finite.tolist() == [True] * 15
    assert stats.nnz.tolist() == ([] if probes == "none" else fired.sum(1).tolist())
    assert (stats.tiles is None) == (probes == "none")
    if stats.tiles is not None:
        assert int(stats.tiles.rows.sum()) == int(rows.sum())
    if probes == "neurons":
        assert stats.neurons is not None
        assert torch.equal(stats.neurons.fires, (fired & (rows[:, None] != 0)).sum(0))


@torch.no_grad()
def test_nothing_is_counted_for_nobody(down: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.kernels.modules.count", lambda _: pytest.fail("it counted"))
    hidden = torch.randn(4, MAP_D_FF)
    assert torch.equal(
        CountedMap(down, MAP_D_MODEL, MAP_D_FF, threshold=0.1, layer=0, probe=Probe())(hidden), down(hidden)
    )
