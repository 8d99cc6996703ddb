"""Check every row of a run's parts: ranges, order, and that its tables agree with each other.

A part is in memory at a time. Cost: 1 s a million tokens of 28 layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from twell.workbench.errors import UserError
from twell.workbench.run.checks.columns_on_disk import column_fault
from twell.workbench.run.checks.ranges import Sizes, value_range
from twell.workbench.run.checks.regular_file import require_regular
from twell.workbench.run.columns import VALUE_BINS
from twell.workbench.run.manifest import Part
from twell.workbench.run.part_files import read_part
from twell.workbench.run.schema import TABLES, expand, nnz_columns
from twell.workbench.run.store import Run


@dataclass
class ReadSums:
    """Sums over the whole parts that were read. nnz, fires, value_fires, tile_fires: [layer]; tokens, tile_tokens:
    unflagged ones; lengths: tokens by sequence."""

    nnz: NDArray
    fires: NDArray
    value_fires: NDArray
    tile_fires: NDArray
    tile_tokens: NDArray
    tokens: int = 0
    losses: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    stated: dict[int, int] = field(default_factory=dict)

    @classmethod
    def zero(cls, layers: int) -> ReadSums:
        """Return sums over nothing."""
        return cls(*np.zeros((5, layers), np.int64))


def part_fault(run: Run, part: Part, sums: ReadSums) -> str:
    """Return what is wrong with a part, as a clause; "" if it is whole, and then its rows are added to the sums."""
    path, sizes = run.path / part.file, Sizes.of(run.manifest)
    try:
        require_regular(path)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if digest != part.sha256:
        return "differs from its checksum in the manifest"
    columns = expand(TABLES[part.table], sizes.layers, sizes.d_ff, sizes.used)
    fault = column_fault(path, part.table, columns, sizes, part.rows)
    if fault:
        return fault
    try:
        rows = read_part(path)
    except UserError:
        return "cannot be read: a page differs from its checksum"
    return next(_value_faults(part.table, rows, sizes), "") or CHECKS.get(part.table, _nothing)(rows, sums)


def run_faults(run: Run, sums: ReadSums) -> Iterator[str]:
    """Yield a sentence for each two tables that do not agree. All parts are whole."""
    if run.has("activity") and run.has("sequences") and sums.lengths != sums.stated:
        yield f"The sequences of {run.path} are not those that its activity table holds."
    if run.has("activity") and sums.losses != run.manifest.loss_tokens:
        yield (
            f"The manifest of {run.path} counts {run.manifest.loss_tokens:,} losses, and its parts hold "
            f"{sums.losses:,}."
        )
    for name, fires in (("neurons", sums.fires), ("value_bins", sums.value_fires), ("tiles", sums.tile_fires)):
        wrong = np.flatnonzero(fires != sums.nnz)
        if run.has("activity") and run.has(name) and len(wrong):
            layer = int(wrong[0])
            yield (
                f"The {name} of {run.path} hold {fires[layer]:,} firings in layer {layer}, and its unflagged tokens "
                f"{sums.nnz[layer]:,}."
            )


def _value_faults(table: str, rows: pa.Table, sizes: Sizes) -> Iterator[str]:
    """Yield a clause for each column with a value out of range, whatever the footer states."""
    for name in rows.schema.names:
        limits = value_range(table, name, sizes)
        values = rows[name]
        if limits is None or not len(values):
            continue
        if pa.types.is_list(values.type):
            values = pc.list_flatten(values)
        if pa.types.is_float16(values.type):
            values = values.cast(pa.float32())
        for value in pc.min_max(values).as_py().values():
            if value is not None and not limits[0] <= value <= limits[1]:
                yield f"has {value} in {name}, where {limits[0]:,} to {limits[1]:,} can be"


def _nothing(rows: pa.Table, sums: ReadSums) -> str:
    return ""


def _activity(rows: pa.Table, sums: ReadSums) -> str:
    sequence, position = (rows[name].to_numpy().astype(np.int64) for name in ("sequence", "position"))
    key = np.sort(sequence * 2**32 + position)
    if (np.diff(key) == 0).any():
        return "has a position twice"
    numbers, lengths = np.unique(sequence, return_counts=True)
    last = np.append(np.flatnonzero(np.diff(key >> 32)), len(key) - 1) if len(key) else np.zeros(0, int)
    if ((key[last] & (2**32 - 1)) != lengths - 1).any():
        return "has a sequence with a gap in its positions"
    if twice := sums.lengths.keys() & set(numbers.tolist()):
        return f"has rows of sequence {min(twice)}, which an earlier part has too"
    layers = len(sums.nnz)
    used = [name for name in nnz_columns(layers, "used") if name in rows.schema.names]
    for name, fewer in zip(nnz_columns(layers), used, strict=False):
        if (rows[fewer].to_numpy() > rows[name].to_numpy()).any():
            return f"has more in {fewer} than in {name}"
    entropy = rows["entropy"] if "entropy" in rows.schema.names else pa.nulls(len(rows))
    if entropy.null_count < len(rows) and not pc.is_null(entropy).equals(pc.is_null(rows["loss"])):
        return "has a loss without an entropy, or an entropy without a loss"
    counted = rows["flags"].to_numpy() == 0
    sums.nnz += [int(rows[name].to_numpy()[counted].sum(dtype=np.int64)) for name in nnz_columns(layers)]
    sums.tokens += int(counted.sum())
    sums.losses += len(rows) - rows["loss"].null_count
    sums.lengths |= dict(zip(numbers.tolist(), lengths.tolist(), strict=True))
    return ""


def _sequences(rows: pa.Table, sums: ReadSums) -> str:
    numbers = rows["sequence"].to_pylist()
    if len(set(numbers)) < len(numbers) or sums.stated.keys() & set(numbers):
        return "has a sequence twice"
    sums.stated |= dict(zip(numbers, rows["tokens"].to_pylist(), strict=True))
    return ""


def _neurons(rows: pa.Table, sums: ReadSums) -> str:
    layer, neuron, fires = (rows[name].to_numpy() for name in ("layer", "neuron", "fires"))
    if len(np.unique(layer.astype(np.int64) * 2**32 + neuron)) < len(rows):
        return "has a neuron twice"
    if (fires < 1).any():
        return "has a neuron that never fired"
    if (rows["token_min"].to_numpy() > rows["token_max"].to_numpy()).any():
        return "has a neuron whose least token is greater than its greatest"
    np.add.at(sums.fires, layer, fires)
    return ""


def _value_bins(rows: pa.Table, sums: ReadSums) -> str:
    layer, neuron, one, fires = (rows[name].to_numpy().astype(np.int64) for name in ("layer", "neuron", "bin", "fires"))
    if len(np.unique((layer * 2**32 + neuron) * VALUE_BINS + one)) < len(rows):
        return "has a bin of a neuron twice"
    if (fires < 1).any():
        return "has a bin without a firing"
    np.add.at(sums.value_fires, layer, fires)
    return ""


def _tiles(rows: pa.Table, sums: ReadSums) -> str:
    layer, tile, occupancy, pairs, tokens = (rows[name].to_numpy() for name in rows.schema.names[:5])
    least = tile == tile.min(initial=2**31 - 1)  # of several sizes, each counts all firings
    np.add.at(sums.tile_fires, layer[least], (occupancy.astype(np.int64) * pairs)[least])
    np.add.at(sums.tile_tokens, layer[least], tokens[least])
    return ""


CHECKS: dict[str, Callable[[pa.Table, ReadSums], str]] = {
    "activity": _activity,
    "sequences": _sequences,
    "neurons": _neurons,
    "value_bins": _value_bins,
    "tiles": _tiles,
}
