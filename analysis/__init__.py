"""Questions about a run, one a module; each function returns a DataFrame (or a dict) with documented columns.

    from twell.workbench import open_run
    from twell.analysis import by_layer
    by_layer(open_run("runs/demo"))

Each function leaves out flagged tokens unless `flagged=True`, states in `attrs` what it counted and left out, and
raises `Missing` with one sentence where the run lacks what it needs. The first question about a run builds its
summaries; a query engine is loaded only for that. About a run that is used without its damaged parts, each names what
it lacks: `attrs["left_out"]`, or the entry of that name in a dict.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from twell.workbench.errors import import_for_use

if TYPE_CHECKING:
    from twell.analysis.figures import plots as plots  # for editors; see __getattr__

with suppress(ModuleNotFoundError):  # where models run, the extra of analysis may lack: `twell check` needs none of it
    from twell.analysis.api import *  # noqa: F403
    from twell.analysis.api import __all__ as __all__


def __getattr__(name: str) -> object:
    """Import `plots` when it is first used, as it needs plotly; for other names, say what would install them."""
    if name == "plots":
        return import_for_use("twell.analysis.figures.plots")
    if not name.startswith("_"):
        import_for_use("twell.analysis.api")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what a notebook completes: the questions, and `plots`, which may not have been imported yet."""
    return [*globals().get("__all__", ()), "plots"]
