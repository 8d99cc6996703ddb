"""Dense and sparse side by side, on this machine: how fast each kernel runs an FFN, and how exactly.

The idea: `kernels/bench.py` times the operations of one case in turns. Here the cases come from `bench_cases`, the
power that a GPU draws is read, and each case goes to a file (`bench_table`) and to the screen (`bench_page`) as soon as
it is known.

    twell bench                                          # the bundled model's layers on the bundled text
    twell bench path/to/model --text book.txt --out runs/mine
    twell bench --shape 2048,5632 --nnz 29,120 --rows 8192 --out shape.parquet
    twell bench --patterns patterns_d2048_f5632.npz --rows 1,8,64

Cost: some tenths of a second (on a GPU one second) of turns a case, made inputs and a check in float64 beside it, and
once a shape some seconds for torch.compile. With --energy, six seconds more for each dense and sparse operation.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from twell.kernels.benchmark.operations import DENSE, Operation
from twell.kernels.benchmark.runner import BenchRequest, Result, bench_packed
from twell.kernels.benchmark.runner import bench as bench_case
from twell.kernels.benchmark.timing import Run
from twell.kernels.dispatch import KERNELS
from twell.kernels.layout import COMPRESSIONS, Layout
from twell.workbench.bench.cases import Case, cases, numbers
from twell.workbench.bench.screen import Page
from twell.workbench.bench.table import Sheet, commit, figures, rows_of
from twell.workbench.doctor import device_name
from twell.workbench.errors import UserError
from twell.workbench.options import BenchOptions
from twell.workbench.power import Gauge, Reading


def bench(options: BenchOptions) -> list[dict[str, Any]]:
    """Run the cases, print them, and write them to --out. Returns the rows of the `bench` table.

    Raises UserError for what cannot be asked; where kernels are asked for by name, before anything is timed if none of
    them takes the shape here, and at the end if none of them ran.
    """
    sheet, asked = Sheet(options.out), _asked(options)
    found, common = cases(options)
    device: torch.device = common["device"]
    gauge = Gauge(device)
    name = device_name(device)
    if options.energy and not gauge.reads:
        raise UserError(f"Expected a GPU that reports its power for --energy, got {name}: leave --energy out.")
    dtype = str(common["dtype"]).removeprefix("torch.")
    about = {"d_model": common["d_model"], "d_ff": common["d_ff"], "dtype": dtype, "device": name, "commit": commit()}
    shape = device, common["dtype"], common["d_model"], common["d_ff"], 1
    if options.kernel:
        _require_one({name: KERNELS[name].refuses(*shape) for name in options.kernel})
    title = f"{common['name']}, {about['d_model']} × {about['d_ff']}, {dtype}, on {name}; medians of turns side by side"
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    with Page(title, len(found), device.type == "cuda", Console()) as page:
        for case in found:
            page.begin(case)
            gauged = gauge if options.energy else None
            fresh, result, known = _run(case, asked, about, gauged)
            sheet.add(fresh)
            rows += fresh
            refused |= result.left_out
            page.show(case, result, known)
        page.close()
    if sheet.out is not None:
        print(f"{sheet.out}: {len(rows):,} figures of {len(found)} cases")
    if options.kernel and not {row["kernel"] for row in rows} & set(options.kernel):
        _require_one({name: refused.get(name, "not timed") for name in options.kernel})
    return rows


def _require_one(refused: dict[str, str | None]) -> None:
    """UserError if each kernel that was asked for by name is refused, with the reasons."""
    if all(refused.values()):
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise UserError(f"Expected a kernel of --kernel that runs here, got none ({why}): ask for another.")


def _asked(options: BenchOptions) -> BenchRequest:
    """What every case compares. UserError for a kernel or a compression that this build does not have."""
    unknown = [name for name in options.kernel if name not in KERNELS]
    if unknown:
        raise UserError(f"Expected --kernel of {', '.join(KERNELS)}, got {unknown[0]!r}.")
    wanted = numbers("--compression", options.compression)
    if not set(wanted) <= set(COMPRESSIONS):
        given = ", ".join(map(str, COMPRESSIONS))
        raise UserError(f"Expected --compression of {given}, got {options.compression}.")
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        raise UserError(f"Expected --seconds above 0, got {options.seconds:g}.")
    return BenchRequest(
        kernels=options.kernel or None,
        layouts=tuple(Layout(compression=compression) for compression in wanted),
        compiled=options.compile,
        probes=options.probes,
        seconds=options.seconds,
    )


def _run(
    case: Case, asked: BenchRequest, about: dict[str, Any], gauge: Gauge | None
) -> tuple[list[dict[str, Any]], Result, dict[Operation, dict[str, float]]]:
    """One case: its rows, what was found, and its figures by operation."""
    power: dict[Operation, Reading] = {}

    def on_timed(operation: Operation, run: Run) -> None:
        if gauge is not None and (operation == DENSE or operation.op == "ffn_sparse"):
            power[operation] = gauge.window(run)

    try:
        ffn, x, packed = case.make()
        asked = replace(asked, cold=case.cold, on_timed=on_timed)
        result = bench_case(ffn, x, asked) if packed is None else bench_packed(ffn, x, packed, asked)
    except torch.OutOfMemoryError:
        raise UserError(f"Expected memory for {case.name} of {case.rows:,} rows, got none: lower --rows.") from None
    about = {**about, "ffn": "plain" if ffn.w_up is None else "gated"}
    found = {
        operation: {metric: value for metric, _, value in figures(case, result, operation, about, power.get(operation))}
        for operation in result.took
    }
    return rows_of(case, result, about, power), result, found
