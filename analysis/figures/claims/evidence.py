"""The evidence of a claim as a small drawing: what its check measured, with the bound of its rule.

    drawing(run, "The first two layers are the least active.")     an image in HTML, "" for a claim without one

Every number comes from the tables that the check itself reads (`analysis/claims`). Cost: that of those tables, which a
page that shows findings has computed already.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import by_layer
from twell.analysis.activity.positions import by_position, position_blocks
from twell.analysis.activity.surprisal import surprisal_within
from twell.analysis.claims import ablations, activity, speed, tokens, training
from twell.analysis.claims.findings import CLAIMS, findings
from twell.analysis.figures.claims.drawings import bars, curve, dots, intervals
from twell.analysis.memo import memo_scope
from twell.analysis.speed.contribution import gain_correlations, layer_gains
from twell.analysis.speed.speedup import speedup as layer_speedup
from twell.analysis.statistics import t_half
from twell.analysis.tokens.by_token import tokens_spelt
from twell.analysis.tokens.classes import token_classes
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

Draw = Callable[[Run], str]
NAN = float("nan")


def drawing(run: Run, claim: str) -> str:
    """Return the drawing of a claim's evidence in a run as HTML; "" where it has none, or the run lacks what it takes.

    claim: its text, as `findings` has it
    """
    draw = DRAWINGS.get(claim)
    try:
        return draw(run) if draw else ""
    except Missing:
        return ""


def drawings(run: Run) -> dict[str, str]:
    """Return the drawings of the claims that the run can test, by the text of the claim."""
    with memo_scope():
        rows = findings(run)
        by_claim = {claim: drawing(run, claim) for claim in rows.loc[rows["this_run"] != "", "claim"]}
    return {claim: image for claim, image in by_claim.items() if image}


def _by_layer(
    column: Callable[[pd.DataFrame, Run], pd.Series], says: str, form: str, limit: float | None = None, name: str = ""
) -> Draw:
    """Return what draws a bar a layer, of a column made from by_layer."""

    def draw(run: Run) -> str:
        table = by_layer(run)
        names = [f"L{layer}" for layer in table["layer"]]
        return bars(column(table, run).to_numpy(float), names, says, form, limit, name)

    return draw


def _first_position(run: Run) -> str:
    rows = by_position(run)
    first, later = rows[rows["first"]], rows[~rows["first"]]
    rest = (later["mean"] * later["tokens"]).groupby(later["layer"]).sum() / later.groupby("layer")["tokens"].sum()
    ratio = (first.set_index("layer")["mean"] / rest).dropna()
    says = "nnz of position 0 over that of later ones, a bar a layer"
    return bars(ratio.to_numpy(), [f"L{layer}" for layer in ratio.index], says, "{:.1f} ×", activity.FAR_MORE, "1.5 ×")


def _along_sequence(run: Run) -> str:
    blocks = position_blocks(run, blocks=24)
    mean = blocks[blocks["position_from"] > 0].groupby("position_from")["mean"].mean()
    x = np.log(mean.index.to_numpy(float))
    names = (f"position {mean.index[0]}", f"{mean.index[-1]}, logarithmic")
    return curve(x, mean.to_numpy(), names, "mean nnz over all layers along the sequence", "{:.0f}")


def _ffn_share(run: Run) -> str:
    share = activity.ffn_parameters(run) / run.manifest.model["parameters"]
    row = ("FFN share", 100 * share, NAN, NAN)
    return intervals(
        [row], 100 * activity.TWO_THIRDS, "two thirds", "share of the parameters in FFN matrices", "{:.0f} %"
    )


def _named(words: tuple[str, ...]) -> Draw:
    def draw(run: Run) -> str:
        rows = tokens_spelt(run, words, 1).dropna(subset=["z_se"])
        rows = rows[rows["sequences"] >= tokens.LEAST_SEQUENCES]
        half = t_half(rows["degrees"].to_numpy()) * rows["z_se"].to_numpy()
        values = [(str(r.text), r.z, r.z - h, r.z + h) for r, h in zip(rows.itertuples(), half, strict=True)]
        return intervals(values, 0, "mean", "z of each token with its interval", "{:+.2f}") if values else ""

    return draw


def _class(kind: str) -> Draw:
    def draw(run: Run) -> str:
        row = token_classes(run).set_index("class").loc[kind]
        values = [("difference", row["difference"], row["difference_low"], row["difference_high"])]
        return intervals(values, 0, "as others", f"z of {kind}s less that of all others, with its interval", "{:+.2f}")

    return draw


def _within_tokens(run: Run) -> str:
    rows = surprisal_within(run).dropna()
    values = [(f"L{row.layer}", row.pearson, row.low, row.high) for row in rows.itertuples()]
    if len(values) > 8:  # evenly over the depth
        values = [values[round(n)] for n in np.linspace(0, len(values) - 1, 8)]
    return intervals(
        values, 0, "none", "correlation of nnz with the next token's loss within tokens, a line a layer", "{:+.2f}"
    )


def _whole_pass(bound: float) -> Draw:
    def draw(run: Run) -> str:
        timed = speed.timed_pass(run)
        row = ("whole pass", timed.ratio, timed.low, timed.high)
        says = f"dense time over sparse time of the whole pass, with its interval over {timed.over}"
        return intervals([row], bound, f"{bound:g} ×", says, "{:.2f} ×")

    return draw


def _energy(run: Run) -> str:
    most, energy = 100 * (1 - speed.ENERGY), speed.timed_pass(run).energy
    if np.isnan(energy):
        return ""
    row = ("energy", 100 * energy, NAN, NAN)
    return intervals([row], most, f"claimed: {most:.0f} % or less", "energy of a token, of that of dense", "{:.0f} %")


def _nnz_and_gain(run: Run) -> str:
    gains = gain_correlations(run)
    gain = "contribution" if "contribution" in set(gains["with"]) else "speedup"
    rows = layer_gains(run).dropna(subset=[gain, "nnz_mean"])
    return dots(rows["nnz_mean"], rows[gain], ("mean nnz", gain), f"mean nnz against {gain}, a dot a layer")


def _slow_layers(run: Run) -> str:
    rows = layer_speedup(run)
    sparsity = by_layer(run).set_index("layer")["sparsity"]
    low = rows[rows["layer"].map(sparsity) < speed.NOT_SPARSE]
    values = [(f"L{row.layer}", row.speedup, row.low, row.high) for row in low.itertuples()]
    return (
        intervals(values, 1, "as dense", "FFN speedup of the layers that are not sparse", "{:.2f} ×") if values else ""
    )


def _uniform(run: Run) -> str:
    gains = speed._bench_gains(run)
    mean = np.exp(np.log(gains.xs(gains.index.get_level_values("rows").max(), level="rows")).mean())
    values = [
        (name, mean["gain", kind], mean["low", kind], mean["high", kind])
        for name, kind in (("text", "text"), ("uniform ids", "uniform"))
    ]
    return intervals(
        values, 1, "as dense", "FFN speedup on text and on uniform ids, with the range of turns", "{:.2f} ×"
    )


def _rise(condition: str, bound: float) -> Draw:
    def draw(run: Run) -> str:
        row = ablations.measured(run, condition, "")
        values = [("rise", 100 * row["rise"], 100 * row["rise_low"], 100 * row["rise_high"])]
        says = "rise of the loss with its interval over documents"
        return intervals(values, 100 * bound, f"{100 * bound:g} %", says, "{:+.2f} %")

    return draw


def _settles(run: Run) -> str:
    log = training.training_log(run)
    names = (f"step {log['step'].iloc[0]:,}", f"{log['step'].iloc[-1]:,}")
    return curve(log["step"], log["nnz"], names, "mean nnz of a layer over the training", "{:.0f}")


_OF_CHECK: dict[object, Draw] = {
    activity.sparse: _by_layer(
        lambda table, run: 100 * table["mean"] / run.widths,
        "share of neurons that fire, a bar a layer",
        "{:.2f} %",
        0.75,
        "0.75 %",
    ),
    activity.dead: _by_layer(
        lambda table, run: 100 * table["dead_share"],
        "share of neurons that never fired, a bar a layer",
        "{:.0f} %",
        30,
        "30 %",
    ),
    activity.quiet_beginning: _by_layer(lambda table, run: table["mean"], "mean nnz, a bar a layer", "{:.0f}"),
    activity.early_peak: _by_layer(lambda table, run: table["mean"], "mean nnz, a bar a layer", "{:.0f}"),
    activity.longest_row: _by_layer(
        lambda table, run: table["max"] / table["mean"].mean(),
        "nnz of the fullest token over the mean, a bar a layer",
        "{:.0f} ×",
    ),
    activity.first_fires_more: _first_position,
    activity.falls_exponentially: _along_sequence,
    activity.ffn_share: _ffn_share,
    tokens.follows_surprisal: _within_tokens,
    speed.faster: _whole_pass(1.17),
    speed.up_to_thirty: _whole_pass(1 + speed.LARGEST),
    speed.energy: _energy,
    speed.follows_nnz: _nnz_and_gain,
    speed.slow_where_dense: _slow_layers,
    speed.text_and_uniform: _uniform,
    ablations.silent_can_go: _rise("dead", ablations.NOTHING),
    ablations.half_can_go: _rise(ablations.HALF, ablations.LITTLE),
    training.settles: _settles,
}
DRAWINGS: dict[str, Draw] = {claim.text: _OF_CHECK[claim.check] for claim in CLAIMS if claim.check in _OF_CHECK} | {
    "Pieces whose sequel is obvious are quiet: doesn, couldn, doi, gov.": _named(("doesn", "couldn", "doi", "gov")),
    "Rare words of much meaning are loud: Vermont, Greeks, formaldehyde.": _named(
        ("Vermont", "Greeks", "formaldehyde")
    ),
    "Function words fire little.": _class("function word"),
    "Parts of URLs fire little.": _class("URL part"),
}
