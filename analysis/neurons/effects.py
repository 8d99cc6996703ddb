"""Neurons by what silencing them does to the loss: estimates for all, exact values for some.

    neuron_effects(run)     a row a neuron: estimate, exact change with its interval where it was measured, density
    loss_change(run, without)   a row a prediction of one passage, read with a neuron and without it

Estimates are of first order (gradient × activation); how their ranks agree with exact values is in `attrs`.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from twell.analysis.ablations.by_condition import ablate_command, effects
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.statistics import mid_ranks
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

SINGLE = re.compile(r"neurons:L(\d+)/N(\d+)")
FEWEST = 5  # pairs of a rank correlation


def neuron_effects(run: Run, layer: int | None = None) -> pd.DataFrame:
    """Return every neuron's effect on the loss, in nats a token of all tokens, the greatest first.

    Columns: layer, neuron, label, density, fires; estimate: change of the loss when it is silent, to first order;
    exact, low, high: the change that was measured, with its interval by document, NaN where it was not. attrs: tokens;
    measured; rank_correlation: Spearman's, of estimates and exact values of the neurons that were measured.

    layer: this one alone. Raises Missing for a run without estimates.
    """
    if not run.has("neuron_effects"):
        raise Missing(f"{run.name} has no effects of neurons: estimate them with `{ablate_command(run)} --neurons 64`.")
    table = run.frame("neuron_effects")
    table["estimate"] = table.pop("estimate_sum") / table["tokens"]
    table = table.merge(_exact(run), on=["layer", "neuron"], how="left")
    tokens, pairs = int(table["tokens"].iloc[0]), table[table["exact"].notna()]
    counted = by_neuron(run)[["layer", "neuron", "label", "density", "fires"]]
    table = table.drop(columns="tokens").merge(counted, on=["layer", "neuron"])
    if layer is not None:
        table = table[table["layer"] == layer]
    order = table["estimate"].abs().sort_values(ascending=False, kind="stable").index
    table = table.loc[order].reset_index(drop=True)
    correlation = rank_correlation(pairs["estimate"].to_numpy(), pairs["exact"].to_numpy())
    note = f"estimates over {tokens:,} predicted tokens; {len(pairs):,} neurons were silenced one by one"
    table.attrs |= {"note": note, "tokens": tokens, "measured": len(pairs), "rank_correlation": correlation}
    return table


def _exact(run: Run) -> pd.DataFrame:
    """Return the neurons that were silenced one by one, with what that did."""
    columns = {"layer": int, "neuron": int, "exact": float, "low": float, "high": float}
    rows = []
    if run.has("effects"):
        table = effects(run)
        for row in table[table["kind"] == "neurons"].itertuples():
            match = SINGLE.fullmatch(str(row.condition))
            if match is not None:
                rows.append((int(match[1]), int(match[2]), row.change, row.low, row.high))
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation, NaN of fewer than FEWEST pairs."""
    return float(np.corrcoef(mid_ranks(a), mid_ranks(b))[0, 1]) if len(a) >= FEWEST else float("nan")


def loss_change(run: Run, without: Run) -> pd.DataFrame:
    """Return each prediction of a passage with its losses, in order. Columns: position (at which the next token is
    predicted), token_id (of the next token), loss, loss_without (nats), change (loss_without less loss).

    run, without: runs of one sequence, the same tokens, the second one read without the neuron
    """
    rows, others = (
        each.frame("activity", ["position", "token_id", "loss"]).sort_values("position", ignore_index=True)
        for each in (run, without)
    )
    if not rows["token_id"].equals(others["token_id"]):
        raise UserError("Expected two readings of the same tokens, got others: ask again.")
    losses = rows["loss"].astype("float64"), others["loss"].astype("float64")
    following = rows["token_id"].shift(-1)
    frame = pd.DataFrame({"position": rows["position"], "token_id": following, "loss": losses[0]})
    frame = frame.assign(loss_without=losses[1], change=losses[1] - losses[0])
    frame = frame[np.isfinite(frame["change"]) & following.notna()]
    return frame.astype({"token_id": "int64"}).reset_index(drop=True)
