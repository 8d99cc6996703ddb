"""The log of a training run: which columns `train-log.parquet` has, and how its rows are written and read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from twell.workbench.run.part_files import open_part

FILE = "train-log.parquet"
Row = dict[str, Any]

# Name: (type, meaning). Every mean is over the steps since the previous row.
COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "optimizer steps done"),
    "tokens": (pa.int64(), "tokens trained on so far"),
    "seconds": (pa.float64(), "seconds of the loop so far, evaluations and checkpoints included, compilation not"),
    "tokens_per_second": (pa.float64(), "training tokens a second since the previous row"),
    "total_steps": (pa.int64(), "steps the run was planned to take at this row; null before a time limit is planned"),
    "loss": (pa.float64(), "mean training cross-entropy, nats a token"),
    "heldout_loss": (pa.float64(), "cross-entropy on the first 131 072 held-out tokens, nats a token; null between"),
    "l1": (pa.float64(), "mean of the L1 term: mean over layers of the mean over tokens of sum |h|"),
    "l1_coefficient": (pa.float64(), "its coefficient at this step"),
    "rate": (pa.float64(), "learning rate at this step"),
    "gradient_norm": (pa.float64(), "mean gradient norm before clipping"),
    "nnz_LL": (pa.float64(), "layer LL: mean number of neurons a token fires (gate > 0)"),
    "dead_LL": (pa.float64(), "layer LL: share of neurons that fired on none of the tokens since the previous row"),
}


def log_schema(layers: int) -> pa.Schema:
    """Return the Arrow schema of the log of a model with so many layers; each field's metadata has its meaning."""
    names = {
        name.replace("LL", f"{layer:02}"): column
        for name, column in COLUMNS.items()
        for layer in (range(layers) if name.endswith("LL") else [0])
    }
    return pa.schema([pa.field(name, kind, metadata={"meaning": meaning}) for name, (kind, meaning) in names.items()])


def write_log(folder: Path, rows: list[Row], layers: int) -> None:
    """Replace the log in a model's folder, whole or not at all."""
    temporary = folder / f"{FILE}.tmp"
    pq.write_table(pa.Table.from_pylist(rows, schema=log_schema(layers)), temporary, compression="zstd")
    os.replace(temporary, folder / FILE)


def read_log(folder: Path, last_step: int) -> list[Row]:
    """Return the rows of a folder's log up to a step."""
    return [row for row in open_part(folder / FILE).read().to_pylist() if row["step"] <= last_step]


def mean(row: Row, prefix: str) -> float:
    """Return the mean over layers of a per-layer column; prefix: `nnz_` or `dead_`."""
    values = [value for name, value in row.items() if name.startswith(prefix)]
    return sum(values) / len(values)
