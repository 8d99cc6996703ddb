"""The queries of the Layers page, and its first figures."""

from __future__ import annotations

import plotly.graph_objects as go

from twell import analysis
from twell.analysis.figures.layers import nnz_bins, ridges, surprisal_bins, surprisal_panels
from twell.analysis.memo import built_once
from twell.app.ui.query import Query, query
from twell.workbench.run.store import Run

LOSSES = ("next", "own")  # the loss of the next token, as predicted at a token, or of the token itself


BY_LAYER = Query(analysis.by_layer)
NNZ_BINS = Query(nnz_bins)
SURPRISAL = Query(surprisal_bins, {"of": LOSSES[0]})
CORRELATION = Query(analysis.surprisal_correlation, {"of": LOSSES[0]})
DEFAULT_QUERIES = (BY_LAYER, NNZ_BINS, *(one.where(of=loss) for loss in LOSSES for one in (SURPRISAL, CORRELATION)))


def distributions(run: Run) -> go.Figure:
    """Return the figure of each layer's distribution of nnz."""
    return built_once(ridges, query(run, NNZ_BINS).frame, query(run, BY_LAYER).frame)


def by_surprisal(run: Run, of: str = LOSSES[0]) -> go.Figure:
    """Return the figure of nnz against the loss. of: whose, one of LOSSES"""
    correlation = query(run, CORRELATION.where(of=of)).frame
    return built_once(surprisal_panels, query(run, SURPRISAL.where(of=of)).frame, correlation)


DEFAULT_FIGURES = (distributions, by_surprisal)
