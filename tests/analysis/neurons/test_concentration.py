"""Concentration, dead neurons, unions, what fires together and examples, from the recorded rows."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from twell.analysis import (
    by_layer,
    by_neuron,
    concentration,
    dead_curve,
    dead_mask,
    dead_neurons,
    examples,
    fired_csr,
    lorenz,
    together,
    union_sizes,
)
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run


def test_concentration(run: Run) -> None:
    table, neurons, layers = concentration(run), by_neuron(run), by_layer(run)
    for row in table.itertuples():
        fires = np.sort(neurons.loc[neurons["layer"] == row.layer, "fires"].to_numpy())[::-1]
        for percent in (1, 5, 10, 20):
            whole, part = divmod(percent / 100 * run.d_ff, 1)
            carried = fires[: int(whole)].sum() + part * fires[int(whole)]
            assert getattr(row, f"busiest_{percent}") == pytest.approx(carried / fires.sum(), rel=1e-9)
        apart = np.abs(fires[:, None] - fires[None, :]).sum() / (2 * run.d_ff**2 * fires.mean())
        assert row.gini == pytest.approx(apart, rel=1e-9)
        assert fires[: row.half].sum() >= fires.sum() / 2 > fires[: row.half - 1].sum()
    assert table["dead"].tolist() == layers["dead"].tolist()
    assert table["dead_share"].tolist() == layers["dead_share"].tolist()
    assert table["dead_upper"].tolist() == layers["dead_upper"].tolist()
    one = neurons[neurons["one_token"] & (neurons["fires"] > 1)].groupby("layer").size()
    assert table["one_token"].tolist() == one.tolist()
    assert (one > 0).all()


def test_lorenz(run: Run) -> None:
    table, shares = lorenz(run, points=21), concentration(run).set_index("layer")
    for layer, curve in table.groupby("layer"):
        firings = curve.set_index(curve["neurons"].round(6))["firings"]
        assert (firings.iloc[0], firings.iloc[-1]) == (0, pytest.approx(1))
        assert firings.is_monotonic_increasing
        assert (np.diff(firings, 2) < 1e-12).all(), "busiest first"
        for percent in (5, 10, 20):
            assert firings[percent / 100] == pytest.approx(shares.loc[layer, f"busiest_{percent}"], rel=1e-9)


def test_dead_curve(run: Run) -> None:
    first = run.frame("neurons").groupby(["layer", "neuron"])["first_sequence"].min()
    for row in dead_curve(run, points=12).itertuples():
        woken = (first.loc[row.layer] < row.sequences).sum()
        assert row.dead_share == pytest.approx(1 - woken / run.d_ff)
    last = dead_curve(run).groupby("layer")["dead_share"].last()
    np.testing.assert_allclose(last, by_layer(run)["dead_share"])


def test_a_curve_of_dead_neurons_counts_sequences_and_not_their_numbers(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers have gaps where parts are left out, and where a beam had read no token."""
    whole = made.make(tmp_path / "whole", sequences=40, parts=1)
    sums = made.neuron_sums

    def spread(*options: Any) -> dict[str, Any]:
        columns = sums(*options)
        return columns | {"first_sequence": columns["first_sequence"] * 5}

    monkeypatch.setattr(made, "neuron_sums", spread)

    def gaps(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"sequence": columns["sequence"] * 5}

    run = made.make(tmp_path / "gaps", sequences=40, parts=1, change=gaps)
    assert dead_curve(run)["sequences"].max() == 40
    pd.testing.assert_frame_equal(dead_curve(run), dead_curve(whole))


def test_dead_neurons(run: Run) -> None:
    never = by_neuron(run).query("fires == 0")
    assert list(zip(dead_neurons(run)["layer"], dead_neurons(run)["neuron"], strict=True)) == list(
        zip(never["layer"], never["neuron"], strict=True)
    )
    mask = dead_mask(run)
    assert mask.shape == (run.layers, run.d_ff)
    assert mask.sum() == len(never) > 100
    assert mask[never["layer"], never["neuron"]].all()


def test_unions(run: Run) -> None:
    table = union_sizes(run)
    rows = run.frame("unions")
    assert len(table) == rows.groupby(["layer", "block"]).ngroups
    mean_nnz = by_layer(run)["mean"]
    for row in table.itertuples():
        here = rows[(rows["layer"] == row.layer) & (rows["block"] == row.block)]
        counts = np.repeat(here["neurons"].to_numpy(), here["blocks"])
        assert (row.blocks, row.max) == (len(counts), counts.max())
        assert row.mean == pytest.approx(counts.mean(), rel=1e-12)
        assert row.p50 == np.quantile(counts, 0.5, method="inverted_cdf")
        assert row.p90 == np.quantile(counts, 0.9, method="inverted_cdf")
        assert row.share == pytest.approx(counts.mean() / run.d_ff)
        assert row.overlap == pytest.approx(counts.mean() / row.block / mean_nnz[row.layer])


def test_fired_csr(run: Run) -> None:
    matrix, places = fired_csr(run, 1)
    rows = run.frame("fired").query("layer == 1").sort_values(["sequence", "position"])
    assert matrix.shape == (len(rows), run.d_ff)
    assert places["position"].tolist() == rows["position"].tolist()
    dense = matrix.toarray()
    for index in (0, 7, len(rows) - 1):
        expected = np.zeros(run.d_ff, np.float32)
        expected[rows["neuron"].iloc[index]] = rows["value"].iloc[index]
        np.testing.assert_array_equal(dense[index], expected)
    counted = run.frame("activity").set_index(["sequence", "position"])["nnz_01"]
    stored = np.diff(matrix.indptr)
    assert (stored == counted.loc[list(places.itertuples(index=False, name=None))]).all()
    with pytest.raises(UserError, match=r"kept \(0, 1, 2, 3\), got 9"):
        fired_csr(run, 9)


def test_together(run: Run) -> None:
    """Against sets, pair by pair; the planted pair comes first among those that 5 is in."""
    table = together(run, 2, limit=10**9, min_fires=5)
    where: dict[int, set[int]] = {}
    rows = run.frame("fired").query("layer == 2")
    for index, neurons in enumerate(rows["neuron"]):
        for neuron in neurons:
            where.setdefault(int(neuron), set()).add(index)
    busy = {neuron: tokens for neuron, tokens in where.items() if len(tokens) >= 5}
    pairs = {(a, b) for a, b in combinations(sorted(busy), 2) if busy[a] & busy[b]}
    assert set(zip(table["a"], table["b"], strict=True)) == pairs
    assert table["phi"].is_monotonic_decreasing
    fired = np.zeros((len(rows), run.d_ff))
    for neuron, tokens in where.items():
        fired[list(tokens), neuron] = 1
    for row in table.sample(60, random_state=0).itertuples():
        a, b = busy[row.a], busy[row.b]
        assert (row.fires_a, row.fires_b, row.both) == (len(a), len(b), len(a & b))
        assert row.jaccard == pytest.approx(len(a & b) / len(a | b))
        assert row.phi == pytest.approx(np.corrcoef(fired[:, row.a], fired[:, row.b])[0, 1])
        assert row.lift == pytest.approx(len(a & b) * len(rows) / len(a) / len(b))
    five = table[(table["a"] == 5) | (table["b"] == 5)].iloc[0]
    assert (five["a"], five["b"]) == (5, 6)
    assert five["both"] == five["fires_a"]


def test_examples(run: Run) -> None:
    table = examples(run, 1, 4, width=3)
    rows = run.frame("examples").query("layer == 1 and neuron == 4")
    top, sample = (rows[rows["kind"] == kind].sort_values("value", ascending=False) for kind in ("top", "sample"))
    assert table["kind"].tolist() == ["top"] * 3 + ["sample"] * 3
    assert table["value"].tolist() == top["value"].tolist() + sample["value"].tolist()
    assert table["quantile"].iloc[:3].isna().all() and table["quantile"].iloc[3:].is_monotonic_decreasing
    assert table["quantile"][:3].isna().all()
    activity = run.frame("activity")
    for row in table.itertuples():
        line = activity[activity["sequence"] == row.sequence].set_index("position")["token_id"]
        ids = [line[p] for p in range(max(0, row.position - 3), row.position)]
        assert row.before == run.decode(ids)
        assert row.token == run.decode([line[row.position]])
        assert row.window[16] == pytest.approx(row.value)


def test_what_was_not_kept(run: Run, made: ModuleType, tmp_path: Path) -> None:
    bare = made.make(tmp_path / "bare", sequences=12, parts=1, neurons=False, tiles=False)
    for question in (concentration, lorenz, dead_curve, dead_neurons, dead_mask):
        with pytest.raises(Missing, match="--probes counts"):
            question(bare)
    with pytest.raises(Missing, match="different neurons"):
        union_sizes(bare)
    with pytest.raises(Missing, match="no sample of firings"):
        together(bare, 0)
    with pytest.raises(Missing, match="no examples of where"):
        examples(bare, 0, 0)
    with pytest.raises(Missing, match="no example of L1/N400"):
        examples(run, 1, 400)
    with pytest.raises(UserError, match="L0/N0 to L3/N511, got L4/N0"):
        examples(run, 4, 0)
    with pytest.raises(Missing, match="Under two neurons"):
        together(run, 0, min_fires=10**6)
    for question in (lorenz, dead_curve):
        with pytest.raises(UserError, match="at least 2 points"):
            question(run, points=1)


def test_a_layer_that_never_fires(made: ModuleType, tmp_path: Path) -> None:
    def silent(columns):
        return {**columns, "nnz_01": np.zeros_like(columns["nnz_01"])}

    run = made.make(tmp_path / "silent", sequences=12, parts=1, change=silent, tiles=False)
    table = concentration(run)
    assert table.loc[1, "dead"] == run.d_ff
    assert pd.isna(table.loc[1, ["busiest_1", "gini"]]).all()
    assert pd.isna(table.loc[1, "half"])
    assert sorted(lorenz(run)["layer"].unique()) == [0, 2, 3]
    assert (dead_curve(run).query("layer == 1")["dead_share"] == 1).all()
