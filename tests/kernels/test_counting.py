"""CountedMap: what goes into a map is reported, above a threshold, and what comes out is the map's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twell.kernels.layout import Layout
from twell.kernels.modules import CountedMap, Probe
from twell.kernels.stats import Stats

D_MODEL, D_FF, THRESHOLD = 16, 72, 0.5


@pytest.fixture
def down() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D_FF, D_MODEL)


@pytest.mark.parametrize("probes", ["none", "counts", "neurons"])
@torch.no_grad()
def test_it_reports_and_passes_on(probes: str, down: nn.Linear) -> None:
    heard: list[tuple[int, torch.Tensor, Stats]] = []
    hidden = torch.randn(D_FF, 3, 5).permute(1, 2, 0)  # [3, 5, d_ff], of strides of its own
    numbers = torch.arange(15, dtype=torch.int32)
    rows = (numbers % 4 != 0).to(torch.uint8)
    probe = Probe(probes, Layout(32, 8), rows=rows, tokens=numbers, sequences=numbers // 5)
    probe.on_stats = lambda *told: heard.append(told)
    counted = CountedMap(down, D_MODEL, D_FF, threshold=THRESHOLD, layer=2, probe=probe)
    assert torch.equal(counted(hidden), down(hidden))
    [(layer, x, stats)] = heard
    flat = hidden.reshape(15, D_FF)
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
    hidden = torch.randn(4, D_FF)
    assert torch.equal(CountedMap(down, D_MODEL, D_FF, threshold=0.1, layer=0, probe=Probe())(hidden), down(hidden))
