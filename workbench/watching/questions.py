"""Ask the analysis about a run that a watch has made: the one place here that reaches into another half of the house.

The analysis is imported when the first question is asked, so that a watch needs nothing that it needs.
"""

from __future__ import annotations

from typing import Any

from twell.workbench.errors import UserError
from twell.workbench.run.store import Run


def ask(question: str, run: Run, **options: Any) -> Any:
    """Return the answer of `twell.analysis` to a question about a run. question: by_layer, …"""
    try:
        from twell import analysis
    except ImportError as error:
        raise UserError(
            f"Expected the analysis for {question}, it cannot be imported ({error.name} is missing): pip install "
            "'twell-workbench[dashboard]'."
        ) from None
    return getattr(analysis, question)(run, **options)
