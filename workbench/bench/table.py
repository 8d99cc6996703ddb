"""Write the figures of a bench as rows of the `bench` table, in a file that is whole at any moment."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa

from twell.kernels.benchmark.operations import GATE, UP_DOWN, Operation
from twell.kernels.benchmark.runner import Result
from twell.kernels.layout import Layout
from twell.workbench.bench.cases import Case
from twell.workbench.errors import UserError
from twell.workbench.power import PowerReading
from twell.workbench.run import locks
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import Part
from twell.workbench.run.parquet_part import GrowingFile, disk_error
from twell.workbench.run.part_files import open_part
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import arrow_schema

TABLE = "bench"
ROOT = Path(__file__).resolve().parents[2]  # of this code
# A new case replaces an earlier one that is equal in these columns.
SAME = ("case", "d_model", "d_ff", "rows", "dtype", "device", "weights")
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")


def rows_of(
    case: Case, result: Result, about: dict[str, Any], power: dict[Operation, PowerReading]
) -> list[dict[str, Any]]:
    """Return the rows of one case.

    about: the columns that all cases share; power: clock and power of the operations that were gauged
    """
    rows = []
    for operation in result.times:
        dense = not operation.compression
        base = {
            **about,
            "case": case.name,
            "input": case.input,
            "layer": case.layer,
            "rows": case.rows,
            "weights": "cold" if case.cold else "warm",
            "tile": 0 if dense else Layout().tile,
            "compression": operation.compression,
            "kernel": operation.kernel,
            "op": operation.op,
            "nnz_mean": result.fired.nnz_mean,
            "repeats": len(result.times[operation]),
            "graph": operation in result.replayed,
        }
        for metric, unit, value in figures(case, result, operation, about, power.get(operation)):
            times = result.times[operation] if metric == "microseconds" else [None]
            spread = {"low": min(times), "high": max(times)}  # type: ignore[type-var]
            rows.append({**base, "metric": metric, "unit": unit, "value": value, **spread})
    return rows


def figures(
    case: Case, result: Result, operation: Operation, about: dict[str, Any], power: PowerReading | None
) -> list[tuple[str, str, float]]:
    """Return metric, unit and value of everything measured on an operation; arguments as in `rows_of`."""
    microseconds = result.median(operation)
    flops, moved = work(case.rows, result, operation, about)
    metrics = [
        ("microseconds", "µs", microseconds),
        ("tflops", "TFLOP/s", flops / microseconds / 1e6),
        ("gigabytes_per_second", "GB/s", moved / microseconds / 1e3),
        ("ceiling_share", "share", result.median(GATE) / microseconds),
    ]
    if operation.op == UP_DOWN.op:
        del metrics[-1]  # it runs without a gate product
    if operation in result.errors:
        mean, largest = result.errors[operation]
        metrics += [("error_mean", "relative", mean), ("error_max", "relative", largest)]
    if operation.op in ("ffn_sparse", "up_down") and operation.compression:
        metrics.append(("rows_past_slots", "rows", result.fired.overflowing[operation.compression]))
    if power is not None:
        mhz, watts = power
        metrics += [("sm_mhz", "MHz", mhz)] if mhz is not None else []
        if watts is not None:
            metrics += [("watts", "W", watts), ("millijoules_per_token", "mJ", watts * microseconds / 1e3 / case.rows)]
    return metrics


def work(rows: int, result: Result, operation: Operation, about: dict[str, Any]) -> tuple[float, float]:
    """Return the least that an operation has to do: floating-point operations, and bytes to and from memory."""
    d_model, d_ff, maps = about["d_model"], about["d_ff"], 2 if about["ffn"] == "gated" else 1
    size = 4 if about["dtype"] == "float32" else 2
    fired, union = (result.fired.nnz_mean, result.fired.union) if operation.compression else (d_ff, d_ff)
    gate = (2.0 * rows * d_model * d_ff, d_ff * d_model)
    up_down = (2.0 * rows * d_model * fired * maps, union * d_model * maps)
    stages = {GATE.op: [gate], UP_DOWN.op: [up_down]}.get(operation.op, [gate, up_down])
    out = d_model
    if operation.op == GATE.op:
        out = 2 * fired if operation.compression else d_ff  # packed, a fired neuron takes the bytes of two values
    ends = rows * (d_model + out)
    return sum(flops for flops, _ in stages), size * (ends + sum(weights for _, weights in stages))


class Sheet:
    """The rows so far, in a Parquet file or as a run's `bench` table; the file is whole at any moment.

    Rows of other cases that it holds already stay, also those that another bench writes at the same time.
    """

    def __init__(self, out: Path | None) -> None:
        """Open the table. Raises UserError if `out` is neither a run's folder nor a Parquet file of a bench.

        out: the run's folder or the file; None to write nothing
        """
        self.out, self.run = out, None
        self.schema = arrow_schema(TABLE, 0, 0)
        if out is None:
            return
        if (out / manifests.FILE).exists():
            self.run = open_run(out)
            if self.run.manifest.status == manifests.RECORDING:
                raise UserError(f"Expected a run that has ended for --out, {out} is still being recorded: wait for it.")
            self.out = self._listed(self.run.path)
        elif out.is_dir() or out.suffix != ".parquet":
            raise UserError(
                f"Expected --out to be a run's folder or a file that ends in .parquet, got {out}: name a file such as "
                f"{out.stem or 'bench'}.parquet, or capture the run first."
            )
        if self.out is not None and self.out.exists():
            self._read(self.out)  # refused before anything is timed

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows of one case, in place of the rows that the file has of the same case."""
        if self.out is None:
            return
        try:
            with locks.locked(self.out.parent):
                self.out = self._put(self.out if self.run is None else self._listed(self.run.path), rows)
        except OSError as error:
            raise disk_error(self.out, error) from error

    def _listed(self, run: Path) -> Path:
        """Return the file of the table that a run's manifest lists, or the first one if it lists none."""
        files = [part.file for part in manifests.read(run).parts if part.table == TABLE]
        return run / (files[0] if files else f"{TABLE}.parquet")

    def _put(self, out: Path, rows: list[dict[str, Any]]) -> Path:
        """Write the file anew, with the rows in it of other cases, and return its path.

        In a run it gets another name and is listed in place of the one before, which goes last: wherever a bench is
        killed, the manifest lists a file that is there and whole.
        """
        table = pa.Table.from_pylist(rows, schema=self.schema)
        if out.exists():
            written, replaced = self._read(out), {tuple(row[name] for name in SAME) for row in rows}
            keys = zip(*(written[name].to_pylist() for name in SAME), strict=True)
            others = written.filter(pa.array([key not in replaced for key in keys], pa.bool_()))
            table = pa.concat_tables([others, table])
        before = out
        if self.run is not None and out.exists():
            out = out.with_name(f"{TABLE}-1.parquet" if out.stem == TABLE else f"{TABLE}.parquet")
        file = GrowingFile(out, self.schema)
        file.write(table)
        size, digest = file.close()
        if self.run is not None:
            parts = [part for part in manifests.read(self.run.path).parts if part.table != TABLE]
            manifests.update(self.run.path, parts=[*parts, Part(TABLE, out.name, table.num_rows, size, digest)])
            if before != out:
                before.unlink()
        return out

    def _read(self, path: Path) -> pa.Table:
        """Read the table in a file. Raises UserError if it holds another."""
        try:
            return open_part(path).read().select(self.schema.names).cast(self.schema)
        except (OSError, KeyError, ValueError, pa.ArrowException):
            raise UserError(
                f"Expected a bench table at {path}, to keep what it has, got another file: choose another --out."
            ) from None


def commit(root: Path = ROOT) -> str:
    """Return the git commit of this code, with a + where files of it have changed since; or a hash of the kernels'
    sources if it is no checkout."""
    if (root / ".git").exists():
        query = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
        commit_id = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if commit_id:
            return commit_id
    digest = hashlib.sha256()
    for path in sorted((root / "kernels").rglob("*")):
        if path.suffix in SOURCES:
            digest.update(path.read_bytes())
    return f"sources-{digest.hexdigest()[:12]}"
