"""Claims about speed and energy, each with the check that settles it on a run's timings. `findings` asks them all.

Only what a fast kernel ran is compared: the reference is an oracle, and no speed is claimed from it.
"""

from __future__ import annotations

from twell.analysis.activity.layers import by_layer
from twell.analysis.claims.activity import LARGE, Answer, Claim
from twell.analysis.speed.contribution import gain_correlations
from twell.analysis.speed.speedup import model_speedup, over_batches, speedup
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

STRONG = -0.9  # a Pearson correlation that deserves the name "follows"
NOT_SPARSE = 0.95


def _model(run: Run) -> dict[str, float]:
    """The whole model's timing, of a model as large as the claims are of."""
    found = model_speedup(run)
    _refuse(found["comparable"], found["note"])
    parameters = run.manifest.model.get("parameters") or 0
    if parameters < LARGE:
        raise Missing(
            f"The claim is of models of 0.5 B parameters and more; this one has {parameters:,}, and runs "
            f"{found['speedup']:.2f} times as fast as dense on {run.manifest.device}."
        )
    return found


def _refuse(comparable: bool, note: str) -> None:
    if not comparable:
        raise Missing(f"{note[0].upper()}{note[1:]}.")


def faster(least: float, text: str) -> Claim:
    """The claim that the whole forward pass gains at least so much."""

    def check(run: Run) -> Answer:
        found = _model(run)
        return Answer(
            f"the whole forward pass runs {found['speedup']:.2f} times as fast, on {run.manifest.device}",
            f"{over_batches(int(found['repeats']))}, from {found['low']:.2f} to {found['high']:.2f}; kernel "
            f"{found['kernel']}",
            found["speedup"] >= 1 + least,
            f"at least {1 + least:g} times dense",
        )

    return Claim("speed", text, check)


def energy(run: Run) -> Answer:
    found = _model(run)
    if found["energy"] != found["energy"]:
        raise Missing("The device reported no power while the model was timed.")
    return Answer(
        f"a token takes {100 * (1 - found['energy']):.0f} % less energy",
        f"power times time, sparse over dense, {over_batches(int(found['repeats']))}: {found['energy']:.2f}",
        found["energy"] <= 1 - 0.118,
        "at least 11.8 % less",
    )


def follows_nnz(run: Run) -> Answer:
    found = gain_correlations(run)
    _refuse(found.attrs["comparable"], found.attrs["note"])
    pairs = {row["with"]: row for row in found[found["of"] == "nnz"].to_dict("records")}
    if not pairs:
        raise Missing("Every layer has the same nnz or the same speedup: there is nothing to correlate.")
    shared = [f"{row['pearson']:.3f}" for row in found[found["of"] == "union"].to_dict("records")]
    chosen = pairs["contribution" if "contribution" in pairs else "speedup"]
    names = {"contribution": "what a layer adds to the model's speed", "speedup": "a layer's FFN speedup"}
    return Answer(
        "mean nnz against "
        + ", ".join(f"{names[gain]}: Pearson {row['pearson']:.3f}" for gain, row in pairs.items())
        + (f"; the different neurons of 128 tokens against the same: {', '.join(shared)}" if shared else ""),
        f"95 % {chosen['low']:.3f} to {chosen['high']:.3f}, Spearman {chosen['spearman']:.3f}, n = {chosen['n']} "
        f"layers, p = {chosen['p']:.2g} ({chosen['method']})",
        chosen["pearson"] <= STRONG,
        f"Pearson at or below {STRONG:g}, of the contribution where the whole model was timed",
    )


def slow_where_dense(run: Run) -> Answer:
    rows = speedup(run)
    _refuse(rows.attrs["comparable"], rows.attrs["note"])
    rows = rows.merge(by_layer(run)[["layer", "sparsity"]], on="layer")
    full = rows[rows["sparsity"] < NOT_SPARSE]
    if full.empty:
        raise Missing(f"Every layer is at least {100 * NOT_SPARSE:.0f} % sparse.")
    worst = full.loc[full["speedup"].idxmin()]
    return Answer(
        f"layer {worst['layer']:.0f}, {100 * worst['sparsity']:.1f} % sparse, runs {worst['speedup']:.2f} times as "
        "fast as dense",
        f"{int((full['speedup'] < 1).sum())} of {len(full)} layers under {100 * NOT_SPARSE:.0f} % sparsity are slower "
        "than dense",
        bool((full["speedup"] < 1).all()),
        f"every layer under {100 * NOT_SPARSE:.0f} % sparsity is slower than dense",
    )


CLAIMS = (
    faster(0.17, "The forward pass gains 17 to 20.5 % at 0.5 to 2 B parameters."),
    faster(0.30, "The forward pass gains up to 30 % at 1.5 B parameters (another report of the same work)."),
    Claim("speed", "Energy per token falls by 11.8 to 17 %.", energy),
    Claim("speed", "What a layer adds to the model's speed follows its mean nnz: Pearson -0.996.", follows_nnz),
    Claim("speed", "In layers that are not sparse the sparse kernels are slower than dense ones.", slow_where_dense),
)
