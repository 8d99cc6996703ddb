"""Claims about which neurons fire, and how many. `findings` runs every check of CLAIMS.

To add a claim, write its check here (`claim` says what it returns) and list it in CLAIMS at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import by_layer
from twell.analysis.activity.position_decay import position_fit
from twell.analysis.activity.positions import by_position
from twell.analysis.activity.surprisal import surprisal_correlation
from twell.analysis.claims.claim import LARGE, Answer, Claim
from twell.analysis.statistics import t_half
from twell.analysis.tokens.by_token import tokens_spelt
from twell.analysis.tokens.classes import token_classes
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SPARSE = 0.99  # the claim's 29 of 5632 neurons are 99.5 % sparsity; 99 % still counts as that kind of sparsity
FAR_MORE = 1.5  # times the later mean, for "far more neurons"
ORDERS_OF_MAGNITUDE = 100.0  # times the mean, for "orders of magnitude more"
LEAST_TOKENS = 1000  # for a verdict on layers; a neuron that none of them fired has a density under 0.3 %
LEAST_COUNT = 5  # occurrences of a named token from which its interval is worth reading


def _layers_for_verdict(run: Run, least_layers: int = 1) -> pd.DataFrame:
    """Return by_layer(run). Raises Missing where a verdict would rest on too few tokens, or on fewer than
    `least_layers` layers."""
    if run.layers < least_layers:
        raise Missing(f"The model has {run.layers} layers: a profile over depth needs at least {least_layers}.")
    layers = by_layer(run)
    tokens = int(layers["tokens"].max())
    if tokens < LEAST_TOKENS:
        raise Missing(f"{tokens:,} tokens were counted: a verdict on layers takes {LEAST_TOKENS:,} or more.")
    return layers


def sparse(run: Run) -> Answer:
    """Check that the mean sparsity over layers is at least 99 %."""
    layers = _layers_for_verdict(run)
    mean, share = layers["mean"], layers["sparsity"].mean()
    return Answer(
        f"{mean.mean():.1f} of {run.d_ff} neurons fire, from {mean.min():.1f} to {mean.max():.1f} by layer",
        f"sparsity {100 * share:.1f} %, mean of {run.layers} layers, {layers['tokens'].iloc[0]:,} tokens",
        share >= SPARSE,
        f"mean sparsity of at least {100 * SPARSE:.0f} %",
    )


def dead(run: Run) -> Answer:
    """Check that more than 30 % of all neurons never fired."""
    counted = by_layer(run)
    if counted["dead"].isna().any():
        raise Missing(str(counted.attrs["note"]))
    layers = _layers_for_verdict(run)
    share = layers["dead_share"].mean()
    return Answer(
        f"{100 * share:.1f} % of all neurons never fired, from {100 * layers['dead_share'].min():.1f} % to "
        f"{100 * layers['dead_share'].max():.1f} % by layer",
        f"{int(layers['dead'].sum()):,} of {run.layers * run.d_ff:,} neurons, in {layers['tokens'].iloc[0]:,} tokens "
        f"of {run.manifest.sequences:,} sequences; each in under {100 * layers['dead_sequences'].iloc[0]:.3g} % of "
        f"them, and of tokens, were they independent, in under {1e6 * layers['dead_upper'].iloc[0]:,.1f} per million "
        "(95 %)",
        share > 0.30,
        "more than 30 % without a firing",
    )


def quiet_beginning(run: Run) -> Answer:
    """Check that layers 0 and 1 have the least mean nnz."""
    layers = _layers_for_verdict(run, least_layers=4).set_index("layer")
    order = layers["mean"].sort_values().index.tolist()
    return Answer(
        f"the least active layers are {order[0]} and {order[1]}; layers 0 and 1 fire {layers['mean'][0]:.1f} and "
        f"{layers['mean'][1]:.1f} neurons",
        f"ranks {order.index(0) + 1} and {order.index(1) + 1} of {run.layers}, quietest first",
        set(order[:2]) == {0, 1},
        "layers 0 and 1 are the two with the least mean nnz",
    )


def early_peak(run: Run) -> Answer:
    """Check that the layer with the greatest mean nnz lies between 20 % and 50 % of the depth."""
    layers = _layers_for_verdict(run, least_layers=4).set_index("layer")
    peak = int(layers["mean"].idxmax())
    depth = peak / (run.layers - 1)
    return Answer(
        f"layer {peak} fires most, {layers['mean'].max():.1f} neurons",
        f"at {100 * depth:.0f} % of the depth, {run.layers} layers",
        0.2 <= depth <= 0.5,
        "the layer with the greatest mean nnz lies between 20 % and 50 % of the depth",
    )


def first_fires_more(run: Run) -> Answer:
    """Check that position 0 fires more than 1.5 times the later mean, with 95 % confidence, in most layers."""
    rows = by_position(run)
    is_first = rows["first"].to_numpy()
    first = rows[is_first].set_index("layer")
    if first.empty or is_first.all():
        raise Missing("No position 0, or nothing after it, was counted.")
    layer, tokens, mean = (rows[name].to_numpy()[~is_first] for name in ("layer", "tokens", "mean"))
    later_mean = np.bincount(layer, mean * tokens, run.layers) / np.bincount(layer, tokens, run.layers)
    n = int(first["tokens"].iloc[0])
    if n < 2 or not (later_mean > 0).all():
        raise Missing(f"{n} sequences have a position 0 that was counted, or a layer fires nothing after it.")
    low = (first["mean"] - float(t_half(n - 1)) * first["se"]) / later_mean
    ratio = first["mean"] / later_mean
    certain_layers = int((low > FAR_MORE).sum())
    return Answer(
        f"position 0 fires {ratio.min():.1f} to {ratio.max():.1f} times the neurons of later ones, by layer",
        f"median ratio {ratio.median():.2f}, {n:,} sequences; above {FAR_MORE:g} with 95 % confidence in "
        f"{certain_layers} of {run.layers} layers",
        certain_layers > run.layers / 2,
        f"more than {FAR_MORE:g} times the later mean, with 95 % confidence, in most layers",
    )


def falls_exponentially(run: Run) -> Answer:
    """Check that an exponential describes the fall along the sequence better than a power law in most layers."""
    _layers_for_verdict(run)
    rows = position_fit(run)
    layers = rows[rows["layer"] >= 0]
    counted = layers["verdict"].value_counts()
    falling = layers[layers["verdict"] == "exponential"]
    spread = f", λ {falling['decay'].min():.0f} to {falling['decay'].max():.0f} tokens" if len(falling) else ""
    return Answer(
        ", ".join(f"{verdict} in {number}" for verdict, number in counted.items())
        + f" of {run.layers} layers after position 0{spread}",
        f"AICc against a power law; median R² {layers['r2'].median():.2f}; {layers['tokens'].iloc[0]:,} tokens",
        len(falling) > run.layers / 2,
        "an exponential describes most layers better than a power law (AICc by more than 2)",
    )


def named_tokens(words: Sequence[str], sign: int) -> Callable[[Run], Answer]:
    """Return a check that every token spelt as one of `words` has z of this sign with 95 % confidence.

    words: spellings, without white space. sign: +1 for z above 0, -1 for z below.
    """
    side = "above" if sign > 0 else "below"

    def check(run: Run) -> Answer:
        rows = tokens_spelt(run, words, LEAST_COUNT).dropna(subset=["z_se"])
        if rows.empty:
            raise Missing(
                f"None of {', '.join(words)} is a single token that occurs {LEAST_COUNT} times in {run.name}: another "
                "vocabulary cuts them up, or the text lacks them."
            )
        half = t_half(rows["sequences"].to_numpy() - 1) * rows["z_se"]
        certain = (sign * rows["z"] - half) > 0
        named = [f"{row.text} {row.z:+.2f} (n = {row.count})" for row in rows.itertuples()]
        absent = [word for word in words if word not in set(rows["text"])]
        return Answer(
            "z of " + ", ".join(named) + (f"; not there as one token: {', '.join(absent)}" if absent else ""),
            f"{int(certain.sum())} of {len(rows)} {side} the layers' means with 95 % confidence",
            bool(certain.all()),
            f"each of those that occur lies {side} 0 with 95 % confidence",
        )

    return check


def obvious_classes(run: Run) -> Answer:
    """Check that function words and URL parts each have a lower mean z than the other classes, with 95 % confidence."""
    rows = token_classes(run).set_index("class")
    kinds = [kind for kind in ("function word", "URL part") if kind in rows.index and rows.loc[kind, "tokens"] > 1]
    if len(kinds) < 2:
        raise Missing("The text holds too few function words or URL parts that are single tokens.")
    rows = rows.loc[kinds]
    return Answer(
        ", ".join(
            f"{kind}s: z {row['z']:+.2f}, against {row['others']:+.2f} of the rest" for kind, row in rows.iterrows()
        ),
        "95 % "
        + ", ".join(
            f"{row['low']:+.2f} to {row['high']:+.2f} (n = {int(row['count']):,})" for _, row in rows.iterrows()
        ),
        bool((rows["high"] < rows["others"]).all()),
        "both classes lie below the rest with 95 % confidence",
    )


def longest_row(run: Run) -> Answer:
    """Check that the fullest token fires at least 100 times the mean nnz in the median layer."""
    layers = _layers_for_verdict(run)
    ratio = layers["max"] / layers["mean"]
    worst = int(ratio.to_numpy().argmax())
    return Answer(
        f"the fullest token of a layer fires {ratio.min():.0f} to {ratio.max():.0f} times its mean; most in layer "
        f"{worst}, {layers['max'].iloc[worst]} against {layers['mean'].iloc[worst]:.1f}",
        f"median of {run.layers} layers {ratio.median():.1f}, {layers['tokens'].iloc[0]:,} tokens",
        ratio.median() >= ORDERS_OF_MAGNITUDE,
        f"at least {ORDERS_OF_MAGNITUDE:g} times the mean in the median layer",
    )


def follows_surprisal(run: Run) -> Answer:
    """Check that nnz rises with the next token's loss, with 95 % confidence, in most layers."""
    rows = surprisal_correlation(run).dropna()
    if rows.empty:
        raise Missing("No layer's counts vary, so there is nothing to correlate with the loss.")
    rising, falling = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
    return Answer(
        f"of {len(rows)} layers, nnz rises with the next token's loss in {rising}, falls in {falling}, neither for "
        f"certain in {len(rows) - rising - falling}",
        f"Spearman {rows['spearman'].min():+.2f} to {rows['spearman'].max():+.2f}, median "
        f"{rows['spearman'].median():+.2f}, {rows['n'].iloc[0]:,} tokens",
        rising > len(rows) / 2,
        "Spearman's correlation is above 0 with 95 % confidence in most layers",
    )


def ffn_share(run: Run) -> Answer:
    """Check that FFN matrices hold more than two thirds of a large model's parameters."""
    model = run.manifest.model
    matrices = 2 if "plain" in run.manifest.nnz_definition else 3
    parameters = model.get("parameters")
    if not parameters:
        raise Missing("The manifest does not say how many parameters the model has.")
    ffn = matrices * model["d_model"] * run.d_ff * run.layers
    share = ffn / parameters
    if parameters < LARGE:
        raise Missing(
            f"At {parameters:,} parameters, {100 * share:.0f} % of them FFN matrices, this is not a large model."
        )
    return Answer(
        f"{100 * share:.0f} % of this model's {parameters:,} parameters stand in FFN matrices",
        f"{matrices} × {model['d_model']} × {run.d_ff} × {run.layers} layers; FLOPs depend on attention's shape, which "
        "a run does not record",
        share > 2 / 3,
        "more than two thirds of the parameters",
    )


CLAIMS = (
    Claim("sparsity", "A little L1 leaves about half a percent of a layer's neurons firing (29 of 5632).", sparse),
    Claim("sparsity", "More than 30 % of the neurons of such a model are dead.", dead),
    Claim("layers", "The first two layers are the least active.", quiet_beginning),
    Claim("layers", "Activity peaks in the early middle of the depth.", early_peak),
    Claim("layers", "The fullest token fires orders of magnitude more neurons than the mean.", longest_row),
    Claim("positions", "The first token of a sequence fires far more neurons than later ones.", first_fires_more),
    Claim("positions", "After the first token, nnz falls off exponentially along the sequence.", falls_exponentially),
    Claim(
        "tokens",
        "Pieces whose sequel is obvious are quiet: doesn, couldn, doi, gov.",
        named_tokens(("doesn", "couldn", "doi", "gov"), -1),
    ),
    Claim(
        "tokens",
        "Rare words of much meaning are loud: Vermont, Greeks, formaldehyde.",
        named_tokens(("Vermont", "Greeks", "formaldehyde"), +1),
    ),
    Claim("tokens", "Function words and parts of URLs fire little.", obvious_classes),
    Claim("surprisal", "Tokens fire little where the model knows what comes next.", follows_surprisal),
    Claim("model", "FFN layers hold more than two thirds of the parameters of a large model.", ffn_share),
)
