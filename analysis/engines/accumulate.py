"""Add up partial summaries: tables of one name, with the same columns, whose rows combine by key.

Keys and the rule of each column are declared with the table in `summary_schema`. A partial summary may have one column
a layer in place of one row a layer (`layer_columns`): such columns are summed, and its keys are the declared ones that
it has. Cost: one group-by each time the pending pieces are as large as the total, so the cost is proportional to what
is added; sums by whole numbers that lie close together take a fifth of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from twell.workbench.run.schema import SUMMARIES

PENDING = 2**28  # bytes of a summary's pieces that are collected before they are added up
CELLS_A_ROW = 4  # possible keys, over rows, up to which each has a place to be summed in

Tables = dict[str, pa.Table]  # by the name of the summary


class Total:
    """Running totals of summaries. tables: totals to begin with, by name of the summary."""

    def __init__(self, tables: Tables | None = None) -> None:
        self._pieces = {name: [table] for name, table in (tables or {}).items()}

    def add(self, tables: Tables) -> None:
        """Add tables to the total."""
        for name, table in tables.items():
            pieces = self._pieces.setdefault(name, [])
            pieces.append(table)
            if sum(piece.nbytes for piece in pieces[1:]) > max(PENDING, pieces[0].nbytes):
                self._pieces[name] = [_merged(name, pieces)]

    def table(self, name: str) -> pa.Table:
        """Return the total of one summary."""
        if len(self._pieces[name]) > 1:
            self._pieces[name] = [_merged(name, self._pieces[name])]
        return self._pieces[name][0]

    def tables(self) -> Tables:
        """Return the total of every summary."""
        return {name: self.table(name) for name in self._pieces}


def added_up(first: Tables, second: Tables) -> Tables:
    """Return two sets of tables added up."""
    total = Total(first)
    total.add(second)
    return total.tables()


def _merged(name: str, pieces: list[pa.Table]) -> pa.Table:
    """Return the pieces of one summary as one table, a row a key."""
    columns, declared = pieces[0].schema.names, SUMMARIES.tables[name]
    keys = [column for column in columns if column in declared.keys]
    merges = declared.merges()
    rules = [(column, merges.get(column, "sum")) for column in columns if column not in keys]
    if all(rule == "sum" for _, rule in rules) and (summed := _summed(pieces, keys)) is not None:
        return summed
    grouped = pa.concat_tables(pieces).group_by(keys).aggregate(rules)
    original = {f"{column}_{rule}": column for column, rule in rules}
    return grouped.rename_columns([original.get(name, name) for name in grouped.schema.names]).select(columns)


def _summed(pieces: Sequence[pa.Table], keys: Sequence[str]) -> pa.Table | None:
    """Return the sums of rows by key, in the order of the keys; each possible key has a place that is added to.

    None where a column holds other than whole numbers (keys may be bools), or where keys lie too far apart. A sum past
    2^63 wraps around, as in a group-by.
    """
    pieces, schema = [piece for piece in pieces if len(piece)], pieces[0].schema
    rows = sum(map(len, pieces))
    if not rows or not all(_is_whole(field) or (field.name in keys and field.type == pa.bool_()) for field in schema):
        return None
    ends = [[(int(values.min()), int(values.max())) for values in _arrays(pieces, name)] for name in keys]
    least = [min(low for low, _ in each) for each in ends]
    spans = [1 + max(high for _, high in each) - low for each, low in zip(ends, least, strict=True)]
    if prod(spans) > CELLS_A_ROW * rows:
        return None
    place = [np.zeros(len(piece), np.int64) for piece in pieces]  # of each row, as that of its key
    for name, low, span in zip(keys, least, spans, strict=True):
        for index, values in zip(place, _arrays(pieces, name), strict=True):
            index *= span
            index += values
            index -= low
    holds = np.zeros(prod(spans), bool)
    for index in place:
        holds[index] = True
    occurring = np.flatnonzero(holds)
    columns = dict(zip(keys, np.unravel_index(occurring, spans), strict=True))
    columns = {name: columns[name] + low for name, low in zip(keys, least, strict=True)}
    for name in schema.names:
        if name not in keys:
            sums = np.zeros(len(holds), np.int64)
            for index, values in zip(place, _arrays(pieces, name), strict=True):
                np.add.at(sums, index, values.astype(np.int64, copy=False))
            columns[name] = sums[occurring]
    types = [field.type if field.name in keys else pa.int64() for field in schema]
    return pa.table(
        [pa.array(columns[name]).cast(kind) for name, kind in zip(schema.names, types, strict=True)], schema.names
    )


def _is_whole(field: pa.Field) -> bool:
    return pa.types.is_integer(field.type) and field.type != pa.uint64()


def _arrays(pieces: Sequence[pa.Table], name: str) -> list[NDArray]:
    """Return a column of each piece."""
    return [piece[name].to_numpy() for piece in pieces]
