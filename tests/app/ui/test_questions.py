"""Questions on pages: the notebook's figures in the dashboard's style, for both themes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from support.page_elements import markup

from twell.analysis import (
    across_layers,
    by_layer,
    by_source,
    entropy_correlation,
    first_positions,
    reuse,
    surprisal_within,
    tile_audit,
    token_identity,
)
from twell.analysis.figures import plots
from twell.analysis.figures.labels import fixed
from twell.analysis.figures.neurons import density_bins, density_map
from twell.analysis.figures.plots import dressed
from twell.analysis.figures.speed.kernels import audit_map
from twell.analysis.figures.style import BLUE
from twell.analysis.figures.table_plots.base import FEW
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def sampled(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of which some firings are kept."""
    return made.make(tmp_path_factory.mktemp("sampled") / "run", sequences=40, fired=True)


@pytest.mark.parametrize(
    ("question", "plot"),
    [
        (reuse, plots.lags),
        (token_identity, plots.identity),
        (across_layers, plots.depth),
        (first_positions, plots.starts),
    ],
)
def test_figures_have_no_background_and_every_name(sampled: Run, question, plot) -> None:
    """What is drawn stays; the page shows through, and several traces are told apart by a name and a colour each."""
    table = question(sampled)
    plain, figure = plot(table), dressed(plot(table))
    assert [trace.type for trace in figure.data] == [trace.type for trace in plain.data]
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.template.layout.paper_bgcolor is None
    named = [trace for trace in figure.data if trace.name and trace.showlegend is not False]
    assert bool(figure.layout.showlegend) == (len(named) > 1)
    if figure.data[0].type != "heatmap":
        colors = {trace.marker.color for trace in named}
        assert None not in colors and len(colors) == len(named)


@pytest.mark.parametrize("plot", [plots.lags, plots.cache, plots.clusters, plots.lorenz, plots.dead])
def test_no_two_layers_share_a_color(plot) -> None:
    layers, values = np.arange(28), np.linspace(0.1, 0.9, 28)
    columns = ("neurons", "firings", "sequences", "dead_share", "lag", "shared", "served", "window", "phi")
    table = pd.DataFrame({"layer": layers, **dict.fromkeys(columns, values)})
    for figure in (plot(table), dressed(plot(table))):
        named = [trace.line.color for trace in figure.data if trace.name]
        assert len(named) == len(set(named)) == 28
        assert named[0] == "rgb(55, 94, 255)" and named[-1] == "rgb(224, 0, 0)", "in the order of depth"


def test_cells_between_few_layers_say_their_correlation(sampled: Run) -> None:
    table = across_layers(sampled)
    (cells,) = dressed(plots.depth(table)).data
    layer, other, said = table["layer"].iloc[0], table["other"].iloc[0], fixed(table["spearman"].iloc[0])
    assert cells.text[layer][other] == cells.text[other][layer] == said
    assert cells.text[0][0] == "" and cells.texttemplate == "%{text}" and not cells.showscale
    (many,) = dressed(plots.depth(table.assign(other=table["other"] + FEW))).data
    assert many.text is None and many.showscale is not False, "whose cells have no room"


def test_one_source_alone_takes_the_first_colour(sampled: Run) -> None:
    table = by_source(sampled)
    one = table[table["source"] == table["source"].iloc[0]].assign(ratio=1.0, ratio_low=0.9, ratio_high=1.1)
    (trace,) = dressed(plots.origins(pd.DataFrame(one))).data
    assert trace.marker.color == trace.error_y.color == BLUE and trace.error_y.width == 0
    with pytest.raises(Missing, match="none to compare it with"):
        plots.origins(table)
    none = pd.concat([table, table.assign(source="another")]).assign(mean=0.0)
    with pytest.raises(Missing, match="No neuron fires on any source"):
        plots.origins(none)


def test_dots_of_one_layer_stand_beside_each_other(sampled: Run) -> None:
    table = first_positions(sampled)
    figure = plots.starts(table)
    places = [place for trace in figure.data for place in trace.x]
    assert len(figure.data) > 1 and len(set(places)) == len(places)
    for trace in figure.data:
        assert np.abs(np.asarray(trace.x) - np.asarray(trace.customdata)).max() < 0.5, "nearest to its own layer"


@pytest.mark.parametrize(
    ("question", "plot"),
    [
        (by_layer, plots.layers),
        (surprisal_within, plots.within),
        (entropy_correlation, plots.expected),
        (first_positions, plots.starts),
        (token_identity, plots.identity),
        (across_layers, plots.depth),
    ],
)
def test_no_half_of_a_layer_has_a_number(sampled: Run, question, plot) -> None:
    table = question(sampled)
    for drawn in (plot(table), dressed(plot(table))):
        axes = [axis for axis in (drawn.layout.xaxis, drawn.layout.yaxis) if axis.title.text == "layer"]
        assert axes and all(axis.dtick == 1 for axis in axes)


@pytest.mark.parametrize(
    ("question", "plot"),
    [(by_layer, plots.layers), (surprisal_within, plots.within), (first_positions, plots.starts)],
)
def test_one_layer_has_no_numbers_beside_it(sampled: Run, question, plot) -> None:
    """Around a single dot plotly draws an axis from -1 to 1, where there are no layers."""
    table = question(sampled)
    axis = dressed(plot(table[table["layer"] == 0])).layout.xaxis
    assert axis.range == (-0.5, 0.5)
    assert all(abs(x) < 0.5 for trace in dressed(plot(table[table["layer"] == 0])).data for x in trace.x)


def test_what_has_no_value_has_no_name_in_the_legend(sampled: Run) -> None:
    """Where the entropies of a text are all of one class, only the loss has a correlation."""
    table = entropy_correlation(sampled)
    lone = table.assign(spearman=table["spearman"].where(table["of"] == "loss"))
    assert [trace.name for trace in plots.expected(lone).data] == ["loss"]


def test_maps_of_many_layers_say_what_their_shades_are(sampled: Run) -> None:
    """Where cells have no room for text, a bar has ticks at the shades of the shares that it names."""
    few, audit = density_bins(sampled), tile_audit(sampled)
    many = pd.concat([few.assign(layer=few["layer"] + 4 * n) for n in range(7)], ignore_index=True)
    more = pd.concat([audit.assign(layer=audit["layer"] + 4 * n) for n in range(7)], ignore_index=True)
    tile = more[more["tile"] == more["tile"].max()]
    for labelled, figure in (
        (True, density_map(few)),
        (False, density_map(many)),
        (True, audit_map(tile[tile["layer"] < 4])),
        (False, audit_map(tile)),
    ):
        heat = figure.data[0]
        assert (heat.texttemplate is not None) == labelled != bool(heat.showscale)
        if not labelled:
            shares = [float(text.split()[0]) / 100 for text in heat.colorbar.ticktext]
            np.testing.assert_allclose(np.square(heat.colorbar.tickvals), shares, rtol=1e-6)
            places = heat.colorbar.len * (np.asarray(heat.colorbar.tickvals) - heat.zmin) / (heat.zmax - heat.zmin)
            assert (np.diff(places) > 25).all(), "pixels: ticks that met would be turned"
            assert heat.zmin < heat.colorbar.tickvals[0] and heat.colorbar.tickvals[-1] < heat.zmax


def test_figures_without_data_are_named_in_one_line(show, runs) -> None:
    """No heading stands over nothing, and a visitor of a run that keeps sums alone is not told to mend it."""
    line = "Left out, as this summary of a run does not keep what they need: "
    for page, title in (
        ("layers", "layers that are busy on the same tokens"),
        ("neurons", "neurons that fire together"),
    ):
        shown = markup(show(runs, page, run="summary"))
        assert shown.count(line) == 1 and title in shown and title.capitalize() not in shown
        assert "holds no" not in shown
    shown = markup(show(runs, "positions", run="oracle"))
    assert (
        "Left out: firings in common with earlier tokens; what a cache of neurons would serve. oracle holds no" in shown
    )
    assert "Left out" not in markup(show(runs, "neurons", run="made"))
