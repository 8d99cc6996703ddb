"""Generate data/BENCHMARKS.md, the page of benchmarks, with every figure computed from a run and its `bench` table.

    python -m twell.analysis.exports.pages    writes it anew from the recorded runs that ship

Each table names its device, rows, dtype, commit and how many turns its medians are of. A ratio is the time of the dense
FFN over that of the sparse one, timed in turns in one process; absolute times are those of that device.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from twell.analysis.activity.layers import by_layer
from twell.analysis.exports import whole_models
from twell.analysis.exports.bench_cases import BASELINES, PROBES, cases, layer_sums
from twell.analysis.exports.markdown import number, percent, table
from twell.analysis.overview import overview
from twell.analysis.speed.speedup import model_speedup, speedup
from twell.workbench.run.store import Run

OFTEN, MANY = 10, 10_000  # numbers of rows of an input up to which it has a table of its own; rows of a long call
INPUTS = {
    "patterns": "recorded patterns",
    "text": "the model on its own text",
    "uniform": "the model on uniform random ids",
    "heavy": "heavy-tailed",
    "even": "even",
    "dense": "fully dense",
}
OPENING = """# Benchmarks

Generated from the recorded run `{name}`, and from `{wide}` where it is named, by `make docs`; a test compares this page
with what that prints. How things are timed is in [the log](log/measuring.md).

**× dense** is the time of the dense FFN over the time of the sparse one. Both ran in turns, in random order, on the
same input in one process; above 1 the sparse one is faster. Layers are added up before they are divided. *Dense* is
torch's matrix products and the elementwise step between them. Times are medians, and hold for the device that is named.

| input | what it is |
|---|---|
| the model on its own text | the FFN inputs of each layer of the recorded model, on held-out text |
| the model on uniform random ids | layer 0 on token ids drawn at random: no text, and far more neurons fire |
| recorded patterns | which neurons eight layers of another trained model fired, token by token |
| heavy-tailed | synthetic; rows and neurons differ strongly in how much they fire |
| even | synthetic; every neuron is equally likely to fire, so two rows share no more than chance |
| fully dense | synthetic; every neuron fires |
"""
ELSEWHERE = """## Measured in other runs

These figures are in no run that ships, so they are not on this page. The log has them, with dates and devices:

| what | where |
|---|---|
| the same cases on an H100, the paper's published kernels, other shapes | [hopper](log/hopper.md) |
| sweeps over many counts of rows, and where the kernel is slower than dense | [hopper](log/hopper.md) |
| the time that a call takes on the host | [hopper](log/hopper.md) |
| the `cuda` and `cpu` kernels | [cuda_cpu](log/cuda_cpu.md) |
| whole captures with and without counts, several GPUs | [capture](log/capture.md) |
| other models of 28 layers, on an H200, by the paper's kernels | [hopper](log/hopper.md), [model](log/model.md) |
| a training step dense and sparse: time, memory, two GPUs | [training](log/training.md) |
"""


def page(run: Run, wide: Run) -> str:
    """Return the page as Markdown. run: one with timings, verified parity and a `bench`; wide: one of whole models."""
    frame = cases(run)
    fast = frame[frame["kernel"] == run.manifest.kernel["name"]]
    sections = (
        OPENING.format(name=run.name, wide=wide.name),
        _model(run),
        _watching(run),
        _long_calls(run, fast),
        _layers_by_rows(run, fast),
        _synthetic_by_rows(run, fast),
        _other_kernels(run, frame),
        whole_models.section(wide),
        ELSEWHERE,
    )
    return "\n".join(section for section in sections if section)


def _turns(low: float, high: float) -> str:
    """Return in words how many turns medians are of, from `low` to `high`."""
    return f"medians of {low:.0f} turns" if low == high else f"medians of {low:.0f} to {high:.0f} turns"


def _setting(run: Run, rows: str, dtype: str, repeats: pd.Series) -> str:
    """Return the line above a table of the bench: device, shape, rows, dtype, turns and commit."""
    commits = ", ".join(sorted(set(run.frame("bench")["commit"])))
    return (
        f"{run.manifest.device}, {run.manifest.model['d_model']} × {run.d_ff}, {rows}, {dtype}, "
        f"{_turns(repeats.min(), repeats.max())}, commit `{commits}`.\n"
    )


def _dtype(frame: pd.DataFrame) -> str:
    return ", ".join(sorted(set(frame["dtype"])))


def _model(run: Run) -> str:
    """Return the section on the recorded model: activity and speed by layer, then the whole forward pass."""
    layers, speed, facts, whole = by_layer(run), speedup(run), overview(run), model_speedup(run)
    manifest, model = run.manifest, run.manifest.model
    rows = [
        [
            int(a["layer"]), number(a["mean"], 1), int(a["p99"]), int(a["max"]), percent(a['dead_share']),
            number(s["dense_us"] / 1e3), number(s["sparse_us"] / 1e3), number(s["speedup"]),
        ]
        for a, s in zip(layers.to_dict("records"), speed.to_dict("records"), strict=True)
    ]  # fmt: skip
    dense, sparse = speed["dense_us"].sum() / 1e3, speed["sparse_us"].sum() / 1e3
    rows.append(
        ["all", f"{facts['nnz_mean']:.1f} (mean)", "", "", percent(facts['dead_share']), number(dense),
         number(sparse), f"**{facts['speedup']:.2f}**"]
    )  # fmt: skip
    less = f" A token takes {percent(1 - whole['energy'])} less energy (readings: {whole['energy_repeats']})."
    energy = "" if pd.isna(whole["energy"]) else less
    return (
        "## A trained model on real text\n\n"
        f"{manifest.device}, {model['family']}, {run.layers} layers of {model['d_model']} × {run.d_ff}, "
        f"{model['parameters']:,} parameters, {manifest.dtype}, kernel `{manifest.kernel['name']}`: the forward "
        f"passes of a capture of {facts['tokens']:,} tokens in {facts['sequences']:,} sequences, in batches of "
        f"{manifest.options['batch_tokens']:,} tokens. Recorded {manifest.created[:10]} with torch "
        f"{manifest.versions['torch']}. FFN times in ms, {speed.attrs['note'].split(',')[0]}; × dense: geometric mean "
        f"of their ratios, for all layers of {facts['speedup_turns']} turns, 95 % {facts['speedup_low']:.2f} to "
        f"{facts['speedup_high']:.2f}.\n\n"
        + table(("layer", f"mean nnz of {run.d_ff}", "p99", "max", "dead", "dense", "sparse", "× dense"), rows)
        + f"\nThe whole forward pass with the loss takes {whole['sparse_us'] / 1e3:.0f} ms, "
        f"{whole['dense_us'] / 1e3:.0f} ms with the dense FFN: **{whole['speedup']:.2f} ×** (mean of "
        f"{whole['repeats']} batches, 95 % {whole['low']:.2f} to {whole['high']:.2f}).{energy} "
        f"Loss {facts['loss']:.2f} nats a token, sparsity {percent(facts['sparsity'], 1)}.\n"
    )


def _watching(run: Run) -> str:
    """Return the section on what `twell verify` measured: agreement with the dense model, and the cost of counts."""
    parity, cost = run.manifest.parity or {}, run.manifest.overhead or {}
    if not parity:
        return "## Agreement with the dense model\n\nNot measured: run `twell verify`.\n"
    lines = (
        "## Agreement with the dense model, and what counting costs\n\n"
        f"`twell verify`, {run.manifest.device}, {parity['dtype']}, {parity['tokens']:,} tokens of the run's text. For "
        f"{percent(parity['same_choice'], 1)} of them the sparse model has the same most likely next token as the "
        f"dense one. Of {parity['counts']:,} counts {parity['differing']:,} differ, {parity['beyond_rounding']:,} "
        "of them by more than rounding explains.\n"
    )
    if cost:
        head = ("forward passes with", "time over that with nothing recorded")
        names = {"counts": "counts", "neurons": "counts and neuron sums", "all": "all, tiles and unions too"}
        rows = [[label, number(cost[f"{name}_over_none"], 3)] for name, label in names.items()]
        lines += f"\nMedians of {cost['rounds']} rounds.\n\n" + table(head, rows)
    return lines


def _summary(frame: pd.DataFrame) -> str:
    """Return the sentence on the worst case and on errors."""
    worst = frame.loc[frame["ratio"].idxmin()]
    slower = int((frame["ratio"] < 1).sum())
    errors = frame.dropna(subset="error_max")
    return (
        f"The bench has {len(frame)} cases. {slower or 'None'} of them {'are' if slower > 1 else 'is'} slower than "
        f"dense; the lowest is {worst['ratio']:.3f} × ({worst['case']}). In {len(errors)} cases the error of a whole "
        "FFN relative to float64 was measured: the sparse FFN's mean error is at most "
        f"{errors['error_mean'].max():.2f} times the dense one's, and its largest error of a row at most "
        f"{errors['error_max'].max():.2f} times.\n"
    )


def _long_calls(run: Run, frame: pd.DataFrame) -> str:
    """Return the section on the longest calls: times, the other dense baselines, and the cost of the probes."""
    rows = frame["rows"].max()
    long = frame[frame["rows"] == rows]
    single = long[long["layer"] < 0]
    single = single.sort_values(["ffn", "input", "nnz_mean"], key=lambda c: c.map(_order) if c.name == "input" else c)
    lines = [
        [
            f"{INPUTS[case['input']]}{', plain FFN' if case['ffn'] == 'plain' else ''}", number(case["nnz_mean"], 1),
            number(case["dense_us"] / 1e3), number(case["sparse_us"] / 1e3), f"**{case['ratio']:.2f}**",
            *(number(case[op]) for op in BASELINES),
        ]
        for case in single.to_dict("records")
    ]  # fmt: skip
    for each in layer_sums(long).to_dict("records"):
        span = f", {each['layers']} layers ({each['low']:.2f} to {each['high']:.2f})" if each["layers"] > 1 else ""
        chosen = long[(long["input"] == each["input"]) & (long["layer"] >= 0)]
        baselines = (each["dense_us"] / (chosen["dense_us"] / chosen[op]).sum(skipna=False) for op in BASELINES)
        lines.append(
            [INPUTS[each["input"]] + span, number(chosen["nnz_mean"].mean(), 1), number(each["dense_us"] / 1e3),
             number(each["sparse_us"] / 1e3), f"**{each['ratio']:.2f}**", *(number(value) for value in baselines)]
        )  # fmt: skip
    probed = long.dropna(subset=PROBES)
    costs = [
        [number(c["nnz_mean"], 1), *(percent(c[op] - 1, 1, "+") for op in PROBES)] for c in probed.to_dict("records")
    ]
    head = (
        "input",
        "mean nnz",
        "dense, ms",
        "sparse, ms",
        "× dense",
        "compiled, × dense",
        "gate and up fused, × dense",
    )
    return (
        f"## The kernel `{run.manifest.kernel['name']}` against dense, {rows:,} rows a call\n\n"
        + _setting(run, f"{rows:,} rows", _dtype(long), long["repeats"])
        + "Recorded patterns are timed as gate product, then up and down.\n\n"
        + table(head, lines)
        + "\n"
        + _summary(frame)
        + "\nTime that the probes add to a call on heavy-tailed inputs:\n\n"
        + table(("mean nnz", "counts", "neuron sums", "TwELL handed out"), costs)
    )


def _layers_by_rows(run: Run, frame: pd.DataFrame) -> str:
    """Return the section on the layers of models by the number of rows."""
    short = frame[(frame["rows"] < MANY) & (frame["layer"] >= 0)]
    lines = [
        [INPUTS[s["input"]], f"{s['rows']:,}", s["weights"], "yes" if s["graph"] else "no", f"**{s['ratio']:.2f}**",
         _by_layer(s)]
        for s in layer_sums(short).sort_values(["input", "rows"], kind="stable").to_dict("records")
    ]  # fmt: skip
    return (
        "## Layers of trained models by rows a call\n\n"
        + _setting(run, _span(short["rows"]), _dtype(short), short["repeats"])
        + "*Cold*: the weights are not in the cache. *Graph*: calls are replayed from a CUDA graph.\n\n"
        + table(("input", "rows", "weights", "graph", "× dense", "by layer"), lines)
    )


def _span(rows: pd.Series) -> str:
    low, high = rows.min(), rows.max()
    return f"{low:,} rows" if low == high else f"{low:,} to {high:,} rows"


def _order(kind: str) -> int:
    """Return the position of an input in this page."""
    return list(INPUTS).index(kind)


def _by_layer(sums: dict[Any, Any]) -> str:
    """Return the least and the greatest ratio of a layer, or a dash for a single layer."""
    return f"{sums['low']:.2f} to {sums['high']:.2f}" if sums["layers"] > 1 else "–"


def _synthetic_by_rows(run: Run, frame: pd.DataFrame) -> str:
    """Return the section on synthetic inputs: a row for each number of rows, a column for each input."""
    short = frame[(frame["layer"] < 0) & (frame["rows"] < frame["rows"].max())]
    short = short.assign(column=[_column(case, kind) for case, kind in zip(short["case"], short["input"], strict=True)])
    grid = short.pivot_table(index="rows", columns="column", values="ratio")
    grid = grid[sorted(grid.columns, key=_nnz)]
    frequent = grid.notna().sum() > OFTEN
    cold, graph = short.loc[short["weights"] == "cold", "rows"].max(), short.loc[short["graph"], "rows"].max()
    return (
        "## Synthetic inputs by rows a call, × dense\n\n"
        + _setting(run, _span(short["rows"]), _dtype(short), short["repeats"])
        + f"Up to {cold:,} rows the weights are cold; up to {graph:,} rows calls are replayed from a CUDA graph. The "
        "number after an input is the mean nnz that it was drawn for.\n\n"
        + _grid(grid.loc[:, frequent])
        + "\n"
        + _grid(grid.loc[:, ~frequent].dropna(how="all"))
    )


def _grid(grid: pd.DataFrame) -> str:
    lines = [[f"{rows:,}", *(number(value) for value in values)] for rows, *values in grid.itertuples()]
    return table(("rows", *grid.columns), lines)


def _column(case: str, kind: str) -> str:
    """Return the heading of a case: its input, and the nnz it was drawn for where its name has one."""
    nnz = case.partition(" nnz ")[2].partition(",")[0]
    return f"{INPUTS[kind]} {nnz}".strip()


def _nnz(heading: str) -> tuple[str, int]:
    """Return the key that sorts headings by input, then by nnz."""
    name, _, number = heading.rpartition(" ")
    return (name, int(number)) if number.isdigit() else (heading, 0)


def _other_kernels(run: Run, frame: pd.DataFrame) -> str:
    """Return the section on the kernels that ran beside the run's own, on the layers of the model; empty for none."""
    others = frame[frame["kernel"] != run.manifest.kernel["name"]]
    if others.empty:
        return ""
    lines = [
        [f"`{kernel}`", INPUTS[s["input"]], f"**{s['ratio']:.2f}**", _by_layer(s)]
        for kernel, group in others.groupby("kernel")
        for s in layer_sums(group).to_dict("records")
    ]
    return (
        "## Other kernels beside it\n\n"
        + _setting(run, _span(others["rows"]), _dtype(others), others["repeats"])
        + "\n"
        + table(("kernel", "input", "× dense", "by layer"), lines)
    )
