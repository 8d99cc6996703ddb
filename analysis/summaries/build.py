"""Building summaries: parts in, Arrow tables out. What is taken of a part is in `sums` and `scores`, how it adds up in
`totals`, where it runs in `engine`, the files in `refresh`.

A second reading of every part, for z (`scores`), follows once the means are known: the tables of `refresh.SCORED` come
from it. Cost, 1 M tokens of 28 layers, on a slow core: 3 CPU seconds for both, and 0.3 GB a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
from ibis import _
from numpy.typing import NDArray

from twell.analysis.engines.accumulate import EXTREMES, KEYS, KIND, Tables, Total
from twell.analysis.engines.base import Engine
from twell.analysis.engines.open import open_engine
from twell.analysis.summaries import part_sums, z_scores
from twell.analysis.summaries.derived import band_moments, correlations, moments
from twell.analysis.summaries.rank_tables import class_step, of_tokens
from twell.analysis.summaries.refresh import SOURCES
from twell.analysis.summaries.token_class import CLASSES, class_numbers
from twell.workbench.run.schema import SUMMARIES, nnz_columns
from twell.workbench.run.store import Run

MOST_WORDS = 2**18  # that a summary keeps: the more frequent ones, of a run that has more
# Summaries that are made with columns a layer: their keys, the columns, and whether the total over layers is one.
WIDE: tuple[tuple[str, list[str], dict[str, str], bool], ...] = (
    ("used", ["flagged", "tokens"], {"used_sum": "s{}"}, False),
    ("surprisal", ["replicate", "loss_bin", "tokens"], {"nnz_sum": "s{}"}, False),
    ("positions", ["position", "flagged", "tokens"], {"nnz_sum": "s{}", "nnz_square": "q{}"}, True),
    ("position_bands", ["replicate", "band", "tokens"], {"nnz_sum": "s{}"}, True),
)

Parts = list[Any]  # entries of the manifest: table, file, rows
Tick = Callable[[int], None]


def build(run: Run, files: set[str], tables: Tables, tick: Tick, engine: str, scored: bool = True) -> Tables:
    """Every summary of the run, from the sums there are already and those of the parts named.

    `tick` is called with the number of tokens read since the last call; without `scored`, the tables of SCORED are
    left out, and no other part is read.
    """
    parts = [part for part in run.manifest.parts if part.file in files]
    kinds = class_numbers(run)
    with open_engine(engine) as opened, ThreadPoolExecutor(1) as beside:
        total = Total(tables)
        total.add(counted(opened, run, parts))
        total.add(shaped(taken(opened, run, parts, kinds, tick), run.layers))
        if not scored:
            return _whole(total)
        means = total.table("layers"), total.table("positions")
        rest = beside.submit(_whole, total)  # on a core that waits for the last part
        return {**_sorted(second_reading(opened, run, kinds, *means)), **rest.result()}


def counted(engine: Engine, run: Run, parts: Parts) -> Tables:
    """The sums of parts that hold sums already."""
    found: Tables = {}
    for name in SOURCES:
        files = [run.path / part.file for part in parts if part.table == name]
        if files and name != "activity":
            found[name] = _typed(name, engine.arrow(added(engine.read(files), KEYS[name], _how(name))))
    return found


def taken(engine: Engine, run: Run, parts: Parts, kinds: NDArray, tick: Tick) -> Tables:
    """The sums of the tokens of parts, some with columns a layer: `shaped` makes summaries of them."""
    rows = {run.path / part.file: part.rows for part in parts if part.table == "activity"}
    of_part = partial(
        part_sums.of_part,
        counts=nnz_columns(run.layers),
        used=nnz_columns(run.layers, "used") if run.manifest.counts_used else [],
        kinds=kinds,
        every=class_step(run),
    )
    return engine.add_up(list(rows), of_part, lambda files: tick(sum(rows[file] for file in files)))


def _whole(total: Total) -> Tables:
    """Every summary of all that was added, and what comes from these alone."""
    tables = _sorted(total.tables())
    ranks, classes = (tables.get(name) for name in ("surprisal_ranks", "surprisal_classes"))
    if ranks and classes:
        tables["surprisal_correlations"] = _typed("surprisal_correlations", correlations(ranks, classes))
    return tables


def _sorted(tables: Tables) -> Tables:
    """By their keys; words by how often they occur, so that a reader of the frequent ones skips the others."""
    order = {name: [(key, "ascending") for key in KEYS[name]] for name in tables}
    order["words"] = [("occurrences", "descending"), ("word", "ascending")]
    return {name: table.sort_by(order[name]) for name, table in tables.items()}


def shaped(found: Tables, layers: int) -> Tables:
    """Every additive summary, a row a layer, of what `taken` found."""
    whole = dict(found)
    for name, keys, columns, total in WIDE:
        if name in found:
            rows = [*range(layers), part_sums.TOTAL] if total else list(range(layers))
            whole[name] = tidy(found[name], keys, rows, columns)
    if "tokens" in found:
        wide = found["tokens"]
        parts = {f"nnz_{part}": f"{{}}_{part}" for part in ("sum", "square", "cross")}
        whole["token_layers"] = tidy(wide, ["token_id", "flagged"], list(range(layers)), parts)
        whole["tokens"] = wide.drop([name for name in wide.schema.names if name[0].isdigit()])
        by_class = found["surprisal_classes"]
        whole["surprisal_classes"] = by_class.append_column("class", CLASSES.take(by_class[KIND]))
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


def second_reading(engine: Engine, run: Run, kinds: NDArray, layers: pa.Table, positions: pa.Table) -> Tables:
    """What takes the means of the whole run, over every part: z by token and, where there is a vocabulary, by word."""
    whole = moments(layers, run.layers)
    places = band_moments(positions, *whole)
    spelling = None
    if run.has("vocab"):
        vocab = run.arrow("vocab", ["token_id", "bytes"])
        spelling = z_scores.Spelling.of(vocab["token_id"].to_numpy(), vocab["bytes"].to_pylist())
    scored = partial(
        z_scores.of_part, counts=nnz_columns(run.layers), scale=z_scores.Scale.of(whole, places), spelling=spelling
    )
    with engine.map_files(run.parts("activity"), scored, z_scores.ROWS) as rows:
        tokens = added(rows.filter(rows.word.isnull()), KEYS["token_scores"], _how("token_scores"))
        scored_tokens = engine.arrow(tokens)
        kind = of_tokens(kinds, scored_tokens["token_id"].to_numpy())
        scored_tokens = scored_tokens.append_column("class", CLASSES.take(pa.array(kind)))
        found = {"token_scores": _typed("token_scores", scored_tokens)}
        if spelling is not None:
            found["words"] = words(engine, added(rows.filter(rows.word.notnull()), KEYS["words"], _how("words")))
    return found


def words(engine: Engine, every: ir.Table) -> pa.Table:
    """The words that a summary keeps, with how many there are (`words`) and how often those kept occur (`least`) in the
    table's own metadata."""
    with engine.cached(every) as held:
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


def _how(name: str) -> dict[str, str]:
    """How each column of a summary that is no key adds up: sum, min or max. (What a row is called does not.)"""
    columns = SUMMARIES.tables[name].columns
    return {c.name: EXTREMES.get(c.name, "sum") for c in columns if c.name not in KEYS[name] and c.type != "string"}


def added(parts: ir.Table, keys: Sequence[str], how: Mapping[str, str]) -> ir.Table:
    """The rows of parts that hold sums already, added up: `how` names sum, min or max for each column."""
    return parts.group_by(*keys).agg(**{name: getattr(parts[name], function)() for name, function in how.items()})
