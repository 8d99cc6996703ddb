"""Building summaries: parts in, Arrow tables out, a chunk at a time. The queries are in `sums` and `clusters`, the
files in `summary`.

Cost: a chunk is held in memory (95 bytes a token at 28 layers) while its sums are taken. A second reading of every
part, for z, follows once the means are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from twell.analysis import clusters, sums
from twell.analysis.classes import CLASSES, numbers
from twell.analysis.engine import Engine, open_engine
from twell.analysis.layers import moments
from twell.analysis.positions import band_moments
from twell.analysis.summary import SOURCES, class_step
from twell.workbench.schema import SUMMARIES, nnz_columns
from twell.workbench.store import Run

HELD_ROWS = 2**22  # of a summary's pieces not yet added up
# What makes a row of each summary; every other column adds up, but for those in EXTREMES.
KEYS = {
    "layers": ("layer", "flagged", "nnz"),
    "positions": ("layer", "flagged", "position"),
    "position_bands": ("layer", "replicate", "band"),
    "tokens": ("token_id", "flagged"),
    "token_layers": ("layer", "flagged", "token_id"),
    "token_scores": ("token_id", "flagged"),
    "surprisal": ("layer", "replicate", "loss_bin"),
    "surprisal_ranks": ("layer", "nnz_class", "loss_class", "replicate"),
    "surprisal_classes": ("layer", "own", "class", "nnz_class", "loss_class", "replicate"),
    "used": ("layer", "flagged"),
    "neurons": ("layer", "neuron"),
    "tiles": ("layer", "tile", "occupancy"),
    "unions": ("layer", "block", "neurons"),
}
EXTREMES = {"value_max": "max", "token_min": "min", "token_max": "max", "first_sequence": "min"}

Tables = dict[str, pa.Table]
Parts = list[Any]  # entries of the manifest: table, file, rows
Tick = Callable[[int], None]


def build(run: Run, files: set[str], tables: Tables, tick: Tick, engine: str) -> Tables:
    """Every summary of the run, from the sums there are already and those of the parts named.

    `tick` is called with the number of tokens read since the last call.
    """
    total = Total(tables)
    with open_engine(engine) as opened:
        for chunk in chunks(run, files, opened.chunk_tokens):
            total.add(take(opened, run, chunk))
            tick(sum(part.rows for part in chunk if part.table == "activity"))
        tables = total.tables()
        tables |= {"token_scores": scores(opened, run, tables["layers"], tables["positions"])}
    return {name: table.sort_by([(key, "ascending") for key in KEYS[name]]) for name, table in tables.items()}


class Total:
    """Summaries as they add up. Pieces are held until they are many, so that adding costs no more than they do."""

    def __init__(self, tables: Tables) -> None:
        self._pieces = {name: [table] for name, table in tables.items()}

    def add(self, tables: Tables) -> None:
        for name, table in tables.items():
            pieces = self._pieces.setdefault(name, [])
            pieces.append(table)
            if sum(piece.num_rows for piece in pieces[1:]) > max(HELD_ROWS, pieces[0].num_rows):
                self._pieces[name] = [_added(name, pieces)]

    def tables(self) -> Tables:
        """Each summary of all that was added."""
        return {name: _added(name, pieces) if len(pieces) > 1 else pieces[0] for name, pieces in self._pieces.items()}


def chunks(run: Run, files: set[str], tokens: int) -> Iterator[Parts]:
    """The parts named, a few at a time: whole parts up to so many tokens, or one larger."""
    chunk: Parts = []
    rows = 0
    for part in run.manifest.parts:
        if part.file not in files:
            continue
        if part.table == "activity":
            if chunk and rows + part.rows > tokens:
                yield chunk
                chunk, rows = [], 0
            rows += part.rows
        chunk.append(part)
    if chunk:
        yield chunk


def take(engine: Engine, run: Run, chunk: Parts) -> Tables:
    """Every additive summary of some parts."""
    files = {table: [run.path / part.file for part in chunk if part.table == table] for table in SOURCES}
    found: Tables = {}
    for name, paths in files.items():
        if paths and name != "activity":
            rows = engine.read(paths)
            found[name] = _typed(name, engine.arrow(sums.added(rows, KEYS[name], _how(name))))
    if not files["activity"]:
        return found
    activity, layers = engine.read(files["activity"]), list(range(run.layers))
    if run.manifest.counts_used:
        wide = engine.arrow(sums.used(activity, nnz_columns(run.layers, "used")))
        found["used"] = tidy(wide, ["flagged", "tokens"], layers, {"used_sum": "s{}"})
    with sums.chunk(engine, activity, nnz_columns(run.layers)) as this:
        found["layers"] = engine.arrow(sums.layers(this))
        found["surprisal_ranks"] = engine.arrow(sums.surprisal_ranks(this))
        bands = engine.arrow(sums.surprisal(this))
        places = engine.arrow(sums.positions(this))
        stretches = engine.arrow(sums.position_bands(this))
        wide = clusters.tokens(engine, this)
        losses = engine.arrow(clusters.losses(this))
        kinds = engine.table(numbers(run))
        by_class = sums.surprisal_classes(engine, this, kinds, class_step(run))
    found["surprisal_classes"] = by_class.append_column("class", CLASSES.take(by_class["kind"]))
    found["surprisal"] = tidy(bands, ["replicate", "loss_bin", "tokens"], layers, {"nnz_sum": "s{}"})
    positions = {"nnz_sum": "s{}", "nnz_square": "q{}"}
    found["positions"] = tidy(places, ["position", "flagged", "tokens"], [*layers, sums.TOTAL], positions)
    found["position_bands"] = tidy(
        stretches, ["replicate", "band", "tokens"], [*layers, sums.TOTAL], {"nnz_sum": "s{}"}
    )
    parts = {f"nnz_{part}": f"{{}}_{part}" for part in ("sum", "square", "cross")}
    found["token_layers"] = tidy(wide, ["token_id", "flagged"], layers, parts)
    found["tokens"] = wide.drop([name for name in wide.schema.names if name[0].isdigit()]).join(
        losses, ["token_id", "flagged"]
    )
    return {name: _typed(name, table) for name, table in found.items()}


def tidy(wide: pa.Table, keys: list[str], layers: list[int], columns: dict[str, str]) -> pa.Table:
    """A row a layer from columns a layer; `columns` maps each new name to the old one, {} standing for the layer."""
    return pa.concat_tables(
        pa.table(
            {name: wide[name] for name in keys}
            | {"layer": pa.repeat(pa.scalar(layer, pa.int32()), wide.num_rows)}
            | {name: wide[source.format(layer)] for name, source in columns.items()}
        )
        for layer in layers
    )


def scores(engine: Engine, run: Run, layers: pa.Table, positions: pa.Table) -> pa.Table:
    """z by token needs the means over the whole run, so it is taken last, over every part."""
    whole = moments(layers.to_pandas(), run.layers)
    places = band_moments(positions.to_pandas(), *whole)
    total = Total({})
    every = {part.file for part in run.manifest.parts if part.table == "activity"}
    for chunk in chunks(run, every, engine.chunk_tokens):
        activity = engine.read([run.path / part.file for part in chunk])
        piece = clusters.scores(engine, activity, nnz_columns(run.layers), whole, places)
        total.add({"token_scores": _typed("token_scores", piece)})
    return total.tables()["token_scores"]


def _typed(name: str, table: pa.Table) -> pa.Table:
    """The rows with their columns as declared."""
    columns = SUMMARIES.tables[name].columns
    schema = pa.schema([(c.name, pa.bool_() if c.type == "bool" else pa.type_for_alias(c.type)) for c in columns])
    return table.select(schema.names).cast(schema)


def _added(name: str, pieces: list[pa.Table]) -> pa.Table:
    how = _how(name)
    grouped = pa.concat_tables(pieces).group_by(list(KEYS[name])).aggregate(list(how.items()))
    renamed = grouped.rename_columns({f"{column}_{function}": column for column, function in how.items()})
    return _typed(name, renamed)


def _how(name: str) -> dict[str, str]:
    """How each column of a summary that is no key adds up: sum, min or max."""
    return {c.name: EXTREMES.get(c.name, "sum") for c in SUMMARIES.tables[name].columns if c.name not in KEYS[name]}
