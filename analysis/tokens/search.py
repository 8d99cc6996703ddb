"""Search: where words stand in the text of a run, and how its passages begin.

    search(run, "lens")        positions at which the text contains these words
    beginnings(run)            the first words of every passage

A match may begin and end within a token, and lies in one sequence. Capitals of ASCII letters are not told apart. The
bytes of a part's tokens are joined and searched at once. Cost: 0.3 s a million tokens; `beginnings` reads two columns.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from twell.analysis.tokens.text_around import split_text, token_windows
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

AROUND = 10  # tokens shown on each side of a match
WORDS = 12  # tokens from which the name of a passage is made


def search(run: Run, words: str, limit: int = 20) -> pd.DataFrame:
    """Return where the run's text contains `words`, in text order, each sequence once. Columns:

    sequence; position (of the token in which the match begins); before, token, after (text around that token). attrs:
    sequences (with a match, in the parts read until `limit` were found); complete (whether all parts were read).
    Missing where the run has no rows of single tokens.
    """
    if not words.strip():
        raise UserError("Expected words to search for, got none.")
    pattern = re.compile(re.escape(words.encode()), re.IGNORECASE)
    vocabulary = _bytes_by_id(run)
    matches: dict[int, int] = {}
    complete = True
    for rows in run.pieces("activity", ["sequence", "position", "token_id"]):
        if len(matches) > limit:
            complete = False
            break
        frame = rows.to_pandas().sort_values(["sequence", "position"], kind="stable")
        for sequence, position in _matches(frame, vocabulary, pattern):
            matches.setdefault(sequence, position)
    first = sorted(matches.items())[:limit]
    frame = pd.DataFrame(first, columns=["sequence", "position"], dtype="int64")
    texts = [split_text(run, window) for window in token_windows(run, frame, AROUND)] if first else []
    for index, name in enumerate(("before", "token", "after")):
        frame[name] = [text[index] for text in texts]
    frame.attrs = {"sequences": len(matches), "complete": complete}
    return frame


def beginnings(run: Run) -> pd.DataFrame:
    """Return the passages with their first words, in order. Columns: sequence, document, source, tokens, text."""
    rows = run.rows("activity", [("position", "<", WORDS)], ["sequence", "position", "token_id"]).to_pandas()
    rows = rows.sort_values(["sequence", "position"], kind="stable")
    ids = rows.groupby("sequence")["token_id"].agg(list)
    frame = run.frame("sequences", ["sequence", "document", "source", "tokens"]).sort_values("sequence")
    frame["text"] = [" ".join(run.decode(ids.get(sequence, [])).split()) for sequence in frame["sequence"]]
    return frame.reset_index(drop=True)


def _bytes_by_id(run: Run) -> pa.Array:
    """Return the bytes of each token by id, empty for ids that the vocabulary lacks."""
    pieces = run.vocab["bytes"]
    table = pieces.reindex(range(int(pieces.index.max()) + 1))
    return pa.array([piece if isinstance(piece, bytes) else b"" for piece in table], pa.large_binary())


def _matches(frame: pd.DataFrame, vocabulary: pa.Array, pattern: re.Pattern[bytes]) -> list[tuple[int, int]]:
    """Return sequence and position of each match among the rows of one part, sorted by sequence and position."""
    ids = frame["token_id"].to_numpy()
    known = pa.array(np.where(ids < len(vocabulary), ids, 0))
    joined = pc.take(vocabulary, known)
    offsets = np.frombuffer(joined.buffers()[1], np.int64)[: len(joined) + 1]
    text = joined.buffers()[2]
    if text is None:
        return []
    sequences, positions = frame["sequence"].to_numpy(), frame["position"].to_numpy()
    result = []
    for match in pattern.finditer(memoryview(text)[: int(offsets[-1])]):
        first = int(np.searchsorted(offsets, match.start(), side="right")) - 1
        last = int(np.searchsorted(offsets, match.end(), side="left")) - 1
        if sequences[first] == sequences[last]:
            result.append((int(sequences[first]), int(positions[first])))
    return result
