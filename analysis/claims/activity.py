"""Claims about how many neurons fire, where in the model and along the sequence. `findings` runs every check of CLAIMS.

To add a claim, write its check here (`claim` says what it returns) and list it in CLAIMS at the end of this file.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import by_layer, mean_over_layers
from twell.analysis.activity.origins import first_over_all
from twell.analysis.activity.position_decay import LITTLE, position_fit
from twell.analysis.activity.positions import by_position
from twell.analysis.claims.claim import (
    FAILS,
    HOLDS,
    IN_PART,
    LARGE,
    PAPER_SIZES,
    REVERSED,
    UNTOLD,
    Answer,
    Claim,
    between,
    by_interval,
    shallow,
)
from twell.workbench.errors import Missing
from twell.workbench.run.manifest import spelled
from twell.workbench.run.store import Run

SPARSE, HARDLY = 0.0075, 0.02  # share of neurons firing: the claim's 29 of 5632 are 0.5 %
DEAD, CLEARLY_NOT = 0.30, 0.27  # share of neurons without a firing
FAR_MORE = 1.5  # times the later mean, for "far more neurons"
ORDERS_OF_MAGNITUDE, AN_ORDER = 100.0, 10.0  # times the mean of all layers
PEAK = (0.2, 0.5)  # of the depth: the early middle
LEAST_TOKENS = 1000  # for a verdict on layers; a neuron that none of them fired has a density under 0.3 %
TWO_THIRDS = 2 / 3


def _layers_for_verdict(run: Run, least_layers: int = 1) -> pd.DataFrame:
    """Return by_layer(run). Raise Missing if it rests on too few tokens, or on fewer than `least_layers` layers, for a
    verdict."""
    if run.layers < least_layers:
        raise Missing(f"A profile over depth needs at least {least_layers} layers, the model has {run.layers}.")
    layers = by_layer(run)
    tokens = int(layers["tokens"].max())
    if tokens < LEAST_TOKENS:
        raise Missing(f"A verdict on layers takes {LEAST_TOKENS:,} counted tokens or more, the run has {tokens:,}.")
    return layers


def sparse(run: Run) -> Answer:
    """Check that at most 0.75 % of the neurons fire, mean over layers."""
    layers = _layers_for_verdict(run)
    mean, (_, low, high) = layers["mean"], mean_over_layers(run)
    span = f"from {mean.min():.1f} to {mean.max():.1f} by layer"
    width = run.neurons / run.layers
    share, low, high = mean.mean() / width, low / width, high / width
    least, most = (share, share) if np.isnan(high) else (low, high)  # a single document has no interval
    return Answer(
        f"{mean.mean():.1f} of {spelled(run.manifest.widths, str)} neurons fire, {span}",
        f"{100 * share:.2f} %, mean of {run.layers} layers, {layers['tokens'].iloc[0]:,} counted tokens",
        HOLDS if most <= SPARSE else FAILS if least > HARDLY else IN_PART,
        f"the interval lies below {100 * SPARSE:g} % firing; above {100 * HARDLY:g} %: does not hold; between: in part",
        "none: one document, so the share decides" if np.isnan(high) else between(100 * low, 100 * high, " %"),
    )


def dead(run: Run) -> Answer:
    """Check that more than 30 % of all neurons would never fire, by Chao's estimate too."""
    counted = by_layer(run)
    if counted["dead"].isna().any():
        raise Missing(str(counted.attrs["note"]))
    layers = _layers_for_verdict(run)
    total, number = run.neurons, int(layers["dead"].sum())
    share, limit = number / total, (number - layers["dead_waking"].sum()) / total
    return Answer(
        f"{100 * share:.1f} % of all neurons never fired, from {100 * layers['dead_share'].min():.1f} % to "
        f"{100 * layers['dead_share'].max():.1f} % by layer; with more text at most {100 * limit:.1f} %",
        f"{number:,} of {total:,} neurons, in {run.manifest.sequences:,} sequences of {layers['tokens'].iloc[0]:,} "
        f"tokens; each fires in under {100 * layers['dead_sequences'].iloc[0]:.3g} % of sequences (95 %)",
        HOLDS if limit > DEAD else FAILS if share < CLEARLY_NOT else IN_PART,
        f"Chao's estimate above {100 * DEAD:g} % holds, an observed share under {100 * CLEARLY_NOT:g} % does not",
        f"{100 * limit:.1f} to {100 * share:.1f} %: Chao's estimate, too high where firings come in bursts, and what "
        "was observed",
    )


def quiet_beginning(run: Run) -> Answer:
    """Check that layers 0 and 1 have the least mean nnz, with 95 % confidence."""
    layers = _layers_for_verdict(run, least_layers=4).set_index("layer")
    order = layers["mean"].sort_values().index.tolist()
    first, rest = layers.loc[[0, 1]], layers.drop([0, 1])
    quietest, loudest = first["high"] < rest["low"].min(), first["low"] > rest["high"].max()
    denied = first["low"] > rest["high"].min()
    verdict = HOLDS if quietest.all() else REVERSED if loudest.all() else IN_PART if quietest.any() else UNTOLD
    verdict = FAILS if verdict == UNTOLD and denied.any() else verdict
    return Answer(
        f"the least active layers are {order[0]} and {order[1]}; layers 0 and 1 fire {layers['mean'][0]:.1f} and "
        f"{layers['mean'][1]:.1f} neurons{shallow(run)}",
        f"ranks {order.index(0) + 1} and {order.index(1) + 1} of {run.layers}, quietest first",
        verdict,
        "the intervals of layers 0 and 1 lie below those of all others; one of them: in part; both above: reversed; "
        "one above another's: does not hold",
        f"layer 0 {between(layers['low'][0], layers['high'][0])}, layer 1 "
        f"{between(layers['low'][1], layers['high'][1])}, the least other "
        f"{between(*rest.loc[rest['mean'].idxmin(), ['low', 'high']])}",
    )


def early_peak(run: Run) -> Answer:
    """Check that the layer with the greatest mean nnz lies between 20 % and 50 % of the depth, with 95 % confidence."""
    layers = _layers_for_verdict(run, least_layers=4).set_index("layer")
    depth = layers.index.to_numpy() / (run.layers - 1)
    middle = (depth >= PEAK[0]) & (depth <= PEAK[1])
    peak = int(layers["mean"].idxmax())
    inside, outside = layers[middle], layers[~middle]
    certain = bool(inside["low"].max() > outside["high"].max())
    denied = bool(outside["low"].max() > inside["high"].max())
    verdict = HOLDS if certain else FAILS if denied else UNTOLD
    return Answer(
        f"layer {peak} fires most, {layers['mean'].max():.1f} neurons{shallow(run)}",
        f"at {100 * depth[peak]:.0f} % of the depth, {run.layers} layers",
        verdict if layers["low"].notna().all() else UNTOLD,
        "the layer with the greatest mean nnz lies between 20 % and 50 % of the depth, its interval above those of all "
        "layers elsewhere; does not hold if one elsewhere lies above all of those; if the intervals meet, it cannot be "
        "told",
        between(layers["low"][peak], layers["high"][peak]),
    )


def longest_row(run: Run) -> Answer:
    """Check that the fullest token fires at least 100 times the mean nnz of all layers."""
    layers = _layers_for_verdict(run)
    if not layers["mean"].any():
        raise Missing("No neuron fires on any counted token: there is no mean to compare the fullest token with.")
    most, mean = layers["max"], layers["mean"].mean()
    worst = int(most.to_numpy().argmax())
    ratio = most.max() / mean
    return Answer(
        f"the fullest token fires {most.max():,} neurons in layer {worst}, {ratio:.0f} times the mean of all layers, "
        f"{mean:.1f}; by layer {(most / layers['mean']).min():.0f} to {(most / layers['mean']).max():.0f} times its "
        "own",
        f"greatest of {layers['tokens'].iloc[0]:,} counted tokens in {run.layers} layers",
        HOLDS if ratio >= ORDERS_OF_MAGNITUDE else IN_PART if ratio >= AN_ORDER else FAILS,
        f"{ORDERS_OF_MAGNITUDE:g} times the mean of all layers or more holds, {AN_ORDER:g} times in part",
        "none: the greatest of a sample grows with it",
    )


def first_fires_more(run: Run) -> Answer:
    """Check that position 0 fires more than 1.5 times the later mean, over all layers, with 95 % confidence."""
    rows = by_position(run)
    first, later = rows[rows["first"]], rows[~rows["first"]]
    if first.empty or later.empty:
        raise Missing("No position 0, or nothing after it, was counted.")
    rest = (later["mean"] * later["tokens"]).groupby(later["layer"]).sum() / later.groupby("layer")["tokens"].sum()
    if not (rest > 0).all():
        raise Missing("A layer fires nothing after position 0.")
    by = first.set_index("layer")["mean"] / rest
    total = first_over_all(run)
    apart = [
        f"{start} {row.ratio:.2f} ({between(row.low, row.high)})" for start, row in total.iterrows() if start != "all"
    ]
    ratio, low, high = (float(total.loc["all", name]) for name in ("ratio", "low", "high"))
    if np.isnan(low):
        raise Missing(
            f"Position 0 fires {ratio:.2f} times as much, of {int(first['tokens'].iloc[0])} sequences: no interval."
        )
    return Answer(
        f"position 0 fires {ratio:.2f} times the neurons of later ones, {by.min():.1f} to {by.max():.1f} times by layer"
        + (f"; by what begins there: {', '.join(apart)}" if len(apart) > 1 else ""),
        f"sum over {run.layers} layers, {int(first['tokens'].iloc[0]):,} sequences",
        by_interval(low, high, FAR_MORE, 1),
        f"the interval over all layers lies above {FAR_MORE:g}; above 1: in part; below 1: reversed; below "
        f"{FAR_MORE:g}: does not hold",
        between(low, high),
    )


def falls_exponentially(run: Run) -> Answer:
    """Check that nnz falls along the sequence, over all layers, and as an exponential rather than in another form."""
    layers = _layers_for_verdict(run)
    if not layers["mean"].any():
        raise Missing("No neuron fires on any counted token: nothing can fall along the sequence.")
    rows = position_fit(run)
    layers, total = rows[rows["layer"] >= 0], rows[rows["layer"] == -1].iloc[0]
    counted = layers["verdict"].value_counts()
    verdicts = {"exponential": HOLDS, "rises": REVERSED, "no decay": FAILS}
    if not total["drop_low"] > 0:  # else it falls for certain, and its form alone cannot be told
        verdicts["cannot be told"] = UNTOLD
    return Answer(
        f"over all layers: {total['verdict']}, λ {total['decay']:.0f} tokens "
        f"({between(total['decay_low'], total['decay_high'])}); by layer "
        + ", ".join(f"{verdict} in {number}" for verdict, number in counted.items())
        + f" of {run.layers}",
        f"AICc against a power law {total['aicc']:+.1f} ({between(total['aicc_low'], total['aicc_high'])}); R² "
        f"{total['r2']:.2f}; {int(total['tokens']):,} tokens",
        verdicts.get(total["verdict"], IN_PART),
        "early positions fire more than late ones, over all layers, with 95 % confidence, and an exponential describes "
        "it better than a power law or two exponentials, jackknifed; in part if it falls in another form; does "
        f"not hold if the interval holds 0 and no drop of {100 * LITTLE:g} % of the late mean",
        f"early less late {between(total['drop_low'], total['drop_high'], ' neurons')}",
    )


def ffn_parameters(run: Run) -> int:
    """Return how many numbers stand in the FFN matrices of a run's model. Missing where the manifest does not say."""
    model = run.manifest.model
    if known := model.get("ffn_parameters"):
        return int(known)
    if run.counts_above_threshold:
        raise Missing("The manifest does not say how many matrices an FFN has: capture it again.")
    plain = "plain" in run.manifest.nnz_definition or model.get("family") in ("opt", "nemotron")
    return (2 if plain else 3) * int(model["d_model"]) * run.neurons


def ffn_share(run: Run) -> Answer:
    """Check that FFN matrices hold more than two thirds of a large model's parameters."""
    model = run.manifest.model
    parameters = model.get("parameters")
    if not parameters:
        raise Missing("The manifest does not say how many parameters the model has.")
    ffn, embedding = ffn_parameters(run), model["d_model"] * model["vocab_size"]
    each = ffn / (model["d_model"] * run.neurons)  # matrices of a layer
    share, without = ffn / parameters, ffn / (parameters - embedding)
    if parameters < LARGE:
        raise Missing(
            f"At {parameters:,} parameters, {100 * share:.0f} % of them FFN matrices, this is not a large model."
        )
    return Answer(
        f"{100 * share:.0f} % of this model's {parameters:,} parameters stand in FFN matrices, {100 * without:.0f} % "
        "without one embedding",
        f"{each:g} × {model['d_model']} × {spelled(run.manifest.widths, str)} × {run.layers} layers; FLOPs depend on "
        "attention's shape, which a run does not record",
        HOLDS if share > TWO_THIRDS else IN_PART if without > TWO_THIRDS else FAILS,
        "more than two thirds of all parameters; of all but one embedding: in part",
        "none: a count",
    )


CLAIMS = (
    Claim("sparsity", "A little L1 leaves about half a percent of a layer's neurons firing (29 of 5632).", sparse),
    Claim("sparsity", "More than 30 % of the neurons of such a model are dead.", dead),
    Claim("layers", "The first two layers are the least active.", quiet_beginning),
    Claim("layers", "Activity peaks in the early middle of the depth.", early_peak),
    Claim("layers", "The fullest token fires orders of magnitude more neurons than the mean.", longest_row),
    Claim("positions", "The first token of a sequence fires far more neurons than later ones.", first_fires_more),
    Claim("positions", "After the first token, nnz falls off exponentially along the sequence.", falls_exponentially),
    Claim("model", "FFN layers hold more than two thirds of the parameters of a large model.", ffn_share, PAPER_SIZES),
)
