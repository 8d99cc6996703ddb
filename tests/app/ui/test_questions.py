"""Questions on pages: the notebook's figures in the dashboard's style, for both themes."""

from __future__ import annotations

from types import ModuleType

import pandas as pd
import pytest

from twell.analysis import across_layers, by_source, reuse, token_identity
from twell.analysis.figures import plots
from twell.analysis.figures.plots import dressed
from twell.analysis.figures.style import BLUE
from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def sampled(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of which some firings are kept."""
    return made.make(tmp_path_factory.mktemp("sampled") / "run", sequences=40, fired=True)


@pytest.mark.parametrize(
    ("question", "plot"),
    [(reuse, plots.lags), (token_identity, plots.identity), (across_layers, plots.depth), (by_source, plots.origins)],
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


def test_one_source_alone_takes_the_first_colour(sampled: Run) -> None:
    table = by_source(sampled)
    one = table[table["source"] == table["source"].iloc[0]].assign(ratio=1.0, ratio_low=0.9, ratio_high=1.1)
    (trace,) = dressed(plots.origins(pd.DataFrame(one))).data
    assert trace.marker.color == trace.error_y.color == BLUE and trace.error_y.width == 0
