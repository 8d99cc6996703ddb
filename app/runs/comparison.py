"""The choice of runs that the Compare page compares."""

from __future__ import annotations

from twell.analysis.compare import of_one_text
from twell.workbench.run.store import Run

MAX_RUNS = 24  # in one figure


def same_text(run: Run, runs: list[Run]) -> list[Run]:
    """Return those of `runs` whose losses can be compared with this run's: the same text and vocabulary.

    The run itself, runs without a loss and runs that are being recorded are left out; at most MAX_RUNS - 1.
    """
    if not run.manifest.loss_tokens:
        return []
    candidates = [other for other in runs if other.path != run.path and of_one_text([run, other])]
    candidates = [other for other in candidates if other.manifest.loss_tokens and other.manifest.status != "recording"]
    return candidates[: MAX_RUNS - 1]
