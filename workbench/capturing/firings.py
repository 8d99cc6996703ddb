"""Single firings kept to be looked at: `examples`, a few of every neuron, and `fired`, all of a sample of tokens.

The idea: both are read from the packed hidden state, entry by entry. Of each neuron the K largest values are kept, and
the K firings with the least draw, a random number that depends on layer, neuron, sequence and position alone: which
firings are kept depends on the text and on nothing else, so runs that are cut short and go on keep the same. A neuron's
worst kept firing is a bar that most later firings do not pass, so what is sorted soon gets less. `fired` takes the
tokens whose own draw is below the share.

Cost: a pass over the entries of every layer; on a GPU a wait for the device in each, as their number is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from twell.kernels.layout import INDEX_MASK, TwELL
from twell.workbench.capturing.forward import Inputs
from twell.workbench.errors import UserError
from twell.workbench.run.schema import nnz_type
from twell.workbench.text.batches import Batch

REACH = 16  # tokens of a window before its firing, and after
KINDS = ("top", "sample")
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed numbers


def draw(*numbers: Tensor | int) -> Tensor:
    """A number in [0, 1) for each row of int64 tensors: the same for the same numbers, on any device."""
    state: Any = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = state + number + _ODD[0]
        for shift, odd in ((30, _ODD[1]), (27, _ODD[2]), (31, 1)):
            state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * odd
    return ((state >> 11) & (2**53 - 1)).double() / 2**53


def entries(packed: TwELL, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What fired, row after row and ascending: row int64 (its place in `rows`, if given), neuron int64, value."""
    layout = packed.layout
    words = packed.words if rows is None else packed.words[rows]
    counts = words[..., 0]
    slot = torch.arange(layout.slots, device=words.device)
    row, tile, at = (slot < torch.where(counts > layout.slots, 0, counts)[..., None]).nonzero(as_tuple=True)
    word = words[row, tile, at + 1]
    column = (word & INDEX_MASK).long()
    if packed.values is None:
        value = (word >> 16).to(torch.int16).view(packed.dtype)
    else:
        value = packed.values[row if rows is None else rows[row], tile, at]
    over_row, over_tile = (counts > layout.slots).nonzero(as_tuple=True)
    if len(over_row):
        place = packed.spill_index[over_row if rows is None else rows[over_row], over_tile].long()
        stored = packed.spill[place]
        one, over_column = (stored != 0).nonzero(as_tuple=True)
        row, tile = torch.cat([row, over_row[one]]), torch.cat([tile, over_tile[one]])
        column, value = torch.cat([column, over_column]), torch.cat([value, stored[one, over_column]])
    neuron = tile * layout.tile + column
    order = (row * packed.d_ff + neuron).argsort()
    return row[order], neuron[order], value[order]


@dataclass
class Firings:
    """Firings of one layer's neurons, each field [firings] but `window` [firings, 2 * REACH + 1]."""

    neuron: Tensor  # int64
    score: Tensor  # float64: the greater, the sooner kept
    value: Tensor  # float32
    sequence: Tensor  # int64
    position: Tensor  # int64
    window: Tensor  # float32

    def best(self, k: int) -> Firings:
        """The k of each neuron with the greatest score; of equal ones the first in the text."""
        order = (self.sequence * 2**31 + self.position).argsort()
        order = order[self.score[order].argsort(descending=True, stable=True)]
        order = order[self.neuron[order].argsort(stable=True)]
        neuron = self.neuron[order]
        rank = torch.arange(len(neuron), device=neuron.device) - torch.searchsorted(neuron, neuron)
        return self.take(order[rank < k])

    def take(self, index: Tensor) -> Firings:
        return Firings(*(getattr(self, item.name)[index] for item in fields(self)))

    def with_more(self, more: Firings) -> Firings:
        return Firings(*(torch.cat([getattr(self, item.name), getattr(more, item.name)]) for item in fields(self)))

    def bars(self, k: int, d_ff: int) -> Tensor:
        """float64 [d_ff]: the score that a firing must reach to be kept; as `best(k)` left these."""
        held = self.neuron.bincount(minlength=d_ff)
        least = torch.full((d_ff,), torch.inf, dtype=torch.float64, device=self.score.device)
        least.scatter_reduce_(0, self.neuron, self.score, "amin")
        return torch.where(held >= k, least, -torch.inf)


class Watch:
    """What a run keeps of single firings. `k`: examples a neuron, 0 for none; `fired`: as the option has it, or None.

    UserError for a `fired` that is not understood.
    """

    def __init__(self, layers: int, d_ff: int, k: int, fired: str | None) -> None:
        self.k, self.d_ff, self.layers = k, d_ff, layers
        self.fired, self.share = parse_fired(fired, layers) if fired else (frozenset(), 0.0)
        self.kept: dict[tuple[int, str], tuple[Firings, Tensor]] = {}  # with their bars

    @property
    def keeps(self) -> bool:
        """Whether anything is to be kept at all."""
        return bool(self.k or self.fired)

    def look(self, batch: Batch, inputs: Inputs) -> Seen | None:
        """What is to hear of the batch's layers, if anything is kept."""
        return Seen(self, batch, inputs) if self.keeps else None

    def keep(self, layer: int, kind: str, more: Firings) -> None:
        """Adds firings, as far as they are among the best."""
        if (layer, kind) in self.kept:
            more = self.kept[layer, kind][0].with_more(more)
        best = more.best(self.k)
        self.kept[layer, kind] = best, best.bars(self.k, self.d_ff)

    def bars(self, layer: int, kind: str, device: torch.device) -> Tensor:
        if (layer, kind) in self.kept:
            return self.kept[layer, kind][1]
        return torch.full((self.d_ff,), -torch.inf, dtype=torch.float64, device=device)

    def examples(self) -> Callable[[], dict[str, Any]]:
        """What gives the columns of the `examples` table, all that is kept now; calling that waits for the device."""
        order = sorted(self.kept, key=lambda key: (key[0], KINDS.index(key[1])))
        kept = [(layer, kind, self.kept[layer, kind][0]) for layer, kind in order]

        def columns() -> dict[str, Any]:
            found = []
            for layer, kind, held in kept:
                table = {item.name: getattr(held, item.name).cpu().numpy() for item in fields(held)}
                score = table.pop("score")
                table |= {"layer": np.full(len(score), layer), "kind": np.full(len(score), kind)}
                found.append(table | {"draw": -score if kind == "sample" else np.zeros(len(score))})
            joined = {name: np.concatenate([table[name] for table in found]) for name in found[0]} if found else {}
            if found:
                joined["window"] = _lists(joined["window"].ravel(), np.full(len(joined["draw"]), 2 * REACH + 1))
            return joined

        return columns

    def restore(self, table: pa.Table, device: torch.device) -> None:
        """Takes back what `examples` gave."""
        frame: pd.DataFrame = table.to_pandas()
        for (layer, kind), rows in frame.groupby(["layer", "kind"]):
            score = -rows["draw"] if kind == "sample" else rows["value"]
            columns = [rows["neuron"], score, rows["value"], rows["sequence"], rows["position"]]
            kinds = (torch.int64, torch.float64, torch.float32, torch.int64, torch.int64)
            tensors: list[Any] = [
                torch.tensor(column.to_numpy(), dtype=dtype, device=device)
                for column, dtype in zip(columns, kinds, strict=True)
            ]
            window = np.stack(rows["window"].to_list())
            tensors.append(torch.tensor(window, dtype=torch.float32, device=device))
            self.keep(int(layer), str(kind), Firings(*tensors))


class Seen:
    """What one batch fired that may be kept; nothing is until `accept`."""

    def __init__(self, watch: Watch, batch: Batch, inputs: Inputs) -> None:
        self.watch, self.inputs = watch, inputs
        device, longest = inputs.ids.device, batch.longest
        row = torch.arange(batch.padded, device=device)
        self._position = row % longest - torch.from_numpy(np.repeat(batch.begins, longest)).to(device)
        self._length = torch.from_numpy(np.repeat(batch.lengths, longest)).to(device)
        self._candidates: list[tuple[int, str, Firings]] = []
        sampled = np.zeros(0, dtype=bool)
        if watch.fired:
            numbers = (
                torch.from_numpy(batch.sequence.astype(np.int64)),
                torch.from_numpy(batch.position.astype(np.int64)),
            )
            sampled = (draw(*numbers) < watch.share).numpy()
        self._sampled = np.flatnonzero(sampled)
        self._rows = torch.from_numpy(batch.place[self._sampled].astype(np.int64)).to(device)
        self._keys = batch.sequence[self._sampled], batch.position[self._sampled]
        self._fired: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def hear(self, layer: int, packed: TwELL) -> None:
        """A layer's packed hidden state, while it lasts."""
        if self.watch.k:
            row, neuron, value = entries(packed)
            for kind in KINDS:
                self._candidates.append((layer, kind, self._passing(layer, kind, row, neuron, value)))
        if layer in self.watch.fired and len(self._rows):
            self._fired.append((layer, *entries(packed, self._rows)))

    def _passing(self, layer: int, kind: str, row: Tensor, neuron: Tensor, value: Tensor) -> Firings:
        sequence, position = self.inputs.sequence[row].long(), self._position[row]
        wide = value.float()
        score = wide.double() if kind == "top" else -draw(sequence, position, layer, neuron)
        bar = self.watch.bars(layer, kind, row.device)[neuron]
        passing = ((score >= bar) & (self.inputs.rows[row] != 0)).nonzero().squeeze(1)
        columns: list[Any] = [column[passing] for column in (neuron, score, wide, sequence, position)] + [passing]
        held = Firings(*columns).best(self.watch.k)  # until it is known which are needed: their place
        place = held.window
        held.window = self._windows(row, neuron, wide, row[place], neuron[place])
        return held

    def _windows(self, row: Tensor, neuron: Tensor, value: Tensor, rows: Tensor, neurons: Tensor) -> Tensor:
        """float32 [firings, window]: the neurons' values around these rows; NaN outside the sequence."""
        keys = row * self.watch.d_ff + neuron  # ascending
        reach = torch.arange(-REACH, REACH + 1, device=row.device)
        position = self._position[rows][:, None] + reach
        inside = (position >= 0) & (position < self._length[rows][:, None])
        wanted = ((rows[:, None] + reach) * self.watch.d_ff + neurons[:, None]).clamp(min=0)
        place = torch.searchsorted(keys, wanted).clamp(max=max(0, len(keys) - 1))
        values = torch.where(keys[place] == wanted, value[place], 0.0) if len(keys) else value.new_zeros(wanted.shape)
        return torch.where(inside, values, torch.nan)

    def accept(self) -> Iterator[dict[str, Any]]:
        """Keeps what is among the best, and hands out the rows of the `fired` table."""
        for layer, kind, firings in self._candidates:
            self.watch.keep(layer, kind, firings)
        sequence, position = self._keys
        kind, most = nnz_type(self.watch.d_ff), torch.finfo(torch.float16).max
        for layer, row, neuron, value in self._fired:
            lengths = row.bincount(minlength=len(sequence)).cpu().numpy()
            yield {
                "sequence": sequence,
                "position": position,
                "layer": np.full(len(sequence), layer),
                "neuron": _lists(neuron.cpu().numpy().astype(kind), lengths),
                "value": _lists(value.float().clamp(max=most).cpu().numpy().astype(np.float16), lengths),
            }


def parse_fired(text: str, layers: int) -> tuple[frozenset[int], float]:
    """`LAYERS[:SHARE]`: layers as in 0,3-5 or all; the share of tokens, default all of them."""
    named, _, share = text.partition(":")
    found: set[int] = set()
    try:
        kept = float(share) if share else 1.0
        for item in named.split(","):
            first, _, last = (f"0-{layers - 1}" if item == "all" else item).partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        found, kept = set(), 0.0
    if not (found and found <= set(range(layers)) and 0 < kept <= 1):
        raise UserError(
            f"Expected --fired as LAYERS[:SHARE], layers from 0 to {layers - 1} as in 0,3-5 or all, and a share of "
            f"tokens above 0 and up to 1, got {text!r}."
        )
    return frozenset(found), kept


def _lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
