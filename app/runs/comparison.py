"""The data of the Compare page: tables of several runs, and the choice of runs to compare. Cost: milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from twell import analysis
from twell.analysis.compare import of_one_text
from twell.workbench.run.store import Run

MAX_RUNS = 24  # in one figure


def layers_of(runs: Sequence[Run]) -> pd.DataFrame:
    """Return `analysis.by_layer` of several runs, the last run first.

    Two more columns: run (0 for the last run, 1 for the one before it, …); name (the run's).
    """
    frames = [analysis.by_layer(run).assign(run=index, name=run.name) for index, run in enumerate(reversed(runs))]
    return pd.concat(frames, ignore_index=True)


def same_text(run: Run, runs: list[Run]) -> list[Run]:
    """Return those of `runs` whose losses can be compared with this run's: the same text and vocabulary.

    The run itself, runs without a loss and runs that are being recorded are left out; at most MAX_RUNS - 1.
    """
    if not run.manifest.loss_tokens:
        return []
    candidates = [other for other in runs if other.path != run.path and of_one_text([run, other])]
    candidates = [other for other in candidates if other.manifest.loss_tokens and other.manifest.status != "recording"]
    return candidates[: MAX_RUNS - 1]


def position_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `analysis.compare_positions` as `small_multiples` draws it: the ratio of the runs by position.

    Args:
        frame: the rows of `analysis.compare_positions`; positions come in bands.

    Returns:
        The rows with a finite ratio, and more columns: position (the middle of the band); relative, low, high (the
        ratio with its interval); first (whether the band is position 0, in place of the first run's mean). `mean` is
        named mean_nnz.
    """
    band = frame["band"].to_numpy(float)
    middle = np.where(band < 8, band, (band**2 + (band + 1) ** 2) / 16)
    ratios = frame.assign(position=np.maximum(middle, 0.5), first=band == 0, relative=frame["ratio"])
    for name in ("low", "high"):
        ratios[name] = (frame["first"] + frame[name]) / frame["first"]
    ratios = ratios[np.isfinite(ratios["relative"]) & (frame["first"] > 0)]
    return ratios.rename(columns={"mean": "mean_nnz"})
