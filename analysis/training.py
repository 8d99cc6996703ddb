"""Training: how a model gets sparse, step by step and layer by layer.

    training_steps(run)     a row of the log, with means over the layers
    training_layers(run)    a row a step and layer
    sparse_since(run)       when each layer went sparse

From the table `training`, which `twell train` writes while it runs. Cost: milliseconds, a few hundred rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

SPARSE_SHARE = 0.1  # of d_ff: from there on the sparse kernels are faster than dense ones (kernels/training.py)


def training_steps(run: Run) -> pd.DataFrame:
    """Return the log of a training, a row each few steps, as table `training` has it, with four columns more.

    Columns: those of `training` but for nnz_LL and dead_LL; nnz and dead (means over the layers); sparsity (1 − nnz /
    d_ff); step_speedup (dense_step / sparse_step; NaN where they were not timed). Raises Missing for other runs.
    """
    frame = _log(run)
    nnz, dead = (frame[nnz_columns(run.layers, name)] for name in ("nnz", "dead"))
    steps = frame.drop(columns=[*nnz.columns, *dead.columns])
    steps["nnz"], steps["dead"] = nnz.mean(axis=1), dead.mean(axis=1)
    steps["sparsity"] = 1 - steps["nnz"] / run.d_ff
    steps["step_speedup"] = steps["dense_step"].astype(float) / steps["sparse_step"].astype(float)
    return steps


def training_layers(run: Run) -> pd.DataFrame:
    """Return each layer's activity over a training. Columns: step, tokens, layer, nnz (mean of a token), sparsity, dead
    (share of neurons that fired on none of the tokens since the row before). Raises Missing for other runs."""
    frame = _log(run)
    layers = [
        pd.DataFrame(
            {
                "step": frame["step"],
                "tokens": frame["tokens"],
                "layer": layer,
                "nnz": frame[nnz],
                "sparsity": 1 - frame[nnz] / run.d_ff,
                "dead": frame[dead],
            }
        )
        for layer, (nnz, dead) in enumerate(zip(nnz_columns(run.layers), nnz_columns(run.layers, "dead"), strict=True))
    ]
    return pd.concat(layers, ignore_index=True).sort_values(["step", "layer"], ignore_index=True)


def sparse_since(run: Run, share: float = SPARSE_SHARE) -> pd.DataFrame:
    """Return when each layer went sparse: from when on its nnz stays below a share of d_ff.

    Columns: layer; step, tokens (of the first row from which on it stays below; null if it does not); nnz, dead (of the
    last row); nnz_least, step_least (the row with the least nnz). Raises Missing for other runs.
    """
    layers = training_layers(run)
    rows = []
    for layer, frame in layers.groupby("layer"):
        above = np.flatnonzero(frame["nnz"].to_numpy() > share * run.d_ff)
        first = int(above[-1]) + 1 if len(above) else 0
        entered = frame.iloc[first] if first < len(frame) else None
        least = frame.loc[frame["nnz"].idxmin()]
        rows.append(
            {
                "layer": layer,
                "step": None if entered is None else entered["step"],
                "tokens": None if entered is None else entered["tokens"],
                "nnz": frame["nnz"].iloc[-1],
                "dead": frame["dead"].iloc[-1],
                "nnz_least": least["nnz"],
                "step_least": int(least["step"]),
            }
        )
    return pd.DataFrame(rows).astype({"step": "Int64", "tokens": "Int64"})


def _log(run: Run) -> pd.DataFrame:
    """Return the table `training`. Raises Missing where the run has none, or no row yet."""
    if not run.has("training"):
        state = " yet" if run.manifest.training and run.manifest.status == "recording" else ""
        raise Missing(f"{run.name} holds no training{state}: `twell train` records how a model gets sparse.")
    return run.frame("training")
