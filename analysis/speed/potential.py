"""Which layer is worth speeding up: what each layer's FFN has gained, and what it could still gain, in the whole pass.

    layer_potential(run)   a row a layer: milliseconds dense, sparse and at the ceiling, and why one is left with more

The ceiling of a layer is its gate product alone: no sparse kernel is spared it. It is timed as torch multiplies it; on
a processor where the whole sparse FFN takes less than that, it bounds nothing. All times are of one batch of as many
rows as `speedup` has. Cost: that of `layer_gains`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.memo import memoized
from twell.analysis.speed.contribution import BLOCK, layer_gains
from twell.analysis.speed.ffn_speedup import numbered
from twell.analysis.speed.speedup import LEAST_BATCHES, mean_interval, model_speedup, of_one_size, pairs, sizes, speedup
from twell.analysis.statistics import distinct, grouped_median
from twell.workbench.errors import Missing
from twell.workbench.run.manifest import RECORDING
from twell.workbench.run.store import Run

FAR = 2.0  # times the median layer from which a layer's nnz, or its union, is named as the reason


@memoized
def layer_potential(run: Run) -> pd.DataFrame:
    """Return what each layer's FFN has gained and could still gain; a row a layer. Columns:

    layer; nnz_mean; dense_ms, sparse_ms, gate_ms (of one batch); saved_ms (dense less sparse); left_ms (sparse less the
    gate product, at least 0); left_share (of the sparse pass); behind_low, behind_high (ms by which less is left than
    in the layer with most: 95 % interval over turns, as `ffn_speedup` has them; NaN under three); reason (why so much
    is left).

    `attrs`: dense_ms, sparse_ms (the whole pass, scaled to as many rows), attention_ms (all layers; NaN where not
    timed, or longer than the pass), turns (that every layer had), beaten (in how many layers the gate product took
    longer than the sparse FFN), comparable, note. Missing where the whole model or the gate product was not timed.
    """
    frame, whole = speedup(run), model_speedup(run)
    if frame["gate_us"].isna().any():
        raise Missing(f"{run.name} did not time the gate product by itself, which bounds what a layer can gain.")
    rows = sizes(run)
    scale = rows["ffn_sparse"] / rows["model_dense"] / 1000
    milliseconds = {name: frame[f"{name}_us"].to_numpy() / 1000 for name in ("dense", "sparse", "gate")}
    dense, sparse, gate = milliseconds.values()
    left = np.maximum(sparse - gate, 0.0)
    passes = {name: float(whole[f"{name}_us"]) * scale for name in ("dense", "sparse")}
    table = pd.DataFrame({"layer": frame["layer"], "nnz_mean": frame["nnz_mean"]})
    table = table.assign(**{f"{name}_ms": values for name, values in milliseconds.items()})
    table = table.assign(saved_ms=dense - sparse, left_ms=left, left_share=left / passes["sparse"])
    low, high = _behind(run, int(left.argmax()))
    table = table.assign(behind_low=low, behind_high=high, reason=_reasons(run, frame))
    attention = of_one_size(run).query("op == 'attention' and layer >= 0")
    medians = grouped_median(attention["microseconds"].to_numpy(), attention["layer"].to_numpy())
    attention_ms = float(np.nansum(medians)) / 1000 if len(attention) else np.nan
    if attention_ms > passes["sparse"]:  # a part cannot take longer than the whole: other work was in its way
        attention_ms = np.nan
    table.attrs = {f"{name}_ms": value for name, value in passes.items()} | {
        "attention_ms": attention_ms,
        "turns": int(frame["repeats"].min()),
        "beaten": int((gate > sparse).sum()),
        "comparable": whole["comparable"],
        "note": whole["note"],
    }
    return table


def _behind(run: Run, first: int) -> tuple[NDArray, NDArray]:
    """Return the ends of behind_low, behind_high of `layer_potential` [layer]; first: index of the layer with most."""
    layer, _, (_, sparse, gate, _) = pairs(run)
    turns = int(np.bincount(distinct(layer)[1]).min())
    left = np.stack([(sparse - gate)[layer == n][:turns] for n in np.unique(layer)]) / 1000  # layer, turn
    ends = [mean_interval(behind[~np.isnan(behind)])[1:] for behind in left[first] - left]
    low, high = np.transpose(ends)
    return low, high


def _reasons(run: Run, frame: pd.DataFrame) -> list[str]:
    """Return for each layer why the time beside its gate product is what it is, as a clause. frame: its `speedup`"""
    if run.manifest.status == RECORDING:  # its unions would have to be summarised with every part
        nnz, union = frame["nnz_mean"].to_numpy(), np.full(len(frame), np.nan)
    else:
        gains = layer_gains(run)
        nnz, union = gains["nnz_mean"].to_numpy(), gains["union"].to_numpy()
    usual, usual_union = np.median(nnz), np.nanmedian(union) if not np.isnan(union).all() else np.nan
    reasons = []
    for fired, different in zip(nnz, union, strict=True):
        if fired > FAR * usual:
            reasons.append(
                f"it fires {fired:,.0f} neurons a token in timed batches, {fired / usual:.1f} times the median layer"
            )
        elif different > FAR * usual_union:
            more = f"{different / usual_union:.1f} times the median layer"
            reasons.append(f"{BLOCK} of its tokens fire {different:,.0f} different neurons, {more}")
        else:
            beside = ": it fires about as many neurons as the others" if len(frame) > 1 else ""
            reasons.append(f"it pays the fixed cost of every layer{beside}")
    return reasons


def _milliseconds(time: float) -> str:
    """Return a time in ms to three digits, or from a second on with every one of them: 0.38 ms, 12,340 ms."""
    return f"{time:,.0f} ms" if time >= 999.5 else f"{time:.3g} ms"


def most_to_gain(table: pd.DataFrame) -> str:
    """Return a sentence that names the layer of `layer_potential` with most to gain, how much, and why; and which
    others might have more, as far as their turns tell."""
    first = table.loc[table["left_ms"].idxmax()]
    name = f"layer {first['layer']:.0f}"
    amount = f"{_milliseconds(first['left_ms'])}, {100 * first['left_share']:.2g} % of the pass"
    if len(table) == 1:
        return f"The only layer that was timed could gain {amount}, because {first['reason']}."
    gain = f"{name} has most to gain: {amount}, because {first['reason']}."
    others = table[table["layer"] != first["layer"]]
    alike = [int(layer) for layer in others.loc[~(others["behind_low"] > 0), "layer"]]
    if not alike:
        return gain[0].upper() + gain[1:]
    if table.attrs["turns"] < LEAST_BATCHES:
        return f"There are too few timings to be sure, but it seems that {gain}"
    return (
        f"{gain[0].upper()}{gain[1:]} That is not sure: by {table.attrs['turns']} timed batches, {numbered(alike)} may "
        "have as much to gain."
    )


def worth_speeding_up(table: pd.DataFrame) -> str:
    """Return `most_to_gain`, and what all layers together could gain; or that their gate products do not tell."""
    if 2 * (beaten := table.attrs["beaten"]) > len(table):
        return (
            f"{most_to_gain(table)} That is beside the gate product, which alone took longer than the whole sparse FFN "
            f"in {beaten} of {len(table)} layers: on this device it does not bound what they could gain."
        )
    left, attention = float(table["left_ms"].sum()), table.attrs["attention_ms"]
    if len(table) == 1:
        return most_to_gain(table)
    sentence = (
        f"{most_to_gain(table)} All layers together could gain {_milliseconds(left)} "
        f"({100 * left / table.attrs['sparse_ms']:.2g} %)"
    )
    more = f"; attention takes {_milliseconds(attention)}, more than they could gain" if attention > left else ""
    return f"{sentence}{more}."
