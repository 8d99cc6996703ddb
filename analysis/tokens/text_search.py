"""Text search: where words stand in the text that a run read, whichever tokens they are cut into.

    places_of(run, "bark of an old tree")     its first places
    first_places(run, ("lens", "tree"))       the first place of each of many words
    beginnings(run)                           the first words of every passage

Words are compared as ASCII lower case, with any white space between them, and never across two sequences.
Cost: 0.2 s a million tokens until enough places are found, part by part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.memo import memoized
from twell.analysis.tokens.text_around import sides
from twell.workbench.run.store import Run

WIDTH = 10  # tokens shown on each side
LETTER = rb"[A-Za-z0-9\x80-\xff]"  # of which words are made, as in `summaries.z_scores`
SOUGHT = 1000  # places that are sought at least, so that those who ask for few share one search, and are told of more
FIRST = 12  # tokens of which the beginning of a passage is made


def places_of(run: Run, words: str, limit: int = 12, width: int = WIDTH, whole: bool = False) -> pd.DataFrame:
    """Return the first positions of the run at which words begin, in the order of its parts; of whole words alone, in
    capitals and small letters as given, if `whole`. Columns:

    sequence; position, last (of the tokens in which they begin and end); before, token, after (their text, and that of
    `width` tokens either side). `attrs["count"]`: how many places there are, counted up to SOUGHT. No rows where the
    words do not occur or are blank. Missing where the run has no rows of single tokens.
    """
    frame = starts_of(run, words, limit, whole)
    texts = sides(run, frame, width) if len(frame) else []
    return frame.assign(**{name: [text[n] for text in texts] for n, name in enumerate(("before", "token", "after"))})


def starts_of(run: Run, words: str, limit: int, whole: bool = False) -> pd.DataFrame:
    """Return what `places_of` does without the text: columns sequence, position, last."""
    found = _starts(run, words, max(limit, SOUGHT), whole)
    first = found.head(limit)
    first.attrs = {"count": len(found)}
    return first


@memoized
def _starts(run: Run, words: str, limit: int, whole: bool) -> pd.DataFrame:
    """Return what `starts_of` does, searching the text."""
    run.parts("activity")  # raises Missing
    spelled = rb"\s+".join(re.escape(word.encode()) for word in words.split())
    pattern = re.compile(_bounded(words, spelled)) if whole and spelled else re.compile(spelled, re.IGNORECASE)
    literal = words.split()[0].encode() if whole and spelled else b""
    places: list[tuple[int, int, int]] = []
    if pattern.pattern:
        spelling = _spelling(run)
        for rows in run.pieces("activity", ["sequence", "position", "token_id"]):
            places += _in_part(rows, spelling, pattern, limit - len(places), literal)
            if len(places) >= limit:
                break
    return pd.DataFrame(places, columns=["sequence", "position", "last"]).astype("int64")


def _bounded(words: str, spelled: bytes) -> bytes:
    """Return the pattern `spelled` of some words with no letter before and after them; a word such as 've, which begins
    with none, may follow one."""
    ends = words.strip().encode()
    before, after = (re.match(LETTER, end) is not None for end in (ends[:1], ends[-1:]))
    return rb"(?<!%b)" % LETTER * before + spelled + rb"(?!%b)" % LETTER * after


def first_places(run: Run, words: tuple[str, ...], width: int = WIDTH) -> pd.DataFrame:
    """Return the first place of each whole word, in the order of the words, without those that have none. Columns:
    word; sequence; position; before, token, after (text around the word, as `places_of` has it around a token)."""
    spelling, places = _spelling(run), dict[str, tuple[int, int]]()
    missing = {word.encode(): word for word in words}
    for rows in run.pieces("activity", ["sequence", "position", "token_id"]) if words else ():
        sequence, position, token = _in_order(rows)
        text, begins = _joined(token, spelling)
        for start, match in _first_matches(text, missing):
            first = int(np.searchsorted(begins, start, side="right")) - 1
            places[missing.pop(match)] = int(sequence[first]), int(position[first])
        if not missing:
            break
    frame = pd.DataFrame([(word, *places[word]) for word in words if word in places])
    frame = frame.set_axis(["word", "sequence", "position"], axis=1) if len(frame) else frame
    texts = sides(run, frame, width) if len(frame) else []
    around = [around_word(word, *text) for word, text in zip(frame.get("word", []), texts, strict=True)]
    return frame.assign(**{name: [text[n] for text in around] for n, name in enumerate(("before", "token", "after"))})


def _first_matches(text: bytes, words: Mapping[bytes, str]) -> list[tuple[int, bytes]]:
    """Return where each word begins first in a text, as (index, word); words of letters alone are found whole."""
    plain = {word for word in words if re.fullmatch(LETTER + b"+", word)}
    matches = [(at, word) for word in words if word not in plain and (at := text.find(word)) >= 0]
    for match in re.finditer(LETTER + b"+", text) if plain else ():
        if match[0] in plain:
            matches.append((match.start(), match[0]))
            plain.discard(match[0])
    return matches


def around_word(word: str, before: str, token: str, after: str) -> tuple[str, str, str]:
    """Return the text before, in and after a word that begins in a token."""
    left, middle, right = (token + after).partition(word)
    return (before + left, middle, right) if middle else (before, token, after)


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


def _in_part(
    rows: pa.Table, spelling: pa.Array, pattern: re.Pattern[bytes], limit: int, literal: bytes
) -> list[tuple[int, int, int]]:
    """Return up to `limit` (sequence, position, last) of one part where the pattern matches, in the order of the text.

    literal: with which every match begins; looking for it first takes a tenth of the time of the pattern alone
    """
    sequence, position, token = _in_order(rows)
    text, begins = _joined(token, spelling)
    places: list[tuple[int, int, int]] = []
    start = 0
    while len(places) < limit and (match := _next_match(pattern, text, start, literal)):
        first, last = np.searchsorted(begins, (match.start(), match.end() - 1), side="right") - 1
        start = match.end()
        if sequence[first] == sequence[last]:
            places.append((int(sequence[first]), int(position[first]), int(position[last])))
        else:
            start = match.start() + 1
    return places


def _next_match(pattern: re.Pattern[bytes], text: bytes, start: int, literal: bytes) -> re.Match[bytes] | None:
    """Return the first match from `start` on. literal: as in `_in_part`"""
    if not literal:
        return pattern.search(text, start)
    while (at := text.find(literal, start)) >= 0:
        if match := pattern.match(text, at):
            return match
        start = at + 1
    return None


def _in_order(rows: pa.Table) -> tuple[NDArray, NDArray, NDArray]:
    """Return sequence, position and token id of a part's rows, in the order of the text."""
    sequence, position, token = (rows[name].to_numpy() for name in ("sequence", "position", "token_id"))
    order = np.lexsort((position, sequence))
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
