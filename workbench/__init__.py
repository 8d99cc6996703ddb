"""Models, capture, training, timing, the run store and the command line. `open_run` opens a run, without torch.

`watch` is imported when it is first used, as it needs torch.
"""

from typing import TYPE_CHECKING

from twell.workbench.run.store import open_run

if TYPE_CHECKING:
    from twell.workbench.watching.session import watch

__all__ = ["open_run", "watch"]

_LAZY = {"watch": "twell.workbench.watching.session"}


def __getattr__(name: str) -> object:
    """Import a name of `_LAZY` when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
