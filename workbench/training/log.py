"""The log of a training: rows of the run's table `training`, collected, written while it goes on, and read again; and
what a person sees of them meanwhile.

The training's folder is a run, so `open_run`, the dashboard and `twell export` read its log like any other table. The
table is small and written whole each time; a reader sees it as of one row or of a later one.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from twell.kernels.dispatch import Choice
from twell.kernels.layout import Layout
from twell.workbench import doctor
from twell.workbench.capturing.progress import time_left
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
FIRST_LINE, LINES = 2.0, 10.0  # seconds until the first line of progress, and between two, where there is no terminal


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


class Display:
    """What a person sees of a training that runs; a context manager.

    On a terminal a bar, elsewhere a line every few seconds, at the end of a step; and a line for every row of the log
    with a held-out loss.
    """

    def __init__(self, console: Console, recipe: Recipe, step: int) -> None:
        """step: that the training is at, as this process begins"""
        self._console, self._recipe, self._first = console, recipe, step
        self._began = self._line = time.monotonic()
        self._next, self._row = FIRST_LINE, ""
        self._stack = ExitStack()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("first steps", total=None)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._stack.enter_context(self._bar)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def step(self, step: int, total: int | None, seconds: float) -> None:
        """Show that a step is done. total: steps of the run, None if not yet known; seconds: of the run so far"""
        now = time.monotonic()
        if self._bar is None and now - self._line < self._next:
            return
        pace = (now - self._began) / (step - self._first)
        left = None if total is None else (total - step) * pace
        if self._recipe.minutes is not None:
            left = 60 * self._recipe.minutes - seconds
        text = f"step {step:,}{'' if total is None else f' of {total:,}'}"
        if left is not None:  # before the rest, which a narrow terminal cuts
            text += f" · {time_left(left)}"
        text += f"{self._row} · {self._recipe.step_tokens / pace:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=step, total=total)
        else:
            self._say(text)
            self._line, self._next = now, LINES

    def row(self, row: Row) -> None:
        """Show the last row of the log."""
        nnz = mean(row, "nnz_")
        self._row = f" · loss {row['loss']:.3f} · nnz {nnz:.1f} · rate {row['rate']:.1e}"
        if row.get("heldout_loss") is not None:
            speed = f" · {row['tokens_per_second']:,.0f} tokens/s"
            text = f"step {row['step']:,}{self._row}{speed} · held-out {row['heldout_loss']:.3f}"
            self._say(f"{text} · {row['seconds']:,.0f} s · of {row['total_steps']:,} steps")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


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
