"""Add up partial summaries: tables of one name, with the same columns, whose rows combine by key.

Keys and the rule of each column are declared with the table in `summary_schema`. A partial summary may have one column
a layer in place of one row a layer (`layer_columns`): such columns are summed, and its keys are the declared ones that
it has. Cost: one group-by each time the pending pieces are as large as the total, so the cost is proportional to what
is added.
"""

from __future__ import annotations

import pyarrow as pa

from twell.workbench.run.schema import SUMMARIES

PENDING = 2**28  # bytes of a summary's pieces that are collected before they are added up

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
    grouped = pa.concat_tables(pieces).group_by(keys).aggregate(rules)
    original = {f"{column}_{rule}": column for column, rule in rules}
    return grouped.rename_columns([original.get(name, name) for name in grouped.schema.names]).select(columns)
