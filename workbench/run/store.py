"""Read a run: `run = open_run("runs/demo")`.

A run is read part by part from the files that its manifest lists, so a run that is still being recorded can be opened
at any moment, and opened again later for what was added. Tables are returned as Arrow or as a DataFrame; `sql` runs
DuckDB over the run's tables where DuckDB is installed. Reading needs no torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.errors import Missing, UserError, import_for_use, path_of, usable, utf8
from twell.workbench.run import manifest as manifests
from twell.workbench.run.checks import left_out, queries
from twell.workbench.run.homes.summary_home import summary_home
from twell.workbench.run.manifest import Manifest
from twell.workbench.run.part_files import open_part, read_part, unreadable_part, with_newer_columns
from twell.workbench.run.schema import SUMMARIES, TABLES, nnz_columns
from twell.workbench.run.shaded import ShadedPassage
from twell.workbench.run.tables.absent import ABSENT, UNTIMED

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Run:
    """One run on disk, as its manifest stood when it was opened."""

    path: Path
    manifest: Manifest

    def __repr__(self) -> str:
        about = self.manifest
        tables = ", ".join(dict.fromkeys(part.table for part in about.parts))
        return (
            f"Run({str(self.path)!r}: {about.status}, {about.tokens:,} tokens, {about.model['name']}, "
            f"{self.layers} layer{'s' * (self.layers != 1)} of {manifests.spelled(about.widths)} neurons; "
            f"tables {tables}){self.left_out and f'. {self.left_out}'}"
        )

    def _repr_html_(self) -> str | None:
        """Return a card for a notebook, which shows `repr` for None: where the analysis that fills it cannot run."""
        try:
            return str(_notebook().card(self))
        except ModuleNotFoundError:
            return None

    def text(self, sequence: int = 0, layer: int | None = None) -> ShadedPassage:
        """Return a sequence that a notebook shows shaded by nnz, in all layers or one; `str()` of it is its text."""
        return _notebook().shaded_text(self, sequence, layer)  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """Return the folder's name, by which the dashboard and the command line call the run."""
        return self.path.name

    @property
    def layers(self) -> int:
        return self.manifest.layers

    @property
    def d_ff(self) -> int:
        """Return how many neurons a layer has; the widest one, where `twell prune --per-layer` made the model."""
        return self.manifest.d_ff

    @property
    def widths(self) -> NDArray:
        """Return how many neurons each layer has, int64 [layers]."""
        import numpy as np

        return np.array(self.manifest.widths, dtype=np.int64)

    @property
    def neurons(self) -> int:
        """Return how many neurons all layers have."""
        return sum(self.manifest.widths)

    @property
    def none_fired(self) -> bool:
        """Return whether the run counted its neurons and none ever fired: it has no part of them, yet knows that all
        are dead."""
        counted = self.has("activity") and self.manifest.options.get("probes", "counts") != "counts"
        return counted and not self.has("neurons")

    @property
    def counts_above_threshold(self) -> bool:
        """Return whether what is above a threshold was counted, beside an FFN that ran densely."""
        return self.manifest.options.get("threshold") is not None

    def has(self, table: str) -> bool:
        """Return whether the run has any part of a table."""
        return any(part.table == table for part in self.manifest.parts)

    def parts(self, table: str) -> list[Path]:
        """Return the checked files of a table, in the order they were written.

        Raises Missing if the run has none, UserError for a damaged file.
        """
        files = self.files(table)
        listed = [part for part in self.manifest.parts if part.table == table]
        for part, reason in left_out.damaged_parts(self.path, self.manifest, listed):
            raise unreadable_part(self.path / part.file, f"one that {reason}")
        return files

    def files(self, table: str) -> list[Path]:
        """Return the files of a table as the manifest lists them, unchecked. Raises Missing if the run has none."""
        if table not in TABLES:
            raise UserError(f"Expected a table of {', '.join(TABLES)}, got {table!r}.")
        if not self.has(table):
            raise Missing(f"{self.name} holds no {ABSENT[table][0]}{self._why(table)}.")
        return [self.path / part.file for part in self.manifest.parts if part.table == table]

    def arrow(self, table: str = "activity", columns: Sequence[str] | None = None) -> pa.Table:
        """Return a table as Arrow, its parts joined, whoever wrote them. columns: their names, all if None."""
        import pyarrow as pa

        return pa.concat_tables(self.pieces(table, columns), promote_options="permissive")

    def pieces(self, table: str = "activity", columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield a table's parts as Arrow, one at a time. Raises UserError for one that cannot be read."""
        import pyarrow as pa

        for path in self.parts(table):
            try:
                with open_part(path) as file:  # pyarrow's read_table takes longer to set up than small tables to read
                    yield with_newer_columns(table, file.read(list(columns) if columns is not None else None), columns)
            except (OSError, pa.ArrowException) as error:
                raise unreadable_part(path, error) from None

    def rows(
        self, table: str, filters: Sequence[tuple[str, str, object]], columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a table that meet every filter, as Arrow.

        filters: (column, operator, value), as pyarrow.parquet.read_table takes them; columns: their names, all if None.
        Raises UserError for a part that cannot be read.
        """
        import pyarrow as pa

        selection = {"filters": list(filters), "columns": None if columns is None else list(columns)}
        pieces = [read_part(path, **selection) for path in self.parts(table)]
        return pa.concat_tables(pieces, promote_options="permissive")

    def frame(self, table: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return a table as a DataFrame. columns: their names, all if None."""
        return left_out.labelled(self.arrow(table, columns).to_pandas(), self.manifest)

    def activity(self, tidy: bool = False, layers: Sequence[int] | None = None, flagged: bool = True) -> pd.DataFrame:
        """Return the counts of each token: nnz and, for a model with a ReLU on the up branch too, used.

        tidy: a row a token and layer (columns layer, nnz, used) in place of a row a token (columns nnz_LL, used_LL);
        layers: keeps these layers alone, all if None; flagged: whether special, first and non-finite tokens are
        returned too. loss is in nats; it is float16 on disk and float32 here, since pandas warns of overflows when it
        displays the former. nnz and used are int32 here, since differences of the unsigned ones on disk wrap around.
        """
        kinds = ("nnz", "used") if self.manifest.counts_used else ("nnz",)
        columns_by_kind = {kind: nnz_columns(self.layers, kind) for kind in kinds}
        selected = list(range(self.layers)) if layers is None else list(layers)
        unknown = [layer for layer in selected if not 0 <= layer < self.layers]
        if unknown:
            raise UserError(f"Expected layers from 0 to {self.layers - 1}, got {unknown[0]}.")
        keys = ["sequence", "position", "token_id", "phase", "flags", "loss", "entropy"]
        counted = [names[layer] for names in columns_by_kind.values() for layer in selected]
        frame = self.frame("activity", keys + counted).astype({"loss": "float32"} | dict.fromkeys(counted, "int32"))
        if not flagged:
            frame = frame[frame["flags"] == 0].reset_index(drop=True)
        if not tidy:
            return frame
        tidied = [
            frame.rename(columns={names[layer]: layer for layer in selected}).melt(
                id_vars=keys, value_vars=selected, var_name="layer", value_name=kind
            )
            for kind, names in columns_by_kind.items()
        ]
        counts = tidied[0].assign(**{kind: each[kind] for kind, each in zip(kinds, tidied, strict=True)})
        return left_out.labelled(counts.astype({"layer": "int32"}), self.manifest)

    def sql(self, query: str) -> pd.DataFrame:
        """Return the result of a DuckDB query over the run's tables, under their names: activity, neurons, …"""
        there = [name for name in TABLES if self.has(name)]
        return left_out.labelled(queries.answer(query, there, self.parts, set(TABLES) - set(there)), self.manifest)

    @property
    def left_out(self) -> str:
        """Return a sentence that names the damaged parts which the run is used without; "" if there are none."""
        return left_out.sentence(self.manifest)

    def summary_path(self, name: str) -> Path:
        """Return the path of a summary, which may not be built yet. Without damaged parts a run has others."""
        own = "-without-damaged" if self.manifest.left_out and not self.manifest.summary_only else ""
        folder = summary_home(self.path, self.manifest.summary_only) / "summary"
        return folder / f"v{SUMMARIES.version}{own}" / f"{name}.parquet"

    @cached_property
    def vocab(self) -> pd.DataFrame:
        """Return the vocabulary by token id; columns bytes, text, special."""
        return self.frame("vocab").set_index("token_id").sort_index()

    def decode(self, token_ids: Sequence[int], errors: str = "replace") -> str:
        """Return the text of tokens: their bytes are joined, then decoded. errors: as of `bytes.decode`"""
        pieces = self.vocab["bytes"].reindex(list(token_ids))
        return b"".join(piece for piece in pieces if isinstance(piece, bytes)).decode("utf-8", errors)

    def damaged(self, *tables: str, files: Collection[str] | None = None) -> list[str]:
        """Return a sentence for each file that is missing or differs from its checksum in the manifest.

        tables, files: check these tables and these files alone; default all
        """
        listed = [
            part
            for part in self.manifest.parts
            if (not tables or part.table in tables) and (files is None or part.file in files)
        ]
        return [f"{part.file} {reason}." for part, reason in left_out.damaged_parts(self.path, self.manifest, listed)]

    def _why(self, table: str) -> str:
        if any(entry["file"].partition("/")[0].partition(".")[0] == table for entry in self.manifest.left_out):
            return f" without its damaged parts. {self.left_out.rstrip('.')}"
        if self.manifest.only_trains:
            return ": it is a training, whose model `twell capture` can record"
        if self.manifest.summary_only and not TABLES[table].in_summary_only:
            if table in SUMMARIES.tables:
                return ": it is a summary-only run, which keeps it added up over the parts, in its summary alone"
            return ": it is a summary-only run, which keeps no row of single tokens"
        if self.manifest.status == manifests.RECORDING:
            return " yet: it is still being recorded"
        reason = UNTIMED if table == "timings" and self.counts_above_threshold else ABSENT[table][1]
        return f": {reason}" if reason else ""


def _notebook() -> Any:
    """Return the analysis' module for notebooks, imported by name when it is needed, as it imports this one."""
    return import_for_use("twell.analysis.exports.notebook")


def open_run(path: str | Path, without_damaged: bool = False) -> Run:
    """Open a run folder. Raises UserError where it holds no run, a broken one, or one from a newer version.

    without_damaged: leave out parts that are missing or damaged, and what was recorded together with them; the run and
    its tables name them (`Run.left_out`). Otherwise a question that needs such a part is refused.
    """
    folder = path_of(path, "the folder of a run")
    usable(folder)
    manifest = manifests.read(folder)
    return Run(folder, left_out.without_damaged(folder, manifest) if without_damaged else manifest)


def list_runs(folder: str | Path) -> tuple[list[Run], dict[str, str]]:
    """Return the runs in a folder (or the folder itself, if it is a run), newest first, and, by the folder's name, a
    sentence for each that cannot be read."""
    folder = path_of(folder, "a folder of runs")
    runs: list[Run] = []
    broken: dict[str, str] = {}
    try:
        candidates = [folder] if _holds_run(folder) else sorted(folder.iterdir()) if folder.is_dir() else []
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return [], {folder.name: f"Expected a folder of runs at {folder}, got {reason}: choose one that can be read."}
    for candidate in candidates:
        try:
            if _holds_run(candidate):
                utf8(candidate.name)
                runs.append(open_run(candidate))
        except UserError as error:
            broken[ascii(candidate.name)[1:-1] if not candidate.name.isprintable() else candidate.name] = str(error)
    return sorted(runs, key=lambda run: run.manifest.created, reverse=True), broken


def _holds_run(folder: Path) -> bool:
    """Return whether a folder holds a manifest, or the rows that one has lost. UserError where that cannot be told."""
    for name in (manifests.FILE, "activity", "vocab.parquet"):
        try:
            os.lstat(folder / name)
            return True
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise UserError(f"Expected a run that can be read in {folder}, got {error.strerror}.") from None
    return False


def refuse_existing(folder: Path) -> None:
    """Raise UserError if the folder holds a run or anything else, or if no folder can have its name."""
    usable(folder)
    if (folder / manifests.FILE).exists():
        raise UserError(
            f"Expected an empty output folder, {folder} already holds a run: choose another folder or remove it first."
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"Expected an output folder, {folder} is a file: choose another folder.")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"Expected an empty output folder, {folder} holds other files: choose another folder.")
