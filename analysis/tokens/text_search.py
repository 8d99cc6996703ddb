"""Text search: where words stand in the text that a run read, whichever tokens they are cut into.

    places_of(run, "bark of an old tree")     its first places

Words are compared as ASCII lower case, with any white space between them, and never across two sequences.
Cost: 0.2 s a million tokens until enough places are found, part by part.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.tokens.text_around import sides
from twell.workbench.run.store import Run

WIDTH = 10  # tokens shown on each side


def places_of(run: Run, words: str, limit: int = 12, width: int = WIDTH) -> pd.DataFrame:
    """Return the first positions of the run at which words begin, in the order of its parts. Columns:

    sequence; position (of the token in which they begin); before, token, after (text, `width` tokens either side).
    No rows where the words do not occur or are blank. Missing where the run has no rows of single tokens.
    """
    run.parts("activity")  # raises Missing
    pattern = re.compile(rb"\s+".join(re.escape(word.encode()) for word in words.split()), re.IGNORECASE)
    places: list[tuple[int, int]] = []
    if pattern.pattern:
        spelling = _spelling(run)
        for rows in run.pieces("activity", ["sequence", "position", "token_id"]):
            places += _in_part(rows, spelling, pattern, limit - len(places))
            if len(places) >= limit:
                break
    frame = pd.DataFrame(places, columns=["sequence", "position"]).astype("int64")
    texts = sides(run, frame, width) if places else []
    return frame.assign(**{name: [text[n] for text in texts] for n, name in enumerate(("before", "token", "after"))})


def _spelling(run: Run) -> pa.Array:
    """Return the bytes of each token id, from 0 to one past the greatest of the vocabulary; empty for one it lacks."""
    vocabulary = run.vocab["bytes"]
    last = int(vocabulary.index.max()) if len(vocabulary) else 0
    known = vocabulary.reindex(range(last + 2))
    return pa.array([piece if isinstance(piece, bytes) else b"" for piece in known], pa.large_binary())


def _in_part(rows: pa.Table, spelling: pa.Array, pattern: re.Pattern[bytes], limit: int) -> list[tuple[int, int]]:
    """Return up to `limit` (sequence, position) of one part at which the pattern begins, in the order of the text."""
    sequence, position, token = (rows[name].to_numpy() for name in ("sequence", "position", "token_id"))
    order = np.lexsort((position, sequence))
    sequence, position, token = sequence[order], position[order], token[order]
    text, begins = _joined(token, spelling)
    places: list[tuple[int, int]] = []
    start = 0
    while len(places) < limit and (match := pattern.search(text, start)):
        first, last = np.searchsorted(begins, (match.start(), match.end() - 1), side="right") - 1
        start = match.end()
        if sequence[first] == sequence[last]:
            places.append((int(sequence[first]), int(position[first])))
        else:
            start = match.start() + 1
    return places


def _joined(token: NDArray, spelling: pa.Array) -> tuple[bytes, NDArray]:
    """Return the bytes of tokens one after the other, and where each begins among them."""
    known = np.where((token >= 0) & (token < len(spelling)), token, len(spelling) - 1)
    pieces = spelling.take(pa.array(known))
    _, offsets, content = pieces.buffers()
    if content is None:
        return b"", np.zeros(len(token), np.int64)
    ends = np.frombuffer(offsets, np.int64)[: len(token) + 1]
    return content.to_pybytes()[: int(ends[-1])], ends[:-1]
