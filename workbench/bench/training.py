"""`twell bench --training`: a training step of each FFN, sparse beside dense and compiled dense, with its memory.

    twell bench path/to/model --training --rows 16384 --out runs/mine
    twell bench --shape 2048,5632 --nnz 7,17,30,69 --rows 16384 --training

A step is forward and backward with the L1 term, of one FFN. Its rows go into the `bench` table as operations
train_dense, train_compiled and train_sparse.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from twell.kernels.benchmark.training import TRAIN_DENSE, TrainingResult, bench_training
from twell.kernels.layout import Layout
from twell.workbench.bench.cases import Case
from twell.workbench.devices import memory_for
from twell.workbench.errors import UserError

COLUMNS = ("operation", "× dense", "of turns", "µs", "peak memory", "error, mean", "largest")
LABELS = {"train_dense": "dense", "train_compiled": "dense (compiled)"}


def run_training_case(
    case: Case, compiled: bool, seconds: float | None, about: dict[str, Any], console: Console
) -> list[dict[str, Any]]:
    """Run one case, print it, and return its rows of the `bench` table. Raises UserError for one it cannot run.

    about: the columns that all cases share
    """
    with memory_for(f"{case.rows:,} rows", "lower --rows"):
        ffn, x, packed = case.make()
        if packed is not None:
            raise UserError(
                f"Expected at most d_model / 2 rows of a recorded pattern for --training, got {case.rows:,}: lower "
                "--rows, or give --shape or a model."
            )
        try:
            result = bench_training(ffn, x, compiled, seconds)
        except ValueError as error:
            raise UserError(f"Expected an FFN with a backward pass for --training, got another ({error}).") from None
    about = {**about, "ffn": "plain" if ffn.w_up is None else "gated"}
    _show(case, result, console, x.is_cuda)
    return _rows(case, result, about)


def _rows(case: Case, result: TrainingResult, about: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for operation, times in result.times.items():
        base = {
            **about,
            "case": f"training, {case.name}",
            "input": case.input,
            "layer": case.layer,
            "rows": case.rows,
            "weights": "warm",
            "tile": Layout().tile if operation.compression else 0,
            "compression": operation.compression,
            "kernel": operation.kernel,
            "op": operation.op,
            "nnz_mean": result.nnz_mean,
            "repeats": len(times),
            "graph": False,
            "low": None,
            "high": None,
        }
        spread = {"low": min(times), "high": max(times)}
        rows.append({**base, **spread, "metric": "microseconds", "unit": "µs", "value": result.median(operation)})
        if operation in result.peak_bytes:
            peak = float(result.peak_bytes[operation])
            rows.append({**base, "metric": "peak_bytes", "unit": "bytes", "value": peak})
        for metric, value in zip(("error_mean", "error_max"), result.errors.get(operation, ()), strict=False):
            rows.append({**base, "metric": metric, "unit": "relative", "value": value})
    return rows


def _show(case: Case, result: TrainingResult, console: Console, absolute: bool) -> None:
    """Print a case. absolute: whether times are shown beside ratios"""
    rows = f", {case.rows:,} rows" * ("row" not in case.name)
    table = Table(box=None, pad_edge=False, title=f"{case.name}, nnz {result.nnz_mean:.1f}{rows}", title_justify="left")
    columns = [name for name in COLUMNS if absolute or name not in ("µs", "peak memory")]
    for name in columns:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    dense = result.median(TRAIN_DENSE)
    for operation, times in result.times.items():
        mean, largest = result.errors.get(operation, (None, None))
        cells = {
            "operation": LABELS.get(operation.op, operation.kernel),
            "× dense": f"{dense / result.median(operation):.2f}",
            "of turns": f"{dense / max(times):.2f}–{dense / min(times):.2f}",
            "µs": f"{result.median(operation):,.1f}",
            "peak memory": f"{result.peak_bytes.get(operation, 0) / 2**30:.2f} GiB",
            "error, mean": "" if mean is None else f"{mean:.1e}",
            "largest": "" if largest is None else f"{largest:.1e}",
        }
        table.add_row(*(cells[name] for name in columns))
    console.print(table)
    console.print(f"  {result.sparse.kernel}: {result.reason}", style="dim", highlight=False, soft_wrap=True)
    for name, reason in result.left_out.items():
        console.print(f"  without {name}: {reason}", style="dim", highlight=False, soft_wrap=True)
