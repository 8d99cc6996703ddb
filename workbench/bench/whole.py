"""Time a whole model with its dense FFN and with the sparse one: forward passes, generation, and a step of decoding.

The idea: the dense side is the model as transformers runs it, with linear modules of its own; the sparse side counts
nnz in every layer. Both run in turns in one process, eager, and compiled layer by layer by torch.compile, with this
package's backend: inductor, which the dense side gets as it is. A step of decoding is replayed from a CUDA graph, with
keys and values at fixed addresses.

    twell bench path/to/model --whole --text book.txt --out runs/mine

Rows of the `bench` table: operations whole_… (a forward pass without the head), generate_… (prompts and all tokens; in
eager mode the sides take the tokens in turns) and step_… (one token of each sequence). Cost on a GPU: a minute and
three quarters for 28 layers, most of it compiling and capturing, and six seconds for each pass on text and each step
with --energy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from twell.kernels.benchmark.timing import TimedCall, time_in_turns
from twell.kernels.layout import Layout
from twell.kernels.modules import Probe
from twell.kernels.stats import Stats
from twell.workbench.bench.cases import ROWS, TEXT, filled_up
from twell.workbench.bench.decoding import Decoder, generation_times, replaced
from twell.workbench.bench.layer_inputs import text_ids, uniform_ids
from twell.workbench.bench.options import BenchOptions, whole_numbers
from twell.workbench.bench.sides import DENSE, SPARSE, Sides, compiled_layer
from twell.workbench.bench.table import Sheet, commit
from twell.workbench.doctor import device_name
from twell.workbench.errors import UserError
from twell.workbench.models.checkpoint import DEMO
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.power import Gauge

PROMPT = {"cpu": 32, "cuda": 128}  # tokens of a prompt
TOKENS = {"cpu": 8, "cuda": 64}  # tokens generated after it
TURNS = {"cpu": 5, "cuda": 7}
SEQUENCE = 2048  # most tokens of a sequence of a forward pass
GAUGED = ("whole_", "step_")  # operations whose power is read


@dataclass(frozen=True)
class WholeCase:
    """A pass or a batch. input: text or uniform; ids: int64 [sequences, positions] on the model's device"""

    name: str
    input: str
    ids: Tensor


@torch.inference_mode()
def bench_whole(options: BenchOptions, sheet: Sheet) -> list[dict[str, Any]]:
    """Run every case, print it, write its rows, and return them. Raises UserError for options or a model that do not
    fit."""
    if options.shape is not None or options.patterns is not None or options.training:
        raise UserError("Expected --whole beside a model alone, got --shape, --patterns or --training: leave it out.")
    sizes = whole_numbers("--batches", options.batches)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    loaded = load(options.model or DEMO, options.revision, options.device, dtype)
    gauge, name = Gauge(loaded.device) if options.energy else None, device_name(loaded.device)
    if gauge is not None and not gauge.reads:
        raise UserError(f"Expected a GPU that reports its power for --energy, got {name}: leave --energy out.")
    ffn = "plain" if loaded.ffns[0].w_up is None else "gated"
    about = {"d_model": loaded.d_model, "d_ff": loaded.d_ff, "dtype": loaded.dtype, "device": name, "commit": commit()}
    sides, console, rows = Sides(loaded), Console(markup=False), []
    model = f"{loaded.name}{filled_up(loaded)}, {loaded.layers} layers, {loaded.dtype}"
    console.print(f"{model}, on {name}; medians of turns side by side")
    torch.compiler.reset()  # else it would give up after several shapes
    with loaded.probing(Probe(probes="counts")):
        for decodes, cases in ((False, _passes(options, loaded)), (True, _batches(options, loaded, sizes))):
            for case in cases:
                timed = (_run_decoding if decodes else _run_passes)(sides, case, options.compile, gauge)
                nnz = _mean_nnz(loaded, case.ids)
                _show(case, timed, nnz, console)
                case_rows = _rows(case, timed, nnz, loaded, about | {"ffn": ffn})
                sheet.add(case_rows)
                rows += case_rows
    return rows


def _passes(options: BenchOptions, loaded: LoadedModel) -> Iterator[WholeCase]:
    """Yield a forward pass of each input: sequences of one length, --rows tokens in all, or as many as there are."""
    tokens = ROWS[loaded.device.type] if options.rows is None else max(whole_numbers("--rows", options.rows))
    length = min(SEQUENCE, loaded.context, tokens)
    text = _whole_sequences(loaded, options.text, length, max(1, tokens // length))
    for name, pieces in (("text", text), ("uniform", uniform_ids(loaded, text))):
        ids = torch.from_numpy(np.stack(pieces).astype(np.int64)).to(loaded.device)
        yield WholeCase(f"whole model on {name if name == 'text' else 'uniform ids'}, {ids.numel():,} rows", name, ids)


def _batches(options: BenchOptions, loaded: LoadedModel, sizes: list[int]) -> Iterator[WholeCase]:
    """Yield a batch of prompts of each size."""
    text = _whole_sequences(loaded, options.text, PROMPT[loaded.device.type], max(sizes))
    ids = torch.from_numpy(np.stack(text).astype(np.int64)).to(loaded.device)
    for size in sizes:
        yield WholeCase(f"whole model, decoding {size} sequence{'s' * (size > 1)}", "text", ids[:size])


def _whole_sequences(loaded: LoadedModel, text: tuple[str, ...], length: int, most: int) -> list[np.ndarray]:
    """Return up to `most` sequences of `length` ids each, cut from the text in its order.

    Raises UserError for too little text.
    """
    ids = np.concatenate(text_ids(loaded, text or TEXT, length * most))
    if len(ids) < length:
        raise UserError(f"Expected at least {length:,} tokens of text for --whole, got {len(ids):,}: give more --text.")
    return [ids[i * length : (i + 1) * length] for i in range(min(most, len(ids) // length))]


@dataclass
class Timed:
    """The measurements of a case, by operation.

    times: microseconds, turn by turn; tokens: of one run; watts: mean power; graphs: the operations that were replayed
    from a CUDA graph
    """

    times: dict[str, list[float]]
    tokens: dict[str, int]
    watts: dict[str, float]
    graphs: set[str]


def _timed(
    sides: Sides, runs: dict[str, tuple[str, TimedCall]], tokens: dict[str, int], gauge: Gauge | None, graphs: set[str]
) -> Timed:
    """Time operations in turns, each with the FFN of its side. runs: side and function by operation"""

    def with_side(side: str, run: TimedCall) -> TimedCall:
        def call() -> None:
            with sides.of(side):
                run()

        return call

    device = sides.loaded.device
    operations = {name: with_side(side, run) for name, (side, run) in runs.items()}
    times = time_in_turns(operations, device, TURNS[device.type])
    gauged = [name for name in operations if gauge is not None and name.startswith(GAUGED)]
    watts = {name: gauge.window(operations[name])[1] for name in gauged if gauge is not None}
    return Timed(times, tokens, {name: power for name, power in watts.items() if power is not None}, graphs)


def _run_passes(sides: Sides, case: WholeCase, compiled: bool, gauge: Gauge | None) -> Timed:
    """Time the forward pass without the head: both sides eager and, if wanted, both compiled by layer."""
    body: Any = sides.loaded.body

    def eager() -> None:
        body(input_ids=case.ids, use_cache=False)

    runs = {f"whole_{side}": (side, eager) for side in (DENSE, SPARSE)}
    if compiled:
        blocks = [compiled_layer(block) for block in sides.loaded.blocks]

        def by_layer() -> None:
            with replaced(body.layers, blocks):
                eager()

        runs |= {f"whole_{side}_compiled": (side, by_layer) for side in (DENSE, SPARSE)}
    return _timed(sides, runs, dict.fromkeys(runs, case.ids.numel()), gauge if case.input == "text" else None, set())


def _run_decoding(sides: Sides, case: WholeCase, compiled: bool, gauge: Gauge | None) -> Timed:
    """Time generation by transformers, generation with a graph, and its steps, on both sides."""
    loaded, device = sides.loaded, sides.loaded.device
    tokens, sequences = TOKENS[device.type], len(case.ids)
    taken = generation_times(sides, case.ids, tokens, TURNS[device.type])
    eager = {f"generate_{side}": times for side, times in taken.items()}
    torch.compiler.reset()
    runs: dict[str, tuple[str, TimedCall]] = {}
    for side in (DENSE, SPARSE):
        with sides.of(side):
            decoder = Decoder(loaded, case.ids, tokens, compiled=compiled)
        runs |= {f"generate_graphed_{side}": (side, decoder.generate), f"step_{side}": (side, decoder.steps)}
    graphs = set(runs) if device.type == "cuda" else set()
    timed = _timed(sides, runs, dict.fromkeys(runs, tokens * sequences), gauge, graphs)
    for side in (DENSE, SPARSE):  # of one step
        timed.times[f"step_{side}"] = [time / tokens for time in timed.times[f"step_{side}"]]
        timed.tokens[f"step_{side}"] = sequences
    tokens_of = dict.fromkeys(eager, tokens * sequences) | timed.tokens
    return Timed(eager | timed.times, tokens_of, timed.watts, timed.graphs)


def _mean_nnz(loaded: LoadedModel, ids: Tensor) -> float:
    """Return the mean nnz over layers and rows of a forward pass."""
    sums: list[Tensor] = []

    def add_nnz(_layer: int, _x: Tensor, stats: Stats) -> None:
        sums.append(stats.nnz.double().mean())

    with loaded.probing(Probe(probes="counts", on_stats=add_nnz)):
        loaded.body(input_ids=ids, use_cache=False)
    return float(torch.stack(sums).mean())


def _rows(
    case: WholeCase, timed: Timed, nnz: float, loaded: LoadedModel, about: dict[str, Any]
) -> list[dict[str, Any]]:
    rows = []
    decodes = "decoding" in case.name
    for operation, times in timed.times.items():
        sparse = SPARSE in operation
        calls = len(case.ids) if decodes else case.ids.numel()  # rows of a call of the FFN
        base = {
            **about,
            "case": case.name,
            "input": case.input,
            "layer": -1,
            "rows": calls,
            "weights": "warm",
            "tile": Layout().tile if sparse else 0,
            "compression": Layout().compression if sparse else 0,
            "kernel": loaded.ffns[0].choice(calls).kernel if sparse else "torch",
            "op": operation,
            "nnz_mean": nnz,
            "repeats": len(times),
            "graph": operation in timed.graphs,
        }
        median, tokens = statistics.median(times), timed.tokens[operation]
        figures: dict[tuple[str, str], list[float | None]] = {
            ("microseconds", "µs"): [median, min(times), max(times)],
            ("tokens_per_second", "tokens/s"): [tokens * 1e6 / time for time in (median, max(times), min(times))],
        }
        if operation in timed.watts:
            watts = timed.watts[operation]
            figures[("watts", "W")] = [watts, None, None]
            figures[("millijoules_per_token", "mJ")] = [watts * median / 1e3 / tokens, None, None]
        for (metric, unit), (value, low, high) in figures.items():
            rows.append({**base, "metric": metric, "unit": unit, "value": value, "low": low, "high": high})
    return rows


def _show(case: WholeCase, timed: Timed, nnz: float, console: Console) -> None:
    """Print the operations of a case, dense and sparse side by side."""
    columns = ("operation", "× dense", "of turns", "dense tokens/s", "sparse tokens/s", "dense mJ", "sparse mJ")
    table = Table(box=None, pad_edge=False, title=f"{case.name}, nnz {nnz:.1f}", title_justify="left")
    for name in columns if timed.watts else columns[:-2]:
        table.add_column(name, justify="left" if name == columns[0] else "right")
    for sparse, times in timed.times.items():
        if SPARSE not in sparse:
            continue
        pair = sparse.replace(SPARSE, DENSE), sparse
        medians = [statistics.median(timed.times[name]) for name in pair]
        ratios = [dense / ours for dense, ours in zip(timed.times[pair[0]], times, strict=True)]
        rates = [timed.tokens[name] * 1e6 / median for name, median in zip(pair, medians, strict=True)]
        millijoules = [
            f"{timed.watts[name] * 1e3 / rate:.3g}"
            for name, rate in zip(pair, rates, strict=True)
            if name in timed.watts
        ]
        table.add_row(
            sparse.replace("_sparse", "").replace("_", ", "),
            f"{medians[0] / medians[1]:.3f}",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
            *(f"{rate:,.0f}" for rate in rates),
            *millijoules,
        )
    console.print(table)
