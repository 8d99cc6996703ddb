"""Summaries in the making, with one column a layer: adding these up costs far less than one row a layer.

    layer_columns("nnz_sum", sums)    {"nnz_sum[0]": …, "nnz_sum[1]": …}, from an array [row, layer]
    layer_rows(table)                 the same numbers as declared, one row a layer with a column nnz_sum

No other module knows how the columns of layers are named. Cost of `layer_rows`: a copy of the keys a layer.
"""

from __future__ import annotations

import re

import pyarrow as pa
from numpy.typing import NDArray

TOTAL = -1  # the layer number under which the sum over all layers goes
_NAME = re.compile(r"(.+)\[(-?\d+)\]")


def layer_columns(name: str, sums: NDArray, total: NDArray | None = None) -> dict[str, NDArray]:
    """Return the columns of one quantity: `sums` [row, layer] and, if given, `total` [row], its sum over all layers."""
    columns = {f"{name}[{layer}]": values for layer, values in enumerate(sums.T)}
    return columns if total is None else {**columns, f"{name}[{TOTAL}]": total}


def is_layer_column(name: str) -> bool:
    """Return whether a column holds a quantity of one layer."""
    return _NAME.fullmatch(name) is not None


def layer_rows(table: pa.Table) -> pa.Table:
    """Return a table with one row a layer; one without columns of layers as it is."""
    plain = [name for name in table.schema.names if not is_layer_column(name)]
    sources: dict[int, dict[str, str]] = {}  # by layer: the column of each quantity
    for match in filter(None, map(_NAME.fullmatch, table.schema.names)):
        sources.setdefault(int(match[2]), {})[match[1]] = match[0]
    if not sources:
        return table
    return pa.concat_tables(
        pa.table(
            {name: table[name] for name in plain}
            | {"layer": pa.repeat(pa.scalar(layer, pa.int32()), table.num_rows)}
            | {quantity: table[column] for quantity, column in columns.items()}
        )
        for layer, columns in sources.items()
    )
