"""How often a context comes again, against a count by brute force on tokens of a vocabulary of three. Cost: 0.1 s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from twell.analysis.tokens import same_context
from twell.analysis.tokens.same_context import times_again
from twell.analysis.tokens.text_around import TokenWindow
from twell.workbench.run.schema import SAME_CONTEXT


def naive(sequences: list[list[int]], sequence: int, position: int) -> int:
    """Return at how many other places the same tokens stand, counted one by one."""
    least = max(0, position + 1 - SAME_CONTEXT)
    wanted = sequences[sequence][least : position + 1]
    ends = [position] if least == 0 and position + 1 < SAME_CONTEXT else None
    return (
        sum(
            ids[end + 1 - len(wanted) : end + 1] == wanted
            for ids in sequences
            for end in (ends or range(len(ids)))
            if len(wanted) - 1 <= end < len(ids)
        )
        - 1
    )


def test_contexts_are_counted_within_sequences_alone(monkeypatch: Any) -> None:
    rng = np.random.default_rng(5)
    # Two letters and stretches that return, so that contexts of eight come again, also over two parts.
    stretch = rng.integers(0, 2, 30).tolist()
    sequences = [[*rng.integers(0, 2, size).tolist(), *stretch] for size in (1, 5, 9, 40, 40)] + [stretch[:4]]
    rows = [(s, p, token) for s, ids in enumerate(sequences) for p, token in enumerate(ids)]
    parts = [[row for row in rows if row[0] % 2 == part] for part in (0, 1)]
    for part in parts:
        rng.shuffle(part)
    tables = [
        pa.table(dict(zip(("sequence", "position", "token_id"), zip(*part, strict=True), strict=True)))
        for part in parts
    ]
    run: Any = SimpleNamespace(manifest=SimpleNamespace(tokens=len(rows)), pieces=lambda *_: iter(tables))
    places = [(s, p) for s, ids in enumerate(sequences) for p in range(len(ids))]
    windows = [TokenWindow(max(0, p - 9), np.array(sequences[s][max(0, p - 9) :]), min(p, 9)) for s, p in places]
    expected = [naive(sequences, s, p) for s, p in places]
    assert max(expected) > 3 and 0 in expected
    counted = times_again(run, windows)
    assert counted is not None and counted.tolist() == expected
    monkeypatch.setattr(same_context, "MOST", len(rows) - 1)
    assert times_again(run, windows) is None
