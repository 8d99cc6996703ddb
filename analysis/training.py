"""Training: how a model gets sparse, step by step and layer by layer.

    training_steps(run)     a row of the log, with means over the layers
    training_layers(run)    a row a step and layer
    sparse_since(run)       when each layer went sparse
    training_results(runs)  how each of several trainings ended: what differs, what its sparsity costs and gains
    compare_trainings([a, b])   the rows of several logs, with the fields of their recipes that differ

From the table `training`, which `twell train` writes while it runs, and the manifest. Cost: milliseconds, a few hundred
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from twell.analysis.memo import memoized
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

SPARSE_SHARE = 0.1  # of d_ff: from there on the sparse kernels are faster than dense ones (kernels/training.py)
NOTE = "means over the training's steps since the row before, of its own text"
LAST = 0.1  # share of the log that stands for its end
EQUAL = 0.1  # how far apart tokens, tokens a parameter, or parameters, may be and still count as equal
OWN = ("name", "seed", "minutes", "log_every", "evaluations")  # fields of a recipe in which one training may differ
# What may be measured of a trained model: dense over sparse time of its FFNs, of its forward pass, of a training step.
SPEEDS = ("ffn_speedup", "model_speedup", "step_speedup", "cpu_ffn_speedup", "cpu_model_speedup")
VARIED = ("seed", "layers", "d_model", "d_ff", "activation", "restart_every", "l1")


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training ended.

    recipe: its fields; d_ff: neurons of a layer, width: their mean over layers, where these differ; gated: whether its
    FFNs are; tokens: trained on; l1_end: coefficient of its last step; loss: nats, heldout: whether of held-out text;
    nnz: mean over layers, dead: share of all neurons, on the held-out text if the training ended; peak: greatest
    memory, bytes; speeds: by names of SPEEDS; sparse: whether any layer ran by sparse kernels.
    """

    name: str
    recipe: dict[str, Any]
    d_ff: int
    width: float
    gated: bool
    heldout: bool
    parameters: int
    tokens: int
    steps: int
    l1_end: float
    loss: float
    nnz: float
    dead: float
    peak: float
    speeds: dict[str, float]
    sparse: bool

    @property
    def risen(self) -> bool:
        """Whether its L1 had risen in full when it ended."""
        return self.l1_end >= 0.999 * float(self.recipe.get("l1") or 0)

    @property
    def seed(self) -> int:
        """The seed of its weights and of the order of its text."""
        return int(self.recipe.get("seed", 0))

    def alike(self, other: TrainingOutcome, *apart: str) -> bool:
        """Return whether another training has the same recipe but for these fields; a Trainer's is not known. Without
        "tokens" among them both have gone on as long: one may have been stopped, or been given minutes."""
        if "trainer" in self.recipe or "trainer" in other.recipe:
            return False
        if "tokens" not in apart and abs(self.tokens / (other.tokens or 1) - 1) > EQUAL:
            return False
        names = (self.recipe.keys() | other.recipe.keys()) - {*OWN, *apart}
        return all(self.recipe.get(name) == other.recipe.get(name) for name in names)


def training_outcomes(runs: Iterable[Run]) -> list[TrainingOutcome]:
    """Return how each of the runs that are trainings ended."""
    results = map(_ended, runs)
    return [result for result in results if result is not None]


@memoized
def _ended(run: Run) -> TrainingOutcome | None:
    """Return how a training ended; None for a run that is none."""
    record = run.manifest.training or {}
    if "recipe" not in record or not run.has("training"):
        return None
    steps = training_steps(run)
    end, heldout = steps[steps["step"] >= (1 - LAST) * steps["step"].max()], steps["heldout_loss"].dropna()
    last = {
        "loss": float(heldout.iloc[-1]) if len(heldout) else float(end["loss"].mean()),
        "nnz": end["nnz"].mean(),
        "dead": end["dead"].mean(),
    }
    measured = record.get("heldout") or last
    speeds = {"step_speedup": float(end["step_speedup"].mean()), **record.get("measured", {})}
    return TrainingOutcome(
        name=run.name,
        recipe=record["recipe"],
        d_ff=run.d_ff,
        width=run.neurons / run.layers,
        gated=bool(record["recipe"].get("gated", "plain" not in run.manifest.nnz_definition)),
        heldout=bool(record.get("heldout")) or len(heldout) > 0,
        parameters=run.manifest.model.get("parameters") or 0,
        tokens=int(steps["tokens"].iloc[-1]),
        steps=int(steps["step"].iloc[-1]),
        l1_end=float(steps["l1_coefficient"].iloc[-1]),
        loss=float(measured["loss"]),
        nnz=float(np.mean(measured["nnz"])),
        dead=float(np.average(np.broadcast_to(measured["dead"], run.layers), weights=run.widths)),
        peak=float(steps["peak_bytes"].astype(float).max()),
        speeds={name: float(speeds.get(name, np.nan)) for name in SPEEDS},
        sparse=bool((end["sparse_layers"].fillna(0) > 0).any()),
    )


def training_results(runs: Sequence[Run]) -> pd.DataFrame:
    """Return how each of several trainings ended; a row a training, by L1. Runs that are none are left out. Columns:

    name; seed, layers, d_model, d_ff, activation, restart_every, l1 (of the recipe); ffn (gated or plain); parameters;
    tokens, steps (trained on); l1_end (the coefficient at its last step: below l1 where it still rose); loss (nats a
    token, held out; where a training has none, such as a Trainer's run, that of its last steps); rise (loss over that
    of the training without L1 of the same recipe, length and seed, less 1; NaN where there is none); nnz (mean over
    layers), sparsity, dead (share of all neurons), on the held-out text; ffn_speedup, model_speedup (dense over sparse
    time of FFNs and of the whole forward pass), step_speedup (of a training step), cpu_ffn_speedup, cpu_model_speedup
    (NaN where they were not measured).

    Missing where none of the runs is a training.
    """
    results = training_outcomes(runs)
    rows = []
    for one in results:
        others = [other for other in results if one.alike(other, "l1", "l1_warmup") and one.seed == other.seed]
        base = [other.loss for other in others if not other.recipe.get("l1")] if len(others) > 1 else []
        rows.append(
            {
                "name": one.name,
                **{name: one.recipe.get(name) for name in VARIED},
                "d_ff": one.d_ff,
                "ffn": "gated" if one.gated else "plain",
                "parameters": one.parameters,
                "tokens": one.tokens,
                "steps": one.steps,
                "l1_end": one.l1_end,
                "loss": one.loss,
                "rise": one.loss / base[0] - 1 if base else np.nan,
                "nnz": one.nnz,
                "sparsity": 1 - one.nnz / one.width,
                "dead": one.dead,
                **one.speeds,
            }
        )
    if not rows:
        raise Missing("None of these runs is a training: `twell train` records how a model gets sparse.")
    frame = pd.DataFrame(rows).sort_values(["l1", "seed", "name"], ignore_index=True)
    trained = [one.name for one in results if not one.heldout]
    loss = f"held-out loss, but of {', '.join(trained)} that of training" if trained else "held-out loss"
    frame.attrs = {"note": f"{loss}; speeds as dense over sparse time, measured after the training"}
    return frame


def training_steps(run: Run) -> pd.DataFrame:
    """Return the log of a training, a row each few steps, as table `training` has it, with four columns more.

    Columns: those of `training` but for nnz_LL and dead_LL; nnz (mean over the layers); dead (share of all neurons);
    sparsity (1 − nnz / d_ff); step_speedup (dense_step / sparse_step; NaN where they were not timed). attrs, of one
    that goes on from another model: origin (its name) and origin_loss (nats, of that model on the held-out text).
    Raises Missing for other runs.
    """
    frame = _log(run)
    nnz, dead = (frame[nnz_columns(run.layers, name)] for name in ("nnz", "dead"))
    steps = frame.drop(columns=[*nnz.columns, *dead.columns])
    steps["nnz"], steps["dead"] = nnz.mean(axis=1), np.average(dead, axis=1, weights=run.widths)
    steps["sparsity"] = 1 - steps["nnz"] * run.layers / run.neurons
    steps["step_speedup"] = steps["dense_step"].astype(float) / steps["sparse_step"].astype(float)
    steps.attrs["note"] = NOTE
    record = run.manifest.training or {}
    if "origin_loss" in record:
        steps.attrs |= {"origin": str(record["origin"]["name"]), "origin_loss": float(record["origin_loss"])}
    return steps


def reached(steps: pd.DataFrame) -> int | None:
    """Return the first step at which the held-out loss is at most that of the model it goes on from; None before.

    steps: of `training_steps`
    """
    there = steps.loc[steps["heldout_loss"].astype(float) <= steps.attrs.get("origin_loss", -np.inf), "step"]
    return int(there.iloc[0]) if len(there) else None


def training_phases(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of a training's log while every layer ran by dense kernels, without the first, in which they are
    compiled, and the rows in which as many layers ran by sparse kernels as at its end; none where none did.

    Columns: those of `training_steps`. Raises Missing for other runs.
    """
    steps = training_steps(run)
    layers = steps["sparse_layers"].fillna(0)
    last = layers.iloc[-1]
    return steps[layers == 0].iloc[1:], steps[(layers == last) & (layers > 0)]


def training_layers(run: Run) -> pd.DataFrame:
    """Return each layer's activity over a training. Columns: step, tokens, layer, nnz (mean of a token), sparsity, dead
    (share of neurons that fired on none of the tokens since the row before). Raises Missing for other runs."""
    frame = _log(run)
    layers = [
        pd.DataFrame(
            {
                "step": frame["step"],
                "tokens": frame["tokens"],
                "layer": layer,
                "nnz": frame[nnz],
                "sparsity": 1 - frame[nnz] / run.widths[layer],
                "dead": frame[dead],
            }
        )
        for layer, (nnz, dead) in enumerate(zip(nnz_columns(run.layers), nnz_columns(run.layers, "dead"), strict=True))
    ]
    table = pd.concat(layers, ignore_index=True).sort_values(["step", "layer"], ignore_index=True)
    table.attrs["note"] = NOTE
    return table


def sparse_since(run: Run, share: float = SPARSE_SHARE) -> pd.DataFrame:
    """Return when each layer went sparse: from when on its nnz stays below a share of d_ff.

    Columns: layer; step, tokens (of the first row from which on it stays below; null if it does not); nnz, dead (of the
    last row); nnz_least, step_least (the row with the least nnz). Raises Missing for other runs.
    """
    layers = training_layers(run)
    rows = []
    for layer, frame in layers.groupby("layer"):
        above = np.flatnonzero(frame["nnz"].to_numpy() > share * run.widths[layer])
        first = int(above[-1]) + 1 if len(above) else 0
        entered = frame.iloc[first] if first < len(frame) else None
        least = frame.loc[frame["nnz"].idxmin()]
        rows.append(
            {
                "layer": layer,
                "step": None if entered is None else entered["step"],
                "tokens": None if entered is None else entered["tokens"],
                "nnz": frame["nnz"].iloc[-1],
                "dead": frame["dead"].iloc[-1],
                "nnz_least": least["nnz"],
                "step_least": int(least["step"]),
            }
        )
    table = pd.DataFrame(rows).astype({"step": "Int64", "tokens": "Int64"})
    table.attrs["note"] = f"sparse: nnz of at most {share:g} of d_ff in each row to the end; {NOTE}"
    return table


def compare_trainings(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the logs of several trainings, one below the other.

    Columns: run (its name), then those of `training_steps`. attrs["recipes"]: a frame with a row for each field of the
    recipes that differs, and a column a run. Raises Missing where one of them is no training.
    """
    frames = [training_steps(run).assign(run=run.name) for run in runs]
    table = pd.concat(frames, ignore_index=True)
    table = table[["run", *(name for name in table if name != "run")]]
    recipes = pd.DataFrame({run.name: pd.Series((run.manifest.training or {}).get("recipe", {})) for run in runs})
    written = recipes.map(str)
    table.attrs["note"] = NOTE
    table.attrs["recipes"] = recipes[written.nunique(axis=1) > 1].drop(index="name", errors="ignore")
    return table


def _log(run: Run) -> pd.DataFrame:
    """Return the table `training`. Raises Missing where the run has none, or no row yet."""
    if not run.has("training"):
        state = " yet" if run.manifest.training and run.manifest.status == "recording" else ""
        raise Missing(f"{run.name} holds no training{state}: `twell train` records how a model gets sparse.")
    return run.frame("training")
