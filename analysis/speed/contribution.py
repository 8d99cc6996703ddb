"""Contribution: what each layer adds to the model's speed, what that follows, and which layers do not follow.

    layer_gains(run)         a row a layer: speedup, contribution, the trend, how far off it, and the likely cause
    gain_correlations(run)   nnz and union against FFN speedup and against contribution, with interval and p
    model_time(run)          where the model's time goes, dense and sparse

The trend is a straight line of the FFN's time (sparse over dense) on mean nnz, by the median of slopes (Theil, 1950;
Sen, 1968), so that single layers do not bend it. Cost: 20 ms (about a second for exact p with 11 layers).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import by_layer
from twell.analysis.speed.speedup import correlate, model_speedup, of_one_size, sizes, speedup
from twell.analysis.speed.tile_overflow import tile_audit
from twell.analysis.statistics import grouped_median
from twell.analysis.summaries.built import with_damage_note
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BLOCK = 128  # the unions that speed is compared with
OFF = 0.10  # a speedup further than this from the trend is given a cause
OVERFLOW = 0.001  # share of tokens past their slots, above which overflow costs time
UNEVEN = 20.0  # nnz of the fullest token over the mean, above which other rows wait for it
UNLIKE = 1.25  # union over the one that nnz suggests, above which tokens share few neurons
NEAR = 0.8  # share of the ceiling, above which fixed cost is most of the time


def layer_gains(run: Run) -> pd.DataFrame:
    """Return what each layer adds to the model's speed, and what that follows; a row a layer. Columns:

    layer; nnz_mean; union (different neurons in 128 consecutive tokens, mean; empty where not recorded); dense_us,
    sparse_us (µs, medians); speedup; contribution (share of the dense model's time that the layer's FFN saves; empty
    where the whole model was not timed); ceiling (speedup if all but the gate product were free; empty where the gate
    was not timed by itself, or took longer so than the whole sparse FFN); expected (speedup by the trend over layers;
    empty under 4 layers); off (speedup / expected - 1); cause (where off is past ±10 %); repeats (batches that were
    timed); kernel.
    """
    frame = speedup(run)
    layer, nnz, gained, dense, sparse, gate = (
        frame[name].to_numpy() for name in ("layer", "nnz_mean", "speedup", "dense_us", "sparse_us", "gate_us")
    )
    union, line = _unions(run)[layer], _line(nnz, 1 / gained)
    expected = 1 / np.where(line > 0, line, np.nan)
    added = {
        "union": union,
        "contribution": (dense - sparse) * _row_ratio(run)("ffn_dense") / _dense_model_us(run),
        "ceiling": np.where(gate < sparse, dense / gate, np.nan),
        "expected": expected,
        "off": gained / expected - 1,
    }
    activity, over = by_layer(run)[["max", "mean", "sparsity"]].iloc[layer].to_dict("list"), _overflow(run)[layer]
    facts = {"speedup": gained, "different": union / _line(nnz, union), "over": over, **added, **activity}
    added["cause"] = [_cause(dict(zip(facts, row, strict=True))) for row in zip(*facts.values(), strict=True)]
    names = "layer nnz_mean union dense_us sparse_us speedup contribution ceiling expected off cause repeats kernel"
    return with_damage_note(frame.assign(**added)[names.split()], run, "unions", "tiles")


def _unions(run: Run) -> NDArray:
    """Return the mean number of different neurons in a block, by layer; NaN where it was not counted."""
    try:
        rows = open_summaries(run).columns("unions", "layer", "block", "neurons", "blocks")
    except Missing:
        return np.full(run.layers, np.nan)
    selected = rows["block"] == BLOCK
    layer, neurons, blocks = (rows[name][selected] for name in ("layer", "neurons", "blocks"))
    with np.errstate(invalid="ignore"):
        return np.bincount(layer, neurons * blocks, run.layers) / np.bincount(layer, blocks, run.layers)


def _dense_model_us(run: Run) -> float:
    """Return the dense model's time in µs; NaN where it was not timed."""
    try:
        return float(model_speedup(run)["dense_us"])
    except Missing:
        return np.nan


def _row_ratio(run: Run) -> Callable[[str], float]:
    """Return a function that gives, by an operation's name, the rows of a timed whole-model pass over the rows that the
    operation's times are of; NaN if either is untimed."""
    rows = sizes(run)
    return lambda op: rows.get("model_dense", np.nan) / rows.get(op, np.nan)


def _line(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the height at each x of the robust line through the points (x, y) [layer]; NaN with fewer than 4."""
    if len(x) < 4:
        return np.full(len(x), np.nan)
    i, j = np.triu_indices(len(x), 1)
    differ = x[i] != x[j]
    slope = np.median((y[i] - y[j])[differ] / (x[i] - x[j])[differ]) if differ.any() else 0.0
    return np.median(y - slope * x) + slope * x


def _overflow(run: Run) -> NDArray:
    """Return the share of tokens past the slots of a tile in the run's own layout, by layer; 0 where no tiles were
    counted."""
    share = np.zeros(run.layers)
    try:
        rows = tile_audit(run)
    except Missing:
        return share
    rows = rows[rows["in_use"]]
    share[rows["layer"]] = rows["rows_over_share"]
    return share


def _cause(row: dict[str, float]) -> str:
    """Return the likeliest cause, among those that the run can show, of a layer's distance from the trend; "" for a
    layer near it. row: the layer's columns."""
    if not abs(row["off"]) > OFF:
        return ""
    if row["off"] > 0:
        shared = row["different"] < 1 / UNLIKE
        return "faster than its nnz says" + (
            ": its tokens share more neurons than those of other layers" if shared else ""
        )
    if row["different"] > UNLIKE:
        return (
            f"little shared: a block of {BLOCK} asks for {row['different']:.1f} times the neurons that its nnz suggests"
        )
    if row["over"] > OVERFLOW:
        return f"overflow: {100 * row['over']:.1f} % of tokens exceed the slots of a tile"
    if row["max"] > UNEVEN * row["mean"]:
        return f"imbalance: the fullest token fires {row['max'] / row['mean']:.0f} times the mean"
    if row["speedup"] > NEAR * row["ceiling"]:
        return "fixed cost: little is left beside the gate product"
    if row["sparsity"] < 0.9:
        return f"little to skip: {100 * row['sparsity']:.0f} % sparse"
    return "none that the run shows"


def gain_correlations(run: Run) -> pd.DataFrame:
    """Correlate nnz and union with speedup and contribution over layers; a row a pair that the run has. Columns: of
    (nnz, union); with (speedup, contribution); pearson, low, high (95 %), spearman, n (layers), p, method. Missing
    where there is no pair, or fewer than 4 layers."""
    frame = layer_gains(run)
    if len(frame) < 4:
        raise Missing(f"A correlation over layers needs at least 4 of them, {run.name} timed {len(frame)}.")
    rows = []
    for of, source in (("nnz", "nnz_mean"), ("union", "union")):
        for gain in ("speedup", "contribution"):
            pair = np.stack([frame[source].to_numpy(), frame[gain].to_numpy()], axis=1)
            pair = pair[~np.isnan(pair).any(axis=1)]
            if len(pair) >= 4 and (np.ptp(pair, axis=0) > 0).all():
                rows.append({"of": of, "with": gain, **correlate(pair[:, 0], pair[:, 1])})
    if not rows:
        raise Missing(f"Every layer of {run.name} has the same nnz or the same speedup: there is nothing to correlate.")
    correlations = pd.DataFrame(rows)
    correlations.attrs = frame.attrs
    return correlations


def model_time(run: Run) -> pd.DataFrame:
    """Return where the time of a forward pass goes. Columns: part (ffn, attention, rest, whole); dense_us, sparse_us
    (µs: sums over layers of medians over batches); dense_share, sparse_share (of the whole); speedup.

    `rest` is the whole less what was timed: norms, embedding, the output product, launches. `attrs["ceiling"]` is the
    model's speedup if every FFN took its gate product alone (None where `layer_gains` has no ceiling of a layer).
    Missing where the whole model was not timed.
    """
    model, layers = model_speedup(run), speedup(run)
    rows, row_ratio = of_one_size(run), _row_ratio(run)
    rows = rows[rows["op"] == "attention"]
    attention = np.nan
    if len(rows):
        medians = grouped_median(rows["microseconds"].to_numpy(), rows["layer"].to_numpy())
        attention = float(np.nansum(medians) * row_ratio("attention"))
    ffn = row_ratio("ffn_dense")
    times = {
        "ffn": (ffn * layers["dense_us"].sum(), ffn * layers["sparse_us"].sum()),
        "attention": (attention, attention),
    }
    dense, sparse = model["dense_us"], model["sparse_us"]
    timed = [np.nansum([value[index] for value in times.values()]) for index in (0, 1)]
    times |= {"rest": (dense - timed[0], sparse - timed[1]), "whole": (dense, sparse)}
    frame = pd.DataFrame([{"part": name, "dense_us": d, "sparse_us": s} for name, (d, s) in times.items()])
    frame["dense_share"], frame["sparse_share"] = frame["dense_us"] / dense, frame["sparse_us"] / sparse
    frame["speedup"] = frame["dense_us"] / frame["sparse_us"]
    bound = layers["gate_us"].where(layers["gate_us"] < layers["sparse_us"])
    saved = ffn * float((layers["dense_us"] - bound).sum(min_count=len(layers), skipna=False))
    frame.attrs = {
        "comparable": model["comparable"],
        "note": model["note"],
        "ceiling": dense / (dense - saved) if saved == saved else None,
    }
    return frame
