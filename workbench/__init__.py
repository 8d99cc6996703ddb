"""Models, capture, training, timing, the run store and the command line. `open_run` opens a run, without torch.

The other names are imported when they are first used, as they need torch.
"""

from typing import TYPE_CHECKING

from twell.workbench.errors import import_for_use
from twell.workbench.run.store import open_run

if TYPE_CHECKING:
    from twell.workbench.ablations.from_objects import study
    from twell.workbench.ablations.prune import load_pruned, prune
    from twell.workbench.models.find_ffns import FFN
    from twell.workbench.models.replace import use_sparse_ffns
    from twell.workbench.watching.ablation import ablate, threshold
    from twell.workbench.watching.callback import TwellCallback
    from twell.workbench.watching.from_objects import capture
    from twell.workbench.watching.session import watch

__all__ = [
    "FFN",
    "TwellCallback",
    "ablate",
    "capture",
    "load_pruned",
    "open_run",
    "prune",
    "study",
    "threshold",
    "use_sparse_ffns",
    "watch",
]

_LAZY = {
    "FFN": "twell.workbench.models.find_ffns",
    "TwellCallback": "twell.workbench.watching.callback",
    "ablate": "twell.workbench.watching.ablation",
    "capture": "twell.workbench.watching.from_objects",
    "load_pruned": "twell.workbench.ablations.prune",
    "prune": "twell.workbench.ablations.prune",
    "study": "twell.workbench.ablations.from_objects",
    "threshold": "twell.workbench.watching.ablation",
    "use_sparse_ffns": "twell.workbench.models.replace",
    "watch": "twell.workbench.watching.session",
}


def __getattr__(name: str) -> object:
    """Import a name of `_LAZY` when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_for_use(_LAZY[name]), name)
