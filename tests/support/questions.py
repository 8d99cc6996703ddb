"""List the API's tables that summaries answer, and compare them between two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

import twell.analysis as analysis
from twell.workbench.run.store import Run

QUESTIONS: dict[str, Callable[[Run], Any]] = {
    "by_layer": analysis.by_layer,
    "flagged": lambda run: analysis.by_layer(run, flagged=True),
    "layer_histogram": analysis.layer_histogram,
    "by_position": analysis.by_position,
    "position_blocks": analysis.position_blocks,
    "position_fit": analysis.position_fit,
    "by_token": analysis.by_token,
    "tokens with flagged": lambda run: analysis.by_token(run, flagged=True),
    "token_classes": analysis.token_classes,
    "token_profile": lambda run: analysis.token_profile(run, 40),
    "by_neuron": analysis.by_neuron,
    "surprisal": analysis.surprisal,
    "surprisal_correlation": analysis.surprisal_correlation,
    "surprisal of the token": lambda run: analysis.surprisal(run, of="own"),
    "surprisal by class": lambda run: analysis.surprisal_correlation(run, by_class=True),
    "entropy_correlation": analysis.entropy_correlation,
    "speedup": analysis.speedup,
    "layer_gains": analysis.layer_gains,
    "gain_correlations": analysis.gain_correlations,
    "tile_audit": analysis.tile_audit,
    "peer_audit": analysis.peer_audit,
    "timings_by_batch": analysis.timings_by_batch,
}


def same(one: Run, other: Run) -> None:
    """Compare every table of two runs: counts exactly, the rest to the last digits."""
    for name, question in QUESTIONS.items():
        pd.testing.assert_frame_equal(question(one), question(other), rtol=1e-12, atol=1e-12, obj=name)


def degrees(groups: pd.Series) -> float:
    """Return Kish's effective number of groups, less one; groups: of each row."""
    size = groups.value_counts()
    return float(size.sum() ** 2 / (size**2).sum()) - 1


def changed(run: Run) -> dict[str, int]:
    """Return when each summary was last written."""
    return {path.name: path.stat().st_mtime_ns for path in run.summary_path("any").parent.iterdir()}
