"""Word places: where whole words stand in the text, cut where `by_word` cuts them, so that their counts agree.

    places_of_word(run, "lens")           its first places, at flagged tokens too, which `by_word` leaves out
    first_places(run, ("lens", "tree"))   the first place of each of many words

Cost: 0.05 s a million tokens until enough places are found, part by part: only words that begin like one that is
sought are spelt out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from twell.analysis.memo import memoized
from twell.analysis.summaries.z_scores import Spelling
from twell.analysis.tokens.text_search import SOUGHT, WIDTH, in_order, with_text
from twell.workbench.run.store import Run


@dataclass(frozen=True)
class _Words:
    """The words of one part that begin with a piece of one that is sought, in the order of the text.

    sequence, position, last [word]: of the tokens in which each begins and ends; begins, ends [word]: its bytes in
    `text`, without the white space around it.
    """

    sequence: NDArray
    position: NDArray
    last: NDArray
    begins: NDArray
    ends: NDArray
    text: NDArray

    @classmethod
    def of(cls, rows: pa.Table, spelling: Spelling, sought: Iterable[bytes]) -> _Words:
        """Cut the rows of a part into words, and keep those that may be among the ones sought."""
        sequence, position, token = in_order(rows)
        token, size = spelling.known(token), len(spelling.begins)
        first = spelling.word_starts(sequence, token)
        past = np.append(first[1:], len(token))[: len(first)]
        kept = _beginnings(spelling, sought)[token[first]]
        first, past = first[kept], past[kept]
        ends = np.cumsum(past - first)  # of each word among the rows that are kept
        piece = token[np.repeat(past - ends, past - first) + np.arange(ends[-1] if len(ends) else 0)]
        lengths = pc.binary_length(spelling.pieces).to_numpy()
        as_it_is, without_left, without_right = lengths[:size], lengths[size : 2 * size], lengths[2 * size : 3 * size]
        end, last = np.cumsum(as_it_is[piece]), token[past - 1]
        text = b"".join(spelling.pieces.slice(0, size).take(pa.array(piece)).to_pylist())
        return cls(
            sequence[first],
            position[first],
            position[past - 1],
            end[ends - (past - first)] - without_left[token[first]],
            end[ends - 1] - as_it_is[last] + without_right[last],
            np.frombuffer(text, np.uint8),
        )

    def equal_to(self, word: bytes) -> NDArray:
        """Return the indices of the words that are spelt like this one."""
        index = np.flatnonzero(self.ends - self.begins == len(word)) if word else np.empty(0, np.int64)
        for at, byte in enumerate(word):
            index = index[self.text[self.begins[index] + at] == byte]
        return index


def places_of_word(run: Run, word: str, limit: int = 12, width: int = WIDTH) -> pd.DataFrame:
    """Return the first places of a whole word, in capitals and small letters as given; columns and `attrs` as
    `places_of` has them. Missing where the run has no rows of single tokens."""
    places = starts_of_word(run, word, limit)
    return with_text(run, places, width)


def starts_of_word(run: Run, word: str, limit: int) -> pd.DataFrame:
    """Return what `places_of_word` does without the text: columns sequence, position, last."""
    found = _starts(run, word, max(limit, SOUGHT))
    first = found.head(limit)
    first.attrs = {"count": len(found)}
    return first


@memoized
def _starts(run: Run, word: str, limit: int) -> pd.DataFrame:
    """Return what `starts_of_word` does, searching the text."""
    run.parts("activity")  # raises Missing
    spelling, found, count = _spelling(run), [pd.DataFrame([], columns=["sequence", "position", "last"])], 0
    for rows in run.pieces("activity", ["sequence", "position", "token_id"]):
        words = _Words.of(rows, spelling, [word.encode()])
        index = words.equal_to(word.encode())[: limit - count]
        columns = {"sequence": words.sequence, "position": words.position, "last": words.last}
        found.append(pd.DataFrame({name: each[index] for name, each in columns.items()}))
        count += len(index)
        if count >= limit:
            break
    return pd.concat(found, ignore_index=True).astype("int64")


def first_places(run: Run, words: tuple[str, ...], width: int = WIDTH) -> pd.DataFrame:
    """Return the first place of each whole word, in the order of the words, without those that have none. Columns:
    word; sequence; position; before, token, after (text around the word, as `places_of` has it around a token)."""
    spelling, places = _spelling(run), dict[str, tuple[int, int, int]]()
    for rows in run.pieces("activity", ["sequence", "position", "token_id"]) if words else ():
        missing = [word for word in words if word not in places]
        part = _Words.of(rows, spelling, (word.encode() for word in missing))
        for word in missing:
            if len(index := part.equal_to(word.encode())):
                at = index[0]
                places[word] = int(part.sequence[at]), int(part.position[at]), int(part.last[at])
        if len(places) == len(words):
            break
    found = [(word, *places[word]) for word in words if word in places]
    frame = with_text(run, pd.DataFrame(found, columns=["word", "sequence", "position", "last"]), width)
    texts = zip(frame["word"], frame["before"], frame["token"], frame["after"], strict=True)
    around = [around_word(*each) for each in texts]
    frame = frame.assign(**{name: [text[n] for text in around] for n, name in enumerate(("before", "token", "after"))})
    return frame.drop(columns="last")


def around_word(word: str, before: str, token: str, after: str) -> tuple[str, str, str]:
    """Return the text before, in and after a word that begins in a token."""
    left, middle, right = (token + after).partition(word)
    return (before + left, middle, right) if middle else (before, token, after)


def _beginnings(spelling: Spelling, words: Iterable[bytes]) -> NDArray:
    """Return whether one of these words can begin with each piece of the vocabulary, or be that piece."""
    prefixes = {word[:length] for word in words for length in range(1, len(word) + 1)}
    size = len(spelling.begins)
    without_space = spelling.pieces.slice(3 * size, size)
    return pc.is_in(without_space, pa.array([*prefixes], pa.binary())).to_numpy(zero_copy_only=False)


def _spelling(run: Run) -> Spelling:
    """Return the spelling of the run's vocabulary; ids whose bytes are not known have none."""
    known = run.vocab["bytes"]
    return Spelling.of(known.index.to_numpy(), [piece if isinstance(piece, bytes) else b"" for piece in known])
