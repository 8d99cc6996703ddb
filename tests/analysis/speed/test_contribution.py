"""Tiles and gains: every number from the recorded rows, and each cause on a run made to have it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis import gain_correlations, layer_gains, model_time, peer_audit, speedup, tile_audit
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

Table = dict[str, Any]


def test_tile_audit(run: Run, rows: pd.DataFrame) -> None:
    table = tile_audit(run)
    tiles = run.frame("tiles")
    assert len(table) == run.layers * 4
    assert table.loc[table["in_use"], "compression"].tolist() == [8] * run.layers
    used = rows[rows["flags"] == 0]
    for row in table.itertuples():
        here = tiles[tiles["layer"] == row.layer]
        fired = np.repeat(here["occupancy"].to_numpy(), here["pairs"])
        fullest = np.repeat(here["occupancy"].to_numpy(), here["rows"])
        assert fired.sum() == used[row.layer].sum(), "the made tiles agree with the made counts"
        assert row.slots == 256 // row.compression - 1
        assert (row.tokens, row.occupancy_max) == (len(used), fired.max())
        assert row.occupancy_mean == pytest.approx(fired.mean(), rel=1e-12)
        assert row.rows_over == (fullest > row.slots).sum()
        assert row.rows_over_share == pytest.approx((fullest > row.slots).mean(), rel=1e-12)
        assert row.tiles_over_share == pytest.approx((fired > row.slots).mean(), rel=1e-12)
        assert row.lost == np.maximum(fired - row.slots, 0).sum()
        assert row.lost_share == pytest.approx(row.lost / fired.sum(), rel=1e-12)
    assert (table["lost"] > 0).any()


def test_peer_audit(run: Run, rows: pd.DataFrame, made: ModuleType, tmp_path: Path) -> None:
    table = peer_audit(run).set_index("layer")
    used = rows[rows["flags"] == 0]
    fixed = tile_audit(run).query("slots == 31").set_index("layer")
    assert table["wrong"].tolist() == fixed["rows_over"].tolist()
    assert table["lost_share"].tolist() == fixed["lost_share"].tolist()
    for layer in range(run.layers):
        assert table.loc[layer, "long"] == (used[layer] > 128).sum()
        assert table.loc[layer, "tail_full"] == ((used[layer] > 128).mean() > 2048 / 16_384)

    def heavy(columns: Table) -> Table:
        counts = np.where(np.arange(len(columns["flags"])) % 5 == 0, 300, 10)
        return {**columns, "nnz_00": counts.astype(np.uint16)}

    run = made.make(tmp_path / "bare", change=heavy, tiles=False, timings=0, parts=1)
    table = peer_audit(run)
    assert table["wrong"].isna().all()
    assert "without tile counts" in table.attrs["note"]
    assert table["tail_full"].tolist() == [True, False, False, False]
    with pytest.raises(Missing, match="without tile counts"):
        tile_audit(run)


def test_layers_on_the_trend_need_no_cause(bos_run: Run) -> None:
    """Made timings are a straight line of nnz, give or take 2 %."""
    table = layer_gains(bos_run)
    assert (table["off"].abs() < 0.05).all()
    assert (table["cause"] == "").all()
    nnz, ratio = table["nnz_mean"], 1 / table["speedup"]
    slope, *_ = stats.theilslopes(ratio, nnz)
    np.testing.assert_allclose(table["expected"], 1 / (np.median(ratio - slope * nnz) + slope * nnz), rtol=1e-9)
    assert table["contribution"].isna().all()
    assert table["ceiling"].isna().all()


def slowed(layer: int, factor: float, gate: float | None = None) -> Callable[[ModuleType], Callable[[Table], Table]]:
    """Slow one layer's sparse times down; with `gate`, time the gate product at that many µs."""

    def of(made: ModuleType) -> Callable[[Table], Table]:
        def change(table: Table) -> Table:
            hit = (table["layer"] == layer) & (table["op"] == "ffn_sparse")
            table = {**table, "microseconds": np.where(hit, table["microseconds"] * factor, table["microseconds"])}
            if gate is None:
                return table
            rows = [{"batch": b, "layer": n, "op": "gate", "microseconds": gate} for b in range(5) for n in range(6)]
            return made.more_timings(table, rows)

        return change

    return of


def counts(mean: float, most: int = 0) -> Callable[[Table], Table]:
    """Layer 2 fires this many neurons on average, others 5 to 15; one token of layer 2 fires `most`."""

    def change(columns: Table) -> Table:
        rng = np.random.default_rng(1)
        for layer, name in enumerate(nnz_columns(6)):
            columns[name] = rng.poisson(mean if layer == 2 else 5 + 2 * layer, len(columns["flags"])).astype(np.uint16)
        if most:
            columns["nnz_02"][np.flatnonzero(columns["flags"] == 0)[0]] = most
        return columns

    return change


@pytest.mark.parametrize(
    ("change", "times", "union", "cause"),
    [
        (counts(50), slowed(2, 1.5), None, "overflow"),
        (counts(12), slowed(2, 1.5), 300, "little shared: a block of 128 asks for 2."),
        (counts(12), slowed(2, 0.7), 50, "faster than its nnz says: its tokens share"),
        (counts(12, most=400), slowed(2, 1.5), False, "imbalance: the fullest token fires"),
        (counts(12), slowed(2, 1.5, gate=125.0), False, "fixed cost"),
        (counts(90), slowed(2, 1.5, gate=40.0), False, "little to skip"),
        (counts(12), slowed(2, 1.5, gate=40.0), False, "none that the run shows"),
        (counts(12), slowed(2, 0.7, gate=40.0), False, "faster than its nnz says"),
    ],
)
def test_layers_off_the_trend(
    made: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change,
    times,
    union: int | bool | None,
    cause: str,
) -> None:
    def unions(shape: Any, columns: Table, rng: Any) -> Table:
        """Ten times the layer's mean nnz, or what was asked for in layer 2."""
        mean = [float(columns[name].mean()) for name in nnz_columns(6)]
        counts = [round(10 * value) for value in mean]
        if union:
            counts[2] = union
        return {"layer": range(6), "block": [128] * 6, "neurons": counts, "blocks": [5] * 6}

    monkeypatch.setattr(made.synthetic_probes, "union_counts", unions)
    run = made.make(
        tmp_path / "off",
        layers=6,
        sequences=60,
        parts=1,
        change=change,
        change_timings=times(made),
        tiles=union is not False,
    )
    table = layer_gains(run)
    assert table.loc[2, "cause"].startswith(cause)
    assert (table["cause"] != "").sum() == 1


def timed(made: ModuleType, gain: float = 1.25) -> Callable[[Table], Table]:
    """The whole model takes 5000 µs dense; attention 100 µs a layer, the gate 40."""

    def change(table: Table) -> Table:
        rows = []
        for batch in range(3):
            rows += [{"batch": batch, "layer": -1, "op": "model_dense", "microseconds": 5000.0}]
            rows += [{"batch": batch, "layer": -1, "op": "model_sparse", "microseconds": 5000 / gain, "kernel": "cpu"}]
            for layer in range(4):
                rows += [{"batch": batch, "layer": layer, "op": "attention", "microseconds": 100.0 + batch}]
                rows += [{"batch": batch, "layer": layer, "op": "gate", "microseconds": 40.0}]
        return made.more_timings(table, rows)

    return change


def test_contributions_and_the_models_time(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "timed", sequences=30, length=300, parts=1, change_timings=timed(made))
    gains, layers = layer_gains(run), speedup(run)
    unions = run.frame("unions").query("block == 128")
    mean = (unions["neurons"] * unions["blocks"]).groupby(unions["layer"]).sum()
    np.testing.assert_allclose(gains["union"], mean / unions.groupby("layer")["blocks"].sum())
    np.testing.assert_allclose(gains["contribution"], (layers["dense_us"] - layers["sparse_us"]) / 5000)
    np.testing.assert_allclose(gains["ceiling"], layers["dense_us"] / 40)
    assert (gains["sparse_us"] > 40).all()
    table = model_time(run).set_index("part")
    assert list(table.index) == ["ffn", "attention", "rest", "whole"]
    assert table.loc["attention", "dense_us"] == 404
    assert table.loc["ffn", "sparse_us"] == pytest.approx(layers["sparse_us"].sum())
    assert table.loc["rest", "dense_us"] == pytest.approx(5000 - 404 - layers["dense_us"].sum())
    assert table["dense_share"].drop("whole").sum() == pytest.approx(1)
    assert table.loc["whole", "speedup"] == pytest.approx(1.25)
    assert model_time(run).attrs["ceiling"] == pytest.approx(5000 / (5000 - (layers["dense_us"] - 40).sum()))
    pairs = gain_correlations(run).set_index(["of", "with"])
    assert set(pairs.index) == {(of, gain) for of in ("nnz", "union") for gain in ("speedup", "contribution")}
    for (of, gain), row in pairs.iterrows():
        pair = gains["nnz_mean" if of == "nnz" else "union"], gains[gain]
        assert row["pearson"] == pytest.approx(stats.pearsonr(*pair).statistic)
        assert row["spearman"] == pytest.approx(stats.spearmanr(*pair).statistic)
        assert row["n"] == 4
    assert pairs.loc[("nnz", "contribution"), "pearson"] < -0.99, "time saved is a straight line of nnz here"


def test_parts_timed_on_fewer_rows_count_for_the_whole_pass(made: ModuleType, tmp_path: Path) -> None:
    def change(table: Table) -> Table:
        table = timed(made)(table)
        rows = np.where(table["layer"] == -1, 4096, np.where(table["op"] == "attention", 1024, 2048))
        return {**table, "tokens": rows}

    run = made.make(tmp_path / "fewer", sequences=20, parts=1, change_timings=change)
    table, layers = model_time(run).set_index("part"), speedup(run)
    assert table.loc["attention", "dense_us"] == pytest.approx(4 * 404)
    assert table.loc["ffn", "sparse_us"] == pytest.approx(2 * layers["sparse_us"].sum())
    saved = 2 * (layers["dense_us"] - layers["sparse_us"]) / 5000
    np.testing.assert_allclose(layer_gains(run)["contribution"], saved)


def test_a_gate_slower_than_the_whole_ffn_is_no_ceiling(made: ModuleType, tmp_path: Path) -> None:
    """Some kernels take the gate product faster within the FFN than it runs by itself."""

    def change(table: Table) -> Table:
        table = timed(made)(table)
        slow = (table["op"] == "gate") & (table["layer"] == 2)
        return {**table, "microseconds": np.where(slow, 1e4, table["microseconds"])}

    run = made.make(tmp_path / "slow gate", sequences=20, parts=1, change_timings=change)
    assert (speedup(run)["sparse_us"] > 40).all()
    assert layer_gains(run)["ceiling"].isna().tolist() == [False, False, True, False]
    assert model_time(run).attrs["ceiling"] is None


def test_what_was_not_timed(run: Run, made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="whole forward pass"):
        model_time(run)
    with pytest.raises(Missing, match="at least 4"):
        gain_correlations(made.make(tmp_path / "three", layers=3, sequences=12, parts=1))
    assert gain_correlations(run)["with"].unique().tolist() == ["speedup"]
