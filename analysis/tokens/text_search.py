"""Text search: where words stand in the text that a run read, whichever tokens they are cut into.

    places_of(run, "bark of an old tree")     its first places
    beginnings(run)                           the first words of every passage

`word_places` finds whole words.

Words are compared as ASCII lower case, with any white space between them, and never across two sequences.
Cost: 0.2 s a million tokens until enough places are found, part by part.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.memo import memoized
from twell.analysis.summaries.part_rows import text_order
from twell.analysis.tokens.text_around import sides
from twell.workbench.run.store import Run

WIDTH = 10  # tokens shown on each side
SOUGHT = 1000  # places that are sought at least, so that those who ask for few share one search, and are told of more
FIRST = 12  # tokens of which the beginning of a passage is made


def places_of(run: Run, words: str, limit: int = 12, width: int = WIDTH) -> pd.DataFrame:
    """Return the first positions of the run at which words begin, in the order of its parts. Columns:

    sequence; position, last (of the tokens in which they begin and end); before, token, after (their text, and that of
    `width` tokens either side). `attrs["count"]`: how many places there are, counted up to SOUGHT. No rows where the
    words do not occur or are blank. Missing where the run has no rows of single tokens.
    """
    frame = _starts(run, words, max(limit, SOUGHT))
    first = with_text(run, frame.head(limit), width)
    first.attrs = {"count": len(frame)}
    return first


def with_text(run: Run, places: pd.DataFrame, width: int) -> pd.DataFrame:
    """Return places (sequence, position, last) with columns before, token, after: text, `width` tokens either side."""
    texts = sides(run, places, width) if len(places) else []
    return places.assign(**{name: [text[n] for text in texts] for n, name in enumerate(("before", "token", "after"))})


@memoized
def _starts(run: Run, words: str, limit: int) -> pd.DataFrame:
    """Return what `places_of` does without the text."""
    run.parts("activity")  # raises Missing
    pattern = re.compile(rb"\s+".join(re.escape(word.encode()) for word in words.split()), re.IGNORECASE)
    places: list[tuple[int, int, int]] = []
    if pattern.pattern:
        spelling = _spelling(run)
        for rows in run.pieces("activity", ["sequence", "position", "token_id"]):
            places += _in_part(rows, spelling, pattern, limit - len(places))
            if len(places) >= limit:
                break
    return pd.DataFrame(places, columns=["sequence", "position", "last"]).astype("int64")


def beginnings(run: Run) -> pd.DataFrame:
    """Return the sequences with their first words, in order. Columns: sequence, document, source, tokens, text."""
    rows = run.rows("activity", [("position", "<", FIRST)], ["sequence", "position", "token_id"]).to_pandas()
    ids = rows.sort_values(["sequence", "position"]).groupby("sequence")["token_id"].agg(list)
    frame = run.frame("sequences", ["sequence", "document", "source", "tokens"]).sort_values("sequence")
    frame["text"] = [" ".join(run.decode(ids.get(sequence, [])).split()) for sequence in frame["sequence"]]
    return frame.reset_index(drop=True)


def _spelling(run: Run) -> pa.Array:
    """Return the bytes of each token id, from 0 to one past the greatest of the vocabulary; empty for one it lacks."""
    vocabulary = run.vocab["bytes"]
    last = int(vocabulary.index.max()) if len(vocabulary) else 0
    known = vocabulary.reindex(range(last + 2))
    return pa.array([piece if isinstance(piece, bytes) else b"" for piece in known], pa.large_binary())


def _in_part(rows: pa.Table, spelling: pa.Array, pattern: re.Pattern[bytes], limit: int) -> list[tuple[int, int, int]]:
    """Return up to `limit` (sequence, position, last) of one part where the pattern matches, in order of the text."""
    sequence, position, token = in_order(rows)
    text, begins = _joined(token, spelling)
    places: list[tuple[int, int, int]] = []
    start = 0
    while len(places) < limit and (match := pattern.search(text, start)):
        first, last = np.searchsorted(begins, (match.start(), match.end() - 1), side="right") - 1
        start = match.end()
        if sequence[first] == sequence[last]:
            places.append((int(sequence[first]), int(position[first]), int(position[last])))
        else:
            start = match.start() + 1
    return places


def in_order(rows: pa.Table) -> tuple[NDArray, NDArray, NDArray]:
    """Return sequence, position and token id of a part's rows, in the order of the text."""
    sequence, position, token = (rows[name].to_numpy() for name in ("sequence", "position", "token_id"))
    order = text_order(sequence, position)
    return sequence[order], position[order], token[order]


def _joined(token: NDArray, spelling: pa.Array) -> tuple[bytes, NDArray]:
    """Return the bytes of tokens one after the other, and where each begins among them."""
    known = np.where((token >= 0) & (token < len(spelling)), token, len(spelling) - 1)
    pieces = spelling.take(pa.array(known))
    _, offsets, content = pieces.buffers()
    if content is None:
        return b"", np.zeros(len(token), np.int64)
    ends = np.frombuffer(offsets, np.int64)[: len(token) + 1]
    return content.to_pybytes()[: int(ends[-1])], ends[:-1]
