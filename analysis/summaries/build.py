"""Build summaries: parts in, Arrow tables out.

`part_sums` and `z_scores` say what is taken of a part, `accumulate` how it adds up, an engine where it runs, `refresh`
which parts are read and where the files go. A second reading of every part, for z, follows once the means of the whole
run are known. Cost, 1 M tokens of 28 layers, on a slow core: 3 CPU seconds for both, and 0.3 GB a thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis import _

from twell.analysis.engines.accumulate import Tables, Total
from twell.analysis.engines.base import Engine
from twell.analysis.engines.layer_columns import layer_rows
from twell.analysis.engines.open import open_engine
from twell.analysis.summaries.built import Tick
from twell.analysis.summaries.derived import ZScale, band_moments, correlations, moments
from twell.analysis.summaries.documents import Documents, SplitDocuments, read_documents, split_documents
from twell.analysis.summaries.part_rows import sorted_by
from twell.analysis.summaries.part_sums import of_part
from twell.analysis.summaries.rank_tables import class_step
from twell.analysis.summaries.token_class import CLASSES, Classes, read_classes
from twell.analysis.summaries.token_sums import highest_of
from twell.analysis.summaries.z_scores import ROWS, Spelling, TokenMeans, scores_of_part
from twell.workbench.run.manifest import Part
from twell.workbench.run.part_files import open_part
from twell.workbench.run.schema import SUMMARIES, TABLES, nnz_columns
from twell.workbench.run.store import Run

MOST_WORDS = 2**18  # that a summary holds: the more frequent ones, of a run that has more


def build(
    run: Run,
    files: Collection[str],
    tables: Tables,
    tick: Tick,
    engine: str,
    scored: bool = True,
    documents: Documents | None = None,
) -> Tables:
    """Return every summary of the run, from the sums there are already and those of the parts named.

    files: of the parts to add; tables: the sums there are, empty to begin anew; tick: is called with the number of
    tokens read since the last call; engine: its address; scored: whether to read all parts again for what needs the
    means of the whole run; documents: the run's, read where they are not given.
    """
    documents = read_documents(run) if documents is None else documents
    parts = [part for part in run.manifest.parts if part.file in files]
    classes = read_classes(run)
    with open_engine(engine) as opened, ThreadPoolExecutor(1) as second_thread:
        total = Total(tables)
        total.add(sums_of_counts(opened, run, parts))
        split = split_documents(*_activity(run, files, covered=bool(tables)), documents)
        total.add(declared(sums_of_tokens(opened, run, parts, classes, documents, split, tick), documents))
        if not scored:
            return _finished(total)
        means = {name: total.table(name) for name in ("layers", "positions", "tokens", "token_layers")}
        finished = second_thread.submit(_finished, total)  # while this thread waits for parts to be read
        if tables:
            split = split_documents(run.parts("activity"), (), documents)
        return {**_sorted(second_reading(opened, run, classes, documents, split, means)), **finished.result()}


def _activity(run: Run, files: Collection[str], covered: bool) -> tuple[list[Path], list[Path]]:
    """Return the parts of `activity` that sums are made of, and those whose sums there are.

    files: of the parts that are read; covered: whether the sums of all others are there. Nothing where none is read.
    """
    parts = [part.file for part in run.manifest.parts if part.table == "activity"]
    if not set(parts) & set(files):
        return [], []
    others = [file for file in parts if file not in files] if covered else []
    return [run.path / file for file in parts if file in files or covered], [run.path / file for file in others]


def sums_of_counts(engine: Engine, run: Run, parts: list[Part]) -> Tables:
    """Return the sums of the run's tables that hold sums already: neurons, tiles, unions."""
    tables: Tables = {}
    for name in SUMMARIES.sources:
        files = [run.path / part.file for part in parts if part.table == name]
        if files and name != "activity":
            tables[name] = _typed(name, engine.arrow(added(name, rows_of(engine, name, files))))
    if parts and run.none_fired:
        tables["neurons"] = _schema("neurons").empty_table()
    return tables


def rows_of(engine: Engine, name: str, files: Sequence[Path]) -> ir.Table:
    """Return the rows of a table's files, with nulls in columns that were declared after a file was written."""
    newer = {column.name: column for column in TABLES[name].columns if column.is_newer}
    lacking: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        there = open_part(file).schema_arrow.names if newer else ()
        lacking.setdefault(tuple(column for column in newer if column not in there), []).append(file)
    names = [column.name for column in TABLES[name].columns]
    tables = [
        engine.read(group).mutate(**{column: ibis.null(newer[column].type) for column in columns}).select(names)
        for columns, group in lacking.items()
    ]
    return tables[0] if len(tables) == 1 else ibis.union(*tables)


def sums_of_tokens(
    engine: Engine,
    run: Run,
    parts: list[Part],
    classes: Classes,
    documents: Documents,
    split: SplitDocuments,
    tick: Tick,
) -> Tables:
    """Return the sums of the tokens of parts as `part_sums` makes them, some with one column a layer.

    classes: of the vocabulary; documents: of the run; split: those in several parts; tick: as in `build`.
    """
    rows = {run.path / part.file: part.rows for part in parts if part.table == "activity"}
    function = partial(
        of_part,
        counts=nnz_columns(run.layers),
        used=nnz_columns(run.layers, "used") if run.manifest.counts_used else [],
        classes=classes,
        step=class_step(run),
        documents=documents,
        split=split,
    )
    return engine.add_up(list(rows), function, lambda files: tick(sum(rows[file] for file in files)))


def declared(tables: Tables, documents: Documents) -> Tables:
    """Return sums of tokens with the rows, columns and types that their summaries are declared with."""
    names = {(table, "class"): CLASSES for table in ("surprisal_classes", "class_layers")}
    names["origins", "source"] = pa.array([*documents.names, ""])
    for (table, column), spelt in names.items():
        if table in tables:
            numbered = tables[table]
            spelt_rows = numbered.drop(column).append_column(column, spelt.take(numbered[column]))
            tables = {**tables, table: spelt_rows}
    return {name: _typed(name, layer_rows(table)) for name, table in tables.items()}


def _finished(total: Total) -> Tables:
    """Return every summary of the total, and what is derived from these alone."""
    tables = total.tables()
    if "highest" in tables:
        tables["highest"] = highest_of(tables["highest"])
    tables = _sorted(tables)
    ranks, classes = (tables.get(name) for name in ("surprisal_ranks", "surprisal_classes"))
    if ranks and classes:
        tables["surprisal_correlations"] = _typed("surprisal_correlations", correlations(ranks, classes))
    return tables


def _sorted(tables: Tables) -> Tables:
    """Return tables sorted by key; words by how often they occur, so that a reader of frequent ones skips the rest."""
    by_count = [("occurrences", "descending"), ("word", "ascending")]
    return {
        name: table.sort_by(by_count) if name == "words" else _sorted_by_keys(table, SUMMARIES.tables[name].keys)
        for name, table in tables.items()
    }


def _sorted_by_keys(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return a table sorted by whole numbers, bools and text: in half the time of pyarrow."""
    order = np.arange(len(table))
    for key in reversed(keys):
        values = table[key].combine_chunks()
        if pa.types.is_string(values.type):
            encoded = values.dictionary_encode()
            rank = np.argsort(pc.sort_indices(encoded.dictionary).to_numpy())
            order = sorted_by(rank[encoded.indices.to_numpy()], order)
        else:
            order = sorted_by(values.to_numpy(zero_copy_only=False), order)
    return table.take(pa.array(order))


def second_reading(
    engine: Engine,
    run: Run,
    classes: Classes,
    documents: Documents,
    split: SplitDocuments,
    means: Mapping[str, pa.Table],
) -> Tables:
    """Return what needs the means of the whole run: z by token, by class and, where there is a vocabulary, by word; and
    how nnz goes with the loss within tokens.

    classes: of the vocabulary; documents: of the run; split: those that lie in several parts; means: the
    summaries that the means come from, by name.
    """
    mean, sd = moments(means["layers"], run.layers)
    spelling = None
    if run.has("vocab"):
        vocab = run.arrow("vocab", ["token_id", "bytes"])
        spelling = Spelling.of(vocab["token_id"].to_numpy(), vocab["bytes"].to_pylist())
    function = partial(
        scores_of_part,
        counts=nnz_columns(run.layers),
        scale=ZScale.of((mean, sd), band_moments(means["positions"], mean, sd)),
        spelling=spelling,
        documents=documents,
        classes=classes,
        within=TokenMeans.of(means["tokens"], means["token_layers"], run.layers) if run.manifest.loss_tokens else None,
        split=split,
    )
    with engine.map_files(run.parts("activity"), function, ROWS) as rows:
        tokens = engine.arrow(added("token_scores", rows.filter(rows.token_id.notnull())))
        kind = classes.of_tokens(tokens["token_id"].to_numpy())
        tokens = tokens.append_column("class", CLASSES.take(pa.array(kind)))
        tables = {"token_scores": _typed("token_scores", tokens)}
        by_class = engine.arrow(added("class_scores", rows.filter(rows["class"].notnull())))
        names = CLASSES.take(by_class["class"])
        tables["class_scores"] = _typed("class_scores", by_class.drop("class").append_column("class", names))
        tables["surprisal_within"] = _typed(
            "surprisal_within", engine.arrow(added("surprisal_within", rows.filter(rows.layer.notnull())))
        )
        if spelling is not None:
            tables["words"] = frequent_words(engine, added("words", rows.filter(rows.word.notnull())))
    return tables


def frequent_words(engine: Engine, words: ir.Table) -> pa.Table:
    """Return the words that the summary holds. The table's metadata has how many words the run has (`words`), and the
    least number of occurrences of a word that is held (`least`)."""
    with engine.cached(words) as cached:
        counts = engine.arrow(cached.group_by("occurrences").agg(words=_.count())).sort_by("occurrences")
        occurrences, number = (counts[name].to_numpy() for name in ("occurrences", "words"))
        too_many = int((np.cumsum(number[::-1]) > MOST_WORDS).sum())
        fewest = 1 + int(occurrences[too_many - 1]) if too_many else 1
        table = _typed("words", engine.arrow(cached.filter(cached.occurrences >= fewest)))
    return table.replace_schema_metadata({"words": str(number.sum()), "least": str(fewest)})


def added(name: str, rows: ir.Table) -> ir.Table:
    """Return rows that hold sums of a summary already, one for each of its keys."""
    table = SUMMARIES.tables[name]
    combined = {column: getattr(rows[column], rule)() for column, rule in table.merges().items()}
    return rows.group_by(*table.keys).agg(**combined)


def _typed(name: str, table: pa.Table) -> pa.Table:
    """Return the columns that a summary is declared with, cast to their types."""
    schema = _schema(name)
    return table.select(schema.names).cast(schema)


def _schema(name: str) -> pa.Schema:
    columns = SUMMARIES.tables[name].columns
    return pa.schema([(c.name, pa.bool_() if c.type == "bool" else pa.type_for_alias(c.type)) for c in columns])
