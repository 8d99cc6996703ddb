"""Values by bins, from the recorded rows. Cost: 1 s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import synthetic_runs

from twell.analysis import by_neuron, examples, neuron_histogram
from twell.analysis.exports.documents.strongest import strongest
from twell.analysis.neurons.coactivation import fires_with
from twell.analysis.neurons.top_tokens import top_tokens
from twell.analysis.neurons.value_histogram import BEGINS, quantile
from twell.analysis.summaries.refresh import summarize
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_runs.make(tmp_path_factory.mktemp("values") / "run", sequences=12, parts=2, fired=True)


def test_bins_add_up_to_the_firings_of_each_neuron(run: Run) -> None:
    table = neuron_histogram(run)
    rows = run.frame("value_bins").groupby(["layer", "neuron", "bin"])["fires"].sum().reset_index()
    assert len(table) == len(rows) < len(run.frame("value_bins"))  # of two parts
    assert table["fires"].tolist() == rows["fires"].tolist()
    assert table["low"].tolist() == BEGINS[rows["bin"]].tolist()
    fires = by_neuron(run).query("fires > 0").set_index(["layer", "neuron"])["fires"]
    assert table.groupby(["layer", "neuron"])["fires"].sum().to_dict() == fires.to_dict()
    np.testing.assert_allclose(table.groupby(["layer", "neuron"])["share"].sum(), 1)
    ends = ((0, 0), (2, 5), (run.layers - 1, run.d_ff - 1))
    for layer, neuron in ends:
        one = neuron_histogram(run, layer, neuron)
        assert one["fires"].tolist() == table.query(f"layer == {layer} and neuron == {neuron}")["fires"].tolist()
    last = int(table["neuron"].max())
    everywhere = table[table["neuron"] == last]
    assert neuron_histogram(run, neuron=last)["fires"].tolist() == everywhere["fires"].tolist(), "in every layer"


def test_quantiles_of_examples(run: Run) -> None:
    table = neuron_histogram(run, 1, 3)
    edges = [*table["low"], table["high"].iloc[-1]]
    np.testing.assert_allclose(quantile(table, edges), [0, *table["share"].cumsum()])
    assert quantile(table, [0.0, 1e9]).tolist() == pytest.approx([0, 1])
    middle = (edges[1] + edges[2]) / 2
    between = table["share"].iloc[0] + table["share"].iloc[1] / 2
    assert quantile(table, [middle, edges[-1]])[0] == pytest.approx(between)
    sample = examples(run, 1, 3).query("kind == 'sample'")
    np.testing.assert_allclose(sample["quantile"], quantile(table, examples(run, 1, 3)["value"])[-len(sample) :])


@pytest.mark.parametrize("kept", [4, 0])
def test_a_run_in_which_nothing_fires_is_not_told_to_keep_examples(tmp_path: Path, kept: int) -> None:
    def nothing(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {name: np.zeros_like(columns[name]) for name in nnz_columns(4)}

    run = synthetic_runs.make(tmp_path / "none", sequences=4, parts=1, change=nothing)
    manifests.update(run.path, options={"probes": "all", "examples": kept})
    run = open_run(run.path)
    with pytest.raises(Missing, match="holds no value_bins: no neuron fired"):
        neuron_histogram(run)
    for ask in (top_tokens, strongest):
        with pytest.raises(Missing, match=r"^none keeps no examples of neurons: none fired\.$"):
            ask(run)
    with pytest.raises(Missing, match="No neuron of none fires"):
        fires_with(run, layer=1, neuron=3)


def test_a_copy_without_rows_keeps_it_and_older_runs_lack_it(run: Run, tmp_path: Path) -> None:
    summarize(SummarizeOptions(runs=(run.path,), summary_only=tmp_path / "copy"))
    assert neuron_histogram(open_run(tmp_path / "copy")).equals(neuron_histogram(run))
    without = synthetic_runs.make(tmp_path / "without", sequences=4, parts=1)
    with pytest.raises(Missing, match="holds no value_bins: it was captured without --examples"):
        neuron_histogram(without)
    for name, wrong, last in (
        ("layer", {"layer": run.layers}, run.layers - 1),
        ("layer", {"layer": -1}, run.layers - 1),
        ("neuron", {"layer": 0, "neuron": run.d_ff}, run.d_ff - 1),
        ("neuron", {"neuron": run.d_ff}, run.d_ff - 1),
    ):
        with pytest.raises(UserError, match=f"^Expected a {name} from 0 to {last}, got {wrong[name]}"):
            neuron_histogram(run, **wrong)
