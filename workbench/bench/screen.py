"""Print a bench: a line for each case as it ends, sums over layers, then a block a case with a line an operation.

A ratio compares an operation with the dense FFN of the same case; a gate product, and up and down alone, are compared
with the dense operation of the same name. Absolute times are shown beside ratios on a GPU only, under its name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from twell.kernels.benchmark.operations import DENSE, GATE, UP_DOWN, Operation
from twell.kernels.benchmark.runner import Result
from twell.workbench.bench.cases import Case

EVEN = 0.03  # a kernel's ratio this near to 1 is shown as neither faster nor slower
WIDTH = 110  # characters, if there is no terminal
DENSE_LABEL = "dense"
LABELS = {"ffn_dense": DENSE_LABEL, "ffn_compiled": "dense (compiled)", "ffn_fused": "dense (gate and up fused)"}
SUFFIXES = {
    "ffn_sparse": "",
    "ffn_counts": ", counts on",
    "ffn_neurons": ", neurons on",
    "ffn_packed": ", TwELL out",
    "gate": ": gate",
    "up_down": ": up, down",
}
LEGEND = (
    "× dense: dense time over its own, the median and the range of turns; gate share: time of the dense gate product "
    "over its own; error: of a row, relative to float64, mean and largest"
)
COLUMNS = {"": 27, "× dense": 8, "of turns": 11, "gate share": 10, "error": 8, "largest": 8}
EXTRA = {"TFLOP/s": 8, "GB/s": 7}  # on a terminal with room for them
TIME = {"µs": 11}
METRICS = {"error": "error_mean", "largest": "error_max", "TFLOP/s": "tflops", "GB/s": "gigabytes_per_second"}
Figures = dict[str, float]  # of one operation, by metric


class Screen:
    """Prints a bench, as a context manager: `begin` and `show` for each case, `close` after the last one.

    The blocks of the cases come last, also those of a bench that was stopped.
    """

    def __init__(self, title: str, total: int, absolute: bool, console: Console) -> None:
        """Print the title.

        total: how many cases will run; absolute: whether times are shown beside ratios
        """
        self._console = console
        if not console.is_terminal:
            console.width = max(console.width, WIDTH)
        room = console.width - sum((COLUMNS | TIME).values()) - len(COLUMNS | TIME)
        extra = {name: width for name, width in EXTRA.items() if room >= sum(EXTRA.values()) + len(EXTRA)}
        self._columns = COLUMNS | (TIME if absolute else {}) | extra
        self._absolute = absolute
        self._shown_reasons: set[str] = set()  # why kernels were left out: each is printed once
        self._sums: dict[str, dict[str, list[float]]] = {}  # microseconds by group of cases and label
        self._progress = Progress(
            SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("cases"), TimeRemainingColumn(),
            TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total)
        self._details: list[Callable[[], None]] = []  # each prints a block, once the bench has ended
        self._total = total
        console.print(title, highlight=False)

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if not self._details:
            return
        self._console.print()
        self._console.print(Text(LEGEND, "dim"))
        self._print([{name: Text(name, "dim") for name in self._columns}])
        for print_block in self._details:
            print_block()

    def begin(self, case: Case) -> None:
        """Name the case that runs now, beside the bar."""
        self._progress.update(self._task, description=case.name)

    def show(self, case: Case, result: Result, metrics: dict[Operation, Figures]) -> None:
        """Print the ratios of a case in a line, and keep its block. metrics: the figures of each operation"""
        if self._total > 1:
            self._console.print(_ratios(case, result), highlight=False, soft_wrap=True)
        self._details.append(partial(self._print_block, case, result, metrics))
        self._add_up(case, result)
        self._progress.advance(self._task)

    def _print_block(self, case: Case, result: Result, metrics: dict[Operation, Figures]) -> None:
        about = [f"nnz {result.fired.nnz_mean:.1f}"] + [f"{case.rows:,} rows"] * ("row" not in case.name)
        about += ["weights cold"] * case.cold + ["CUDA graph"] * bool(result.replayed)
        line = Text(case.name, "bold").append("  " + ", ".join(about), "not bold dim")
        self._console.print(line)
        self._print(
            [_cells(result, operation, figures) for operation, figures in metrics.items()]
            + [_sum_cells(result, kernel, time) for kernel, time in stage_sums(result).items()]
        )
        if energy := power(metrics):
            self._console.print(Text("  " + energy, "dim"), soft_wrap=True)
        for reason in dict.fromkeys(result.left_out.values()):
            if reason not in self._shown_reasons:
                self._shown_reasons.add(reason)
                names = ", ".join(name for name, other in result.left_out.items() if other == reason)
                self._console.print(Text(f"  without {names}: {reason}", "dim"), soft_wrap=True)

    def close(self) -> None:
        """Print the ratios of several layers together, for each group of cases that has more than one."""
        for group, times in self._sums.items():
            layers = len(times[DENSE_LABEL])
            totals = {name: sum(total) for name, total in times.items() if len(total) == layers > 1}
            dense = totals.pop(DENSE_LABEL, 0.0)
            ratios = [f"{name} {dense / total:.2f} ×" for name, total in totals.items()]
            suffix = f"; dense {dense / 1e3:,.2f} ms" if self._absolute else ""
            if ratios:
                self._console.print(
                    f"{layers} layers {group}: {'; '.join(ratios)}{suffix}", highlight=False, soft_wrap=True
                )

    def _add_up(self, case: Case, result: Result) -> None:
        """Add a layer's times to those of its group: the cases that differ from it in the layer alone."""
        if case.layer < 0:
            return
        name = case.name.replace(f"recorded layer {case.layer}", "as recorded").replace(f"layer {case.layer} ", "")
        sums = self._sums.setdefault(name, {})
        medians = {label(operation): result.median(operation) for operation in result.times if _whole(operation)}
        for heading, time in (medians | stage_sums(result)).items():
            sums.setdefault(heading, []).append(time)

    def _print(self, rows: list[dict[str, Text]]) -> None:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        for name, width in self._columns.items():
            table.add_column(width=width, justify="right" if name else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row.get(name, Text()) for name in self._columns))
        self._console.print(table)


def short(value: float) -> str:
    """Return a number with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def label(operation: Operation) -> str:
    """Return the operation's name on the screen."""
    if operation.kernel == "torch":
        return LABELS.get(operation.op, DENSE_LABEL + SUFFIXES.get(operation.op, ""))
    layout = f" at C {operation.compression}" if operation.compression != 8 else ""
    return operation.kernel + layout + SUFFIXES[operation.op]


def _ratios(case: Case, result: Result) -> str:
    """Return a case's ratios to dense on one line."""
    dense = result.median(DENSE)
    times = {label(one): result.median(one) for one in result.times if one.op == "ffn_sparse"} | stage_sums(result)
    ratios = ", ".join(f"{name} {dense / time:.2f} ×" for name, time in times.items())
    return f"{case.name}, {case.rows:,} rows, nnz {result.fired.nnz_mean:.1f}: {ratios or 'dense alone'}"


def power(metrics: dict[Operation, Figures]) -> str:
    """Return power and energy of the operations that were gauged, on one line; "" if none was."""
    return "; ".join(
        f"{label(operation)} {figures['watts']:.0f} W, {figures['millijoules_per_token']:.3g} mJ a token"
        + (f" at {figures['sm_mhz']:.0f} MHz" if "sm_mhz" in figures else "")
        for operation, figures in metrics.items()
        if "watts" in figures
    )


def stage_sums(result: Result) -> dict[str, float]:
    """Return gate product plus up and down, in microseconds, for kernels whose whole FFN was not run."""
    sums = {}
    for operation in result.times:
        alone = Operation("ffn_sparse", operation.kernel, operation.compression) not in result.times
        if operation.op == UP_DOWN.op and operation.kernel != "torch" and alone:
            gate = Operation(GATE.op, operation.kernel, operation.compression)
            sums[f"{operation.kernel}: the two"] = result.median(gate) + result.median(operation)
    return sums


def _whole(operation: Operation) -> bool:
    """Return whether an operation is a whole FFN."""
    return operation.op.startswith("ffn_")


def _cells(result: Result, operation: Operation, figures: Figures) -> dict[str, Text]:
    """Return the cells of an operation's line, by column."""
    times, median = result.times[operation], result.median(operation)
    base = DENSE if _whole(operation) else Operation(operation.op)
    cells = {"": Text("  " + label(operation)), "µs": Text(f"{median:,.1f}")}
    if base in result.times:
        dense = result.median(base)
        ratio = dense / statistics.median(times)
        colour = "" if operation.kernel == "torch" or abs(ratio - 1) < EVEN else " green" if ratio > 1 else " red"
        cells["× dense"] = Text(f"{ratio:.2f}", "bold" + colour)
        cells["of turns"] = Text(f"{dense / max(times):.2f}–{dense / min(times):.2f}", "dim")
    if "ceiling_share" in figures and operation != GATE:
        cells["gate share"] = Text(f"{figures['ceiling_share']:.0%}")
    for name, metric in METRICS.items():
        if metric in figures:
            cells[name] = Text(f"{figures[metric]:.1e}" if metric.startswith("error") else short(figures[metric]))
    return cells


def _sum_cells(result: Result, name: str, microseconds: float) -> dict[str, Text]:
    """Return the cells of a sum of stages, by column."""
    ratio = Text(f"{result.median(DENSE) / microseconds:.2f}", "bold")
    return {"": Text("  " + name), "× dense": ratio, "µs": Text(f"{microseconds:,.1f}")}
