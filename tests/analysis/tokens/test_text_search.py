"""Where words stand in the text, against the decoded sequences searched one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from twell.analysis.tokens import text_search
from twell.analysis.tokens.text_search import places_of
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.summary_only import copy_without_activity


def in_sequences(run: Run, rows: pd.DataFrame, words: str) -> list[tuple[int, int]]:
    """Return every place of `words`, without overlap: the token that holds the first byte of each."""
    places = []
    vocabulary = run.vocab["bytes"]
    for sequence, group in rows.sort_values(["sequence", "position"]).groupby("sequence"):
        pieces = vocabulary.reindex(group["token_id"]).tolist()
        text, start = b"".join(pieces).lower(), 0
        while (start := text.find(words.encode().lower(), start)) >= 0:
            length = 0
            for position, piece in zip(group["position"], pieces, strict=True):
                length += len(piece)
                if start < length:
                    places.append((int(sequence), int(position)))
                    break
            start += len(words)
    return places


def test_places_are_those_of_the_decoded_sequences(run: Run, rows: pd.DataFrame) -> None:
    first = run.decode(rows[rows["sequence"] == 0].sort_values("position")["token_id"].tolist())
    phrase = first[20:34].strip()  # begins and ends within tokens
    for words in ("formaldehyde", "FORMAL", phrase):
        expected = in_sequences(run, rows, words)
        table = places_of(run, words, limit=10_000)
        assert expected
        assert sorted(zip(table["sequence"], table["position"], strict=True)) == sorted(expected)
    first = places_of(run, "formaldehyde", limit=3)
    assert len(first) == 3 and first.attrs["count"] == len(in_sequences(run, rows, "formaldehyde"))


def test_no_more_places_are_looked_for_than_are_asked(
    run: Run, rows: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over parts too: as many as the first part holds and one of the second; no later part is read."""
    read, pieces = [], Run.pieces

    def noted(self: Run, table: str = "activity", columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for piece in pieces(self, table, columns):
            if table == "activity":
                read.append(set(piece["sequence"].to_pylist()))
            yield piece

    everywhere = in_sequences(run, rows, "formaldehyde")
    monkeypatch.setattr(text_search, "SOUGHT", 1)
    monkeypatch.setattr(Run, "pieces", noted)
    places_of(run, "formaldehyde", limit=1)
    assert len(read) == 1 < len(run.parts("activity"))
    in_first = sum(sequence in read[0] for sequence, _ in everywhere)
    table = places_of(run, "formaldehyde", limit=in_first + 1)
    assert len(table) == table.attrs["count"] == in_first + 1 < len(everywhere)


def test_a_place_is_all_the_tokens_that_hold_the_words(run: Run, rows: pd.DataFrame) -> None:
    ids = rows.set_index(["sequence", "position"])["token_id"]
    across = run.decode(rows[rows["sequence"] == 0].sort_values("position")["token_id"].tolist())[20:34].strip()
    for words in ("formaldehyde", "ormal", across):
        for place in places_of(run, words, width=2).itertuples():
            within = range(place.position, place.last + 1)
            assert place.token == run.decode([ids[place.sequence, at] for at in within])
            assert words.lower() in place.token.lower()
            inner = [ids[place.sequence, at] for at in within]
            assert all(words.lower() not in run.decode(part).lower() for part in (inner[1:], inner[:-1]) if part)
    assert places_of(run, across)["last"].gt(places_of(run, across)["position"]).all()


def test_words_do_not_run_from_one_sequence_into_the_next(run: Run, rows: pd.DataFrame) -> None:
    ends, begins = (
        run.decode(rows[rows["sequence"] == number].sort_values("position")["token_id"].tolist()) for number in (0, 1)
    )
    across = ends[-12:] + begins[:12]
    assert across.split()
    assert places_of(run, across).empty
    assert places_of(run, "  ").empty


def test_a_run_without_rows_says_so(run: Run, tmp_path: Path) -> None:
    copy_without_activity(run.path, tmp_path / "summary")
    summary = open_run(tmp_path / "summary")
    with pytest.raises(Missing):
        places_of(summary, "formaldehyde")
