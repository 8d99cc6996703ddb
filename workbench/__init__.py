"""Models, capture, training, timing, the run store, the command line. `open_run` is the way into a run."""

from twell.workbench.run.store import open_run

__all__ = ["open_run"]
