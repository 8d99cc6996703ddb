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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILES = (32, 64, 128, 256, 512)
COMPRESSIONS = (2, 4, 8, 16)
INDEX_MASK = 0xFFFF
SLOTS_AT_ONCE = 2**22  # in `fired_by_any`, which bounds the memory of their indices


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
        """32-bit words per tile: its count and its slots."""
        return self.tile // self.compression

    @property
    def slots(self) -> int:
        """Fired neurons that a tile holds before it overflows."""
        return self.words - 1

    def tiles(self, d_ff: int) -> int:
        """Return the tiles of a row of d_ff columns; the last one may be partly filled."""
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
        """Return where a kernel left it: each tile's first words, its other words (None: the first are all of them),
        spill_index (None: tiles lie in place, see `unions.h`), and spill."""
        return self.words, None, self.spill_index, self.spill

    @classmethod
    def cat(cls, states: Sequence[TwELL]) -> TwELL:
        """Return the rows of several packed states of one layout, one after the other."""
        first = states[0]
        indices, spilled = [], 0
        for state in states:
            indices.append(torch.where(state.spill_index < 0, -1, state.spill_index + spilled))
            spilled += len(state.spill)
        values = [state.values for state in states if state.values is not None]
        return cls(
            first.layout,
            first.d_ff,
            first.dtype,
            torch.cat([state.words for state in states]),
            torch.cat(values) if values else None,
            torch.cat(indices),
            torch.cat([state.spill for state in states]),
        )

    def take_rows(self, index: Tensor) -> TwELL:
        """Return the rows of `index` (int64 [m]) in its order; `spill` is shared, not copied."""
        values = None if self.values is None else self.values[index]
        return TwELL(self.layout, self.d_ff, self.dtype, self.words[index], values, self.spill_index[index], self.spill)

    def compact(self) -> TwELL:
        """Return a copy in memory of its own, whose `spill` holds the tiles that overflow and no others."""
        overflows = self.spill_index >= 0
        spill = self.spill[self.spill_index[overflows].long()]
        values = None if self.values is None else self.values.clone()
        return TwELL(self.layout, self.d_ff, self.dtype, self.words.clone(), values, number_spilled(overflows), spill)


def tile_view(dense: Tensor, layout: Layout) -> Tensor:
    """Return [rows, d_ff] as [rows, tiles, tile]; a partial last tile is filled up with zeros."""
    rows, d_ff = dense.shape
    tiles = layout.tiles(d_ff)
    missing = tiles * layout.tile - d_ff
    full = torch.nn.functional.pad(dense, (0, missing)) if missing else dense
    return full.reshape(rows, tiles, layout.tile)


def number_spilled(overflows: Tensor) -> Tensor:
    """Return `spill_index` for tiles that lie in `spill` one after the other; overflows: bool [rows, tiles]."""
    return torch.where(overflows, overflows.flatten().cumsum(0).view_as(overflows) - 1, -1).int()


def filled_slots(words: Tensor) -> Tensor:
    """Return which slots of packed tiles are in use, bool [..., slots], for words [..., slots + 1]."""
    return torch.arange(words.shape[-1] - 1, device=words.device) < words[..., :1]


def column_of(word: Tensor) -> Tensor:
    """Return the column within the tile, int64, that slots hold."""
    return (word & INDEX_MASK).long()


def narrow_value_of(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value of a 16-bit dtype that slots hold."""
    return (word >> 16).to(torch.int16).view(dtype)


def pack(hidden: Tensor, fired: Tensor, layout: Layout) -> TwELL:
    """Pack the values of the fired neurons of a hidden state.

    hidden: [rows, d_ff] of bfloat16, float16, float32 or float64; fired: bool [rows, d_ff]. What stands in
    `hidden` where `fired` is False is not read. A fired neuron whose value is 0 keeps its slot and its count.
    """
    rows, d_ff = hidden.shape
    tiles, slots = layout.tiles(d_ff), layout.slots
    in_tiles = tile_view(fired, layout)
    counts = in_tiles.sum(-1, dtype=torch.int32)  # [rows, tiles]

    row, column = fired.nonzero(as_tuple=True)  # row-major, so ascending within each tile
    value = hidden[row, column]
    owner = row * tiles + column // layout.tile  # the (row, tile) pair, numbered
    flat = counts.flatten().long()
    begin = flat.cumsum(0) - flat
    slot = torch.arange(len(owner), device=hidden.device) - begin[owner]
    fits = slot < slots
    owner, slot, index, value = owner[fits], slot[fits], (column[fits] % layout.tile).int(), value[fits]

    words = torch.zeros(rows * tiles, layout.words, dtype=torch.int32, device=hidden.device)
    words[:, 0] = counts.flatten()
    values = None
    if hidden.element_size() == 2:
        words[owner, slot + 1] = index | (value.view(torch.int16).int() << 16)
    else:
        words[owner, slot + 1] = index
        values = torch.zeros(rows * tiles, slots, dtype=hidden.dtype, device=hidden.device)
        values[owner, slot] = value
        values = values.view(rows, tiles, slots)

    overflows = counts > slots
    at = overflows.nonzero(as_tuple=True)
    spill = torch.where(
        in_tiles[at], tile_view(hidden, layout)[at], torch.zeros((), dtype=hidden.dtype, device=hidden.device)
    )
    words = words.view(rows, tiles, layout.words)
    return TwELL(layout, d_ff, hidden.dtype, words, values, number_spilled(overflows), spill)


def unpack(twell: TwELL) -> Tensor:
    """Return the dense hidden state [rows, d_ff]: zero where no neuron fired, exact also under overflow."""
    words, layout = twell.words, twell.layout
    rows, tiles, _ = words.shape
    dense = torch.zeros(rows, tiles, layout.tile, dtype=twell.dtype, device=words.device)
    row, tile, slot = filled_slots(words).nonzero(as_tuple=True)
    word = words[row, tile, slot + 1]
    value = narrow_value_of(word, twell.dtype) if twell.values is None else twell.values[row, tile, slot]
    dense[row, tile, column_of(word)] = value
    overflows = twell.spill_index >= 0
    dense[overflows] = twell.spill[twell.spill_index[overflows].long()]
    return dense.view(rows, tiles * layout.tile)[:, : twell.d_ff]


def entries(twell: TwELL) -> tuple[Tensor, Tensor, Tensor]:
    """Return every fired neuron, row after row and ascending in each: row int64, neuron int64, value.

    A value of 0 in a tile that overflows is not told from a neuron that did not fire. On a GPU this waits for the host
    twice, as the number of firings is data.
    """
    words, layout = twell.words, twell.layout
    overflows = twell.counts > layout.slots
    row, tile, slot = (filled_slots(words) & ~overflows[..., None]).nonzero(as_tuple=True)
    word = words[row, tile, slot + 1]
    column = column_of(word)
    value = narrow_value_of(word, twell.dtype) if twell.values is None else twell.values[row, tile, slot]
    dense_row, dense_tile = overflows.nonzero(as_tuple=True)
    neuron = tile * layout.tile + column
    if not len(dense_row):
        return row, neuron, value
    dense = twell.spill[twell.spill_index[dense_row, dense_tile].long()]
    at, dense_column = (dense != 0).nonzero(as_tuple=True)
    row, neuron = torch.cat([row, dense_row[at]]), torch.cat([neuron, dense_tile[at] * layout.tile + dense_column])
    order = (row * twell.d_ff + neuron).argsort()
    return row[order], neuron[order], torch.cat([value, dense[at, dense_column]])[order]


def fired_by_any(twell: TwELL, blocks: Tensor) -> Tensor:
    """Return the neurons that any row of a block fired: bool [blocks, d_ff filled up to whole tiles].

    blocks: integer [blocks, rows of one], the rows of each block. Nothing here waits for the host.
    """
    layout, (_, tiles, _) = twell.layout, twell.words.shape
    wide = tiles * layout.tile
    marks = torch.zeros(len(blocks) * wide + 1, dtype=torch.bool, device=blocks.device)  # the last one: for no neuron
    nowhere = marks.numel() - 1
    column = torch.arange(layout.tile, device=blocks.device)
    tile_begin = torch.arange(tiles, device=blocks.device) * layout.tile
    step = max(1, SLOTS_AT_ONCE // (tiles * layout.slots * blocks.shape[1]))
    in_place = len(twell.spill) > len(twell.words)  # room for every tile, used by a few: read where they lie
    for first in range(0, len(blocks), step):
        rows = blocks[first : first + step].long()
        block = torch.arange(first, first + len(rows), device=blocks.device)
        base = (block * wide)[:, None, None] + tile_begin  # the mark of each tile's first column
        words = twell.words[rows]  # [blocks, rows, tiles, words]
        marked = column_of(words[..., 1:]) + base[..., None]
        marks.scatter_(0, torch.where(filled_slots(words), marked, nowhere).flatten(), True)
        overflows = words[..., 0] > layout.slots
        if in_place:
            dense = twell.spill[twell.spill_index[rows].clamp(min=0)] != 0
            dense_marks = (dense & overflows[..., None]).any(1).flatten()
            marks[first * wide : (first + len(rows)) * wide].logical_or_(dense_marks)
        elif len(twell.spill):
            at, row, tile = torch.nonzero_static(overflows, size=len(twell.spill), fill_value=-1).unbind(1)
            dense = twell.spill[twell.spill_index[rows[at, row], tile].clamp(min=0)] != 0
            marked = (base[at, 0, tile])[:, None] + column
            marks.scatter_(0, torch.where(dense & (at >= 0)[:, None], marked, nowhere).flatten(), True)
    return marks[:nowhere].view(len(blocks), wide)
