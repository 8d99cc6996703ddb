"""Claims about what can go: silent neurons, small values, and whether activity is importance. From `twell ablate`.

To add a claim, write its check here (`claim` says what it returns) and list it in CLAIMS at the end of this file. Each
raises Missing with the command that would tell, where the run has no such study.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.ablations.by_condition import effects, of_clusters
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, Answer, Claim, between
from twell.analysis.comparisons import widened
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.effects import neuron_effects, rank_correlation
from twell.analysis.statistics import t_half
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run
from twell.workbench.run.tables.effects import OWN_TOKENS

NOTHING, LITTLE = 0.001, 0.01  # rise of the loss, as a share of it, that counts as none and as little
HALF = "smallest:0.5"
AGREE = 0.7  # Spearman's correlation from which the two orders are taken for one
FEW_NEURONS = 20  # living neurons of a layer, for a correlation in it
DRAWS = 4  # of effects by chance


def measured(run: Run, condition: str, command: str) -> pd.Series:
    """Return the row of `effects` of a condition, with rise, rise_low and rise_high: shares of the untouched loss.

    command: what would measure it. Raises Missing without such a row, and for one without an interval.
    """
    rows = effects(run) if run.has("effects") else pd.DataFrame({"condition": []})
    rows = rows[rows["condition"] == condition]
    if rows.empty:
        raise Missing(f"{run.name} has no study of it: {command}.")
    row = rows.iloc[-1].copy()
    for name, of in (("rise", "change"), ("rise_low", "low"), ("rise_high", "high")):
        row[name] = row[of] / row["base"]
    if np.isnan(row["rise_low"]):
        raise Missing(f"{row['documents']} documents were read, and an interval takes three: {command}, on more text.")
    return row


def text_of(run: Run, study: int) -> list[str]:
    """Return the names of the texts that a study was measured on."""
    entries = [entry for entry in run.manifest.effects if entry.get("study") == study]
    return [str(name) for name in entries[-1].get("text", [])] if entries else []


def silent_can_go(run: Run) -> Answer:
    """Check that the loss on other text stays without the neurons that fired on no token of the run."""
    command = "`twell ablate RUN --condition dead --text OTHER`"
    row = measured(run, "dead", command)
    texts = text_of(run, int(row["study"]))
    seen = {OWN_TOKENS, *(str(source.get("source")) for source in run.manifest.text)}
    if not texts or set(texts) & seen:
        raise Missing(f"Its silent neurons were taken away on the run's own text, where they are silent: {command}.")
    return Answer(
        f"without its {int(row['silenced']):,} silent neurons the loss on other text changes by {row['change']:+.4f} "
        f"nats a token, {100 * row['rise']:+.2f} %",
        _about(run, row, texts),
        HOLDS if row["rise_high"] <= NOTHING else FAILS if row["rise_low"] > LITTLE else IN_PART,
        f"the interval lies below a rise of {100 * NOTHING:g} % of the loss; above {100 * LITTLE:g} %: does not hold; "
        "between: in part",
        between(row["low"], row["high"], " nats"),
    )


def half_can_go(run: Run) -> Answer:
    """Check that the loss stays when the half of each layer's values that is next to 0 goes."""
    row = measured(run, HALF, f"`twell ablate RUN --condition {HALF}`")
    return Answer(
        f"with the smaller half of each layer's hidden values at 0 the loss changes by {row['change']:+.4f} nats a "
        f"token, {100 * row['rise']:+.2f} %",
        _about(run, row, text_of(run, int(row["study"]))),
        HOLDS if row["rise_high"] <= LITTLE else IN_PART if row["rise_low"] <= LITTLE else FAILS,
        f"the interval lies below a rise of {100 * LITTLE:g} % of the loss; in part if it holds that number",
        between(row["low"], row["high"], " nats"),
    )


def activity_is_importance(run: Run) -> Answer:
    """Check that the order of a layer's neurons by firings is that by their effect on the loss."""
    if not run.has("neuron_effects"):
        raise Missing(f"{run.name} has no effects of neurons: `twell ablate RUN --neurons 64` estimates all of them.")
    table = neuron_effects(run)
    living = table[table["fires"] > 0]
    read = min(table.attrs["tokens"] / max(int(by_neuron(run, layer=0)["tokens"].iloc[0]), 1), 1.0)
    layers = [rows for _, rows in living.groupby("layer") if len(rows) >= FEW_NEURONS]
    pairs = [
        (rank_correlation(rows["fires"].to_numpy(), rows["estimate"].abs().to_numpy()), *_of_chance(rows, read))
        for rows in layers
    ]
    values, chance, reach = np.array([each for each in pairs if not np.isnan(each[0])]).reshape(-1, 3).T
    if not len(values):
        raise Missing(f"No layer of {run.name} has {FEW_NEURONS} neurons that fire.")
    busiest = living.sort_values("fires", ascending=False, kind="stable").head(max(1, len(living) // 10))
    carried = busiest["estimate"].abs().sum() / living["estimate"].abs().sum()
    exact = table.attrs["rank_correlation"]
    checked = f"; {table.attrs['measured']} measured exactly agree at {exact:.2f}" if exact == exact else ""
    return Answer(
        f"firings and effect on the loss go together at Spearman {np.median(values):+.2f}, median of layers, where "
        f"firings that push the loss either way at random would at {np.median(chance):+.2f}; the busiest "
        f"tenth of the living neurons carries {100 * carried:.0f} % of the effects",
        f"{len(living):,} living neurons of {len(values)} layers, effects to first order on "
        f"{table.attrs['tokens']:,} tokens{checked}",
        _verdict_on_importance(values, chance, reach),
        f"Spearman of firings and |effect| at {AGREE:g} or above in every layer, and above that of chance; above 0 in "
        "every: in part; below 0 in every: reversed; in every as by chance: cannot be told",
        f"{values.min():+.2f} to {values.max():+.2f}, least and greatest layer: layers are no sample",
    )


def _of_chance(rows: pd.DataFrame, read: float) -> tuple[float, float]:
    """Return Spearman's correlation of firings and |effect| where each firing pushes the loss either way at random, and
    how far from it one may lie by chance, on the scale of atanh.

    Such pushes add up to more where there are more of them: a sum of n has the size of √n. rows: of `neuron_effects`,
    of one layer; read: the share of the run's tokens that effects are of
    """
    fires, rng = rows["fires"].to_numpy(np.int64), np.random.default_rng(0)
    drawn = [rng.normal(size=len(fires)) * np.sqrt(rng.binomial(fires, read)) for _ in range(DRAWS)]
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = np.mean([rank_correlation(fires, np.abs(each)) for each in drawn])
    spread = np.sqrt((1 + chance**2 / 2) / (len(fires) - 3))  # of atanh of a rank correlation: Bonett and Wright (2000)
    return float(chance), float(t_half(np.inf) * spread * np.sqrt(1 + 1 / DRAWS))


def _verdict_on_importance(values: NDArray, chance: NDArray, reach: NDArray) -> str:
    """Return the verdict on correlations of firings and |effect| [layer], beside those of `_of_chance`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        above = np.arctanh(values) - np.arctanh(chance)  # NaN: every neuron fires as often, or both are 1
    if (np.abs(above) <= reach * widened(np.inf, len(values))).all():
        return UNTOLD
    if values.min() >= AGREE and (above > reach).all():
        return HOLDS
    return IN_PART if values.min() > 0 else REVERSED if values.max() < 0 else FAILS


def _about(run: Run, row: pd.Series, texts: list[str]) -> str:
    return (
        f"{row['tokens']:,} tokens of {of_clusters(int(row['documents']))}, paired, of {', '.join(texts) or run.name}"
    )


CLAIMS = (
    Claim("what can go", "Neurons that never fired on one text can go on another.", silent_can_go, ""),
    Claim(
        "what can go",
        "Half of the hidden values, those next to 0, can be set to 0 at little loss.",
        half_can_go,
        "7 to 70 B parameters, inputs of every matrix of SiLU models",
    ),
    Claim("what can go", "The neurons that fire most are those that matter most.", activity_is_importance, ""),
)
