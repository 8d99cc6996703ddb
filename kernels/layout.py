"""TwELL, the tile-wise ELLPACK form of a sparse hidden state, and the way in and out of it.

A row of `d_ff` columns is cut into tiles of `tile` columns. Each tile owns `tile // compression` 32-bit words:
word 0 is the tile's true count, also where that is more than the slots; the words after it are slots, one for
each fired neuron in ascending order: the low 16 bits are the column within the tile, the high 16 bits the value
in bfloat16 or float16. Wider values stand beside the words, in `values`, and the high halves are 0. Slots past
the count are 0.

A tile that overflows (count > slots) keeps its first entries in the slots and is stored whole, dense, in
`spill`, so that `unpack` is exact for any input. The layout bounds neither rows nor d_ff, since a column is
counted within its tile.

Cost: `pack` reads the mask twice and touches values only where it is set; memory is
rows * tiles * (tile / compression) words and the tiles that overflow. On a GPU it waits for the host once or
twice, as the number of values is data.

    twell = pack(hidden, hidden > 0, Layout(tile=256, compression=8))
    assert torch.equal(unpack(twell), hidden)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILES = (32, 64, 128, 256, 512)
COMPRESSIONS = (2, 4, 8, 16)
INDEX_MASK = 0xFFFF


@dataclass(frozen=True)
class Layout:
    """How a row is cut: `tile` columns to a tile, `tile // compression` words to a packed tile."""

    tile: int = 256
    compression: int = 8

    def __post_init__(self) -> None:
        if self.tile not in TILES:
            raise ValueError(f"tile: expected one of {TILES} columns, got {self.tile!r}")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression: expected one of {COMPRESSIONS}, got {self.compression!r}")

    @property
    def words(self) -> int:
        """32-bit words a tile: its count and its slots."""
        return self.tile // self.compression

    @property
    def slots(self) -> int:
        """Fired neurons that a tile holds before it overflows."""
        return self.words - 1

    def tiles(self, d_ff: int) -> int:
        """Tiles a row of d_ff columns; the last one may be partly filled."""
        return -(-d_ff // self.tile)


@dataclass
class TwELL:
    """A packed hidden state [rows, d_ff].

    words:       int32 [rows, tiles, tile // compression], to be read as uint32
    values:      float32 (or float64) [rows, tiles, slots], in slot order; None where values are 16 bits wide
    spill_index: int32 [rows, tiles], the tile's row in `spill`; -1 where it fits its slots
    spill:       dtype [spilled tiles, tile], dense
    """

    layout: Layout
    d_ff: int
    dtype: torch.dtype
    words: Tensor
    values: Tensor | None
    spill_index: Tensor
    spill: Tensor

    @property
    def counts(self) -> Tensor:
        """int32 [rows, tiles]: the true count of each tile, also past its slots."""
        return self.words[:, :, 0]

    @property
    def device(self) -> torch.device:
        return self.words.device

    def stored(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Where a kernel left it: each tile's first words, its other ones (None: the first are all), spill_index (None:
        in place, see `unions.h`), spill."""
        return self.words, None, self.spill_index, self.spill

    @classmethod
    def cat(cls, parts: list[TwELL]) -> TwELL:
        """The rows of several packed states of one layout, one after the other."""
        first = parts[0]
        places, spilled = [], 0
        for part in parts:
            places.append(torch.where(part.spill_index < 0, -1, part.spill_index + spilled))
            spilled += len(part.spill)
        return cls(
            first.layout,
            first.d_ff,
            first.dtype,
            torch.cat([part.words for part in parts]),
            None if first.values is None else torch.cat([part.values for part in parts if part.values is not None]),
            torch.cat(places),
            torch.cat([part.spill for part in parts]),
        )


def tile_view(dense: Tensor, layout: Layout) -> Tensor:
    """[rows, d_ff] as [rows, tiles, tile]; a partial last tile is filled up with zeros."""
    rows, d_ff = dense.shape
    tiles = layout.tiles(d_ff)
    missing = tiles * layout.tile - d_ff
    full = torch.nn.functional.pad(dense, (0, missing)) if missing else dense
    return full.reshape(rows, tiles, layout.tile)


def pack(hidden: Tensor, fired: Tensor, layout: Layout) -> TwELL:
    """Packs the values of the fired neurons of a hidden state.

    hidden: [rows, d_ff] of bfloat16, float16, float32 or float64; fired: bool [rows, d_ff]. What stands in
    `hidden` where `fired` is False is not read. A fired neuron whose value is 0 keeps its slot and its count.
    """
    rows, d_ff = hidden.shape
    tiles, slots = layout.tiles(d_ff), layout.slots
    in_tiles = tile_view(fired, layout)
    counts = in_tiles.sum(-1, dtype=torch.int32)  # [rows, tiles]

    row, column = fired.nonzero(as_tuple=True)  # row-major, so ascending within each tile
    value = hidden[row, column]
    owner = row * tiles + column // layout.tile  # which (row, tile)
    flat = counts.flatten().long()
    begin = flat.cumsum(0) - flat
    rank = torch.arange(len(owner), device=hidden.device) - begin[owner]
    kept = rank < slots
    owner, rank, index, value = owner[kept], rank[kept], (column[kept] % layout.tile).int(), value[kept]

    words = torch.zeros(rows * tiles, layout.words, dtype=torch.int32, device=hidden.device)
    words[:, 0] = counts.flatten()
    values = None
    if hidden.element_size() == 2:
        words[owner, rank + 1] = index | (value.view(torch.int16).int() << 16)
    else:
        words[owner, rank + 1] = index
        values = torch.zeros(rows * tiles, slots, dtype=hidden.dtype, device=hidden.device)
        values[owner, rank] = value
        values = values.view(rows, tiles, slots)

    over = counts > slots
    spill_index = torch.where(over, over.flatten().cumsum(0).view_as(over) - 1, -1).int()
    at = over.nonzero(as_tuple=True)
    spill = torch.where(
        in_tiles[at], tile_view(hidden, layout)[at], torch.zeros((), dtype=hidden.dtype, device=hidden.device)
    )
    return TwELL(layout, d_ff, hidden.dtype, words.view(rows, tiles, layout.words), values, spill_index, spill)


def unpack(twell: TwELL) -> Tensor:
    """The dense hidden state [rows, d_ff]: zero where no neuron fired, exact also under overflow."""
    words, layout = twell.words, twell.layout
    rows, tiles, _ = words.shape
    dense = torch.zeros(rows, tiles, layout.tile, dtype=twell.dtype, device=words.device)
    slot = torch.arange(layout.slots, device=words.device)
    row, tile, at = (slot < twell.counts[:, :, None]).nonzero(as_tuple=True)
    word = words[row, tile, at + 1]
    narrow = (word >> 16).to(torch.int16)
    value = narrow.view(twell.dtype) if twell.values is None else twell.values[row, tile, at]
    dense[row, tile, (word & INDEX_MASK).long()] = value
    over = twell.spill_index >= 0
    dense[over] = twell.spill[twell.spill_index[over].long()]
    return dense.view(rows, tiles * layout.tile)[:, : twell.d_ff]
