"""Read a run's summaries, from which every table of the API is computed.

    summaries = open_summaries(run)                        bring them up to date, once per question
    summaries.columns("tokens", "token_id", "nnz_sum")     columns as arrays, the cheapest way to read them
    summaries.frame("tokens", token_id=5)                  a summary as a DataFrame, here only rows of one token
    summaries.arrow("words", ["word", "occurrences"])      the same as an Arrow table

Opening may build (`refresh`); reading never does. `summary/vN/` holds one Parquet file a table, declared in
`workbench.run.summary_schema` and sorted by its keys. Cost: 1 ms to open summaries that are up to date, 5 ms a million
numbers to read; columns that were read before are not decoded again as long as their file is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.memo import memoized
from twell.analysis.summaries.built import damage, growing, read_built, summary_fault
from twell.analysis.summaries.documents import BLOCK
from twell.analysis.summaries.refresh import ensure
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.checks.columns_on_disk import column_fault
from twell.workbench.run.checks.ranges import Sizes
from twell.workbench.run.columns import NO_ENTROPY, NO_LOSS
from twell.workbench.run.part_files import open_part
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run

DECODED = 12  # sets of columns cached as arrays, of one run or several: 50 MB for a long run with many layers
EARLIER = "its summaries are of an earlier revision: summarise the run it was copied from and copy it again"


@memoized
def open_summaries(run: Run, scored: bool = False) -> Summaries:
    """Bring the summaries of a run up to date and return a reader of them.

    scored: whether summaries that need the means of the whole run (`token_scores`, `words`) are required too. While a
    run is being recorded they cost a reading of every part, so only a question that uses them sets this.
    Raises Missing where the run has nothing to summarise, UserError where its summaries cannot be written, and for what
    is no run.
    """
    if not isinstance(run, Run):
        raise UserError(f"Expected a run, got a {type(run).__name__}: open it first, as in open_run('runs/mine').")
    ensure(run, scored=scored or not growing(run))
    return Summaries(run, scored)


@dataclass(frozen=True)
class Summaries:
    """The summaries of a run, as `open_summaries` returns them.

    Each method raises Missing, with the reason, where the run has no summary of that name.
    """

    run: Run
    scored: bool

    @property
    def clusters(self) -> int:
        """The number of clusters that errors are taken over: documents, or sequences in a copy of before revision 4."""
        return read_built(self.run).clusters or self.run.manifest.sequences

    @property
    def clustered_by(self) -> str:
        """Return the unit of these clusters in words; where it is no document, with its meaning for intervals."""
        built = read_built(self.run)
        if not built.clusters:
            return "sequences (recorded before documents were kept: too narrow where documents are longer than those)"
        if not built.known:
            return f"blocks of {BLOCK} sequences, as the run does not tell its documents"
        if built.cut:
            return f"documents, and blocks of {BLOCK} sequences of long ones"
        return "documents"

    @property
    def path(self) -> Path:
        """Return the folder of the run."""
        return self.run.path

    @property
    def left_out(self) -> str:
        """Return what the run is used without, in words."""
        return self.run.left_out

    def frame(self, name: str, columns: Sequence[str] = (), **equal: Any) -> pd.DataFrame:
        """Return a summary as a DataFrame.

        columns: their names, all if empty; a column that a copy of an earlier revision lacks is empty. equal: keeps the
        rows in which these columns have these values.
        """
        names = list(columns) or [column.name for column in SUMMARIES.tables[name].columns]
        return self.arrow(name, [*dict.fromkeys([*names, *equal])], **equal).to_pandas().reindex(columns=names)

    def columns(self, name: str, *names: str) -> dict[str, NDArray]:
        """Return columns of a summary as read-only arrays, all NaN where a copy of an earlier revision lacks one."""
        return _columns(self, name, *names)

    def arrow(self, name: str, names: Sequence[str], **equal: Any) -> pa.Table:
        """Return columns of a summary as an Arrow table, without those that a copy of an earlier revision lacks.

        equal: keeps the rows in which these columns have these values.
        """
        rows = _read(self.file(name), names)
        for column, value in equal.items():
            rows = rows.filter(pa.array(rows[column].to_numpy() == value))
        return rows

    def words_kept(self) -> tuple[int, int]:
        """Return how many words the run has, and how often a word must occur to be in its summary."""
        metadata = open_part(self.file("words")).schema_arrow.metadata
        return int(metadata[b"words"]), int(metadata[b"least"])

    def file(self, name: str) -> Path:
        """Return the file of a summary. Raises UserError where it holds a key that no row of the run can have."""
        if SUMMARIES.tables[name].needs_means and not self.scored:
            raise ValueError(f"expected summaries opened with scored=True to read {name}")
        path = self.run.summary_path(name)
        if not path.exists():
            raise Missing(f"{self.run.name} holds no {name}: {_reason(self.run, name)}.")
        sizes = Sizes.of(self.run.manifest)
        columns = SUMMARIES.tables[name].columns
        fault = summary_fault(
            self.run,
            name,
            lambda: column_fault(path, name, columns, sizes, complete=False),
            f"summaries of revision {SUMMARIES.revision}, {sizes}",
        )
        if fault:
            raise UserError(
                f"Expected a summary as declared at {path}, got one that {fault}: remove its folder to have it made "
                "anew, or copy a run without rows again."
            )
        return path


@memoized
def _columns(summaries: Summaries, name: str, *names: str) -> dict[str, NDArray]:
    path = summaries.file(name)
    now = path.stat()
    return dict(_decoded(path, (now.st_ino, now.st_size, now.st_mtime_ns), names))


@lru_cache(maxsize=DECODED)
def _decoded(path: Path, version: tuple[int, ...], names: tuple[str, ...]) -> dict[str, NDArray]:
    """Return columns of a file. version: changes with the file, and with it the entry in the cache."""
    table = _read(path, names)
    absent = np.broadcast_to(np.nan, len(table))
    arrays = {column: table[column].to_numpy() if column in table.schema.names else absent for column in names}
    for values in arrays.values():
        values.flags.writeable = False
    return arrays


def _read(path: Path, names: Sequence[str]) -> pa.Table:
    """Return the named columns that a file has."""
    with open_part(path) as file:  # pyarrow's read_table can filter, but takes longer to set up than a summary to read
        return file.read([column for column in names if column in file.schema_arrow.names], use_threads=False)


def _reason(run: Run, name: str) -> str:
    """Return why a run has no summary of that name, as a clause."""
    table, damaged = SUMMARIES.tables[name], damage(run)
    if table.source in damaged:
        return damaged[table.source].rstrip(".")
    if read_built(run).revision < table.since:
        return EARLIER
    if run.manifest.summary_only and not table.in_summary_only:
        return "it is a summary-only run, which spells out none of its text"
    if run.manifest.summary_only and name in read_built(run).files:
        return "its copy leaves it out to stay small, and the run that it was copied from has it"
    if table.absent in (NO_LOSS, NO_ENTROPY) and _only_uncounted_losses(run):
        return "no token that is counted has a loss"
    if name == "value_bins" and run.none_fired:
        return "no neuron fired"
    return table.absent or "it was not recorded"


def _only_uncounted_losses(run: Run) -> bool:
    """Return whether a run recorded losses, none of them of a counted token: that of one token alone is the first's."""
    recorded = run.manifest.loss_tokens and not run.manifest.summary_only
    return bool(recorded) and not run.summary_path("surprisal_ranks").exists()
