"""Time dense and sparse FFNs side by side on this machine, and measure how exact each kernel is.

The idea: `kernels/benchmark/runner.py` times the operations of one case in turns. Here the cases come from `cases.py`,
the power that a GPU draws is read, and the figures of each case go to a file (`table.py`) and to the screen
(`screen.py`) before the next one begins.

    twell bench                                          # the bundled model's layers on the bundled text
    twell bench path/to/model --text book.txt --out runs/mine
    twell bench --shape 2048,5632 --nnz 29,120 --rows 8192 --out shape.parquet
    twell bench --patterns patterns_d2048_f5632.npz --rows 1,8,64

Cost of a case: some tenths of a second of turns (one second on a GPU), building its inputs, and a check in float64; and
for each shape some seconds for torch.compile. With --energy, six seconds more for each dense and sparse operation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from twell.kernels.backends import gpu
from twell.kernels.benchmark.operations import DENSE, Operation
from twell.kernels.benchmark.runner import BenchRequest, Result, bench_packed
from twell.kernels.benchmark.runner import bench as bench_case
from twell.kernels.benchmark.timing import TimedCall
from twell.kernels.dispatch import KERNELS
from twell.kernels.layout import COMPRESSIONS, Layout
from twell.workbench.bench.cases import Case, cases
from twell.workbench.bench.options import BenchOptions, refuse_options, whole_numbers
from twell.workbench.bench.screen import Screen
from twell.workbench.bench.table import Sheet, commit, figures, rows_of
from twell.workbench.bench.training import run_training_case
from twell.workbench.devices import memory_for
from twell.workbench.doctor import device_name
from twell.workbench.errors import UserError
from twell.workbench.options import GPU_KERNELS
from twell.workbench.power import Gauge, PowerReading


def bench(options: BenchOptions) -> list[dict[str, Any]]:
    """Run the cases, print them, and write them to --out. Return the rows of the `bench` table.

    Raises UserError for options that do not fit; and if kernels are named, before anything is timed if none of them
    takes the shape here, and at the end if none of them ran.
    """
    refuse_options(options)
    sheet, requested = Sheet(options.out), _requested(options)
    if options.whole:
        from twell.workbench.bench.whole import bench_whole

        return bench_whole(options, sheet)
    listed, common = cases(options)
    device: torch.device = common["device"]
    gauge = Gauge(device)
    name = device_name(device)
    if options.energy and not gauge.reads:
        raise UserError(f"Expected a GPU that reports its power for --energy, got {name}: leave --energy out.")
    dtype = str(common["dtype"]).removeprefix("torch.")
    about = {"d_model": common["d_model"], "d_ff": common["d_ff"], "dtype": dtype, "device": name, "commit": commit()}
    shape = device, common["dtype"], common["d_model"], common["d_ff"], 1
    if options.kernel:
        _require_gpu(options.kernel, device)
        _require_one({name: KERNELS[name].refuses(*shape) for name in options.kernel})
    if options.training:
        return _bench_training(options, listed, about, sheet)
    title = f"{common['name']}, {about['d_model']} × {about['d_ff']}, {dtype}, on {name}; medians of turns side by side"
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    with Screen(title, len(listed), device.type == "cuda", Console(markup=False)) as screen:
        for case in listed:
            screen.begin(case)
            gauged = gauge if options.energy else None
            case_rows, result, metrics = _run(case, requested, about, gauged)
            sheet.add(case_rows)
            rows += case_rows
            refused |= result.left_out
            screen.show(case, result, metrics)
        screen.close()
    if sheet.out is not None:
        print(f"{sheet.out}: {len(rows):,} figures of {len(listed)} cases")
    if options.kernel and not {row["kernel"] for row in rows} & set(options.kernel):
        _require_one({name: refused.get(name, "not timed") for name in options.kernel})
    return rows


def _bench_training(
    options: BenchOptions, listed: list[Case], about: dict[str, Any], sheet: Sheet
) -> list[dict[str, Any]]:
    """Run the cases as training steps, print them, write them, and return their rows."""
    console, rows = Console(markup=False), []
    console.print(f"A step of forward and backward on {about['device']}, {about['dtype']}; medians of turns.")
    for case in listed:
        case_rows = run_training_case(case, options.compile, options.seconds, about, console)
        sheet.add(case_rows)
        rows += case_rows
    return rows


def _require_gpu(kernels: tuple[str, ...], device: torch.device) -> None:
    """Raise UserError if all kernels named by --kernel run on a GPU, and the cases lie elsewhere: none would run."""
    if device.type == "cuda" or not set(kernels) <= GPU_KERNELS:
        return
    names = " and ".join(kernels)
    if gpu.missing():
        raise UserError(
            f"Expected an NVIDIA GPU for --kernel {names}, found none that PyTorch sees: run it on a machine with one, "
            "or name another kernel; `twell doctor` says which run here."
        )
    raise UserError(f"Expected --device cuda for --kernel {names}, got {device.type}: leave --device out.")


def _require_one(refused: dict[str, str | None]) -> None:
    """Raise UserError if every kernel named by --kernel is refused. refused: the reason by kernel, None if it runs"""
    if all(refused.values()):
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise UserError(f"Expected a kernel of --kernel that runs here, got none ({why}): name another.")


def _requested(options: BenchOptions) -> BenchRequest:
    """Return what every case compares. Raises UserError for a compression that this build does not have."""
    compressions = whole_numbers("--compression", options.compression)
    if not set(compressions) <= set(COMPRESSIONS):
        known = ", ".join(map(str, COMPRESSIONS))
        raise UserError(f"Expected --compression of {known}, got {options.compression}.")
    return BenchRequest(
        kernels=options.kernel or None,
        layouts=tuple(Layout(compression=compression) for compression in compressions),
        compiled=options.compile,
        probes=options.probes,
        seconds=options.seconds,
    )


def _run(
    case: Case, requested: BenchRequest, about: dict[str, Any], gauge: Gauge | None
) -> tuple[list[dict[str, Any]], Result, dict[Operation, dict[str, float]]]:
    """Run one case; return its rows of the table, its times, and its figures by operation and metric.

    requested: what is compared; about: columns that all rows share; gauge: reads the power, None without --energy
    """
    power: dict[Operation, PowerReading] = {}

    def read_power(operation: Operation, run: TimedCall) -> None:
        if gauge is not None and (operation == DENSE or operation.op == "ffn_sparse"):
            power[operation] = gauge.window(run)

    with memory_for(f"{case.rows:,} rows", "lower --rows"):
        ffn, x, packed = case.make()
        requested = replace(requested, cold=case.cold, on_timed=read_power)
        result = bench_case(ffn, x, requested) if packed is None else bench_packed(ffn, x, packed, requested)
    about = {**about, "ffn": "plain" if ffn.w_up is None else "gated"}
    by_operation = {
        operation: {metric: value for metric, _, value in figures(case, result, operation, about, power.get(operation))}
        for operation in result.times
    }
    return rows_of(case, result, about, power), result, by_operation
