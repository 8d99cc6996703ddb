"""Same context: how often a stretch of tokens comes again in a run.

    times_again(run, windows)   of each window, how often the SAME_CONTEXT tokens up to its position stand elsewhere too

Of like contexts a capture keeps the first as an example (`workbench/text/repeats.py`): these are the others.
Cost: one pass over three columns, 0.1 s a million tokens; runs of more than MOST tokens are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twell.analysis.tokens.text_around import TokenWindow
from twell.workbench.run.schema import SAME_CONTEXT
from twell.workbench.run.store import Run

MOST = 4_000_000  # tokens of a run in which a page still answers at once


def times_again(run: Run, windows: Sequence[TokenWindow]) -> NDArray[np.float64] | None:
    """Return how often each window's last SAME_CONTEXT tokens, its position included, come at other positions of the
    run; of a position nearer to its sequence's beginning, how often another sequence begins alike. Shape [windows].

    None where the run is longer than MOST tokens. Missing where it has no rows of single tokens.
    """
    if run.manifest.tokens > MOST:
        return None
    contexts = [_context(window) for window in windows]
    last = np.array([context[-1] for context in contexts])
    times = np.zeros(len(contexts))
    for rows in run.pieces("activity", ["sequence", "position", "token_id"]):
        sequence, position, token = (rows[name].to_numpy() for name in ("sequence", "position", "token_id"))
        order = np.lexsort((position, sequence))
        position, token = position[order], token[order]
        for index, context in enumerate(contexts):
            times[index] += _matches(context, np.flatnonzero(token == last[index]), position, token)
    return times - 1  # without itself


def _context(window: TokenWindow) -> NDArray:
    """Return the ids of the last SAME_CONTEXT tokens up to a window's position, or of those since the beginning."""
    return window.ids[max(0, window.center + 1 - SAME_CONTEXT) : window.center + 1]


def _matches(context: NDArray, at: NDArray, position: NDArray, token: NDArray) -> int:
    """Return at how many of the rows `at` a context ends; position, token: of all rows, in the order of the text."""
    back = len(context) - 1
    at = at[position[at] >= back] if len(context) == SAME_CONTEXT else at[position[at] == back]
    for step in range(1, back + 1):
        at = at[token[at - step] == context[back - step]]
    return len(at)
