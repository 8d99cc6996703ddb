"""The queries of the Tokens pages, and the filters in their addresses."""

from __future__ import annotations

from twell import analysis
from twell.analysis.figures.tokens import MIN_COUNT
from twell.app.ui.query import Query
from twell.app.ui.url_state import parameter

RANKING = Query(analysis.by_token, {"min_count": MIN_COUNT, "rank": "shrunk"})
ALL_TOKENS = Query(analysis.by_token, {"min_count": 1})
WORDS = Query(analysis.by_word, {"min_count": MIN_COUNT})
CLASSES = Query(analysis.token_classes)
IDENTITY = Query(analysis.token_identity)
COVARIATES = Query(analysis.token_covariates)
DEFAULT_QUERIES = (RANKING, ALL_TOKENS, WORDS, CLASSES, IDENTITY, COVARIATES)


def address_filters() -> dict[str, str]:
    """Return the query parameters of the address that filter the list of tokens."""
    return {name: text for name in ("view", "find", "least", "rank", "end") if (text := parameter(name))}
