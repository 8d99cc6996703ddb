"""Say why a run in which no token is counted has no statistics.

Statistics count tokens without a flag. Where a model's values overflow, or each text is a single token, every token has
a flag, and there is nothing to take a mean or a sparsity over. Cost: reading the column of flags.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twell.workbench.errors import Missing
from twell.workbench.run.schema import FLAG_NOT_FINITE
from twell.workbench.run.store import Run


def no_counted_token(run: Run, takes_flagged: bool = False) -> Missing:
    """Return the error for a run whose tokens all have a flag: one sentence with the flags and what to do.

    takes_flagged: whether the caller's `flagged` shows such tokens
    """
    nonfinite = _count(run, lambda flags: flags & FLAG_NOT_FINITE != 0)
    if nonfinite:
        finite = run.manifest.tokens - nonfinite
        remainder = f", and the other {finite:,} are special or the first of their sequence" if finite else ""
        return Missing(
            f"{run.name} holds no unflagged token, and so no sparsity: at {nonfinite:,} of its "
            f"{run.manifest.tokens:,} tokens an FFN had values that are not finite (NaN or infinity) in "
            f"{run.manifest.dtype}{remainder}; check the model's weights, or use a dtype with a wider range."
        )
    return Missing(
        f"{run.name} holds no unflagged token, and so no sparsity: each of its {run.manifest.tokens:,} tokens is "
        f"special or the first of its sequence; {'ask for flagged=True to see those it holds, or ' * takes_flagged}"
        "capture longer texts, in longer sequences."
    )


def nonfinite_note(run: Run) -> str:
    """Return a sentence that says how many tokens are left out because of values that are not finite; "" if none are,
    or if all are (`no_counted_token`)."""
    nonfinite, tokens = _count(run, lambda flags: flags & FLAG_NOT_FINITE != 0), run.manifest.tokens
    if not 0 < nonfinite < tokens:
        return ""
    return (
        f"{nonfinite:,} of its {tokens:,} tokens are left out of every statistic: an FFN had values there that are not "
        f"finite (NaN or infinity) in {run.manifest.dtype}."
    )


def counts_no_token(run: Run) -> bool:
    """Return whether every token of a run is known to have a flag; False for a run without rows of single tokens."""
    return run.has("activity") and _count(run, lambda flags: flags == 0) == 0


def is_nowhere_finite(run: Run) -> bool:
    """Return whether some FFN had non-finite values at every token; False for a run without rows of single tokens."""
    tokens = run.manifest.tokens
    return tokens > 0 and _count(run, lambda flags: flags & FLAG_NOT_FINITE != 0) == tokens


def _count(run: Run, condition: Callable[[np.ndarray], np.ndarray]) -> int:
    """Return how many tokens have flags that meet a condition; 0 for a run without rows of single tokens.

    condition: a function from flags [token] to a mask [token]
    """
    if not run.has("activity"):
        return 0
    return sum(int(condition(piece["flags"].to_numpy()).sum()) for piece in run.pieces("activity", ["flags"]))
