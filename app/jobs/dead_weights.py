"""What the model's weights say of the neurons that never fired, where the model is on this machine.

Cost: the lengths of all gate and down rows, once a run: 20 ms for the bundled model. Of models past READABLE weights
nothing is read; the list of dead neurons on page Neurons reads them when it is asked for.
"""

from __future__ import annotations

from twell.analysis.neurons.top_tokens import dead_kinds
from twell.app.jobs.runner import weights_folder
from twell.app.ui.formatting import whole
from twell.app.ui.query import fetch
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SHORT = "weights under a quarter as long as those of neurons that fire"  # as `dead_kinds` has it


def why_dead(run: Run) -> str:
    """Return in a clause why the run's dead neurons are dead, with counts; "" where their weights do not tell."""
    folder = weights_folder(run)
    if not folder:
        return ""
    try:
        gone, kept = fetch(run, dead_kinds, folder=folder)
    except Missing:
        return ""
    return because(gone, kept)


def because(gone: int, kept: int) -> str:
    """Return in a clause how many dead neurons have hardly any weights left, and how many have; "" of none."""
    if not gone + kept:
        return ""
    if not kept:
        return f"all have {SHORT}"
    return f"{whole(gone)} have {SHORT}, {whole(kept)} have longer ones"
