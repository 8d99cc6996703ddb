"""Export: a run's tables as files that other tools read.

    twell export runs/demo --out tables                          every analysis table, Parquet, in a folder
    twell export runs/demo --table by_token --out tokens.csv     by its ending; --format csv for a folder of them
    twell export runs/demo --out demo.ipynb                      or .html: the run in one document, see `report`
    twell export runs/demo --table fired --format npz --out x    a scipy CSR matrix a layer; dead_neurons: a mask

Analysis tables are those of the API with its defaults. Tables of the run itself are copied part by part, so memory does
not grow with them; CSV has no bytes, lists or half floats, so it gets hexadecimal digits, JSON and floats; JSON is an
array of records, with null for what is no number. A file that is there already is replaced, whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import scipy.sparse

from twell.analysis.activity.layers import by_layer, layer_histogram
from twell.analysis.activity.position_decay import position_fit
from twell.analysis.activity.positions import by_position, position_blocks
from twell.analysis.activity.surprisal import surprisal, surprisal_classes, surprisal_correlation, surprisal_own
from twell.analysis.claims.findings import findings
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.coactivation import fired_csr
from twell.analysis.neurons.concentration import concentration, dead_curve, dead_mask, dead_neurons, lorenz
from twell.analysis.speed.compression import tile_settings
from twell.analysis.speed.contribution import gain_correlations, layer_gains, model_time
from twell.analysis.speed.speedup import speedup, timings_by_batch
from twell.analysis.speed.tile_overflow import peer_audit, tile_audit
from twell.analysis.speed.unions import union_sizes
from twell.analysis.tokens.by_token import by_token
from twell.analysis.tokens.classes import token_classes
from twell.analysis.tokens.words import by_word
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import ExportOptions, Format
from twell.workbench.run.schema import TABLES
from twell.workbench.run.store import Run, open_run, read_part

ANALYSIS: dict[str, Callable[[Run], pd.DataFrame]] = {
    "by_layer": by_layer,
    "layer_histogram": layer_histogram,
    "by_position": by_position,
    "position_blocks": position_blocks,
    "position_fit": position_fit,
    "by_token": by_token,
    "by_word": by_word,
    "token_classes": token_classes,
    "by_neuron": by_neuron,
    "concentration": concentration,
    "lorenz": lorenz,
    "dead_curve": dead_curve,
    "dead_neurons": dead_neurons,
    "union_sizes": union_sizes,
    "surprisal": surprisal,
    "surprisal_correlation": surprisal_correlation,
    "surprisal_own": surprisal_own,
    "surprisal_classes": surprisal_classes,
    "speedup": speedup,
    "layer_gains": layer_gains,
    "gain_correlations": gain_correlations,
    "model_time": model_time,
    "timings_by_batch": timings_by_batch,
    "tile_audit": tile_audit,
    "peer_audit": peer_audit,
    "tile_settings": tile_settings,
    "findings": findings,
}


ENDING: dict[Format, str] = {
    "parquet": ".parquet",
    "csv": ".csv",
    "json": ".json",
    "npz": ".npz",
    "notebook": ".ipynb",
    "html": ".html",
}


def export(options: ExportOptions) -> list[Path]:
    """Write the tables asked for, or every analysis table that the run can give; says what was written.

    One table goes to the file `out` (or into it, where it is a folder), several into the folder `out`.
    """
    run = open_run(options.run)
    kind = _format(options)
    if kind in ("notebook", "html", "npz"):
        return [_whole(run, options, kind)] if kind != "npz" else _arrays(run, options)
    unknown = [name for name in options.table if name not in ANALYSIS and name not in TABLES]
    if unknown:
        raise UserError(
            f"Expected a table of {', '.join(ANALYSIS)}, or of the run itself ({', '.join(TABLES)}), "
            f"got {unknown[0]!r}{_nearest(unknown[0])}"
        )
    names = options.table or tuple(ANALYSIS)
    if len(names) > 1:
        _folder(options.out, f"{len(names)} tables")
    one = len(options.table) == 1 and not options.out.is_dir()
    written = []
    for name in names:
        path = options.out if one else options.out / f"{name}{ENDING[kind]}"
        try:
            rows = _write(run, name, kind, path)
        except Missing as reason:
            if options.table:
                raise
            print(f"{name}: left out. {reason}")
            continue
        print(f"{path}: {rows:,} rows")
        written.append(path)
    return written


def _nearest(name: str) -> str:
    """The table that may have been meant, as the end of a sentence."""
    found = get_close_matches(name, [*ANALYSIS, *TABLES], 1)
    return f": did you mean {found[0]}?" if found else "."


def _format(options: ExportOptions) -> Format:
    """The format asked for, or what `out` ends in, or Parquet."""
    of_file = {ending: kind for kind, ending in ENDING.items()}
    ends = None if options.out.is_dir() else of_file.get(options.out.suffix.lower())
    if options.format and ends and ends != options.format:
        raise UserError(
            f"Expected --out with the ending of --format {options.format} ({ENDING[options.format]}), got "
            f"{options.out}: leave --format out, or name another file."
        )
    return options.format or ends or "parquet"


def _folder(out: Path, what: str) -> None:
    """UserError where several files would go to what is a file, or is named as one."""
    if out.is_dir():
        return
    if out.exists() or out.suffix.lower() in ENDING.values():
        raise UserError(f"Expected a folder for {what}, got the file {out}: name a folder, or one table with --table.")


def _whole(run: Run, options: ExportOptions, kind: Format) -> Path:
    """The run in one document."""
    from twell.analysis.exports import document

    if options.table:
        raise UserError(f"Expected no --table with --format {kind}, got {options.table[0]!r}: it has them all.")
    path = options.out / f"{run.name}{ENDING[kind]}" if options.out.is_dir() else options.out
    temporary = path.with_name(path.name + ".tmp")
    with _writing(path, temporary):
        count = (document.notebook if kind == "notebook" else document.page)(run, temporary)
        os.replace(temporary, path)
    print(f"{path}: {count} {'cells' if kind == 'notebook' else 'sections'}")
    return path


def _arrays(run: Run, options: ExportOptions) -> list[Path]:
    """What is an array, not a table: `fired`, a file a layer into the folder `out`, or the mask of dead neurons."""
    if len(options.table) != 1 or options.table[0] not in ("fired", "dead_neurons"):
        raise UserError("Expected --table fired or --table dead_neurons with --format npz.")
    written = []
    if options.table[0] == "dead_neurons":
        path = options.out / "dead_neurons.npz" if options.out.is_dir() else options.out
        mask = dead_mask(run)
        with _writing(path, path.with_name(path.name + ".tmp.npz")) as temporary:
            np.savez_compressed(temporary, dead=mask)
            os.replace(temporary, path)
        print(f"{path}: {int(mask.sum()):,} of {mask.size:,} neurons")
        return [path]
    _folder(options.out, "a file a layer")
    for layer in sorted(set(run.arrow("fired", ["layer"])["layer"].to_pylist())):
        matrix, _places = fired_csr(run, layer)
        path = options.out / f"fired-L{layer}.npz"
        with _writing(path, path.with_name(path.name + ".tmp.npz")) as temporary:
            scipy.sparse.save_npz(temporary, matrix)
            os.replace(temporary, path)
        print(f"{path}: {matrix.shape[0]:,} tokens × {matrix.shape[1]:,} neurons, {matrix.nnz:,} firings")
        written.append(path)
    return written


@contextmanager
def _writing(path: Path, temporary: Path) -> Iterator[Path]:
    """What a disk refuses, in one sentence; nothing half written stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except OSError as error:
        raise UserError(
            f"Expected to write {path}, got {error.strerror or error}: choose a place that can be written to."
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write(run: Run, name: str, format: str, path: Path) -> int:
    """Write one table whole or not at all. Returns its rows."""
    pieces = _pieces(run, name, format)
    first = next(pieces)
    rows = 0
    with _writing(path, path.with_name(path.name + ".tmp")) as temporary:
        with _writer(temporary, first.schema, format) as writer:
            for piece in chain([first], pieces):
                writer.write_table(piece)
                rows += piece.num_rows
        os.replace(temporary, path)
    return rows


class JsonWriter:
    """An array of records, piece by piece."""

    def __init__(self, path: Path) -> None:
        self.file, self.rows = open(path, "w", encoding="utf-8"), 0  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> JsonWriter:
        return self

    def __exit__(self, *problem: object) -> None:
        self.file.write("\n]\n" if self.rows else "[]\n")
        self.file.close()

    def write_table(self, piece: pa.Table) -> None:
        for record in piece.to_pylist():
            self.file.write(",\n" if self.rows else "[\n")
            self.file.write(json.dumps({name: _json(value) for name, value in record.items()}, ensure_ascii=False))
            self.rows += 1


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _writer(path: Path, schema: pa.Schema, format: str) -> pq.ParquetWriter | pa.csv.CSVWriter | JsonWriter:
    if format == "json":
        return JsonWriter(path)
    if format == "csv":
        return pa.csv.CSVWriter(path, schema)
    return pq.ParquetWriter(path, schema, compression="zstd")


def _pieces(run: Run, name: str, format: str) -> Iterator[pa.Table]:
    """The table, in one piece or part by part. Missing or UserError comes before the first piece."""
    if name in ANALYSIS:
        yield pa.Table.from_pandas(ANALYSIS[name](run), preserve_index=False)
        return
    for path in run.parts(name):
        piece = read_part(path)
        yield piece if format == "parquet" else _plain(piece, format)


def _plain(table: pa.Table, format: str) -> pa.Table:
    """The columns as CSV or JSON can hold them."""
    for index, field in enumerate(table.schema):
        if pa.types.is_float16(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(pa.float32()))
        elif pa.types.is_binary(field.type):
            digits = [None if value is None else value.hex() for value in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(digits, pa.string()))
        elif pa.types.is_list(field.type) and format == "csv":
            lists = [json.dumps([float(entry) for entry in row]) for row in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(lists, pa.string()))
    return table
