"""Where whole words stand: as often as `by_word` counts them, and spelt out in the decoded text."""

from __future__ import annotations

import pandas as pd

from twell.analysis import by_word
from twell.analysis.tokens.word_places import _spelling, _Words, first_places, places_of_word, starts_of_word
from twell.workbench.run.store import Run

ALL = 10**6


def unflagged_places(run: Run, rows: pd.DataFrame, word: str) -> int:
    """Return the number of a word's places none of whose tokens is flagged."""
    flags = rows.set_index(["sequence", "position"])["flags"]
    places = starts_of_word(run, word, ALL).itertuples()
    return sum(all(flags[place.sequence, at] == 0 for at in range(place.position, place.last + 1)) for place in places)


def test_a_word_stands_where_it_is_counted(run: Run, rows: pd.DataFrame) -> None:
    """Its page said `Count 20` beside `21 places`, and the t of can't was a place of the word t."""
    words = by_word(run, min_count=1)
    words = pd.concat([words.nlargest(20, "count"), words.nsmallest(10, "count"), words.nlargest(5, "pieces")])
    assert {word: unflagged_places(run, rows, word) for word in words["word"]} == dict(
        zip(words["word"], words["count"], strict=True)
    )
    assert sum(len(starts_of_word(run, word, ALL)) for word in words["word"]) > words["count"].sum(), "flagged ones too"


def test_a_place_is_the_tokens_of_the_word(run: Run, rows: pd.DataFrame) -> None:
    ids = rows.set_index(["sequence", "position"])["token_id"]
    words = by_word(run, min_count=1).nlargest(8, "pieces")["word"].tolist()
    for word in words:
        places = places_of_word(run, word, limit=2)
        for place in places.itertuples():
            tokens = [ids[place.sequence, at] for at in range(place.position, place.last + 1)]
            assert run.decode(tokens).strip() == word == place.token.strip()
        assert places.attrs["count"] == len(starts_of_word(run, word, ALL))
    first = first_places(run, (*words, "no such word"))
    assert first["word"].tolist() == words and first["token"].tolist() == words
    for place in first.itertuples():
        expected = starts_of_word(run, place.word, 1).iloc[0]
        assert (place.sequence, place.position) == (expected["sequence"], expected["position"])
    assert starts_of_word(run, "", 5).empty


def test_only_words_that_begin_like_one_that_is_sought_are_spelt_out(run: Run) -> None:
    """All of them were, part by part, up to the last one for a word that is nowhere."""
    rows, spelling = run.arrow("activity", ["sequence", "position", "token_id"]), _spelling(run)
    for word in by_word(run, min_count=1).nlargest(5, "pieces")["word"]:
        kept = _Words.of(rows, spelling, [word.encode()])
        spelt = {kept.text[begin:end].tobytes() for begin, end in zip(kept.begins, kept.ends, strict=True)}
        assert word.encode() in spelt
        assert {text[:1] for text in spelt} == {word.encode()[:1]}
        assert len(kept.begins) < rows.num_rows / 5
    assert not len(_Words.of(rows, spelling, [b"\xef\xbf\xbd"]).begins)
