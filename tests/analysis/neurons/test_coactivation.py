"""Neurons that fire together: what fires at first tokens alone, much, or by chance is not taken for it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from support import synthetic_probes

from twell.analysis import firing_clusters, together
from twell.analysis.neurons import coactivation
from twell.analysis.neurons import firing_clusters as clusters
from twell.analysis.neurons.coactivation import counted_firings, fired_csr, fires_with
from twell.workbench.run.store import Run

FIRST = np.arange(50, 60)  # neurons that fire at flagged tokens and nowhere else


@pytest.fixture(scope="module")
def bos(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of short sequences, each of which begins with a token that fires the same ten neurons, which no other
    token fires; as a second flagged token does in a few of them."""
    drawn = synthetic_probes.fired_rows

    def with_first(shape: Any, columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        rows = drawn(shape, columns, rng)
        rows["neuron"] = [each[each < FIRST[0]] for each in rows["neuron"]]
        rows["value"] = [value[: len(each)] for value, each in zip(rows["value"], rows["neuron"], strict=True)]
        for token in np.flatnonzero(columns["flags"]):
            values = (columns["sequence"][token], columns["position"][token], 0, FIRST.astype(np.uint16))
            for column, value in zip(rows.values(), (*values, np.ones(len(FIRST), np.float16)), strict=True):
                column.append(value)
        return rows

    def flagged(columns: dict[str, Any]) -> dict[str, Any]:
        columns["flags"][columns["position"] == 0] |= 2
        columns["flags"][(columns["position"] == 5) & (columns["sequence"] % 7 == 0)] = 1
        return columns

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_probes, "fired_rows", with_first)
        options = {"layers": 1, "d_ff": 64, "sequences": 60, "length": 24, "parts": 2, "fired": True}
        return made.make(tmp_path_factory.mktemp("bos") / "bos", change=flagged, **options)


def test_what_fires_at_first_tokens_alone_does_not_fire_together(bos: Run) -> None:
    matrix, _ = fired_csr(bos, 0)
    assert (np.diff(matrix.tocsc().indptr)[FIRST] >= 60).all(), "planted: in the sample as it was kept"
    members = " ".join(firing_clusters(bos, least=0.05)["members"]).split()
    assert not set(FIRST) & set(map(int, members))
    pairs = together(bos, 0, min_fires=2)
    assert len(pairs) and not pairs[["a", "b"]].isin(FIRST).any(axis=None)
    assert fires_with(bos, 0, int(FIRST[0])).empty
    fired = counted_firings(bos, 0, np.int64)
    flags = bos.frame("activity", ["flags"])["flags"]
    assert fired.shape[0] == matrix.shape[0] - (flags > 0).sum() and fired[:, FIRST].nnz == 0


def as_sample(monkeypatch: pytest.MonkeyPatch, fired: np.ndarray) -> None:
    for module in (coactivation, clusters):
        monkeypatch.setattr(module, "counted_firings", lambda run, layer, dtype: csr_matrix(fired.astype(dtype)))


def test_two_that_fire_much_are_not_a_pair(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 and 1 fire on nine tokens of ten, each for itself; 2 and 3 seldom, and as one in two of three."""
    rng = np.random.default_rng(0)
    fired = rng.random((2000, 4)) < [0.9, 0.9, 0.05, 0]
    fired[:, 3] = np.where(rng.random(2000) < 0.67, fired[:, 2], rng.random(2000) < 0.05)
    as_sample(monkeypatch, fired)
    table = together(run, 0)
    assert table[["a", "b"]].iloc[0].tolist() == [2, 3]
    assert table["jaccard"].idxmax() > 0, "though 0 and 1 share more of their tokens"


def test_both_of_a_pair_fire_together_and_not_either(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    fired = np.repeat(rng.random((1000, 1)) < 0.3, 2, axis=1) & (rng.random((1000, 2)) < 0.8)
    as_sample(monkeypatch, fired)
    (row,) = firing_clusters(run, layer=0).itertuples()
    assert row.together == pytest.approx(fired.all(axis=1).sum() / fired.any(axis=1).sum()) and row.together < 0.8


@pytest.mark.parametrize("tokens", [100, 200, 1000])
def test_independent_neurons_are_hardly_ever_joined(run: Run, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """However few tokens there are; five that fire as one are joined all the same."""
    rng = np.random.default_rng(tokens)
    fired = rng.random((tokens, 300)) < rng.uniform(0.2, 0.5, 300)
    as_sample(monkeypatch, fired)
    assert len(firing_clusters(run, layer=0)) <= 2
    fired[:, :5] = fired[:, :1]
    as_sample(monkeypatch, fired)
    assert "0 1 2 3 4" in set(firing_clusters(run, layer=0)["members"])
