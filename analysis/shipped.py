"""Studies: what sparsity costs and what it gains, from the small trainings that ship (data/studies).

    studies()        a row a training: loss, nnz and speed beside what was varied
    studies(run)     the same, and the run itself as the last row
    study_runs()     the trainings, each a run with its log
    recorded_trainings()   those that ship beside recorded captures, of large models
    findings_at_hand(run)  `findings` of a run, with all of these among what it is compared with

Their recipes, and the command that trains and measures them all, are in data/studies. Cost: 30 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import by_layer
from twell.analysis.claims.findings import findings
from twell.analysis.speed.ffn_speedup import ffn_speedup
from twell.analysis.speed.speedup import model_speedup
from twell.analysis.training import training_results
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run, list_runs

GPU_ROWS, CPU_ROWS = 32_768, 4_096  # most of a timed batch, as data/studies/speed.py cuts the text
NONE_SHIP = "This package holds no trainings of the studies: data/studies/run.py makes them on a GPU"


def study_runs() -> list[Run]:
    """Return the trainings that ship with the package, by name; none where it has none."""
    folder = Path(str(resources.files("twell.data"))) / "studies" / "runs"
    return sorted(list_runs(folder)[0], key=lambda run: run.name) if folder.is_dir() else []


def recorded_trainings() -> list[Run]:
    """Return the recorded runs of the package that are trainings, by name."""
    folder = Path(str(resources.files("twell.data"))) / "recorded"
    runs = list_runs(folder)[0] if folder.is_dir() else []
    return sorted((run for run in runs if run.has("training")), key=lambda run: run.name)


def findings_at_hand(runs: Run | Sequence[Run]) -> pd.DataFrame:
    """Return `findings` of a run, the last of several; claims between models and on trainings are checked on the others
    and on the trainings that ship too."""
    *others, run = [runs] if isinstance(runs, Run) else runs
    known = {each.path.resolve() for each in (run, *others)}
    shipped = [each for each in (*recorded_trainings(), *study_runs()) if each.path.resolve() not in known]
    return findings(run, *others, *shipped)


def studies(run: Run | None = None) -> pd.DataFrame:
    """Return how each training of the studies ended; a row a training, by L1. Columns, as `training_results` has them:

    name; seed, layers, d_model, d_ff, activation, restart_every, l1; ffn (gated or plain); parameters; tokens, steps
    (trained on); l1_end (the coefficient at its last step); loss (nats a token, held out); rise (loss over that of the
    same training without L1, less 1); nnz (mean over layers), sparsity, dead (share of all neurons); ffn_speedup,
    model_speedup, step_speedup, cpu_ffn_speedup, cpu_model_speedup (dense over sparse time; NaN where not measured);
    this_run (whether the row is `run`'s). attrs: note; device, cpu_device, rows, cpu_rows, step_rows (what the speeds
    hold for).

    run: a run that is added as the last row, with its nnz, its speeds on its own device and this_run true; its loss is
    left out, as it is of another text. Raises Missing where the package holds no training.
    """
    runs = study_runs()
    if not runs:
        raise Missing(f"{NONE_SHIP}.")
    table = training_results(runs).assign(this_run=False)
    attrs = table.attrs | measured_on(runs[0])
    if run is not None and (row := _row(run)):
        table = pd.concat([table, pd.DataFrame([row])], ignore_index=True)
    table.attrs = attrs
    return table


def measured_on(training: Run) -> dict[str, Any]:
    """Return what the speeds of the studies hold for: device and cpu_device ("" where unknown), rows and cpu_rows (most
    of a timed batch), step_rows (tokens of a training step)."""
    record: dict[str, Any] = training.manifest.training or {}
    measured, recipe = record.get("measured", {}), record.get("recipe", {})
    devices = {name: str(measured.get(name, "")) for name in ("device", "cpu_device")}
    step = int(recipe.get("rows") or 0) * int(recipe.get("seq_len") or 0)
    return devices | {"rows": GPU_ROWS, "cpu_rows": CPU_ROWS, "step_rows": step}


def _row(run: Run) -> dict[str, Any]:
    """Return the columns of studies that a run has; none where it counts nothing."""
    try:
        nnz = float(by_layer(run)["mean"].mean())
    except Missing:
        return {}
    speeds = {}
    for name, question in (("ffn_speedup", ffn_speedup), ("model_speedup", model_speedup)):
        try:
            answer = question(run)
        except Missing:
            continue
        speeds[name] = answer["speedup"] if answer["comparable"] else np.nan
    model = run.manifest.model
    shape = {"layers": run.layers, "d_model": model.get("d_model"), "d_ff": run.d_ff}
    return {
        "name": run.name,
        "activation": "",
        "ffn": "",
        **shape,
        "parameters": model.get("parameters"),
        "nnz": nnz,
        "sparsity": 1 - nnz * run.layers / run.neurons,
        **speeds,
        "this_run": True,
    }
