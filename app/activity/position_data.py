"""The queries of the Positions page, and its first figure."""

from __future__ import annotations

import plotly.graph_objects as go

from twell import analysis
from twell.analysis.figures.positions import position_bins, position_panels
from twell.analysis.memo import built_once
from twell.app.ui.query import Query, query
from twell.workbench.run.store import Run

POSITION_BINS = Query(position_bins)
FITS = Query(analysis.position_fit)
DEFAULT_QUERIES = (POSITION_BINS, FITS)


def by_position(run: Run) -> go.Figure:
    """Return the figure of mean nnz by position."""
    return built_once(position_panels, query(run, POSITION_BINS).frame)


DEFAULT_FIGURES = (by_position,)
