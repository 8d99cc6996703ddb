"""Where whole words stand: as often as `by_word` counts them, and spelt out in the decoded text."""

from __future__ import annotations

import pandas as pd

from twell.analysis import by_word
from twell.analysis.tokens.word_places import first_places, places_of_word, starts_of_word
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
