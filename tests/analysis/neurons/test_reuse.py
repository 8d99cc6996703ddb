"""Reuse and clusters of firings, against loops over the sampled tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support import synthetic_probes
from support.clusters import drawn_interval

from twell.analysis import firing_clusters, reuse, reuse_cache, together
from twell.analysis.neurons import reuse as module
from twell.analysis.neurons.coactivation import fired_csr, fires_with
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def sets(run: Run) -> dict[tuple[int, int], set[int]]:
    """By sequence and position: the neurons of one sampled layer. Each fourth token is there, and two sequences."""
    rows = run.frame("fired")
    rows = rows[rows["layer"] == rows["layer"].min()]
    return {(row.sequence, row.position): set(row.neuron.tolist()) for row in rows.itertuples()}


def test_shared_with_an_earlier_token(run: Run, sets: dict[tuple[int, int], set[int]]) -> None:
    table = reuse(run, lags=(4, 12))
    for row in table[(table["layer"] == table["layer"].min()) & (table["lag"] > 0)].itertuples():
        there = [(s, p) for s, p in sets if (s, p - row.lag) in sets]
        pairs = [(sets[s, p - row.lag], sets[s, p]) for s, p in there]
        assert row.pairs == len(pairs)
        counts = pd.DataFrame([(len(a & b), len(b)) for a, b in pairs], columns=["shared", "all"])
        documents = pd.Series([s // 2 % 20 for s, _ in there])
        ends = drawn_interval(documents, lambda rows: rows["shared"].sum() / rows["all"].sum(), counts)
        assert (row.low, row.high) == pytest.approx(ends, rel=1e-9)
        assert row.shared == pytest.approx(sum(len(a & b) for a, b in pairs) / sum(len(b) for _, b in pairs))
    assert {0, 4, 12} == set(table["lag"])
    assert "of flagged tokens too" in table.attrs["note"]
    places, half = [*sets], len(sets) // 2  # each is paired with the one half of the sample away
    both = zip(places[half:] + places[:half], places, strict=True)
    apart = [(sets[one], sets[two]) for one, two in both if one[0] != two[0]]
    other = table[table["lag"] == 0].iloc[0]
    assert other["pairs"] == len(apart)
    assert other["shared"] == pytest.approx(sum(len(a & b) for a, b in apart) / sum(len(b) for _, b in apart))


def test_served_by_a_cache(run: Run, sets: dict[tuple[int, int], set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A token counts where the whole window before it is in the sample: of two sequences, less each seventh token."""
    matrix, places = fired_csr(run, run.frame("fired")["layer"].min())
    kept = np.arange(len(places)) % 7 > 0
    monkeypatch.setattr(module, "fired_csr", lambda run, layer: (matrix[kept], places[kept].reset_index(drop=True)))
    sets = {place: sets[place] for place in zip(places["sequence"][kept], places["position"][kept], strict=True)}
    table = reuse_cache(run, windows=(1, 4, 8))
    table = table[table["layer"] == table["layer"].min()]
    assert table["window"].tolist() == [1, 4], "no eight in a row are in the sample"
    for row in table.itertuples():
        served, total, sizes = 0, 0, []
        for (s, p), each in sets.items():
            window = [(s, p - back) for back in range(1, row.window + 1)]
            if all(place in sets for place in window):
                union = set().union(*(sets[place] for place in window))
                served, total = served + len(each & union), total + len(each)
                sizes.append(len(union))
        assert (row.tokens, row.neurons) == (len(sizes), pytest.approx(np.mean(sizes)))
        assert row.served == pytest.approx(served / total)


def test_no_cache_is_known_of_single_tokens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fourth token is in the sample: what fired in between was not kept."""
    matrix, places = fired_csr(run, 0)
    monkeypatch.setattr(module, "fired_csr", lambda run, layer: (matrix[::4], places[::4].reset_index(drop=True)))
    with pytest.raises(Missing, match=r"no token with all of the 1 before it: keep all tokens"):
        reuse_cache(run)


def test_neurons_that_fire_together_are_one_cluster(
    run: Run, monkeypatch: pytest.MonkeyPatch, made: ModuleType, tmp_path: Path
) -> None:
    """Two groups of five that fire as one, and forty that fire alone."""
    from scipy.sparse import csr_matrix

    from twell.analysis.neurons import firing_clusters as clusters

    rng = np.random.default_rng(0)
    fired = rng.random((400, 50)) < 0.2
    for start in (0, 5):
        fired[:, start : start + 5] = (rng.random(400) < 0.2)[:, None]
    monkeypatch.setattr(clusters, "counted_firings", lambda run, layer, dtype: csr_matrix(fired.astype(dtype)))
    table = firing_clusters(run, layer=0)
    assert sorted(table["members"]) == ["0 1 2 3 4", "5 6 7 8 9"]
    assert table["phi"].tolist() == pytest.approx([1, 1])
    assert table["together"].tolist() == [1, 1]
    assert table.attrs["alone"] == {0: 40}


def test_a_firing_whose_value_rounds_to_0_has_fired(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third value is below the least of float16: who fires with whom is what it is with larger ones."""

    def faint(*options: Any) -> dict[str, Any]:
        rows = drawn(*options)
        return rows | {"value": [np.where(np.arange(len(each)) % 3, each, np.float16(1e-9)) for each in rows["value"]]}

    drawn, runs = synthetic_probes.fired_rows, []
    for name in ("plain", "faint"):
        runs.append(made.make(tmp_path / name, layers=1, d_ff=64, sequences=20, parts=1, fired=True))
        monkeypatch.setattr(synthetic_probes, "fired_rows", faint)
    matrix = fired_csr(runs[1], 0)[0]
    assert (matrix.data == 0).sum() > matrix.nnz / 4, "planted"
    for question in (
        reuse,
        reuse_cache,
        partial(together, layer=0),
        partial(fires_with, layer=0, neuron=5),
        partial(firing_clusters, least=0.01),
    ):
        tables = [question(run) for run in runs]
        assert len(tables[0]) > 0
        pd.testing.assert_frame_equal(*tables)


def test_a_damaged_sample_is_not_passed_over(made: ModuleType, tmp_path: Path) -> None:
    """Examples answer for layers that were not sampled, and for no others."""
    run = made.make(tmp_path / "damaged", layers=2, d_ff=64, sequences=8, parts=1, fired=True)
    assert run.has("examples")
    (part,) = run.files("fired")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(UserError, match="differs from its checksum"):
        fires_with(run, layer=0, neuron=5)


def test_without_a_sample(made: ModuleType, tmp_path: Path, run: Run) -> None:
    bare = made.make(tmp_path / "bare", sequences=4, parts=1)
    for question in (reuse, reuse_cache, firing_clusters):
        with pytest.raises(Missing, match="--fired"):
            question(bare)
    with pytest.raises(UserError, match="between 0 and 1"):
        firing_clusters(run, least=1.0)
    with pytest.raises(Missing, match="no two tokens of one sequence"):
        module._table(bare, [])


def test_groups_of_documents_without_a_pair_have_no_say() -> None:
    """Pairs are of ten of twenty groups, one of which has a single one."""
    rng = np.random.default_rng(5)
    unit = np.append(2 * (np.arange(270) // 30), 19)
    total = rng.integers(20, 60, len(unit))
    counts = pd.DataFrame({"shared": rng.binomial(total, 0.3), "all": total})
    row = module._share(counts["shared"].to_numpy(), total, unit, unit)
    ends = drawn_interval(pd.Series(unit), lambda rows: rows["shared"].sum() / rows["all"].sum(), counts)
    assert (row["low"], row["high"]) == pytest.approx(ends, rel=1e-9)


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_pairs_of_other_sequences_go_together_by_either_token(own: float) -> None:
    """The error of a mean over pairs is that of all pairs of pairs with a document in common, each counted once: where
    documents differ (own 1) and where pairs alone do (own 0)."""
    rng, tokens = np.random.default_rng(4), 4000
    unit, total = np.arange(tokens) // 40 % 20, np.full(tokens, 50)
    other = rng.permutation(np.arange(20))[unit // 2] + unit % 2  # as many pairs of two replicates as of others
    other = (unit + 1 + other) % 20
    effect = 3 * own * rng.normal(size=20)
    shared = 10 + effect[unit] + effect[other] + rng.normal(size=tokens)
    row = module._share(shared, total, unit, other)
    half = (row["high"] - row["low"]) / 2
    residual = shared - row["shared"] * total
    sums = np.zeros((20, 20))
    np.add.at(sums, (np.minimum(unit, other), np.maximum(unit, other)), residual)
    sums = sums + sums.T - np.diag(np.diag(sums))
    square = (sums.sum(axis=1) ** 2).sum() - np.triu(sums**2, 1).sum()
    size = np.bincount(unit, minlength=20) + np.bincount(other[unit != other], minlength=20)
    reach = stats.t.ppf(0.975, size.sum() ** 2 / (size**2).sum() - 1)
    assert half == pytest.approx(reach * np.sqrt(square) / total.sum(), rel=0.2)
    left = [(unit != group) & (other != group) for group in range(20)]
    without = np.array([shared[rows].sum() / total[rows].sum() for rows in left])
    twice = np.triu(sums**2, 1).sum() / total.sum() ** 2
    variance = 19 / 20 * ((without - row["shared"]) ** 2).sum() - twice
    assert half == pytest.approx(reach * np.sqrt(max(variance, twice)), rel=1e-9), "by leaving each group out"
