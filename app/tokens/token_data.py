"""What the figure of a ranking draws: its two ends. Cost: nothing to speak of."""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.app.ui.url_state import parameter

ENDS = ("loudest", "quietest")
MIN_COUNT = 20  # times that a token must occur to be ranked, unless the user chooses otherwise

RANKING = Query(analysis.by_token, {"min_count": MIN_COUNT, "rank": "z"})
ALL_TOKENS = Query(analysis.by_token, {"min_count": 1})
WORDS = Query(analysis.by_word, {"min_count": MIN_COUNT})
CLASSES = Query(analysis.token_classes)
DEFAULT_QUERIES = (RANKING, ALL_TOKENS, WORDS, CLASSES)


def both_ends(frame: pd.DataFrame, each: int) -> pd.DataFrame:
    """The first rows of a ranking, and the last, the very last first; at most `each` of both, none twice. One column
    more: end (loudest, quietest)."""
    each = min(each, -(-len(frame) // 2))
    first, last = frame.head(each), frame[each:].tail(each)[::-1]
    return pd.concat([part.assign(end=end) for part, end in zip((first, last), ENDS, strict=True)], ignore_index=True)


def ranked_by(frame: pd.DataFrame, rank: str) -> pd.DataFrame:
    """A ranking of tokens with z and its error replaced by those that it goes by: z or z_position."""
    return frame.assign(z=frame[rank], z_se=frame[f"{rank}_se"])


def address_filters() -> dict[str, str]:
    """Return the query parameters of the address that filter the list of tokens."""
    return {name: text for name in ("find", "least", "rank") if (text := parameter(name))}
