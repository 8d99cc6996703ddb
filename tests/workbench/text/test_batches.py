"""Which sequences run together, every one once, of like length, within a window of the text; and rows in its order."""

from __future__ import annotations

import numpy as np
import pytest

from twell.workbench.text import batches as module
from twell.workbench.text.batches import Batch, InOrder, batches
from twell.workbench.text.sequences import Sequence

TOKENS = 256


def sequences(count: int, seed: int = 3) -> list[Sequence]:
    """Make sequences as they are in text: many short ones, some of the full 100 tokens."""
    lengths = np.minimum(np.random.default_rng(seed).lognormal(3, 1, count).astype(int) + 1, 100)
    return [Sequence(n, "made", 0, np.full(length, n, dtype=np.int32)) for n, length in enumerate(lengths)]


def padding(made: list[Batch]) -> float:
    return 1 - sum(int(batch.lengths.sum()) for batch in made) / sum(batch.padded for batch in made)


def test_every_sequence_runs_once_and_windows_follow_the_text() -> None:
    given = sequences(400)
    made = list(batches(given, TOKENS, {5}))
    assert [batch.number for batch in made] == list(range(len(made)))
    seen = 0
    for window in range(made[-1].window + 1):
        held = [batch for batch in made if batch.window == window]
        assert [batch.ends for batch in held] == [False] * (len(held) - 1) + [True]
        numbers = np.concatenate([batch.numbers for batch in held])
        assert sorted(numbers) == list(range(seen, seen + len(numbers)))  # nothing of a later window comes before
        tokens = sum(int(batch.lengths.sum()) for batch in held)
        assert tokens <= (module.WINDOW if window else 1) * TOKENS  # work begins soon
        assert tokens > (module.WINDOW - 1) * TOKENS or window in (0, made[-1].window)  # and then there is a choice
        seen += len(numbers)
    assert seen == 400
    for batch in made:
        assert (np.diff(batch.numbers) > 0).all()
        assert batch.padded <= TOKENS
        assert [sequence.document for sequence in batch.sequences] == batch.numbers.tolist()
        np.testing.assert_array_equal(batch.token_id, batch.sequence)
        np.testing.assert_array_equal(batch.row_of % batch.longest, batch.position)
        np.testing.assert_array_equal(batch.numbers[batch.row_of // batch.longest], batch.sequence)


def test_sequences_of_like_length_leave_less_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = padding(list(batches(sequences(400), TOKENS, set())))
    monkeypatch.setattr(module.np, "argsort", lambda lengths, kind: np.arange(len(lengths)))  # as the text has them
    theirs = padding(list(batches(sequences(400), TOKENS, set())))
    assert ours < 0.15 < 0.4 < theirs


def test_a_sequence_longer_than_a_batch_runs_alone() -> None:
    given = [Sequence(0, "made", 0, np.zeros(length, dtype=np.int32)) for length in (10, 5000, 10)]
    made = list(batches(given, TOKENS, set()))
    assert [batch.lengths.tolist() for batch in made] == [[10], [5000], [10]]
    assert list(batches([], TOKENS, set())) == []


def test_tokens_to_be_generated_have_their_room() -> None:
    """Of 4 tokens and 28 more, 8 sequences fill a batch, and the first window is one batch."""
    given = [Sequence(n, "made", 0, np.full(4, n, dtype=np.int32)) for n in range(100)]
    made = list(batches(given, TOKENS, set(), further=28))
    assert [len(batch.sequences) for batch in made] == [8] * 12 + [4]
    assert [batch.window for batch in made[:6]] == [0, *[1] * module.WINDOW, 2]


def test_the_head_of_a_batch() -> None:
    given = [Sequence(0, "made", 0, np.zeros(length, dtype=np.int32)) for length in (10, 20, 30, 40)]
    (batch,) = batches(given, 1000, set())
    assert batch.head(1).lengths.tolist() == [10]
    assert batch.head(45).lengths.tolist() == [10, 20, 30]
    assert batch.head(10**6).numbers.tolist() == [0, 1, 2, 3]


def rows_of(batch: Batch) -> dict[str, np.ndarray]:
    return {"sequence": batch.sequence, "position": batch.position, "other": batch.sequence * 1000 + batch.position}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_go_on_in_the_order_of_the_text_as_soon_as_they_can(seed: int) -> None:
    given, came, went = sequences(400, seed), set[int](), list[int]()
    in_order, early = InOrder(), 0
    for batch in batches(given, TOKENS, set()):
        came |= set(batch.numbers.tolist())
        going = in_order.add(batch, rows_of(batch))
        if going is not None:
            assert len(going["sequence"])
            np.testing.assert_array_equal(going["other"], going["sequence"] * 1000 + going["position"])
            length = np.array([len(sequence.ids) for sequence in given])[np.unique(going["sequence"])]
            np.testing.assert_array_equal(going["position"], np.concatenate([np.arange(one) for one in length]))
            went += np.unique(going["sequence"]).tolist()
            early += not batch.ends
        missing = next(number for number in range(401) if number not in came)
        assert went == [*range(missing)]  # all that can have gone, and no more
    assert len(went) == 400 and early > 3


def test_rows_of_sequences_that_are_as_long_as_each_other_are_not_held() -> None:
    given = [Sequence(n, "made", 0, np.full(32, n, dtype=np.int32)) for n in range(100)]
    in_order = InOrder()
    for batch in batches(given, TOKENS, set()):
        rows = rows_of(batch)
        going = in_order.add(batch, rows)
        assert going is not None and all(np.array_equal(going[name], rows[name]) for name in rows)
