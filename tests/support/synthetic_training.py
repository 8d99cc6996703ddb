"""A training made up with known truth, written by the writer: layer L goes sparse at row 2 L + 1, the last never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support import synthetic_runs

from twell.workbench.run.manifest import COMPLETE
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter

ROWS, STEPS_A_ROW, TOKENS_A_STEP = 12, 10, 256
DENSE, SPARSE = 0.5, 0.02  # nnz over d_ff before and after a layer goes sparse


def make_training(
    path: Path, layers: int = 4, d_ff: int = 512, status: str = COMPLETE, rows: int = ROWS, seed: int = 0
) -> Run:
    """Write a run that is a training alone. Row r stands for step 10 (r + 1)."""
    manifest = synthetic_runs.manifest(synthetic_runs.Shape(layers=layers, d_ff=d_ff), path.name)
    manifest.training = {"recipe": {"name": "made up", "layers": layers, "seed": seed}}
    writer = RunWriter(path, manifest)
    writer.add("training", columns(layers, d_ff, rows))
    writer.finish(status)
    return open_run(path)


def columns(layers: int, d_ff: int, rows: int) -> dict[str, Any]:
    """Return the table: the loss falls by 0.1 a row, a held-out loss every third row, steps timed from row 6 on."""
    row = np.arange(rows)
    step = STEPS_A_ROW * (row + 1)
    timed = row >= 6
    table: dict[str, Any] = {
        "step": step,
        "tokens": TOKENS_A_STEP * step,
        "seconds": 0.5 * step,
        "tokens_per_second": np.full(rows, 2.0 * TOKENS_A_STEP),
        "total_steps": np.full(rows, STEPS_A_ROW * ROWS),
        "loss": 6.0 - 0.1 * row,
        "heldout_loss": np.ma.MaskedArray(5.5 - 0.1 * row, mask=row % 3 != 2),
        "l1": 10.0 / (1 + row),
        "l1_coefficient": np.full(rows, 0.01),
        "rate": np.full(rows, 1e-3),
        "gradient_norm": np.ones(rows),
        "peak_bytes": np.ma.MaskedArray(np.full(rows, 2**30), mask=~timed),
        "sparse_layers": np.where(timed, layers - 1, 0),
        "dense_step": np.ma.MaskedArray(np.full(rows, 3000.0), mask=~timed),
        "sparse_step": np.ma.MaskedArray(np.full(rows, 2000.0), mask=~timed),
    }
    for layer in range(layers):
        sparse = (row > 2 * layer) & (layer < layers - 1)
        table[f"nnz_{layer:02}"] = d_ff * np.where(sparse, SPARSE, DENSE)
        table[f"dead_{layer:02}"] = np.where(sparse, 0.25, 0.0)
    return table
