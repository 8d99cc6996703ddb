"""Text around: the tokens on both sides of given positions, read once for all of them.

    token_windows(run, positions, width)   token ids
    sides(run, positions, width)           the text before, at and after each position
    pieces(bytes_of_tokens)                the text that each token adds to a passage
    position_keys(rows)                    a number for each position, by which rows of two tables are matched

Cost: one pass over three columns of the sequences asked for, 0.1 s a million tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.tokens.token_text import SPELLED
from twell.workbench.run.store import Run

LONGEST_CHARACTER = 4  # bytes in UTF-8, and so the most tokens that one character is cut into


def position_keys(rows: pd.DataFrame | pa.Table) -> NDArray[np.int64]:
    """Return one number for each row's sequence and position, int64 [rows]: no two positions of a run share one, and
    neighbours in a sequence differ by 1."""
    sequence, position = (np.asarray(rows[name]).astype(np.int64) for name in ("sequence", "position"))
    return sequence * 2**32 + position  # positions are int32


@dataclass(frozen=True)
class TokenWindow:
    """The tokens around one position, or around several in a row, in text order.

    start: position of the first token in its sequence; ids [n]: token ids; center: index in `ids` of the position, the
    first of `size`.
    """

    start: int
    ids: NDArray
    center: int
    size: int = 1

    @property
    def token_id(self) -> int:
        """Return the id of the token at the position itself."""
        return int(self.ids[self.center])


def token_windows(run: Run, positions: pd.DataFrame, width: int) -> list[TokenWindow]:
    """Return the tokens around each row of `positions` (columns sequence, position), up to `width` on each side; with a
    column `last`, around those from `position` to that one.

    Missing where the run has no rows of single tokens.
    """
    from twell.analysis.engines.open import open_engine

    requested = sorted(set(positions["sequence"].tolist()))
    with open_engine() as engine:
        rows = engine.read(run.parts("activity"))
        rows = rows.filter(rows.sequence.isin(requested)).select("sequence", "position", "token_id")
        tokens = engine.arrow(rows).to_pandas().sort_values(["sequence", "position"])
    by_sequence = {
        sequence: (group["position"].to_numpy(), group["token_id"].to_numpy())
        for sequence, group in tokens.groupby("sequence")
    }
    windows = []
    lasts = positions.get("last", positions["position"])
    for sequence, position, last in zip(positions["sequence"], positions["position"], lasts, strict=True):
        in_sequence, ids = by_sequence[sequence]
        places = (position - width, position, last + 1, last + width + 1)
        first, center, past, end = np.searchsorted(in_sequence, places)
        start = int(in_sequence[first]) if first < len(in_sequence) else 0
        windows.append(TokenWindow(start, ids[first:end], int(center - first), int(past - center)))
    return windows


def sides(run: Run, positions: pd.DataFrame, width: int) -> list[tuple[str, str, str]]:
    """Return the text before, at and after each row of `positions`, which are as `token_windows` takes them, `width`
    tokens on each side."""
    return [split_text(run, window) for window in token_windows(run, positions, width)]


def split_text(run: Run, window: TokenWindow) -> tuple[str, str, str]:
    """Return the text of a window before, at and after its position, where part of a character is spelled."""
    before, token, after = np.split(window.ids, (window.center, window.center + window.size))
    return run.decode(before.tolist()), run.decode(token.tolist(), SPELLED), run.decode(after.tolist())


def pieces(bytes_of_tokens: Iterable[object]) -> list[str]:
    """Return the text that each token adds to a passage.

    bytes_of_tokens: the bytes of each token in order; anything else, as of an id that the vocabulary lacks, adds
    nothing. A character that several tokens make up belongs to the last of them, and the others add nothing.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(piece) if isinstance(piece, bytes) else "" for piece in bytes_of_tokens]
