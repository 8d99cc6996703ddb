"""Positions of sequences that branch off one another, thousands of times: beams, and drafts that are cut away."""

from __future__ import annotations

from itertools import count

import numpy as np

from twell.workbench.watching.reads import Group, _Tokens


def test_positions_count_the_context_that_each_token_had() -> None:
    """Compared with contexts that are written out; padding is a column without a token."""
    random, fresh = np.random.default_rng(0), count(3)
    group = Group(np.arange(3, dtype=np.int32), np.arange(3), column=2)
    contexts = [[0, 1] for _ in group.numbers]  # of each row, the columns that hold a token
    read: list[tuple[int, int, int]] = []  # number, column, position
    for _ in range(3000):
        for row, number in enumerate(group.numbers.tolist()):
            if random.random() < 0.9:
                read.append((number, group.columns, len(contexts[row])))
                contexts[row].append(group.columns)
        group.columns += 1
        kind = random.integers(4)
        if kind < 2:
            index = random.integers(0, 3, 3).tolist()
            group.reorder(index, fresh)
            contexts = [list(contexts[row]) for row in index]
        elif kind == 2:
            column = max(2, group.columns - int(random.integers(1, 9)))
            group.cut(column, fresh)
            contexts = [[one for one in context if one < column] for context in contexts]
    sequence, column, position = np.array(sorted(read)).T
    nothing = np.zeros(len(sequence), dtype=np.uint8)
    tokens = _Tokens(sequence.astype(np.int32), column, nothing, nothing, np.arange(len(sequence)))
    np.testing.assert_array_equal(group._positions(tokens), position)
    assert len(group.branches) > 3000
