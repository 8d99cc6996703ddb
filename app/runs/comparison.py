"""The data of the Compare page: tables of several runs, and the choice of runs to compare. Cost: milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from twell import analysis
from twell.analysis.compare import of_one_text
from twell.workbench.run.store import Run

MOST = 24  # runs that are shown in one figure


def layers_of(runs: Sequence[Run]) -> pd.DataFrame:
    """by_layer of several runs, one below the other, the last first, with two columns more: run (0 for the last, 1 for
    the one before it, …), name."""
    frames = [analysis.by_layer(run).assign(run=place, name=run.name) for place, run in enumerate(reversed(runs))]
    return pd.concat(frames, ignore_index=True)


def same_text(run: Run, runs: list[Run]) -> list[Run]:
    """The runs over the text and vocabulary of this one that recorded a loss: those whose losses compare."""
    if not run.manifest.loss_tokens:
        return []
    alike = [other for other in runs if other.path != run.path and of_one_text([run, other])]
    return [other for other in alike if other.manifest.loss_tokens and other.manifest.status != "recording"][: MOST - 1]


def by_place(frame: pd.DataFrame) -> pd.DataFrame:
    """compare_positions as panels want it: `relative` is the ratio to the other run's mean, with its interval; position
    is the middle of the band."""
    band = frame["band"].to_numpy(float)
    middle = np.where(band < 8, band, (band**2 + (band + 1) ** 2) / 16)
    found = frame.assign(position=np.maximum(middle, 0.5), first=band == 0, relative=frame["ratio"])
    for name in ("low", "high"):
        found[name] = (frame["first"] + frame[name]) / frame["first"]
    found = found[np.isfinite(found["relative"]) & (frame["first"] > 0)]
    return found.rename(columns={"mean": "here"})
