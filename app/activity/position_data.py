"""The queries of the Positions page."""

from __future__ import annotations

from twell import analysis
from twell.analysis.figures.positions import position_bins
from twell.app.ui.query import Query

POSITION_BINS = Query(position_bins)
FITS = Query(analysis.position_fit)
DEFAULT_QUERIES = (POSITION_BINS, FITS)
