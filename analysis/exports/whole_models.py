"""The section of the page of benchmarks on whole models: what `twell bench --whole` measured of a run's model.

Cost: 30 ms.
"""

from __future__ import annotations

import pandas as pd

from twell.analysis.exports.bench_cases import cases, layer_sums
from twell.analysis.exports.markdown import number, percent, table
from twell.analysis.overview import overview
from twell.analysis.speed.whole_model import SIDES, meanings, whole_model
from twell.workbench.run.store import Run

HEAD = ("case", "operation", "mean nnz", "dense, tokens/s", "sparse, tokens/s", "× dense", "energy a token")
LEGEND = """
Tokens are those read in forward passes, else those generated; mean nnz is of a forward pass, in decoding of that over
the prompts. In brackets: the slowest and the fastest turn. × dense is the time of the whole model with dense FFNs over
that with sparse ones, which count; it is bold where the turns of the two sides do not overlap. Elsewhere they do not
tell which side is faster.

"""


def section(run: Run) -> str:
    """Return the section as Markdown. run: one with whole models in its `bench` table, and layers on text."""
    manifest, model, facts = run.manifest, run.manifest.model, overview(run)
    frame = whole_model(run)
    (ffn,) = layer_sums(cases(run)).to_dict("records")
    return (
        f"## A whole model of {run.layers} layers: forward passes, generation, steps of decoding\n\n"
        f"The recorded run `{run.name}`: {manifest.device}, {model['family']}, {run.layers} layers of "
        f"{model['d_model']} × {run.d_ff}, {model['parameters']:,} parameters, {manifest.dtype}, kernel "
        f"`{manifest.kernel['name']}`, trained for a minute by the commands in [ship.py](recorded/ship.py): mean nnz "
        f"{facts['nnz_mean']:.1f}, loss {facts['loss']:.2f} nats a token on held-out text. Recorded "
        f"{manifest.created[:10]} with torch {manifest.versions['torch']}, commit `{frame['commit'].iloc[0]}`.\n\n"
        f"Its FFNs alone, {ffn['layers']} layers on text at {ffn['rows']:,} rows: **{ffn['ratio']:.2f} ×** "
        f"({ffn['low']:.2f} to {ffn['high']:.2f} by layer; medians of {ffn['repeats']:.0f} turns or more). The whole "
        f"model, medians of {frame['repeats'].min()} turns:\n\n{table(HEAD, whole_models(frame))}{LEGEND}"
        + "".join(f"- *{name.capitalize()}*: {meaning}\n" for name, meaning in meanings(frame).items())
    )


def whole_models(frame: pd.DataFrame) -> list[list[str]]:
    """Return the rows of the table, one an operation of a case. frame: as `whole_model` returns it."""
    rows = []
    for row in frame.to_dict("records"):
        ratio = f"{row['speedup']:.2f}"
        saved = "–" if pd.isna(row["energy_change"]) else percent(row["energy_change"], 0, "+")
        rates = (_rate(*(row[f"{side}_tokens{end}"] for end in ("", "_low", "_high"))) for side in SIDES)
        shown = f"**{ratio}**" if row["apart"] else ratio
        rows.append([row["case"], row["operation"], number(row["nnz_mean"], 1), *rates, shown, saved])
    return rows


def _rate(value: float, low: float, high: float) -> str:
    return f"{value:,.0f} ({low:,.0f} to {high:,.0f})"
