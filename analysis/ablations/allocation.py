"""How a budget of loss is divided over layers, from what each share of a layer's values costs alone.

    allocation(run, 0.02)    a row a layer: the share of its values that goes, and what that costs alone
    allocation(run)          the same of the shares that `twell ablate --budget` ran together, with their joint loss

The idea is greedy: of all steps from a layer's share to a larger one, the cheapest by change of loss over the share
that goes is taken, as long as the sum of the changes stays within the budget. What layers cost together is another
number than that sum, so the mixture is run too, and after it smaller ones as long as they cost more than the budget.
What is cheapest by chance is chosen too, and looks cheaper than it is on the tokens that it was chosen by. So shares
are chosen by every other document, and what they cost is told of the others, where each half has HALF of them.
Cost: 10 ms a condition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from twell.analysis.ablations.by_condition import ablate_command, effects, mean_changes
from twell.analysis.activity.layers import by_layer
from twell.analysis.memo import memo_scope, memoized
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

EffectCurves = Mapping[int, Sequence[tuple[float, float]]]  # by layer: shares and the changes that each makes alone
JOINT = ("joint", "joint_low", "joint_high")
LEAST = 0.01  # of the budget: a sum of changes below which no smaller mixture is looked for
LESS = 0.9  # of a sum of changes: the next one at most, where the mixture by it breaks the budget
HALF = 10  # documents or blocks of a half, at least


def allocate(curves: EffectCurves, budget: float) -> dict[int, float]:
    """Return the share of each layer for a budget in nats a token; 0 where nothing of a layer goes."""
    chosen = dict.fromkeys(curves, (0.0, 0.0))
    while True:
        left = budget - sum(change for _, change in chosen.values())
        steps = [
            ((change - chosen[layer][1]) / (share - chosen[layer][0]), layer, share, change)
            for layer, curve in curves.items()
            for share, change in curve
            if share > chosen[layer][0] and change - chosen[layer][1] <= left
        ]
        if not steps:
            return {layer: share for layer, (share, _) in chosen.items()}
        _, layer, share, change = min(steps)
        chosen[layer] = share, change


def allocation(run: Run, budget: float | None = None) -> pd.DataFrame:
    """Return the share of each layer's smallest values that goes, for a budget or as it was run last; a row a layer.

    Columns: layer; share (of the layer's values |hidden| that are not 0, the smallest ones); change (of the loss, nats
    a token, when that alone goes), low, high (its 95 % interval by document); threshold (the value up to which they
    go; NaN where the shares were not run). attrs: condition (as `twell ablate` spells the shares); singles (sum of the
    changes); joint, joint_low, joint_high (change with all of them at once; NaN where it was not run); halved (whether
    shares are chosen by one half of the documents, and changes are of the other); chosen_by (whether joint is of tokens
    by which shares were chosen, as documents are too few for halves: too little then, and its interval holds the truth
    too seldom); budget (that it is for, in nats a token; NaN where it was not for one); unread (share of the model's
    weights that one token need not read then, beside those it need not read now), speedup (1 over the rest): an
    estimate for batch 1 by bytes alone, NaN where the run does not know the model's size, or which of its tables one
    row is read of.

    budget: in nats a token. Raises Missing for a run whose layers were not measured one by one.
    """
    table = _measured(run)
    single, halved = _singles(table), table.attrs["halved"]
    if budget is None:
        shares, budget = _last(run, table)
    else:
        shares = _best(run, _chosen_by(run, single, halved), budget)
    condition = "shares:" + ",".join(f"{share:g}" for share in shares)
    measured = single.set_index(["layer", "share"])[["change", "low", "high"]]
    answer = pd.DataFrame(
        {"layer": layer, "share": share}
        | (dict(measured.loc[layer, share]) if (layer, share) in measured.index else _nothing(share))
        for layer, share in enumerate(shares)
    )
    answer["threshold"] = _thresholds(run, condition)
    together, of_these = _together(run, table, condition)
    answer.attrs |= {"note": table.attrs["note"], "halved": halved, "chosen_by": of_these and not halved}
    answer.attrs |= {"condition": condition, "singles": float(answer["change"].sum(skipna=False)), "budget": budget}
    answer.attrs |= dict(zip(JOINT, together, strict=True)) | _bytes(run, np.array(shares))
    return answer


@memoized
def _measured(run: Run) -> pd.DataFrame:
    """Return `effects` of the half of the documents by which no share is chosen, or of all where they are few. attrs:
    halved. Raises Missing where no layer's shares were measured alone."""
    table = effects(run, half=1)
    if _singles(table).empty:
        raise Missing(f"{run.name} has no shares of single layers: {_todo(run)}.")
    halved = bool((_singles(table)["documents"] >= HALF).all())
    table = table if halved else effects(run)
    table.attrs["halved"] = halved
    return table


def _chosen_by(run: Run, single: pd.DataFrame, halved: bool) -> pd.DataFrame:
    """Return the rows of single layers' shares with the changes by which shares are chosen: those of the other half."""
    return single.assign(change=single["condition"].map(mean_changes(run, 0))) if halved else single


def _singles(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of shares of single layers. table: of `effects`"""
    return table[(table["kind"] == "smallest") & (table["layer"] >= 0)]


def _together(run: Run, table: pd.DataFrame, condition: str) -> tuple[list[float], bool]:
    """Return what a mixture changes and its interval, NaN where it was not run; and whether it ran on the tokens of
    single layers' shares: else all of its documents are others. table: of `_measured`"""
    rows = table[table["condition"] == condition]
    if rows.empty:
        return [np.nan] * len(JOINT), False
    same = _of_the_same_tokens(rows.iloc[0], _singles(table))
    rows = rows if same else effects(run).query("condition == @condition")
    return rows[["change", "low", "high"]].iloc[0].astype(float).tolist(), same


def _of_the_same_tokens(joint: pd.Series, single: pd.DataFrame) -> bool:
    """Return whether a mixture was measured on the tokens of any share of a single layer: as many, of one untouched
    loss."""
    as_many = (single[["tokens", "documents"]] == joint[["tokens", "documents"]]).all(axis=1)
    return bool((as_many & np.isclose(single["base"], joint["base"], rtol=1e-4)).any())


def _todo(run: Run) -> str:
    return f"measure them with `{ablate_command(run)} --budget 0.02`"


def _best(run: Run, single: pd.DataFrame, budget: float) -> list[float]:
    """Return the share of each layer for a budget. single: rows of `effects`"""
    groups = {int(layer): rows for layer, rows in single.groupby("layer")}
    curves = {layer: list(zip(rows["share"], rows["change"], strict=True)) for layer, rows in groups.items()}
    shares = allocate(curves, budget)
    return [shares.get(layer, 0.0) for layer in range(run.layers)]


def _last(run: Run, table: pd.DataFrame) -> tuple[list[float], float]:
    """Return the shares that were run together last, and the budget that they were for. table: of `effects`"""
    mixtures = table[table["kind"] == "shares"].sort_values("study", kind="stable")
    if mixtures.empty:
        raise Missing(f"{run.name} has no shares of several layers that were run together: {_todo(run)}.")
    known, newest, budget = set(mixtures["condition"]), str(mixtures["condition"].iloc[-1]), np.nan
    for entry in run.manifest.effects:  # the last one asked for, which may have been measured before others
        for condition in known.intersection(entry.get("conditions") or ()):
            newest, budget = condition, float(entry.get("budget", np.nan))
    return [float(share) for share in newest.partition(":")[2].split(",")], budget


def _nothing(share: float) -> dict[str, float]:
    """Return the change of a layer of which nothing goes, or of a share that was not measured alone."""
    return dict.fromkeys(("change", "low", "high"), 0.0 if share == 0 else np.nan)


def _thresholds(run: Run, condition: str) -> list[float]:
    known = [entry.get("thresholds", {}).get(condition) for entry in run.manifest.effects]
    values = next((each for each in reversed(known) if each is not None), [np.nan] * run.layers)
    return [float(value) for value in values]


def _bytes(run: Run, shares: np.ndarray) -> dict[str, float]:
    """Return which share of all weights a token need not read once shares of the hidden values are 0, and 1 / the rest.

    A ReLU's FFN need not read the up rows and down columns of what did not fire before; then fewer columns of the map
    back are needed, and nothing else.
    """
    model, counts_zeros = run.manifest.model, run.manifest.options.get("threshold") is None
    unknown = not counts_zeros and any(entry.get("has_zeros") for entry in run.manifest.effects)
    tables = {entry["unread_table_rows"] for entry in run.manifest.effects if "unread_table_rows" in entry}
    if not tables or not model.get("parameters") or not model.get("d_model") or unknown:
        return {"unread": np.nan, "speedup": np.nan}
    matrix = model["d_model"] * run.widths  # numbers, by layer
    maps = 2 if "plain" in run.manifest.nnz_definition or model.get("family") in ("opt", "nemotron") else 3
    layers = by_layer(run)
    fired = layers["mean"].to_numpy() / run.widths if counts_zeros else np.ones(run.layers)
    density = layers["used"].to_numpy() / run.widths if run.manifest.counts_used else fired  # of values that are not 0
    before = 1 + (maps - 2) * fired + density  # matrices a layer
    read = model["parameters"] - max(tables) - (matrix * (maps - before)).sum()
    unread = float((matrix * shares * density).sum() / read)
    return {"unread": unread, "speedup": 1 / (1 - unread)}


@memo_scope()
def allocated(run: Run, budget: float, broke: Sequence[str] = ()) -> str:
    """Return the shares for a budget as a condition of `twell ablate`; "" where none are left to try.

    broke: conditions that were run for it before; with them the shares are fewer, unless the last of them keeps it.
    Raises UserError where not even a first one fits.
    """
    table, changes, alone = _measured(run), budget, allocation(run, budget)
    if not alone["share"].any():
        single = _chosen_by(run, _singles(table), table.attrs["halved"]).set_index("condition")["change"]
        raise UserError(
            f"Expected a budget in which some layer's share fits, got {budget:g} nats: the least is "
            f"{single.min():.2g}, of {single.idxmin()}."
        )
    for condition in broke:
        (joint, *_), _ = _together(run, table, condition)
        if not joint > budget:
            return ""
        changes *= min(LESS, budget / joint)
    while alone["share"].any() and alone.attrs["condition"] in broke and changes > LEAST * budget:
        alone = allocation(run, changes)
        changes *= LESS
    return "" if alone.attrs["condition"] in broke or not alone["share"].any() else str(alone.attrs["condition"])


def summary(table: pd.DataFrame) -> str:
    """Return a sentence on an allocation: its sum, its joint change beside the budget, and what it would buy.

    table: of `allocation`
    """
    about = table.attrs
    text = f"Alone these changes add up to {about['singles']:+.4f} nats a token"
    if about["joint"] == about["joint"]:
        interval = f" [{about['joint_low']:+.4f}, {about['joint_high']:+.4f}]"
        text += f"; run together they make {about['joint']:+.4f}{interval if 'nan' not in interval else ''}"
        text += _kept(about["joint"], about["joint_high"], about["budget"])
        if about["chosen_by"]:
            text += (
                ". That is on the tokens by which the shares were chosen, where they look cheaper than they are: of "
                "other text twell ablate tells, with these shares as --condition and with --text"
            )
    if about["halved"]:
        text += ". Shares are chosen by every other document, and changes are those of the others"
    if about["unread"] == about["unread"]:
        text += (
            f". At batch 1 a token would read {100 * about['unread']:.2g} % fewer bytes of weights: at most "
            f"{about['speedup']:.3g} ×, an estimate by bytes alone"
        )
    return text + "."


def _kept(joint: float, high: float, budget: float) -> str:
    """Return whether a change of the loss keeps a budget, as the end of a clause; "" where it is for none."""
    if budget != budget:
        return ""
    if joint > budget:
        return f", over the budget of {budget:g}"
    return f", within the budget of {budget:g}" + (", unlike the interval's upper end" if high > budget else "")


def lines(table: pd.DataFrame) -> list[str]:
    """Return an allocation as lines of text. table: of `allocation`"""
    rows = [
        f"  layer {row.layer:<4}{row.share:>7.0%} of the values, up to {row.threshold:<10.4g}{row.change:>+10.4f} alone"
        for row in table.itertuples()
    ]
    return [f"Shares by layer, {table.attrs['condition']}", *rows, f"  {summary(table)}"]
