"""Building summaries: parts in, Arrow tables out, a chunk at a time. The queries are in `sums` and `clusters`, the
files in `summary`.

Cost: a chunk is held in memory (95 bytes a token at 28 layers) while its sums are taken. A second reading of every
part, for z (`scores`), follows once the means are known: tables that do not add up come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
from ibis import _

from twell.analysis import clusters, scores, sums
from twell.analysis.classes import CLASSES, numbers
from twell.analysis.engine import Engine, open_engine
from twell.analysis.layers import moments
from twell.analysis.positions import band_moments
from twell.analysis.summary import SOURCES, class_step
from twell.workbench.schema import SUMMARIES, nnz_columns
from twell.workbench.store import Run

HELD_ROWS = 2**22  # of a summary's pieces not yet added up
MOST_WORDS = 2**18  # that a summary keeps: the more frequent ones, of a run that has more
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
    "words": ("word",),
    "neurons": ("layer", "neuron"),
    "tiles": ("layer", "tile", "occupancy"),
    "unions": ("layer", "block", "neurons"),
}
LOSSES = "losses"  # by token, on their way into `tokens`
# Summaries that queries give with columns a layer: their keys, the columns, and whether the total over layers is one.
WIDE: tuple[tuple[str, list[str], dict[str, str], bool], ...] = (
    ("used", ["flagged", "tokens"], {"used_sum": "s{}"}, False),
    ("surprisal", ["replicate", "loss_bin", "tokens"], {"nnz_sum": "s{}"}, False),
    ("positions", ["position", "flagged", "tokens"], {"nnz_sum": "s{}", "nnz_square": "q{}"}, True),
    ("position_bands", ["replicate", "band", "tokens"], {"nnz_sum": "s{}"}, True),
)
EXTREMES = {"value_max": "max", "token_min": "min", "token_max": "max", "first_sequence": "min"}

Tables = dict[str, pa.Table]
Parts = list[Any]  # entries of the manifest: table, file, rows
Tick = Callable[[int], None]


def build(run: Run, files: set[str], tables: Tables, tick: Tick, engine: str, scored: bool = True) -> Tables:
    """Every summary of the run, from the sums there are already and those of the parts named.

    `tick` is called with the number of tokens read since the last call; without `scored`, the tables that do not add up
    are left out, and no other part is read.
    """
    total, kinds = Total(tables), numbers(run)
    # What the engine has answered is put into its form and added up beside its next query, which leaves a core idle.
    with open_engine(engine) as opened, ThreadPoolExecutor(1) as beside:
        adding = []
        for chunk in chunks(run, files, opened.chunk_tokens):
            adding.append(
                beside.submit(lambda found: total.add(shaped(found, run.layers)), take(opened, run, chunk, kinds))
            )
            tick(sum(part.rows for part in chunk if part.table == "activity"))
        for each in adding:
            each.result()
        if not scored:
            return _sorted(total.tables())
        means = total.table("layers"), total.table("positions")
        rest = beside.submit(total.tables)
        found = second_reading(opened, run, kinds, *means)
        return _sorted({**rest.result(), **found})


def _sorted(tables: Tables) -> Tables:
    """By their keys; words by how often they occur, so that a reader of the frequent ones skips the others."""
    order = {name: [(key, "ascending") for key in KEYS[name]] for name in tables}
    order["words"] = [("occurrences", "descending"), ("word", "ascending")]
    return {name: table.sort_by(order[name]) for name, table in tables.items()}


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

    def table(self, name: str) -> pa.Table:
        """One summary of all that was added."""
        if len(self._pieces[name]) > 1:
            self._pieces[name] = [_added(name, self._pieces[name])]
        return self._pieces[name][0]

    def tables(self) -> Tables:
        """Each summary of all that was added."""
        return {name: self.table(name) for name in self._pieces}


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


def take(engine: Engine, run: Run, chunk: Parts, kinds: pa.Table) -> Tables:
    """What the engine answers of some parts, as its queries give it: `shaped` makes summaries of it. `kinds` has the
    class of each token."""
    files = {table: [run.path / part.file for part in chunk if part.table == table] for table in SOURCES}
    found: Tables = {}
    for name, paths in files.items():
        if paths and name != "activity":
            found[name] = engine.arrow(sums.added(engine.read(paths), KEYS[name], _how(name)))
    if not files["activity"]:
        return found
    activity = engine.read(files["activity"])
    if run.manifest.counts_used:
        found["used"] = engine.arrow(sums.used(activity, nnz_columns(run.layers, "used")))
    with sums.chunk(engine, activity, nnz_columns(run.layers)) as this:
        found["layers"] = engine.arrow(sums.layers(this))
        found["surprisal_ranks"] = engine.arrow(sums.surprisal_ranks(this, class_step(run)))
        found["surprisal"] = engine.arrow(sums.surprisal(this))
        found["positions"] = engine.arrow(sums.positions(this))
        found["position_bands"] = engine.arrow(sums.position_bands(this))
        found["tokens"] = clusters.tokens(engine, this)
        found[LOSSES] = engine.arrow(clusters.losses(this))
        found["surprisal_classes"] = sums.surprisal_classes(engine, this, engine.table(kinds), class_step(run))
    return found


def shaped(found: Tables, layers: int) -> Tables:
    """Every additive summary, a row a layer, of what `take` found."""
    whole = dict(found)
    for name, keys, columns, total in WIDE:
        if name in found:
            rows = [*range(layers), sums.TOTAL] if total else list(range(layers))
            whole[name] = tidy(found[name], keys, rows, columns)
    if "tokens" in found:
        wide = found["tokens"]
        parts = {f"nnz_{part}": f"{{}}_{part}" for part in ("sum", "square", "cross")}
        whole["token_layers"] = tidy(wide, ["token_id", "flagged"], list(range(layers)), parts)
        narrow = wide.drop([name for name in wide.schema.names if name[0].isdigit()])
        whole["tokens"] = narrow.join(whole.pop(LOSSES), ["token_id", "flagged"])
        by_class = found["surprisal_classes"]
        whole["surprisal_classes"] = by_class.append_column("class", CLASSES.take(by_class["kind"]))
    return {name: _typed(name, table) for name, table in whole.items()}


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


def second_reading(engine: Engine, run: Run, kinds: pa.Table, layers: pa.Table, positions: pa.Table) -> Tables:
    """What takes the means of the whole run, over every part: z by token and, where there is a vocabulary, by word."""
    whole = moments(layers.to_pandas(), run.layers)
    places = band_moments(positions.to_pandas(), *whole)
    spelling = None
    if run.has("vocab"):
        vocab = run.arrow("vocab", ["token_id", "bytes"])
        spelling = scores.Spelling.of(vocab["token_id"].to_numpy(), vocab["bytes"].to_pylist())
    scored = partial(
        scores.of_part, counts=nnz_columns(run.layers), scale=scores.Scale.of(whole, places), spelling=spelling
    )
    with engine.each(run.parts("activity"), scored, scores.ROWS) as rows:
        tokens = sums.added(rows.filter(rows.word.isnull()), KEYS["token_scores"], _how("token_scores"))
        found = {"token_scores": _typed("token_scores", _classed(engine.arrow(tokens), kinds))}
        if spelling is not None:
            found["words"] = words(engine, sums.added(rows.filter(rows.word.notnull()), KEYS["words"], _how("words")))
    return found


def _classed(tokens: pa.Table, kinds: pa.Table) -> pa.Table:
    """The rows with the class of each token; one that the vocabulary lacks is of the last."""
    ids, known = tokens["token_id"].to_numpy(), kinds["token_id"].to_numpy()
    kind = np.full(1 + max(ids.max(initial=0), known.max(initial=0)), len(CLASSES) - 1)
    kind[known] = kinds["kind"].to_numpy()
    return tokens.append_column("class", CLASSES.take(pa.array(kind[ids])))


def words(engine: Engine, every: ir.Table) -> pa.Table:
    """The words that a summary keeps, with how many there are (`words`) and how often those kept occur (`least`) in the
    table's own metadata."""
    with engine.keep(every) as held:
        counted = engine.arrow(held.group_by("occurrences").agg(words=_.count())).sort_by("occurrences")
        occurs, number = (counted[name].to_numpy() for name in ("occurrences", "words"))
        past = int((np.cumsum(number[::-1]) > MOST_WORDS).sum())
        least = 1 + int(occurs[past - 1]) if past else 1
        kept = _typed("words", engine.arrow(held.filter(held.occurrences >= least)))
    return kept.replace_schema_metadata({"words": str(number.sum()), "least": str(least)})


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
    """How each column of a summary that is no key adds up: sum, min or max. (What a row is called does not.)"""
    columns = SUMMARIES.tables[name].columns
    return {c.name: EXTREMES.get(c.name, "sum") for c in columns if c.name not in KEYS[name] and c.type != "string"}
