"""The options of a study of a small run."""

from __future__ import annotations

from typing import Any

from twell.workbench.ablations.options import AblateOptions
from twell.workbench.run.store import Run


def options(run: Run, *conditions: str, **given: Any) -> AblateOptions:
    """Return the options of `twell ablate` on a run's own text, on the CPU."""
    return AblateOptions(
        target=str(run.path), condition=conditions, batch_tokens=64, tokens=10**6, device="cpu", **given
    )
