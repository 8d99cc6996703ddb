"""What the figure of a ranking draws: its two ends. Cost: nothing to speak of."""

from __future__ import annotations

import pandas as pd

ENDS = ("loudest", "quietest")


def both_ends(frame: pd.DataFrame, each: int) -> pd.DataFrame:
    """The first rows of a ranking, and the last, the very last first; at most `each` of both, none twice. One column
    more: end (loudest, quietest)."""
    each = min(each, -(-len(frame) // 2))
    first, last = frame.head(each), frame[each:].tail(each)[::-1]
    return pd.concat([part.assign(end=end) for part, end in zip((first, last), ENDS, strict=True)], ignore_index=True)


def ranked_by(frame: pd.DataFrame, rank: str) -> pd.DataFrame:
    """A ranking of tokens with z and its error replaced by those that it goes by: z or z_position."""
    return frame.assign(z=frame[rank], z_se=frame[f"{rank}_se"])
