"""The log of a training: rows of the run's table `training`, collected, written while it goes on, and read again.

The training's folder is a run, so `open_run`, the dashboard and `twell export` read its log like any other table. The
table is small and written whole each time; a reader sees it as of one row or of a later one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from twell.kernels.dispatch import Choice
from twell.kernels.layout import Layout
from twell.workbench import doctor
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import Manifest
from twell.workbench.run.rank_share import RankShare
from twell.workbench.run.schema import TRAINING, expand
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import RunWriter
from twell.workbench.training.recipes import Recipe

Row = dict[str, Any]
FROM_THE_START = ("recipe", "corpus", "origin", "origin_loss", "teacher")  # fields of the record
PACE = 2.0  # seconds between two writes, at least


class TrainingLog:
    """The log of one training, which writes it into the run's folder.

    rows: every row so far, oldest first, by the columns of `training`; a column that a row lacks is null
    """

    def __init__(self, folder: Path, manifest: Manifest, share: RankShare, last_step: int) -> None:
        """Begin the run, or continue the one in the folder with its rows up to a step."""
        self.rows: list[Row] = []
        if last_step and (folder / manifests.FILE).exists():
            run = open_run(folder)
            if run.has("training"):
                self.rows = [row for row in run.arrow("training").to_pylist() if row["step"] <= last_step]
            manifest = replace(manifest, created=run.manifest.created, parts=run.manifest.parts)
        self._columns = [column.name for column in expand(TRAINING, manifest.layers, manifest.d_ff)]
        self._writer = RunWriter(folder, manifest, resume=True, share=share)
        self._written = 0.0

    def append(self, row: Row) -> None:
        """Add a row, and write the log unless that was done a moment ago."""
        self.rows.append(row)
        if time.monotonic() - self._written >= PACE:
            self.write()

    def write(self) -> None:
        """Write the log so far, and wait until it is on disk. Raises UserError where it cannot be."""
        self._add()
        self._writer.close_part(seconds=self._seconds)
        self._writer.drain()
        self._written = time.monotonic()

    def finish(self, **fields: Any) -> None:
        """Write the log and mark the run complete. fields: of the manifest, set with it."""
        self._add()
        self._writer.finish(seconds=self._seconds, **fields)

    def interrupt(self) -> None:
        """Mark the run as interrupted, with the rows that were written."""
        self._writer.abandon()

    def note(self, **fields: Any) -> None:
        """Set fields of the manifest; they are written with the next rows."""
        for name, value in fields.items():
            setattr(self._writer.manifest, name, value)

    @property
    def record(self) -> dict[str, Any]:
        """The manifest's field `training`, of which changes are written with the next rows."""
        return self._writer.manifest.training or {}

    @property
    def _seconds(self) -> float:
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0

    def _add(self) -> None:
        if self.rows:
            self._writer.add("training", {name: [row.get(name) for row in self.rows] for name in self._columns})


def new_manifest(
    name: str, recipe: Recipe, record: dict[str, Any], parameters: int, device: torch.device, choice: Choice
) -> Manifest:
    """Return the manifest of a training that begins.

    record: recipe and corpus, as `training.json` holds them; choice: the kernel that sparse layers run by, if any do
    """
    family, layout = "llama" if recipe.gated else "nemotron", Layout()
    product = "gate" if recipe.gated else "first"
    return Manifest(
        name=name,
        model={
            "name": name,
            "revision": None,
            "family": family,
            "layers": recipe.layers,
            "d_model": recipe.d_model,
            "d_ff": recipe.d_ff,
            "vocab_size": recipe.vocab,
            "parameters": parameters,
        },
        tokenizer={"name": name, "vocab_size": recipe.vocab},
        nnz_definition=f"pre-activation > 0 in the {product} product, as the model trains",
        dtype="bfloat16 beside float32 weights" if device.type == "cuda" else "float32",
        device=doctor.device_name(device),
        driver=doctor.driver(device),
        kernel={"name": choice.kernel, "reason": choice.reason},
        layout={"tile": layout.tile, "compression": layout.compression, "slots": layout.slots},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        text=[{"source": source["source"], "sha256": source["sha256"]} for source in record["corpus"]["sources"]],
        training={name: record[name] for name in FROM_THE_START if name in record},
        versions=doctor.versions(),
    )


def mean(row: Row, prefix: str) -> float:
    """Return the mean over layers of a per-layer column. prefix: `nnz_` or `dead_`"""
    values = [value for name, value in row.items() if name.startswith(prefix)]
    return sum(values) / len(values)
