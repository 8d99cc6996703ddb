"""The queries of the Tokens pages, and the two ends of a ranking, which its figure draws. Cost: negligible."""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.app.ui.url_state import parameter

ENDS = ("most active", "least active")
MIN_COUNT = 20  # times that a token must occur to be ranked, unless the user chooses otherwise

RANKING = Query(analysis.by_token, {"min_count": MIN_COUNT, "rank": "z"})
ALL_TOKENS = Query(analysis.by_token, {"min_count": 1})
WORDS = Query(analysis.by_word, {"min_count": MIN_COUNT})
CLASSES = Query(analysis.token_classes)
DEFAULT_QUERIES = (RANKING, ALL_TOKENS, WORDS, CLASSES)


def both_ends(frame: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return the first and the last rows of a ranking, the very last one first among the last.

    Args:
        frame: a table in order of rank.
        count: how many rows of each end, at most. In a short ranking no row is returned twice.

    Returns:
        The rows, with one more column: end (one of ENDS).
    """
    count = min(count, -(-len(frame) // 2))
    first, last = frame.head(count), frame[count:].tail(count)[::-1]
    return pd.concat([rows.assign(end=end) for rows, end in zip((first, last), ENDS, strict=True)], ignore_index=True)


def ranked_by(frame: pd.DataFrame, rank: str) -> pd.DataFrame:
    """Return `analysis.by_token` with z and z_se replaced by the columns that it is ranked by: z or z_position."""
    return frame.assign(z=frame[rank], z_se=frame[f"{rank}_se"])


def address_filters() -> dict[str, str]:
    """Return the query parameters of the address that filter the list of tokens."""
    return {name: text for name in ("find", "least", "rank") if (text := parameter(name))}
