"""Intervals in figures of tokens are those that the tables' errors and degrees of freedom give."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis import by_token, by_word, surprisal, token_profile
from twell.analysis.figures import plots
from twell.analysis.figures.layers import surprisal_bins
from twell.analysis.figures.tokens import as_ranked, both_ends, profile, ranked_by, ranking
from twell.workbench.run.store import Run

RARE = 5  # occurrences: so few documents that Student's t is far from the normal distribution


def reach(degrees: pd.Series, error: pd.Series) -> np.ndarray:
    """Half of a 95 % interval."""
    return (stats.t.ppf(0.975, degrees) * error).to_numpy()


@pytest.mark.parametrize("rank", ["shrunk", "z", "z_position", "mean"])
def test_rankings_of_tokens(run: Run, rank: str) -> None:
    ends = both_ends(ranked_by(by_token(run, min_count=RARE), rank), 8)
    degrees = {"mean": ends["effective"] - 1, "shrunk": pd.Series(np.inf, ends.index)}.get(rank, ends["degrees"])
    drawn = np.concatenate([trace.error_x.array for trace in ranking(ends).data])
    np.testing.assert_allclose(drawn, reach(degrees, ends[f"{rank}_se"]), rtol=1e-9)


def test_rankings_of_words(run: Run) -> None:
    ends = both_ends(by_word(run, min_count=RARE), 8)
    drawn = np.concatenate([trace.error_x.array for trace in ranking(as_ranked(ends)).data])
    np.testing.assert_allclose(drawn, reach(ends["degrees"], ends["z_se"]), rtol=1e-9)


def test_profile(run: Run) -> None:
    rarest = by_token(run, min_count=RARE).sort_values("effective")["token_id"].iloc[0]
    table = token_profile(run, int(rarest))
    (trace,) = profile(table).data
    np.testing.assert_allclose(trace.error_y.array, reach(table["effective"] - 1, table["z_se"]), rtol=1e-9)


def test_bins_of_loss(run: Run) -> None:
    bins, table = surprisal_bins(run), surprisal(run)
    assert len(bins) == len(table)
    for end in ("low", "high"):
        np.testing.assert_allclose(bins[end] * bins["layer_mean"], table[end], rtol=1e-9)


def test_the_title_below_classes_fits_a_phone(run: Run) -> None:
    layout = plots.token_class_dots(run).layout
    lines, room = layout.xaxis.title.text.split("<br>"), layout.margin
    assert 6 * max(map(len, lines)) < 345 - room.l - room.r
