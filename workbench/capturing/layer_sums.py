"""Sum over tokens: what every neuron did, how full tiles are, and how many neurons a block of tokens has in common.

The idea: one forward pass gives sums of all layers, on the device; they add up batch by batch, and go to the host when
a part of the run closes. Everything is an integer count or an extreme, so any order of adding gives the same bits.

Unions come from the packed hidden state. The unflagged tokens of a sequence are cut into full blocks of 16 (what is
left over is in no block); a block's union is a row of marks that its tokens' neurons are scattered into, and blocks of
64 and 128 are made of those of 16. Tiles past their slots are read from where they are stored whole. Nothing here waits
for the device. Cost: about that of reading the packed words three times; on a GPU `unions.py` of the kernels does it in
one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.kernels.backends import union_counts as on_gpu
from twell.kernels.layout import TwELL, fired_by_any
from twell.kernels.stats import NeuronSums, Stats, TileCounts
from twell.workbench.run.writer import TableColumns

BLOCKS = (16, 64, 128)  # tokens of a block: the first is scattered, each other one is made of those before it


@dataclass
class LayerSums:
    """Sums of all layers over unflagged tokens; None for what the probes did not count.

    neurons: fields [layers, d_ff]; tiles: pairs and rows int64 [layers, tile + 1]
    unions: int64 [layers, blocks, d_ff + 1], how many blocks have a union of that many neurons
    values: int64 [layers, d_ff, BINS], firings by their value; where examples are kept
    """

    neurons: NeuronSums | None
    tiles: TileCounts | None
    unions: Tensor | None
    values: Tensor | None = None

    @classmethod
    def stack(cls, layers: list[Stats], unions: list[Tensor]) -> LayerSums:
        """Stack the sums of a forward pass. layers, unions: one entry for each layer, in order."""

        neurons = [layer.neurons for layer in layers if layer.neurons is not None]
        tiles = [layer.tiles for layer in layers if layer.tiles is not None]
        return cls(
            NeuronSums.stack(neurons) if neurons else None,
            TileCounts.stack(tiles) if tiles else None,
            torch.stack(unions) if unions else None,
        )

    def merge(self, other: LayerSums) -> None:
        """Add the sums of other tokens in place; they have the same fields."""
        if self.neurons is not None and other.neurons is not None:
            self.neurons.merge(other.neurons)
        if self.tiles is not None and other.tiles is not None:
            self.tiles.merge(other.tiles)
        if self.unions is not None and other.unions is not None:
            self.unions += other.unions
        if self.values is not None and other.values is not None:
            self.values += other.values

    def tables(self) -> Iterator[TableColumns]:
        """Yield the name and the columns of each table of the run that holds these sums, of the longest what makes
        them; waits for the device."""
        if self.neurons is not None:
            sums = {item.name: getattr(self.neurons, item.name).cpu().numpy() for item in fields(NeuronSums)}
            layer, neuron = np.nonzero(sums["fires"])
            columns = {name: values[layer, neuron] for name, values in sums.items()}
            yield "neurons", {"layer": layer, "neuron": neuron} | columns
        if self.tiles is not None:
            pairs, rows = self.tiles.pairs.cpu().numpy(), self.tiles.rows.cpu().numpy()
            layer, occupancy = np.nonzero(pairs | rows)
            tile = np.full(len(layer), self.tiles.layout.tile, dtype=np.int32)
            counts = {"pairs": pairs[layer, occupancy], "rows": rows[layer, occupancy]}
            yield "tiles", {"layer": layer, "tile": tile, "occupancy": occupancy} | counts
        if self.unions is not None:
            blocks = self.unions.cpu().numpy()
            layer, size, neurons = np.nonzero(blocks)
            counts = {"neurons": neurons, "blocks": blocks[layer, size, neurons]}
            yield "unions", {"layer": layer, "block": np.array(BLOCKS)[size]} | counts
        if self.values is not None:
            yield "value_bins", partial(_value_bins, self.values)


def _value_bins(values: Tensor) -> dict[str, Any]:
    """Return the columns of `value_bins`. values: as in LayerSums"""
    fires = values.cpu().numpy()
    layer, neuron, one = np.nonzero(fires)
    return {"layer": layer, "neuron": neuron, "bin": one, "fires": fires[layer, neuron, one]}


def blocks_of(sequence: np.ndarray, plain: np.ndarray) -> list[np.ndarray]:
    """Return the members of blocks: int32 rows [blocks, 16], then for each larger size the blocks of the size before.

    sequence: [rows], ascending; plain: bool [rows], the rows that count
    """
    rows = np.flatnonzero(plain)
    starts = np.flatnonzero(np.diff(sequence[rows], prepend=-1))  # of each sequence among the rows that count
    lengths = np.diff(starts, append=len(rows))
    members: list[np.ndarray] = []
    for size, smaller in zip(BLOCKS, (1, *BLOCKS), strict=False):
        wide = size // smaller  # members of a block
        held = lengths // wide  # blocks of each sequence
        first = np.repeat(starts, held * wide)
        rank = np.arange(len(first)) - np.repeat(np.cumsum(held * wide) - held * wide, held * wide)
        members.append((first + rank).astype(np.int32).reshape(-1, wide))
        starts, lengths = np.cumsum(held) - held, held
    members[0] = rows.astype(np.int32)[members[0]]
    return members


def union_counts(packed: TwELL, members: list[Tensor]) -> Tensor:
    """Return int64 [sizes of a block, d_ff + 1]: how many blocks have a union of each size.

    members: as `blocks_of` returns them, on the device
    """
    return on_gpu.counts(packed, members) if on_gpu.takes(packed) else scattered_counts(packed, members)


def scattered_counts(packed: TwELL, members: list[Tensor]) -> Tensor:
    """Return the same as `union_counts`, by torch alone and on any device."""
    marks = fired_by_any(packed, members[0])
    histograms = []
    for index, blocks in enumerate(members):
        if index:
            marks = marks[blocks].any(1)
        sizes = marks.sum(1)
        histogram = sizes.new_zeros(packed.d_ff + 1)
        histograms.append(histogram.index_add_(0, sizes, torch.ones_like(sizes)))
    return torch.stack(histograms)
