"""Models, capture, training, timing, the run store and the command line. `open_run` opens a run, without torch."""

from twell.workbench.run.store import open_run

__all__ = ["open_run"]
