"""Turn what `run.py` packed into the trainings that ship: logs and manifests, with the speeds that were measured.

    python data/studies/collect.py /tmp/studies-back data/studies/runs

The first folder holds `studies-N.tar`, or what is in them. Each training that ended becomes a run of some 30 kB without
weights, whose manifest carries its speeds (`training.measured`); `studies()` reads them all.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from twell.analysis import by_layer, ffn_speedup, model_speedup, training_results
from twell.workbench.errors import Missing, UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import open_run

DROPPED = ("command", "valid")  # of a training's record: they name folders, or hold nothing


def main() -> int:
    """Collect every training, and print what came out."""
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    source, target = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        archives = sorted(source.rglob("*.tar"))
        for path in archives:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
        work = Path(folder) if archives else source
        names = [path.parent.name for path in sorted(work.glob("models/*/training.json"))]
        runs = [ship(work, name, target / name) for name in names if ended(work / "models" / name)]
    table = training_results([open_run(path) for path in runs])
    print(table.drop(columns=["layers", "d_model", "d_ff", "ffn", "activation"]).round(4).to_string())
    print(f"{len(runs)} of {len(names)} trainings, {sum(size(path) for path in runs):,} bytes")
    return 0


def ended(folder: Path) -> bool:
    """Return whether a training ended."""
    return bool(json.loads((folder / "training.json").read_text(encoding="utf-8"))["status"] == "complete")


def ship(work: Path, name: str, target: Path) -> Path:
    """Copy a training's manifest and log, and add what was measured of its model; return the copy."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    source = work / "models" / name
    shutil.copytree(source / "training", target / "training")
    shutil.copyfile(source / "run.json", target / "run.json")
    record: dict[str, Any] = dict(open_run(target).manifest.training or {})
    record = {key: value for key, value in record.items() if key not in DROPPED}
    manifests.update(target, training={**record, "measured": measured(work, name)})
    return target


def measured(work: Path, name: str) -> dict[str, Any]:
    """Return the speeds of a model by the names that `training_results` has, and where they were measured."""
    values: dict[str, Any] = {}
    for prefix, folder in (("", "captures"), ("cpu_", "captures-cpu")):
        path = work / folder / name
        if not (path / "activity").exists():  # stopped before its first part, or never begun
            continue
        run = open_run(path)
        values[f"{prefix}device"] = run.manifest.device
        values[f"{prefix}kernel"] = run.manifest.kernel["name"]
        values[f"{prefix}nnz"] = nnz_of(run)
        for key, question in (("ffn", ffn_speedup), ("model", model_speedup)):
            values |= speed(f"{prefix}{key}", question, run)
    steps = work / "steps.json"
    step = json.loads(steps.read_text(encoding="utf-8")).get(name) if steps.exists() else None
    if step:
        values |= {"dense_step": median(step["dense"]), "sparse_step": median(step["sparse"])}
        values |= {"step_layers": step["sparse_layers"], "step_kernel": step["kernel"]}
        values |= {"step_speedup": values["dense_step"] / values["sparse_step"]} if step["sparse_layers"] else {}
    return values


def nnz_of(run: Any) -> float:
    """Return a capture's mean nnz over layers."""
    return float(by_layer(run)["mean"].mean())


def speed(key: str, question: Callable[..., dict[str, Any]], run: Any) -> dict[str, float]:
    """Return a speedup with its interval, by name; nothing where it was not timed."""
    try:
        answer = question(run)
    except (Missing, UserError) as reason:
        print(f"{run.name}: {reason}")
        return {}
    return {f"{key}_speedup": answer["speedup"], f"{key}_low": answer["low"], f"{key}_high": answer["high"]}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
