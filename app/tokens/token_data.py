"""The queries of the Tokens pages and their first figure, and the filters in their addresses."""

from __future__ import annotations

import plotly.graph_objects as go

from twell import analysis
from twell.analysis.figures.tokens import END_ROWS, MIN_COUNT, as_ranked, both_ends, ranking
from twell.analysis.memo import built_once
from twell.app.ui.query import Query, QueryResult, query
from twell.app.ui.url_state import parameter
from twell.workbench.run.store import Run

RANKING = Query(analysis.by_token, {"min_count": MIN_COUNT, "rank": "shrunk", "spelled": True})
ALL_TOKENS = Query(analysis.by_token, {"min_count": 1, "spelled": True})
WORDS = Query(analysis.by_word, {"min_count": MIN_COUNT})
CLASSES = Query(analysis.token_classes)
IDENTITY = Query(analysis.token_identity)
COVARIATES = Query(analysis.token_covariates)
DEFAULT_QUERIES = (RANKING, ALL_TOKENS, WORDS, CLASSES, IDENTITY, COVARIATES)


def ends_of_words(words: QueryResult) -> go.Figure:
    """Return the figure of both ends of a ranking of words. words: rows of `analysis.by_word`, the most active first"""
    return built_once(ranking, as_ranked(words.then(both_ends, END_ROWS).frame))


def all_words(run: Run) -> go.Figure:
    """Return `ends_of_words` of the words that the page begins with."""
    return ends_of_words(query(run, WORDS))


DEFAULT_FIGURES = (all_words,)


def address_filters() -> dict[str, str]:
    """Return the query parameters of the address that filter the list of tokens."""
    return {name: text for name in ("view", "find", "least", "rank", "end") if (text := parameter(name))}
