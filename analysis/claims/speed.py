"""Claims about speed and energy. `findings` runs every check of CLAIMS.

To add a claim, write its check here (`claim` says what it returns) and list it in CLAIMS at the end of this file. Only
times of a fast kernel are compared: the reference kernel is there to check results, so no speed is claimed from it.
"""

from __future__ import annotations

import numpy as np

from twell.analysis.activity.layers import by_layer
from twell.analysis.claims.claim import LARGE, Answer, Claim, refuse_incomparable
from twell.analysis.speed.contribution import gain_correlations
from twell.analysis.speed.speedup import model_speedup, over_batches, speedup
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

STRONG = -0.9  # Pearson correlation at or below which speed "follows" nnz
NOT_SPARSE = 0.95  # sparsity below which a layer counts as "not sparse"


def _large_model_speedup(run: Run) -> dict[str, float]:
    """Return model_speedup(run). Raises Missing where the model is smaller than those that the claims are about, or
    where the reference kernel ran."""
    timing = model_speedup(run)
    refuse_incomparable(timing["comparable"], timing["note"])
    parameters = run.manifest.model.get("parameters") or 0
    if parameters < LARGE:
        raise Missing(
            f"The claim is of models of 0.5 B parameters and more; this one has {parameters:,}, and runs "
            f"{timing['speedup']:.2f} times as fast as dense on {run.manifest.device}."
        )
    return timing


def faster(gain: float, text: str) -> Claim:
    """Return the claim that the whole forward pass runs at least 1 + `gain` times as fast as dense; text: the claim."""

    def check(run: Run) -> Answer:
        timing = _large_model_speedup(run)
        return Answer(
            f"the whole forward pass runs {timing['speedup']:.2f} times as fast, on {run.manifest.device}",
            f"{over_batches(int(timing['repeats']))}, from {timing['low']:.2f} to {timing['high']:.2f}; kernel "
            f"{timing['kernel']}",
            timing["speedup"] >= 1 + gain,
            f"at least {1 + gain:g} times dense",
        )

    return Claim("speed", text, check)


def energy(run: Run) -> Answer:
    """Check that a token takes at least 11.8 % less energy than dense."""
    timing = _large_model_speedup(run)
    if np.isnan(timing["energy"]):
        raise Missing("The device reported no power while the model was timed.")
    return Answer(
        f"a token takes {100 * (1 - timing['energy']):.0f} % less energy",
        f"power times time, sparse over dense, {over_batches(int(timing['energy_repeats']))}: {timing['energy']:.2f}",
        timing["energy"] <= 1 - 0.118,
        "at least 11.8 % less",
    )


def follows_nnz(run: Run) -> Answer:
    """Check that mean nnz and what a layer adds to the model's speed correlate at -0.9 or below over layers."""
    rows = gain_correlations(run)
    refuse_incomparable(rows.attrs["comparable"], rows.attrs["note"])
    pairs = {row["with"]: row for row in rows[rows["of"] == "nnz"].to_dict("records")}
    if not pairs:
        raise Missing("Every layer has the same nnz or the same speedup: there is nothing to correlate.")
    of_unions = [f"{row['pearson']:.3f}" for row in rows[rows["of"] == "union"].to_dict("records")]
    chosen = pairs["contribution" if "contribution" in pairs else "speedup"]
    names = {"contribution": "what a layer adds to the model's speed", "speedup": "a layer's FFN speedup"}
    return Answer(
        "mean nnz against "
        + ", ".join(f"{names[gain]}: Pearson {row['pearson']:.3f}" for gain, row in pairs.items())
        + (f"; the different neurons of 128 tokens against the same: {', '.join(of_unions)}" if of_unions else ""),
        f"95 % {chosen['low']:.3f} to {chosen['high']:.3f}, Spearman {chosen['spearman']:.3f}, n = {chosen['n']} "
        f"layers, p = {chosen['p']:.2g} ({chosen['method']})",
        chosen["pearson"] <= STRONG,
        f"Pearson at or below {STRONG:g}, of the contribution where the whole model was timed",
    )


def slow_where_dense(run: Run) -> Answer:
    """Check that every layer under 95 % sparsity runs slower than dense."""
    rows = speedup(run)
    refuse_incomparable(rows.attrs["comparable"], rows.attrs["note"])
    rows = rows.merge(by_layer(run)[["layer", "sparsity"]], on="layer")
    not_sparse = rows[rows["sparsity"] < NOT_SPARSE]
    if not_sparse.empty:
        raise Missing(f"Every layer is at least {100 * NOT_SPARSE:.0f} % sparse.")
    slower, bound = not_sparse["speedup"] < 1, f"under {100 * NOT_SPARSE:.0f} % sparsity"
    slowest = not_sparse.loc[not_sparse["speedup"].idxmin()]
    return Answer(
        f"layer {slowest['layer']:.0f}, {100 * slowest['sparsity']:.1f} % sparse, runs {slowest['speedup']:.2f} "
        "times as fast as dense",
        f"{int(slower.sum())} of {len(not_sparse)} layers {bound} are slower than dense",
        bool(slower.all()),
        f"every layer {bound} is slower than dense",
    )


CLAIMS = (
    faster(0.17, "The forward pass gains 17 to 20.5 % at 0.5 to 2 B parameters."),
    faster(0.30, "The forward pass gains up to 30 % at 1.5 B parameters (another report of the same work)."),
    Claim("speed", "Energy per token falls by 11.8 to 17 %.", energy),
    Claim("speed", "What a layer adds to the model's speed follows its mean nnz: Pearson -0.996.", follows_nnz),
    Claim("speed", "In layers that are not sparse the sparse kernels are slower than dense ones.", slow_where_dense),
)
