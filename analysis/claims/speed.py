"""Claims about speed and energy. `findings` runs every check of CLAIMS.

To add a claim, write its check here (`claim` says what it returns) and list it in CLAIMS at the end of this file. Only
times of a fast kernel are compared: the reference kernel is there to check results, so no speed is claimed from it. A
speedup is said of the layers and batches that were timed, with an interval over batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import by_layer
from twell.analysis.claims.claim import (
    BILLION,
    FAILS,
    HOLDS,
    IN_PART,
    LARGE,
    PAPER,
    PAPER_SPEED,
    REVERSED,
    UNTOLD,
    Answer,
    Claim,
    between,
    by_interval,
    refuse_incomparable,
)
from twell.analysis.comparisons import widened
from twell.analysis.speed.contribution import gain_correlations, layer_gains
from twell.analysis.speed.ffn_speedup import conditions
from twell.analysis.speed.speedup import BLOCKS, LEAST_BATCHES, geometric, model_speedup, pairs, speedup
from twell.analysis.speed.whole_model import bench_rows, pass_on_text
from twell.workbench.errors import Missing
from twell.workbench.run.schema import WHOLE_MODEL
from twell.workbench.run.store import Run

STRONG = -0.9  # Pearson correlation at or below which speed "follows" nnz
NOT_SPARSE = 0.95  # sparsity below which a layer counts as "not sparse"
LEAST_LAYERS = 2  # that are not sparse
ENERGY = 0.118  # of a token's energy that is saved, at least
CLOSE = 0.05  # how far apart two speedups are the same
LEAST_GAIN = 1.17  # dense over sparse time of the whole pass, of the first
LARGEST = 0.30  # gain of the second report


@dataclass(frozen=True)
class Pass:
    """The whole forward pass, dense over sparse time. low, high: 95 %, NaN where not known.

    over: what was repeated, in the plural; how: what the ratio is of, in words; energy: a token's, sparse over dense,
    NaN where not known, of so many readings; clause: what is said of the time that was saved, or nothing
    """

    ratio: float
    low: float
    high: float
    repeats: int
    over: str
    how: str
    device: str
    where: str
    energy: float
    readings: int
    clause: str = ""


def _of_size(run: Run, least: float, words: str) -> Pass:
    """Return `timed_pass`. Raise Missing for it, and if the model is smaller than those that the claim is about."""
    timed = timed_pass(run)
    parameters = run.manifest.model.get("parameters") or 0
    if parameters < least:
        raise Missing(
            f"The claim is of models of {words}; this one has {parameters:,}, and runs {timed.ratio:.2f} times as fast "
            f"as dense on {timed.device}."
        )
    return timed


def timed_pass(run: Run) -> Pass:
    """Return how the whole pass was timed: over batches of the capture, or by the bench where those were too few.

    Raise Missing if it was not, or if the reference kernel ran.
    """
    try:
        batches = model_speedup(run)
    except Missing:
        batches = None
    if batches is None or np.isnan(batches["low"]):
        turns = pass_on_text(run)
        if turns is not None and turns["kernel"] != "reference":
            how = f"ratio of medians of {turns['repeats']} turns a side; kernel {turns['kernel']}"
            bounds = turns["mean"], turns["mean_low"], turns["mean_high"]
            return Pass(*bounds, turns["repeats"], "turns", how, turns["device"], turns["where"], turns["energy"], 1)
    timing = model_speedup(run) if batches is None else batches  # the former says what is missing
    refuse_incomparable(timing["comparable"], timing["note"])
    how = f"geometric mean of {int(timing['repeats'])} batches; kernel {timing['kernel']}"
    bounds, readings = (timing["speedup"], timing["low"], timing["high"]), int(timing["energy_repeats"])
    where, clause = conditions(run, WHOLE_MODEL[1]), _unexplained(run, timing)
    return Pass(
        *bounds, int(timing["repeats"]), "batches", how, run.manifest.device, where, timing["energy"], readings, clause
    )


def faster(run: Run) -> Answer:
    """Check that the whole forward pass runs at least 1.17 times as fast as dense."""
    timed = _of_size(run, LARGE, "0.5 B parameters and more")
    if np.isnan(timed.low):
        count = "1 batch was" if timed.repeats == 1 else f"{timed.repeats} batches were"
        raise Missing(f"{count} timed whole, {timed.ratio:.2f} times as fast: an interval takes 3.")
    return Answer(
        f"the whole forward pass runs {timed.ratio:.2f} times as fast, on {timed.device}{timed.clause}",
        f"{timed.how}, {timed.where}",
        by_interval(timed.low, timed.high, LEAST_GAIN, 1),
        f"the interval over {timed.over} lies above {LEAST_GAIN:g} times dense; above 1: in part; below 1: reversed; "
        f"below {LEAST_GAIN:g}: does not hold",
        between(timed.low, timed.high),
    )


def _unexplained(run: Run, timing: dict[str, float]) -> str:
    """Return a clause with how much of the time saved the layers that were timed explain; empty if they were not."""
    share = layer_gains(run)["contribution"].sum(min_count=1)
    saved = 1 - timing["sparse_us"] / timing["dense_us"]
    if np.isnan(share) or saved <= 0:
        return ""
    return f"; the FFNs that were timed save {100 * share:.0f} % of its time, of {100 * saved:.0f} % saved"


def up_to_thirty(run: Run) -> Answer:
    """Check that the whole forward pass of a model of 1.5 B parameters runs at least 1.3 times as fast as dense."""
    timed = _of_size(run, BILLION, "1.5 B parameters")
    if np.isnan(timed.low):
        raise Missing(f"It runs {timed.ratio:.2f} times as fast: an interval takes {LEAST_BATCHES} batches.")
    return Answer(
        f"the whole forward pass runs {timed.ratio:.2f} times as fast, on {timed.device}",
        f"{timed.how.partition(';')[0]}; {timed.where}",
        by_interval(timed.low, timed.high, 1 + LARGEST, 1),
        f"the interval lies above {1 + LARGEST:g} times dense; above 1: in part; below 1: reversed; below "
        f"{1 + LARGEST:g}: does not hold",
        between(timed.low, timed.high),
    )


def energy(run: Run) -> Answer:
    """Check that a token takes at least 11.8 % less energy than dense."""
    timed = _of_size(run, LARGE, "0.5 B parameters and more")
    if np.isnan(timed.energy):
        raise Missing("The device reported no power while the model was timed.")
    n, saved = timed.readings, 1 - timed.energy
    of = ("batch" if n == 1 else "batches") if timed.over == "batches" else "window"
    return Answer(
        f"a token takes {100 * abs(saved):.0f} % {'more' if saved < 0 else 'less'} energy",
        f"power times time, sparse over dense, n = {n} {of} with a reading: {timed.energy:.2f}; {timed.where}",
        HOLDS if saved >= ENERGY else IN_PART if saved > 0 else REVERSED if saved < 0 else FAILS,
        f"at least {100 * ENERGY:g} % less; less at all: in part; more: reversed",
        "none: one reading" if n == 1 else f"none: {n} readings, the median",
    )


def follows_nnz(run: Run) -> Answer:
    """Check that mean nnz and what a layer adds to the model's speed correlate at -0.9 or below over layers."""
    rows = gain_correlations(run)
    refuse_incomparable(rows.attrs["comparable"], rows.attrs["note"])
    pairs = {row["with"]: row for row in rows[rows["of"] == "nnz"].to_dict("records")}
    if not pairs:
        raise Missing("Every layer has the same nnz or the same speedup: there is nothing to correlate.")
    of_unions = [f"{row['pearson']:.3f}" for row in rows[rows["of"] == "union"].to_dict("records")]
    gain = "contribution" if "contribution" in pairs else "speedup"
    chosen, names = (
        pairs[gain],
        {"contribution": "what a layer adds to the model's speed", "speedup": "a layer's FFN speedup"},
    )
    layers = layer_gains(run).dropna(subset=[gain])
    x, y = layers["nnz_mean"].to_numpy(), layers[gain].to_numpy()
    without = [np.corrcoef(np.delete(x, i), np.delete(y, i))[0, 1] for i in range(len(x))]
    low, high = min(without), max(without)
    pearson = chosen["pearson"]
    verdict = HOLDS if max(pearson, high) <= STRONG else IN_PART if low <= STRONG else REVERSED if low > 0 else FAILS
    return Answer(
        "mean nnz against "
        + ", ".join(f"{names[gain]}: Pearson {row['pearson']:.3f}" for gain, row in pairs.items())
        + (f"; the different neurons of 128 tokens against the same: {', '.join(of_unions)}" if of_unions else ""),
        f"Pearson of {names[gain]}, n = {chosen['n']} layers, p = {chosen['p']:.2g} ({chosen['method']}); without an "
        f"interval, Spearman {chosen['spearman']:.3f}; {conditions(run)}",
        verdict,
        f"Pearson at or below {STRONG:g}, of the contribution where the whole model was timed, whichever layer is left "
        "out; left out some: in part; above 0 whichever is left out: reversed",
        f"Pearson {low:.3f} to {high:.3f}, each layer left out once: layers are no sample",
    )


def slow_where_dense(run: Run) -> Answer:
    """Check that the layers under 95 % sparsity run slower than dense."""
    rows = speedup(run)
    refuse_incomparable(rows.attrs["comparable"], rows.attrs["note"])
    bound = f"under {100 * NOT_SPARSE:.0f} % sparsity"
    sparsity = by_layer(run).set_index("layer")["sparsity"]
    layers = [layer for layer in rows["layer"] if sparsity[layer] < NOT_SPARSE]
    if len(layers) < LEAST_LAYERS:
        raise Missing(
            f"{len(layers)} of the {len(rows)} layers that were timed {'is' if len(layers) == 1 else 'are'} {bound}: "
            f"it takes {LEAST_LAYERS}."
        )
    layer_of, _, (dense, sparse, *_) = pairs(run)
    ratios = {layer: geometric((dense / sparse)[layer_of == layer]) for layer in layers}
    if any(np.isnan(low) for _, low, _ in ratios.values()):
        raise Missing(f"A layer {bound} was timed in under {LEAST_BATCHES} batches: no interval.")
    slower, faster = (sum(test(each) for each in ratios.values()) for test in (lambda e: e[2] < 1, lambda e: e[1] > 1))
    kernels = ", ".join(sorted(set(rows["kernel"])))
    return Answer(
        ", ".join(
            f"layer {layer}, {100 * sparsity[layer]:.1f} % sparse, runs {each[0]:.2f} times as fast as dense"
            for layer, each in ratios.items()
        ),
        f"{slower} of {len(ratios)} layers {bound} are slower than dense for certain, {faster} faster; kernel "
        f"{kernels}, {conditions(run)}",
        _verdict_slower(np.array([*ratios.values()]), np.minimum(np.bincount(layer_of)[layers], BLOCKS) - 1),
        f"the interval of every layer {bound} lies below 1; of some, by intervals that hold together: in part; all "
        "above 1: reversed; some above 1, by such intervals, and none below: does not hold",
        ", ".join(f"layer {layer} {between(low, high)}" for layer, (_, low, high) in ratios.items()),
    )


def _verdict_slower(ratios: NDArray, degrees: NDArray) -> str:
    """Return the verdict on the claim that layers are slower than dense. ratios [layer, 3]: dense over sparse, and the
    ends of its interval; degrees [layer]: of freedom of that"""
    if (ratios[:, 2] < 1).all():
        return HOLDS
    if (ratios[:, 1] > 1).all():
        return REVERSED
    middle, low, _ = np.log(ratios).T
    reach = (middle - low) * widened(degrees, len(ratios))
    return IN_PART if (middle < -reach).any() else FAILS if (middle > reach).any() else UNTOLD


def text_and_uniform(run: Run) -> Answer:
    """Check that the FFNs run as fast on uniform random ids as on text, in the run's bench."""
    if not run.has("bench"):
        raise Missing("It holds no bench: `twell bench MODEL --out RUN` times text and uniform ids side by side.")
    gains = _bench_gains(run)
    most = gains.index.get_level_values("rows").max()
    largest = gains.xs(most, level="rows")
    mean = np.exp(np.log(largest).mean())
    ratio = mean["gain", "uniform"] / mean["gain", "text"]
    layers = [int(layer) for layer in largest.index]
    where = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} of {run.layers}"
    low, high = mean["low", "uniform"] / mean["high", "text"], mean["high", "uniform"] / mean["low", "text"]
    return Answer(
        f"the FFN of {where} gains {ratio:.2f} times as much on uniform ids as on text: {mean['gain', 'uniform']:.2f} "
        f"times as fast as dense against {mean['gain', 'text']:.2f}",
        f"{'geometric mean, ' * (len(largest) > 1)}{most:,} rows a call, {run.manifest.dtype}, on "
        f"{run.manifest.device}; of {where} only",
        HOLDS if low >= 1 - CLOSE and high <= 1 + CLOSE else FAILS if low > 1 + CLOSE or high < 1 - CLOSE else UNTOLD,
        f"the range of uniform over text over turns lies within {100 * CLOSE:g} % of 1; outside of that: does not hold",
        f"uniform over text {between(low, high)}, least and greatest turns of the sparse FFN",
    )


def _bench_gains(run: Run) -> pd.DataFrame:
    """Return dense over sparse times by rows and layer that the run's bench timed on text and on uniform ids: columns
    (gain, low, high) × (text, uniform), the range being that of the sparse FFN's turns. Missing where there are
    none."""
    rows = bench_rows(run)
    timed = (rows["metric"] == "microseconds") & (rows["layer"] >= 0) & rows["input"].isin(("text", "uniform"))
    own = (rows["op"] == "ffn_dense") | ((rows["op"] == "ffn_sparse") & (rows["kernel"] == run.manifest.kernel["name"]))
    rows = rows[timed & own & rows["low"].notna()]
    by = rows.groupby(["rows", "layer", "input", "op"])[["value", "low", "high"]].first().unstack("op").dropna()
    if by.empty or len(by["value"].columns) < 2:
        raise Missing("Its bench times no FFN on text and on uniform ids, dense and sparse.")
    gains = {
        "gain": by["value", "ffn_dense"] / by["value", "ffn_sparse"],
        "low": by["value", "ffn_dense"] / by["high", "ffn_sparse"],
        "high": by["value", "ffn_dense"] / by["low", "ffn_sparse"],
    }
    both = pd.DataFrame(gains).unstack("input").dropna()
    if both.empty or len(both["gain"].columns) < 2:
        raise Missing("Its bench times no layer on both text and uniform ids.")
    return both


CLAIMS = (
    Claim("speed", "The forward pass gains 17 to 20.5 % at 0.5 to 2 B parameters.", faster, PAPER_SPEED),
    Claim(
        "speed",
        "The forward pass gains up to 30 % at 1.5 B parameters (another report of the same work).",
        up_to_thirty,
        "1.5 B parameters",
    ),
    Claim("speed", "Energy per token falls by 11.8 to 17 %.", energy, PAPER_SPEED),
    Claim("speed", "What a layer adds to the model's speed follows its mean nnz: Pearson -0.996.", follows_nnz, PAPER),
    Claim(
        "speed", "In layers that are not sparse the sparse kernels are slower than dense ones.", slow_where_dense, PAPER
    ),
    Claim("method", "Speed measured on uniform random token ids is that of text.", text_and_uniform, PAPER_SPEED),
)
