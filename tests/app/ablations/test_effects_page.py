"""Page What matters: its numbers are those of the tables; a run without ablations names the command. Cost: 2 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.planted_effects import rows_of

from twell.analysis import allocation, effects, neuron_effects, plots
from twell.app.ui.formatting import number, plural, whole
from twell.workbench.ablations.appended import append
from twell.workbench.run.store import Run, open_run

SHARES = "shares:0.5,0,0.5,0"


@pytest.fixture(scope="module")
def ablated(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> Run:
    run = made.make(tmp_path_factory.mktemp("ablated") / "ablated", sequences=24)
    rng = np.random.default_rng(0)
    for kind, share, layer in (
        ("weakest", 0.5, -1), ("weakest", 0.75, -1), ("random", 0.5, -1), ("ffn", None, 0), ("ffn", None, 1),
        ("neurons", None, -1), ("shares", None, -1), *(("smallest", 0.5, layer) for layer in range(run.layers)),
    ):  # fmt: skip
        names = {
            "ffn": f"ffn@{layer}",
            "neurons": "neurons:L1/N5",
            "shares": SHARES,
            "smallest": f"smallest:0.5@{layer}",
        }
        name = names.get(kind, f"{kind}:{share}")
        same = np.random.default_rng(0)  # every condition on the same tokens, as one study measures them
        append(run.path, "effects", rows_of(same, kind=kind, share=share, layer=layer, condition=name)[0])
    layer, neuron = (index.ravel() for index in np.indices((run.layers, run.d_ff)))
    estimate = {
        "layer": layer,
        "neuron": neuron,
        "estimate_sum": rng.normal(size=len(layer)),
        "tokens": layer * 0 + 500,
    }
    entry = {"study": 0, "tokens": 9, "seconds": 0.0, "complete": True, "conditions": [SHARES], "budget": 0.5}
    append(run.path, "neuron_effects", estimate, effects=[entry])
    return open_run(run.path)


def text(test: AppTest) -> str:
    return " ".join(str(block.proto.body) for block in test.get("html"))


def test_it_draws_what_the_tables_hold(ablated: Run, show: Callable[..., AppTest]) -> None:
    test = show(ablated.path.parent, "matters", run="ablated")
    assert not test.exception
    table = effects(ablated).set_index("condition")
    assert number(table.loc["random:0.5", "base"]) in text(test) and "of 60 documents" in text(test)
    assert "bars: 95\u202f% by document" in text(test)
    assert len(test.get("plotly_chart")) == 4
    assert test.dataframe[0].value.set_index("condition")["change"].equals(table["change"])
    assert b"%" in test.dataframe[0].proto.arrow_data.styler.display_values, "as its caption says"
    assert "kept: firings over those with nothing taken away; above 100\u202f%" in text(test)
    curve = next(line for line in plots.ablation_curves(ablated).data if line.name == "weakest firings away")
    assert sorted(curve.y) == sorted(table.loc[["weakest:0.5", "weakest:0.75"], "change"])
    assert list(plots.ablation_layers(ablated).data[0].x) == table.loc[["ffn@0", "ffn@1"], "change"].tolist()
    budget, half = allocation(ablated), effects(ablated, half=1).set_index("condition")["change"]
    assert f"run together they make {half[SHARES]:+.4f}" in text(test)
    assert f"{number(0.5)} nats a token. The share of" in text(test) and ", within the budget of 0.5." in text(test)
    assert list(plots.ablation_budget(ablated).data[0].x) == [50, 0, 50, 0] == (100 * budget["share"]).tolist()
    assert budget.attrs["singles"] == half[["smallest:0.5@0", "smallest:0.5@2"]].sum()
    neurons = neuron_effects(ablated)
    assert neurons["estimate"].abs().is_monotonic_decreasing
    drawn = len(plots.ablation_neurons(ablated).data[0].x)
    assert drawn < 4000 and f"; all {whole(drawn)} that fire; amber: 1" in text(test)
    exact = neurons.set_index("label").loc["L1/N5", "exact"]
    assert exact == table.loc["neurons:L1/N5", "change"] and neurons.attrs["measured"] == 1


def test_the_axes_of_neurons_read_as_other_shares_do(ablated: Run) -> None:
    figure = plots.ablation_neurons(ablated)
    densities, changes = figure.layout.xaxis, figure.layout.yaxis
    for axis, name in ((densities, "x"), (changes, "y")):
        values = np.concatenate([trace[name] for trace in figure.data])
        assert len(axis.tickvals) >= 2 and min(values) <= axis.tickvals[0] < axis.tickvals[-1] <= max(values)
    said = [float(text.removesuffix("\u202f%")) / 100 for text in densities.ticktext]
    assert said == pytest.approx(list(densities.tickvals))
    assert [*changes.ticktext] == [number(value, 1) for value in changes.tickvals]


def test_what_was_not_measured_is_said_below_what_was(
    made: ModuleType, tmp_path: Path, show: Callable[..., AppTest]
) -> None:
    run = made.make(tmp_path / "one <b>", layers=2, sequences=20, timings=0)
    rows = rows_of(np.random.default_rng(0), kind="ffn", layer=1, condition="ffn@1")[0]
    append(run.path, "effects", rows)
    test = show(tmp_path, "matters", run="one <b>")
    assert not test.exception and not test.info
    page = text(test)
    assert page.count("<p>one &lt;b&gt; has no") == 2 and "<code>twell ablate" in page
    assert '<span class="tw-option">--neurons</span> 64' in page, "no line ends after its hyphens"
    assert page.index("Every condition") < page.index("<p>one &lt;b&gt; has no")
    assert "share" not in test.dataframe[0].value and "silenced" not in test.dataframe[0].value


def test_three_documents_have_no_bars(made: ModuleType, tmp_path: Path, show: Callable[..., AppTest]) -> None:
    run = made.make(tmp_path / "few", layers=2, sequences=20, timings=0)
    append(run.path, "effects", rows_of(np.random.default_rng(0), documents=3, share=0.5)[0])
    test, line = show(tmp_path, "matters", run="few"), plots.ablation_curves(open_run(run.path)).data[0]
    assert not test.exception and "condition; no bars, of too few documents for intervals." in text(test)
    assert list(line.text) == [f"weakest:0.5: {line.y[0]:+.4f} nats [too few documents]"]


def test_no_line_goes_over_points_of_two_texts(made: ModuleType, tmp_path: Path, show: Callable[..., AppTest]) -> None:
    """Two studies of different tokens: each has a figure and a caption of its own."""
    run = made.make(tmp_path / "two", layers=2, sequences=20, timings=0)
    for study, (documents, shares) in enumerate(((9, (0.5, 0.75)), (7, (0.25, 0.9)))):
        for share in shares:
            rng = np.random.default_rng(study)
            name = f"random:{share}"
            rows, _ = rows_of(rng, study, documents, name, kind="random", share=share)
            append(run.path, "effects", rows)
    run, table = open_run(run.path), effects(open_run(run.path)).set_index("condition")
    lines = plots.ablation_curves(run).data
    conditions = [{text.split(": ")[0] for text in line.text} for line in lines]
    assert conditions == [{"random:0.25", "random:0.9"}, {"random:0.5", "random:0.75"}], "the newest study first"
    assert len({line.name for line in lines}) == 2
    test = show(tmp_path, "matters", run="two")
    assert not test.exception and len(test.get("plotly_chart")) == 2
    page = text(test)
    for condition, figure in (("random:0.25", 1), ("random:0.5", 2)):
        row = table.loc[condition]
        same = f"the same {plural(int(row['tokens']), 'token')} of {row['documents']} documents or blocks"
        assert f"Change from {number(row['base'])} nats" in page and same in page
        assert f"Figure {figure} of 2" in page


def test_a_run_without_ablations_names_the_command(
    runs: Path, show: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = show(runs, "matters", run="made")
    assert not test.exception
    assert "The model of this run is not on this machine" in text(test)
    assert "twell ablate MODEL" in text(test) and f"twell ablate {runs}" not in text(test)
    monkeypatch.setattr("twell.app.jobs.runner.model_of", lambda run: ("folder", None))
    assert f"twell ablate {runs / 'made'}" in text(show(runs, "matters", run="made"))
