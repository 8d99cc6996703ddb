"""The section of the page of benchmarks on whole models: what `twell bench --whole` measured of a run's model.

Cost: 30 ms.
"""

from __future__ import annotations

import pandas as pd

from twell.analysis.exports.bench_cases import WHOLE, cases, layer_sums
from twell.analysis.exports.markdown import number, percent, table
from twell.analysis.overview import overview
from twell.workbench.run.store import Run

SIDES = ("dense", "sparse")
HEAD = ("case", "operation", "mean nnz", "dense, tokens/s", "sparse, tokens/s", "× dense", "energy a token")
LEGEND = """
Tokens are those read in forward passes, else those generated. In brackets: the slowest and the fastest turn. × dense is
the time of the whole model with dense FFNs over that with sparse ones, which count; it is bold where the turns of the
two sides do not overlap. Elsewhere they do not tell which side is faster.

- *Whole*: a forward pass without the head. *Compiled*: both sides by torch.compile, layer by layer.
- *Generate*: prompts and generated tokens in transformers' own loop. The host sets its pace, so its turns differ much.
  *Graphed*: the same with fixed addresses, steps compiled and replayed from a CUDA graph.
- *Step*: one such step, a token of each sequence.
"""


def section(run: Run) -> str:
    """Return the section as Markdown. run: one with whole models in its `bench` table, and layers on text."""
    manifest, model, facts = run.manifest, run.manifest.model, overview(run)
    bench = run.frame("bench")
    bench = bench[(bench["d_ff"] == run.d_ff) & bench["op"].str.match(WHOLE)]
    (ffn,) = layer_sums(cases(run)).to_dict("records")
    return (
        f"## A whole model of {run.layers} layers: forward passes, generation, steps of decoding\n\n"
        f"The recorded run `{run.name}`: {manifest.device}, {model['family']}, {run.layers} layers of "
        f"{model['d_model']} × {run.d_ff}, {model['parameters']:,} parameters, {manifest.dtype}, kernel "
        f"`{manifest.kernel['name']}`, trained for a minute by the commands in [ship.py](recorded/ship.py): mean nnz "
        f"{facts['nnz_mean']:.1f}, loss {facts['loss']:.2f} nats a token on held-out text. Recorded "
        f"{manifest.created[:10]} with torch {manifest.versions['torch']}, commit `{bench['commit'].iloc[0]}`.\n\n"
        f"Its FFNs alone, {ffn['layers']} layers on text at {ffn['rows']:,} rows: **{ffn['ratio']:.2f} ×** "
        f"({ffn['low']:.2f} to {ffn['high']:.2f} by layer; medians of {ffn['repeats']:.0f} turns or more). The whole "
        f"model, medians of {bench['repeats'].min()} turns:\n\n" + table(HEAD, whole_models(bench)) + LEGEND
    )


def whole_models(bench: pd.DataFrame) -> list[list[str]]:
    """Return the rows of the table, one an operation of a case. bench: rows of `bench` of whole models."""
    side = bench["op"].str.extract("_(dense|sparse)")[0].rename("side")
    operation = bench["op"].str.replace("_dense|_sparse", "", regex=True).rename("operation")
    keys = [bench["case"], operation, bench["metric"], side]
    figures = bench.groupby(keys, sort=False)[["value", "low", "high"]].median().unstack(["metric", "side"])
    nnz, rows = bench.groupby("case")["nnz_mean"].first(), []
    for (case, name), row in figures.iterrows():
        value, low, high = (row[each] for each in ("value", "low", "high"))
        time, least, most = (each["microseconds"] for each in (value, low, high))
        ratio = f"{time['dense'] / time['sparse']:.2f}"
        apart = max(least) > min(most)  # the slower side's fastest turn took longer than the other's slowest
        rates = (_rate(*(each["tokens_per_second", of] for each in (value, low, high))) for of in SIDES)
        energy = [value.get(("millijoules_per_token", of), float("nan")) for of in SIDES]
        saved = "–" if pd.isna(energy).any() else percent(energy[1] / energy[0] - 1, 0, "+")
        shown = f"**{ratio}**" if apart else ratio
        about = case.removeprefix("whole model").lstrip(" ,")
        rows.append([about, name.replace("_", ", "), number(nnz[case], 1), *rates, shown, saved])
    return rows


def _rate(value: float, low: float, high: float) -> str:
    return f"{value:,.0f} ({low:,.0f} to {high:,.0f})"
