"""Export: a run's tables as files that other tools read.

    twell export runs/demo --out tables                          every analysis table, Parquet, in a folder
    twell export runs/demo --table by_token --out tokens.csv     the format of the ending; --format csv for a folder
    twell export runs/demo --out demo.ipynb                      or .html: the run in one document, see `documents`
    twell export runs/demo --table fired --format npz --out x    a scipy CSR matrix a layer; dead_neurons: a mask
    from twell.analysis import export; export(run, "demo.html")  the same from Python

Analysis tables (`tables`) are those of the API with its defaults. Tables of the run itself are copied part by part, so
memory does not grow with them. An existing file is replaced completely or not at all (`files`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pyarrow as pa
import scipy.sparse

from twell.analysis.exports.files import replacing, write_table
from twell.analysis.exports.tables import ANALYSIS
from twell.analysis.neurons.coactivation import fired_csr, sampled_layers
from twell.analysis.neurons.concentration import dead_mask
from twell.analysis.questions import with_places
from twell.workbench.errors import Missing, UserError, path_of
from twell.workbench.option_fields import python_names
from twell.workbench.options import ExportOptions, Format
from twell.workbench.run.schema import TABLES
from twell.workbench.run.store import Run, open_run

ENDING: dict[Format, str] = {
    "parquet": ".parquet",
    "csv": ".csv",
    "json": ".json",
    "npz": ".npz",
    "notebook": ".ipynb",
    "html": ".html",
}
OF_ABLATIONS = ("effects", "neuron_effects")  # tables of the run that no analysis stands for


def export(
    run: Run | ExportOptions,
    out: str | Path | None = None,
    table: str | Sequence[str] = (),
    format: Format | None = None,
) -> list[Path]:
    """Write the requested tables, or every analysis table that the run can give, and return the files written.

    run: a run, or the options of `twell export`, which say the rest; out: a file for one table, and for the whole run
    one that ends in .ipynb or .html, else a folder; table, format: as `twell export` takes them

    One table goes to the file `out` (or into it, if it is a folder), several go into the folder `out`. A training gives
    the tables that it has recorded. Raises UserError for a table or a combination of options that does not exist.
    """
    if isinstance(run, ExportOptions):
        return _export(open_run(run.run, run.without_damaged), run)
    path = path_of(out, "a file or a folder for out=")  # type: ignore[arg-type]  # None it refuses
    tables = (table,) if isinstance(table, str) else tuple(table)
    with python_names(ExportOptions):
        return _export(run, ExportOptions(run=run.path, table=tables, format=format, out=path))


def _export(run: Run, options: ExportOptions) -> list[Path]:
    if run.left_out:
        print(run.left_out)
    format = _format(options)
    if format in ("notebook", "html"):
        return [_write_document(run, options, format)]
    if format == "npz":
        return _write_arrays(run, options)
    return _write_tables(run, options, format)


def _write_tables(run: Run, options: ExportOptions, format: Format) -> list[Path]:
    """Write tables as Parquet, CSV or JSON; skip those that the run lacks unless they were requested by name."""
    unknown = [name for name in options.table if name not in ANALYSIS and name not in TABLES]
    if unknown:
        raise UserError(
            f"Expected a table of {', '.join(ANALYSIS)}, or of the run itself ({', '.join(TABLES)}), "
            f"got {unknown[0]!r}{_suggestion(unknown[0])}"
        )
    own = [name for name in (TABLES if run.manifest.only_trains else OF_ABLATIONS) if run.has(name)]
    every = own if run.manifest.only_trains else [*ANALYSIS, *own]
    names = options.table or tuple(every)
    if len(names) > 1:
        _require_folder(options.out, f"{len(names)} tables", ", or one table with --table")
    to_file = len(options.table) == 1 and not options.out.is_dir()
    written = []
    for name in names:
        path = options.out if to_file else options.out / f"{name}{ENDING[format]}"
        try:
            rows = write_table(_pieces(run, name), path, format)
        except Missing as reason:
            if options.table:
                raise
            print(f"{name}: left out. {reason}")
            continue
        print(f"{path}: {rows:,} rows")
        written.append(path)
    return written


def _pieces(run: Run, name: str) -> Iterator[pa.Table]:
    """Yield a table in one piece (an analysis table) or part by part (a table of the run)."""
    if name in ANALYSIS:
        yield pa.Table.from_pandas(with_places(ANALYSIS[name](run)), preserve_index=False)
        return
    yield from run.pieces(name)


def _suggestion(name: str) -> str:
    """Return the end of a sentence that names the table which may have been meant."""
    matches = get_close_matches(name, [*ANALYSIS, *TABLES], 1)
    return f": did you mean {matches[0]}?" if matches else "."


def _format(options: ExportOptions) -> Format:
    """Return the requested format, or else that of the ending of `out`, or else Parquet."""
    by_ending = {ending: format for format, ending in ENDING.items()}
    ending = "" if options.out.is_dir() else options.out.suffix.lower()
    of_file = by_ending.get(ending)
    if of_file is None and ending[1:2].isalpha():  # a folder may be called tables-1.2
        raise UserError(
            f"Expected --out with an ending of {', '.join(by_ending)}, or a folder without one, got {options.out}: "
            "name another file."
        )
    if options.format and of_file and of_file != options.format:
        raise UserError(
            f"Expected --out with the ending of --format {options.format} ({ENDING[options.format]}), got "
            f"{options.out}: leave --format out, or name another file."
        )
    return options.format or of_file or "parquet"


def _require_folder(out: Path, content: str, or_else: str = "") -> None:
    """Raise UserError if `out`, to which several files go, is a file or is named like one.

    content: what goes there; or_else: what else to name than a folder
    """
    if out.is_dir():
        return
    if out.exists() or out.suffix.lower() in ENDING.values():
        raise UserError(f"Expected a folder for {content}, got the file {out}: name a folder{or_else}.")


def _write_document(run: Run, options: ExportOptions, format: Format) -> Path:
    """Write the run as one notebook or one HTML page."""
    if options.table:
        raise UserError(f"Expected no --table with --format {format}, got {options.table[0]!r}: it has them all.")
    path = options.out / f"{run.name}{ENDING[format]}" if options.out.is_dir() else options.out
    with replacing(path) as temporary:  # what follows loads plotly, which no table needs
        if format == "notebook":
            from twell.analysis.exports.documents.notebook import notebook

            cells, note = notebook(run, temporary)
            count = f"{cells} cells, all of which have run. {note}".rstrip()
        else:
            from twell.analysis.exports.documents.report import page

            count = f"{page(run, temporary)} sections"
    print(f"{path}: {count}")
    return path


def _write_arrays(run: Run, options: ExportOptions) -> list[Path]:
    """Write `fired`, a sparse matrix a layer into the folder `out`, or the mask of dead neurons, as .npz files."""
    if len(options.table) != 1 or options.table[0] not in ("fired", "dead_neurons"):
        given = " ".join(f"--table {name}" for name in options.table) or "no --table"
        raise UserError(
            f"Expected --table fired or --table dead_neurons with --format npz, got {given}: other tables are written "
            "as csv, json or parquet."
        )
    if options.table[0] == "dead_neurons":
        path = options.out / "dead_neurons.npz" if options.out.is_dir() else options.out
        mask = dead_mask(run)
        with replacing(path, ".tmp.npz") as temporary:  # numpy appends .npz to a name that ends otherwise
            np.savez_compressed(temporary, dead=mask)
        print(f"{path}: {int(mask.sum()):,} of {mask.size:,} neurons")
        return [path]
    _require_folder(options.out, "fired, a file a layer in --format npz")
    written = []
    for layer in sampled_layers(run):
        matrix, _rows = fired_csr(run, layer)
        path = options.out / f"fired-L{layer}.npz"
        with replacing(path, ".tmp.npz") as temporary:
            scipy.sparse.save_npz(temporary, matrix)
        print(f"{path}: {matrix.shape[0]:,} tokens × {matrix.shape[1]:,} neurons, {matrix.nnz:,} firings")
        written.append(path)
    return written
