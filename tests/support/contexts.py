"""Which tokens of a run's text are in a context that was not read before, by tuples of their ids."""

from __future__ import annotations

from typing import Any

import numpy as np


def first_in_context(run: Any) -> dict[int, np.ndarray]:
    """By sequence, whether the eight tokens up to each were not read before in the text."""
    seen: set[tuple[int, ...]] = set()
    fresh: dict[int, np.ndarray] = {}
    for sequence, rows in run.activity().groupby("sequence"):
        ids = rows["token_id"].tolist()
        marks = []
        for end in range(1, len(ids) + 1):
            context = tuple(ids[max(0, end - 8) : end])
            marks.append(context not in seen)
            seen.add(context)
        fresh[sequence] = np.array(marks)
    return fresh
