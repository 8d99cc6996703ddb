"""The queries of the Layers page."""

from __future__ import annotations

from twell import analysis
from twell.analysis.figures.layers import nnz_bins, surprisal_bins
from twell.app.ui.query import Query

LOSSES = ("next", "own")  # the loss of the next token, as predicted at a token, or of the token itself


NNZ_BINS = Query(nnz_bins)
SURPRISAL = Query(surprisal_bins, {"of": LOSSES[0]})
CORRELATION = Query(analysis.surprisal_correlation, {"of": LOSSES[0]})
DEFAULT_QUERIES = (NNZ_BINS, *(query.where(of=loss) for loss in LOSSES for query in (SURPRISAL, CORRELATION)))
