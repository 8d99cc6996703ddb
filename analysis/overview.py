"""Overview: a run in a few numbers, each with the number of tokens, layers or batches behind it.

    overview(run)

Cost: 0.15 s. A number that the run does not have is None, with the reason in `missing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from twell.analysis.activity.layers import by_layer, flagged_tokens
from twell.analysis.activity.origins import first_over_all
from twell.analysis.activity.surprisal import surprisal_correlation
from twell.analysis.memo import memo_scope
from twell.analysis.speed.ffn_speedup import caveats, ffn_speedup, layer_names
from twell.analysis.speed.speedup import model_speedup, speedup, speedup_correlation
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.by_token import by_token
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def overview(run: Run) -> dict[str, Any]:
    """Return the run's headline numbers:

    status; nnz_definition; layers; d_ff; tokens; flagged_tokens; sequences; loss (nats), loss_tokens; nnz_mean (a
    layer, mean over layers); used_mean (likewise, of by_layer's `used`; None where the model has no ReLU on the up
    branch); sparsity; densest_layer, sparsest_layer and their means densest_nnz, sparsest_nnz;
    dead, dead_share (of all neurons), dead_upper (95 % bound of a dead neuron's density); first_ratio (mean nnz of
    position 0 over that of all later ones, summed over layers), first_low, first_high (95 %), first_tokens;
    loudest, quietest (dicts: token_id, text, z, z_se, count) among tokens that occur 20 times; spearman (nnz and
    the next token's loss, median over layers), spearman_tokens; speedup, with speedup_low, speedup_high,
    speedup_turns (as `ffn_speedup` has them; None where the reference ran), speedup_layers (those timed, in words),
    speedup_caveats (sentences), speedup_repeats, kernel, comparable; pass_speedup, with pass_low, pass_high (the
    whole forward pass, NaN under three batches), pass_repeats (batches); pearson (nnz and speedup over layers),
    pearson_layers; missing (dict: what is None, and why).
    """
    manifest = run.manifest
    numbers: dict[str, Any] = {
        "status": manifest.status,
        "nnz_definition": manifest.nnz_definition,
        "layers": run.layers,
        "d_ff": run.d_ff,
        "sequences": manifest.sequences,
        "loss": manifest.loss,
        "loss_tokens": manifest.loss_tokens,
        "missing": {},
    }
    with memo_scope():
        for names, answer in QUESTIONS.items():
            try:
                numbers |= answer(run)
            except Missing as reason:
                numbers |= dict.fromkeys(names)
                numbers["missing"] |= dict.fromkeys(names, str(reason))
    return numbers


def _activity(run: Run) -> dict[str, Any]:
    """Return the numbers that come from by_layer: counts of tokens, nnz, sparsity and dead neurons."""
    layers = by_layer(run)
    densest, sparsest = layers.iloc[layers["mean"].argmax()], layers.iloc[layers["mean"].argmin()]
    mean = float(layers["mean"].mean())
    return {
        "tokens": int(layers["tokens"].iloc[0]),
        "flagged_tokens": flagged_tokens(open_summaries(run)),
        "nnz_mean": mean,
        "sparsity": 1 - mean * run.layers / run.neurons,
        "densest_layer": int(densest["layer"]),
        "densest_nnz": float(densest["mean"]),
        "sparsest_layer": int(sparsest["layer"]),
        "sparsest_nnz": float(sparsest["mean"]),
    }


def _used(run: Run) -> dict[str, Any]:
    """Return how many of the fired neurons have a product."""
    used = by_layer(run)["used"]
    if not run.manifest.counts_used:
        raise Missing("The model has no ReLU on the up branch: every neuron that fires has a product.")
    if used.isna().any():
        raise Missing(f"{run.name} has no sums of the products that are not zero: build its summaries again.")
    return {"used_mean": float(used.mean())}


def _dead(run: Run) -> dict[str, Any]:
    """Return how many neurons never fired."""
    layers = by_layer(run)
    if layers["dead"].isna().any():
        raise Missing(str(layers.attrs["note"]))
    dead = int(layers["dead"].sum())
    upper = float(layers["dead_upper"].iloc[0])
    return {"dead": dead, "dead_share": dead / run.neurons, "dead_upper": upper}


def _first(run: Run) -> dict[str, Any]:
    """Return mean nnz at position 0 over that of later positions with its interval, and the tokens at position 0."""
    first = first_over_all(run).loc["all"]
    numbers = {name: float(first[name]) for name in ("ratio", "low", "high")}
    known = {f"first_{name}": value if np.isfinite(value) else None for name, value in numbers.items()}
    return {**known, "first_tokens": int(first["tokens"])}


def _extremes(run: Run) -> dict[str, Any]:
    """Return the loudest and the quietest token by z."""
    rows = by_token(run, spelled=True)[["token_id", "text", "z", "z_se", "count"]]
    loudest, quietest = rows.iloc[0].to_dict(), rows.iloc[-1].to_dict()
    return {"loudest": loudest, "quietest": quietest}


def _surprisal(run: Run) -> dict[str, Any]:
    """Return the median rank correlation of nnz and the next token's loss over layers."""
    rows = surprisal_correlation(run)
    return {"spearman": float(rows["spearman"].median()), "spearman_tokens": int(rows["n"].iloc[0])}


def _speedup(run: Run) -> dict[str, Any]:
    """Return the speedup of all timed FFNs together, and what stands beside it."""
    total = ffn_speedup(run)
    _refuse_incomparable(total)
    numbers = {f"speedup_{name}": total[name] for name in ("low", "high", "turns")}
    words = {"speedup_layers": layer_names(total), "speedup_caveats": caveats(total)}
    return {"speedup": total["speedup"]} | numbers | words


def _pass(run: Run) -> dict[str, Any]:
    """Return the speedup of the whole forward pass with its interval."""
    timing = model_speedup(run)
    _refuse_incomparable(timing)
    return {f"pass_{name}": timing[name] for name in ("speedup", "low", "high", "repeats")}


def _timed(run: Run) -> dict[str, Any]:
    """Return how the FFNs were timed: number of batches, kernel, and whether the times can be compared."""
    rows = speedup(run)
    return {
        "speedup_repeats": int(rows["repeats"].min()),
        "kernel": ", ".join(sorted(set(rows["kernel"]))),
        "comparable": rows.attrs["comparable"],
    }


def _refuse_incomparable(numbers: Mapping[Any, Any]) -> None:
    """Raise Missing with the numbers' own note if they cannot be compared."""
    if not numbers["comparable"]:
        raise Missing(f"{numbers['note'][0].upper()}{numbers['note'][1:]}.")


def _pearson(run: Run) -> dict[str, Any]:
    """Return the Pearson correlation of nnz and speedup over layers."""
    correlation = speedup_correlation(run)
    _refuse_incomparable(correlation)
    return {"pearson": correlation["pearson"], "pearson_layers": correlation["n"]}


_ACTIVITY = "tokens flagged_tokens nnz_mean sparsity densest_layer densest_nnz sparsest_layer sparsest_nnz"
QUESTIONS: dict[tuple[str, ...], Callable[[Run], dict[str, Any]]] = {
    tuple(_ACTIVITY.split()): _activity,
    ("used_mean",): _used,
    ("dead", "dead_share", "dead_upper"): _dead,
    ("first_ratio", "first_low", "first_high", "first_tokens"): _first,
    ("loudest", "quietest"): _extremes,
    ("spearman", "spearman_tokens"): _surprisal,
    ("speedup", *(f"speedup_{name}" for name in ("low", "high", "turns", "layers", "caveats"))): _speedup,
    ("speedup_repeats", "kernel", "comparable"): _timed,
    ("pass_speedup", "pass_low", "pass_high", "pass_repeats"): _pass,
    ("pearson", "pearson_layers"): _pearson,
}
