"""Compare two runs of the same text by the same model: rows in order, sums after adding up."""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.workbench.run.store import Run

ROWS = ("activity", "sequences", "vocab", "examples", "fired")
EXTREMES = {"value_max": "max", "token_min": "min", "token_max": "max", "first_sequence": "min"}
KEYS = ("layer", "neuron", "tile", "occupancy", "block", "neurons")
ORDER = ("kind", "layer", "neuron", "sequence", "position")


def added_up(run: Run, table: str) -> pd.DataFrame:
    """Return the sums of a table over all parts, by its keys."""
    frame = run.frame(table)
    keys = [name for name in KEYS if name in frame]
    return frame.groupby(keys).agg({name: EXTREMES.get(name, "sum") for name in frame.columns.drop(keys)})


def assert_same_tables(run: Run, other: Run, in_order: bool = True) -> None:
    """Compare every table of two runs.

    in_order: whether rows have to lie in the same order too
    """
    for table in ROWS:
        ours, theirs = (one.arrow(table) for one in (run, other))
        if not in_order and table != "vocab":
            names = [name for name in ORDER if name in ours.column_names and (name, table) != ("neuron", "fired")]
            ours, theirs = (rows.sort_by([(name, "ascending") for name in names]) for rows in (ours, theirs))
        for name in ours.column_names:
            one, two = (rows[name].combine_chunks() for rows in (ours, theirs))
            if name == "window":  # NaN equals NaN here
                np.testing.assert_array_equal(one.flatten().to_numpy(), two.flatten().to_numpy())
            else:
                assert one.equals(two), (table, name)
    for table in ("neurons", "tiles", "unions"):
        pd.testing.assert_frame_equal(added_up(run, table), added_up(other, table))


def assert_nothing_else(run: Run) -> None:
    """Expect no damaged file, and no file in the run's folder that its manifest does not list."""
    assert run.damaged() == []
    listed = {run.path / part.file for part in run.manifest.parts} | {run.path / "run.json"}
    assert {path for path in run.path.rglob("*") if path.is_file()} == listed


def assert_same_run(run: Run, other: Run) -> None:
    """Compare two runs: every table, and what their manifests say of it."""
    assert_same_tables(run, other)
    for name in ("status", "tokens", "sequences", "loss_sum", "loss_tokens", "text"):
        assert getattr(run.manifest, name) == getattr(other.manifest, name), name
    assert other.damaged() == []
    assert_nothing_else(run)
