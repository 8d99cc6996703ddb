"""Totals: summaries as they add up, from pieces that hold sums already.

A summary in the making may have its layers side by side (columns a layer) in place of a row each: its keys are then
those it has. Every column that is no key adds up, but for those in EXTREMES. Cost: that of one group-by each time that
as much has come as there is, so that adding costs no more than what is added.
"""

from __future__ import annotations

import pyarrow as pa

HELD = 2**28  # bytes of a summary's pieces not yet added up
# What makes a row of each summary.
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
    "surprisal_correlations": ("own", "class", "layer"),
    "used": ("layer", "flagged"),
    "words": ("word",),
    "neurons": ("layer", "neuron"),
    "tiles": ("layer", "tile", "occupancy"),
    "unions": ("layer", "block", "neurons"),
}
KIND = "kind"  # the number of a class, in a summary in the making
EXTREMES = {"value_max": "max", "token_min": "min", "token_max": "max", "first_sequence": "min"}

Tables = dict[str, pa.Table]


class Total:
    """Summaries as they add up."""

    def __init__(self, tables: Tables | None = None) -> None:
        self._pieces = {name: [table] for name, table in (tables or {}).items()}

    def add(self, tables: Tables) -> None:
        """Take these as well."""
        for name, table in tables.items():
            pieces = self._pieces.setdefault(name, [])
            pieces.append(table)
            if sum(piece.nbytes for piece in pieces[1:]) > max(HELD, pieces[0].nbytes):
                self._pieces[name] = [_added(name, pieces)]

    def table(self, name: str) -> pa.Table:
        """One summary of all that was added."""
        if len(self._pieces[name]) > 1:
            self._pieces[name] = [_added(name, self._pieces[name])]
        return self._pieces[name][0]

    def tables(self) -> Tables:
        """Each summary of all that was added."""
        return {name: self.table(name) for name in self._pieces}


def added_up(one: Tables, other: Tables) -> Tables:
    """The two added up."""
    total = Total(one)
    total.add(other)
    return total.tables()


def _added(name: str, pieces: list[pa.Table]) -> pa.Table:
    columns = pieces[0].schema.names
    keys = [column for column in columns if column in (*KEYS[name], KIND)]
    how = [(column, EXTREMES.get(column, "sum")) for column in columns if column not in keys]
    grouped = pa.concat_tables(pieces).group_by(keys).aggregate(how)
    named = {f"{column}_{function}": column for column, function in how}
    return grouped.rename_columns([named.get(name, name) for name in grouped.schema.names]).select(columns)
