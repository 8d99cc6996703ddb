"""What each layer could still gain, on a run made to have it, and the steps of its waterfall."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from twell.analysis import layer_potential, speedup
from twell.analysis.figures.speed.potential import steps, waterfall
from twell.analysis.speed.potential import worth_speeding_up
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


@pytest.fixture
def timed(made: ModuleType, tmp_path: Path) -> Run:
    """Ten layers, gate 10 µs, attention 900 µs each; the model 20 ms dense on twice the rows, 12 ms sparse."""

    def change(table: dict[str, Any]) -> dict[str, Any]:
        rows = []
        for batch in range(2):
            rows += [{"batch": batch, "layer": n, "op": "gate", "microseconds": 10.0} for n in range(10)]
            rows += [{"batch": batch, "layer": n, "op": "attention", "microseconds": 900.0} for n in range(10)]
            for op, time in (("model_dense", 20_000.0), ("model_sparse", 12_000.0)):
                rows.append({"batch": batch, "layer": -1, "op": op, "microseconds": time, "tokens": 4096})
        table = made.more_timings(table, rows)
        loud = (table["layer"] == 3) & (table["op"] == "ffn_sparse")
        return {
            **table,
            "microseconds": np.where(loud, 390.0, table["microseconds"]),
            "nnz_mean": np.where(table["layer"] == 3, 60.0, 7.0),
        }

    return made.make(tmp_path / "timed", layers=10, sequences=10, parts=1, timings=2, change_timings=change)


def test_what_is_left_in_each_layer(timed: Run) -> None:
    table, frame = layer_potential(timed), speedup(timed)
    np.testing.assert_allclose(table["left_ms"], (frame["sparse_us"] - 10) / 1000)
    np.testing.assert_allclose(table["saved_ms"], (frame["dense_us"] - frame["sparse_us"]) / 1000)
    assert (table.attrs["dense_ms"], table.attrs["sparse_ms"]) == pytest.approx((10.0, 6.0))
    assert table.attrs["attention_ms"] == pytest.approx(9.0)
    np.testing.assert_allclose(table["left_share"], table["left_ms"] / 6.0)
    text = worth_speeding_up(table)
    assert text.startswith("Layer 3 has most to gain: 0.38 ms, 6.3 % of the pass, because it fires 60 neurons a token")
    assert text.endswith("attention takes 9 ms, more than all of it.")


def test_the_waterfall_ends_at_the_ceiling(timed: Run) -> None:
    table = layer_potential(timed)
    rows = steps(table)
    names = [name for name, _, _ in rows]
    assert names[0] == "dense" and names[-1] == "ceiling" and names.count("4 more") == 2
    until = names.index("sparse")
    assert sum(value for _, _, value in rows[:until]) == pytest.approx(6.0)
    assert sum(value for _, _, value in rows) == pytest.approx(6.0 - table["left_ms"].sum())
    assert len(waterfall(table).data[0].x) == len(rows)


def test_without_the_gate_nothing_bounds_a_layer(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing):
        layer_potential(made.make(tmp_path / "plain", sequences=10, parts=1))
