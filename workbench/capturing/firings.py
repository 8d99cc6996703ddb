"""Keep single firings: `examples`, some of every neuron, and `fired`, all firings of a sample of tokens.

The idea: both are read from the packed hidden state, entry by entry. Of each neuron the K largest values are kept, and
the K firings with the least draw, a random number that depends on layer, neuron, sequence and position alone. So the
selection depends on the text and on nothing else, and a run that is resumed selects the same. The lowest score that a
neuron keeps is a threshold that most later firings do not pass, so there is soon less to sort. `fired` takes the tokens
whose own draw is below the share.

Cost: a pass over the entries of every layer; on a GPU the host waits for the device in each, to learn their number.
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

from twell.kernels.layout import TwELL, entries
from twell.workbench.capturing.forward import Inputs
from twell.workbench.errors import UserError
from twell.workbench.run.schema import nnz_type
from twell.workbench.text.batches import Batch

REACH = 16  # tokens of a window before its firing, and after
KINDS = ("top", "sample")
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed numbers


def draw(*numbers: Tensor | int) -> Tensor:
    """Return a number in [0, 1) for each row of int64 tensors: the same for the same numbers, on any device."""
    state: Any = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = state + number + _ODD[0]
        for shift, odd in ((30, _ODD[1]), (27, _ODD[2]), (31, 1)):
            state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * odd
    return ((state >> 11) & (2**53 - 1)).double() / 2**53


@dataclass
class Firings:
    """Firings of one layer's neurons, each field [firings] but `window` [firings, 2 * REACH + 1]."""

    neuron: Tensor  # int64
    score: Tensor  # float64: the greatest are kept
    value: Tensor  # float32
    sequence: Tensor  # int64
    position: Tensor  # int64
    window: Tensor  # float32

    def best(self, k: int) -> Firings:
        """Return each neuron's k firings of the greatest score; of equal scores those first in the text."""
        return self.take(best_of(self.neuron, self.score, self.sequence, self.position, k))

    def take(self, index: Tensor) -> Firings:
        """Return the firings at these indices, int64."""
        return Firings(*(getattr(self, item.name)[index] for item in fields(self)))

    def joined(self, other: Firings) -> Firings:
        """Return these firings, then those of `other`."""
        return Firings(*(torch.cat([getattr(self, item.name), getattr(other, item.name)]) for item in fields(self)))

    def thresholds(self, k: int, d_ff: int) -> Tensor:
        """Return float64 [d_ff]: the score that a further firing must reach; these firings come from `best(k)`."""
        held = self.neuron.bincount(minlength=d_ff)
        least = torch.full((d_ff,), torch.inf, dtype=torch.float64, device=self.score.device)
        least.scatter_reduce_(0, self.neuron, self.score, "amin")
        return torch.where(held >= k, least, -torch.inf)


def best_of(neuron: Tensor, score: Tensor, sequence: Tensor, position: Tensor, k: int) -> Tensor:
    """Return the indices of each neuron's k firings of the greatest score; of equal scores those first in the text."""
    order = (sequence * 2**31 + position).argsort()
    order = order[score[order].argsort(descending=True, stable=True)]
    order = order[neuron[order].argsort(stable=True)]
    neuron = neuron[order]
    rank = torch.arange(len(neuron), device=neuron.device) - torch.searchsorted(neuron, neuron)
    return order[rank < k]


class FiringCollector:
    """The single firings that a run has kept so far.

    k: examples of each neuron and kind, 0 for none; fired: the text of the option --fired, or None
    Raises UserError for a `fired` that is not understood.
    """

    def __init__(self, layers: int, d_ff: int, k: int, fired: str | None) -> None:
        self.k, self.d_ff, self.layers = k, d_ff, layers
        self.fired, self.share = parse_fired(fired, layers) if fired else (frozenset(), 0.0)
        self._best: dict[tuple[int, str], tuple[Firings, Tensor]] = {}  # by layer and kind; with their thresholds

    @property
    def is_active(self) -> bool:
        """Return whether any firing is to be kept."""
        return bool(self.k or self.fired)

    def collect_from(self, batch: Batch, inputs: Inputs) -> BatchFirings | None:
        """Return the object that a batch's layers report to; None if nothing is to be kept."""
        return BatchFirings(self, batch, inputs) if self.is_active else None

    def merge(self, layer: int, kind: str, firings: Firings) -> None:
        """Add firings of a layer, and keep the best of all."""
        if (layer, kind) in self._best:
            firings = self._best[layer, kind][0].joined(firings)
        best = firings.best(self.k)
        self._best[layer, kind] = best, best.thresholds(self.k, self.d_ff)

    def thresholds(self, layer: int, kind: str, device: torch.device) -> Tensor:
        """Return float64 [d_ff]: the score that a firing of each neuron must reach to be kept."""
        if (layer, kind) in self._best:
            return self._best[layer, kind][1]
        return torch.full((self.d_ff,), -torch.inf, dtype=torch.float64, device=device)

    def examples(self) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the columns of the `examples` table, of the firings kept by now.

        Calling it waits for the device.
        """
        order = sorted(self._best, key=lambda key: (key[0], KINDS.index(key[1])))
        selected = [(layer, kind, self._best[layer, kind][0]) for layer, kind in order]

        def columns() -> dict[str, Any]:
            tables = []
            for layer, kind, firings in selected:
                table = {item.name: getattr(firings, item.name).cpu().numpy() for item in fields(firings)}
                score = table.pop("score")
                table |= {"layer": np.full(len(score), layer), "kind": np.full(len(score), kind)}
                tables.append(table | {"draw": -score if kind == "sample" else np.zeros(len(score))})
            joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]} if tables else {}
            if tables:
                joined["window"] = lists(joined["window"].ravel(), np.full(len(joined["draw"]), 2 * REACH + 1))
            return joined

        return columns

    def restore(self, table: pa.Table, device: torch.device) -> None:
        """Merge the rows of an `examples` table, of this run or of another rank."""
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
            self.merge(int(layer), str(kind), Firings(*tensors))


class BatchFirings:
    """The firings of one batch that may be kept; none of them is until `commit`."""

    def __init__(self, collector: FiringCollector, batch: Batch, inputs: Inputs) -> None:
        self.collector, self.inputs = collector, inputs
        device, longest = inputs.ids.device, batch.longest
        row = torch.arange(batch.padded, device=device)
        self._position = row % longest - torch.from_numpy(np.repeat(batch.begins, longest)).to(device)
        self._length = torch.from_numpy(np.repeat(batch.lengths, longest)).to(device)
        self._candidates: list[tuple[int, str, Firings]] = []
        sampled = np.zeros(0, dtype=bool)
        if collector.fired:
            numbers = (
                torch.from_numpy(batch.sequence.astype(np.int64)),
                torch.from_numpy(batch.position.astype(np.int64)),
            )
            sampled = (draw(*numbers) < collector.share).numpy()
        self._sampled = np.flatnonzero(sampled)
        self._rows = torch.from_numpy(batch.row_of[self._sampled].astype(np.int64)).to(device)
        self._keys = batch.sequence[self._sampled], batch.position[self._sampled]
        self._fired: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def on_packed(self, layer: int, packed: TwELL) -> None:
        """Read a layer's packed hidden state, which need not outlive the call."""
        if self.collector.k:
            row, neuron, value = entries(packed)
            for kind in KINDS:
                self._candidates.append((layer, kind, self._passing(layer, kind, row, neuron, value)))
        if layer in self.collector.fired and len(self._rows):
            self._fired.append((layer, *entries(packed.take_rows(self._rows))))

    def _passing(self, layer: int, kind: str, row: Tensor, neuron: Tensor, value: Tensor) -> Firings:
        """Return the batch's best firings among those that reach their neuron's threshold, with their windows.

        row, neuron, value: as `entries` returns them
        """
        sequence, position = self.inputs.sequence[row].long(), self._position[row]
        value = value.float()
        score = value.double() if kind == "top" else -draw(sequence, position, layer, neuron)
        threshold = self.collector.thresholds(layer, kind, row.device)[neuron]
        passing = ((score >= threshold) & (self.inputs.rows[row] != 0)).nonzero().squeeze(1)
        best = passing[best_of(neuron[passing], score[passing], sequence[passing], position[passing], self.collector.k)]
        columns = [column[best] for column in (neuron, score, value, sequence, position)]
        columns.append(self._windows(row, neuron, value, row[best], neuron[best]))
        return Firings(*columns)

    def _windows(self, row: Tensor, neuron: Tensor, value: Tensor, rows: Tensor, neurons: Tensor) -> Tensor:
        """Return float32 [firings, window]: the neurons' values around these rows, NaN outside the sequence.

        row, neuron, value: all firings of the layer; rows, neurons: those that windows are wanted of
        """
        keys = row * self.collector.d_ff + neuron  # ascending
        reach = torch.arange(-REACH, REACH + 1, device=row.device)
        position = self._position[rows][:, None] + reach
        inside = (position >= 0) & (position < self._length[rows][:, None])
        wanted = ((rows[:, None] + reach) * self.collector.d_ff + neurons[:, None]).clamp(min=0)
        index = torch.searchsorted(keys, wanted).clamp(max=max(0, len(keys) - 1))
        values = torch.where(keys[index] == wanted, value[index], 0.0) if len(keys) else value.new_zeros(wanted.shape)
        return torch.where(inside, values, torch.nan)

    def commit(self) -> Iterator[dict[str, Any]]:
        """Merge the batch's firings into the collector; yield the rows of the `fired` table, a dict for each layer."""
        for layer, kind, firings in self._candidates:
            self.collector.merge(layer, kind, firings)
        sequence, position = self._keys
        kind, most = nnz_type(self.collector.d_ff), torch.finfo(torch.float16).max
        for layer, row, neuron, value in self._fired:
            lengths = row.bincount(minlength=len(sequence)).cpu().numpy()
            yield {
                "sequence": sequence,
                "position": position,
                "layer": np.full(len(sequence), layer),
                "neuron": lists(neuron.cpu().numpy().astype(kind), lengths),
                "value": lists(value.float().clamp(max=most).cpu().numpy().astype(np.float16), lengths),
            }


def parse_fired(text: str, layers: int) -> tuple[frozenset[int], float]:
    """Read a --fired `LAYERS[:SHARE]`: the layers, as in 0,3-5 or all, and the share of tokens, 1 if it is left out."""
    named, _, share = text.partition(":")
    chosen: set[int] = set()
    try:
        part = float(share) if share else 1.0
        for item in named.split(","):
            first, _, last = (f"0-{layers - 1}" if item == "all" else item).partition("-")
            chosen |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        chosen, part = set(), 0.0
    if not (chosen and chosen <= set(range(layers)) and 0 < part <= 1):
        raise UserError(
            f"Expected --fired as LAYERS[:SHARE], layers from 0 to {layers - 1} as in 0,3-5 or all, and a share of "
            f"tokens above 0 and up to 1, got {text!r}."
        )
    return frozenset(chosen), part


def lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    """Return an Arrow array of lists of these lengths, whose entries are `values` one after another."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
