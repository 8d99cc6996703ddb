"""Find the tokens of a run whose context was not read before, by comparing tuples of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np


def first_in_context(run: Any) -> dict[int, np.ndarray]:
    """Return by sequence whether each token and the seven before it are new in the text: bool [tokens]."""
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
