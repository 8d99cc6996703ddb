"""Keep examples of every neuron: its greatest values, and firings drawn at random over the range of its values.

The idea: `select` finds a batch's candidates while its layers run, where TwELL lies; once the batch is accepted they
are merged, for all layers at once. What is kept depends on the text alone: not on batches, parts or ranks, and a run
that is resumed keeps the same. Of like contexts, the same SAME_CONTEXT tokens up to a firing, the first in the text
counts (`text/repeats.py`). Nothing here waits for the device but `columns`, which the writing thread calls.

Cost: on the device some 170 bytes an example, three times; a few sorts of all examples a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from twell.kernels.backends.selection import (
    BANDS,
    MOST_DRAW,
    REACH,
    WINDOW,
    Bounds,
    RowMetadata,
    Selection,
    bin_of,
    draws_of_sample,
    rows_of,
    values_of_top,
)

KINDS = ("top", "sample")
DRAWS = 2.0**31  # a draw in the table is a number in [0, 1)


@dataclass(frozen=True)
class Kept:
    """Examples of every neuron of some layers, each field [layers, d_ff, k] but `window` [layers, d_ff, k, WINDOW].

    They are in order: those that would be left out first come last. sequence: -1 where there is none
    """

    value: Tensor  # float32
    draw: Tensor  # int32; 0 in `top`
    sequence: Tensor  # int32
    position: Tensor  # int32
    window: Tensor  # of the dtype of the values

    @classmethod
    def none(cls, layers: int, d_ff: int, k: int, dtype: torch.dtype, device: torch.device) -> Kept:
        """Return room for examples, and no example."""
        shape = (layers, d_ff, k)
        draw, sequence, position = torch.zeros(3, *shape, dtype=torch.int32, device=device)
        window = torch.zeros(*shape, WINDOW, dtype=dtype, device=device)
        return cls(torch.zeros(shape, device=device), draw, sequence - 1, position, window)

    def joined(self, other: Kept, sample: bool) -> Kept:
        """Return the best k of both; sample: whether they are drawn at random."""
        narrow = min(self.window.dtype, other.window.dtype, key=lambda dtype: dtype.itemsize)  # a table has float32
        mine, others = (replace(one, window=one.window.to(narrow)) for one in (self, other))
        both = [torch.cat([getattr(mine, item.name), getattr(others, item.name)], 2) for item in fields(self)]
        everything = Kept(*both)
        k = self.value.shape[2]
        order = (everything.sample_order() if sample else everything.top_order())[:, :, :k]
        chosen = [each.gather(2, order) for each in both[:-1]]
        chosen.append(both[-1].gather(2, order[..., None].expand(*order.shape, WINDOW)))
        return Kept(*chosen)

    def top_order(self) -> Tensor:
        """Return the indices along the last dimension by falling value; of equal values those first in the text."""
        score = torch.where(self.sequence < 0, -1, self.value.view(torch.int32))
        return _sorted(score, self._text_order(), descending=True)

    def sample_order(self) -> Tensor:
        """Return the indices: the least draw of each band of values, then the second least, greater values first."""
        band = bin_of(self.value) // 2
        key = torch.where(self.sequence < 0, BANDS << 31, (band << 31) | self.draw)
        order = _sorted(key, self._text_order(), descending=False)
        band = torch.where(self.sequence < 0, BANDS, band).gather(2, order)
        index = torch.arange(band.shape[2], device=band.device).expand_as(band)
        begins = torch.cat([torch.ones_like(band[..., :1], dtype=torch.bool), band[..., 1:] != band[..., :-1]], 2)
        rank = index - torch.where(begins, index, 0).cummax(2).values
        position = torch.where(band == BANDS, _LAST, rank * BANDS + BANDS - 1 - band)
        return order.gather(2, position.argsort(2))

    def table(self, layer: int, kind: str) -> dict[str, Any]:
        """Return the columns of a layer's rows of the `examples` table, by neuron; the fields are on the host."""
        there = np.flatnonzero(self.sequence[layer].numpy().ravel() >= 0)
        value, draw, sequence, position, window = (
            _on_host(getattr(self, item.name)[layer].flatten(0, 1)).take(there, axis=0) for item in fields(self)
        )
        return {
            "layer": np.full(len(there), layer),
            "neuron": there // self.value.shape[2],
            "kind": pa.array([kind]).take(pa.array(np.zeros(len(there), dtype=np.int32))),
            "value": value,
            "sequence": sequence,
            "position": position,
            "draw": draw / DRAWS,
            "window": lists(_float32(window).ravel(), np.full(len(there), WINDOW)),
        }

    def _text_order(self) -> Tensor:
        return (self.sequence.long() << 31) | self.position

    def bound_values(self) -> Tensor:
        """Return float32 [layers, d_ff]: the least value that a further firing needs to be among the top k."""
        return torch.where(self.sequence[..., -1] >= 0, self.value[..., -1], 0.0)

    def bound_draws(self) -> Tensor:
        """Return int32 [layers, d_ff, BANDS]: the greatest draw with which a further firing may be in the sample."""
        there = self.sequence >= 0
        band = torch.where(there, bin_of(self.value) // 2, 0)
        shape = (*self.value.shape[:2], BANDS)
        held = torch.zeros(shape, dtype=torch.int64, device=band.device).scatter_add_(2, band, there.long())
        most = torch.full(shape, -1, dtype=torch.int32, device=band.device)
        most.scatter_reduce_(2, band, torch.where(there, self.draw, -1), "amax")
        highest = BANDS - 1 - torch.arange(BANDS, device=band.device)
        last = torch.where(held > 0, (held - 1) * BANDS + highest, -1).amax(2, keepdim=True)  # as in `sample_order`
        has_room = ~there[..., -1:] | (held * BANDS + highest < last)
        return torch.where(has_room, MOST_DRAW, most)


_LAST = 2**62  # a place after all others


def _on_host(values: Tensor) -> np.ndarray:
    """Return the memory of a tensor of the host as NumPy sees it, bfloat16 as the uint16 of its bits.

    NumPy reads it in this thread alone: torch would share small work with threads that a busy machine has to wait for.
    """
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()


def _float32(values: np.ndarray) -> np.ndarray:
    """Return values of `_on_host` as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values.astype(np.float32)


def _sorted(key: Tensor, text: Tensor, descending: bool) -> Tensor:
    """Return the indices by key, and by place in the text where keys are equal."""
    order = text.argsort(2)
    return order.gather(2, key.gather(2, order).argsort(dim=2, descending=descending, stable=True))


class Examples:
    """The examples that a run has kept so far, of all layers. k: of each neuron and kind."""

    def __init__(self, layers: int, d_ff: int, k: int) -> None:
        self.layers, self.d_ff, self.k = layers, d_ff, k
        self._kept: dict[str, Kept] = {}
        self._bounds: Bounds | None = None

    def bounds(self, layer: int, device: torch.device) -> Bounds:
        """Return what a further firing of a layer needs to be kept."""
        if self._bounds is None:
            return Bounds.none(self.d_ff, device)
        return Bounds(self._bounds.value[layer], self._bounds.draw[layer])

    def merge(self, selection: Selection, rows: RowMetadata) -> None:
        """Merge what was selected in a batch, of all layers. rows: of the batch"""
        there = selection.keys != 0
        for kind, keys, row, present, window in zip(
            KINDS,
            selection.keys.unbind(1),
            rows_of(selection.keys.transpose(0, 1)),
            there.unbind(1),
            selection.windows.unbind(1),
            strict=True,
        ):
            row = torch.where(present, row, 0)
            sequence = torch.where(present, rows.sequence[row], -1)
            sample = kind == "sample"
            value = window[..., REACH].float() if sample else values_of_top(keys)
            draw = draws_of_sample(keys) if sample else torch.zeros_like(sequence)
            value = torch.where(present, value, 0.0)
            self._join(kind, Kept(value, draw, sequence, rows.position[row], window))
        self._bounds = Bounds(self._kept["top"].bound_values(), self._kept["sample"].bound_draws())

    def _join(self, kind: str, kept: Kept) -> None:
        before = self._kept.get(kind)
        if before is None:
            before = Kept.none(self.layers, self.d_ff, self.k, kept.window.dtype, kept.value.device)
        self._kept[kind] = before.joined(kept, kind == "sample")

    def restore(self, table: pa.Table, device: torch.device) -> None:
        """Merge the rows of an `examples` table, of this run or of another rank."""
        frame: pd.DataFrame = table.drop(["window"]).to_pandas()
        window = table["window"].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, WINDOW)
        for kind in KINDS:
            chosen = np.flatnonzero(frame["kind"] == kind)
            rows = frame.iloc[chosen]
            neuron = rows["layer"].to_numpy(np.int64) * self.d_ff + rows["neuron"].to_numpy()
            slot = rows.groupby(neuron).cumcount().to_numpy()
            keep = slot < self.k
            index = torch.from_numpy(neuron[keep] * self.k + slot[keep])
            empty = Kept.none(self.layers, self.d_ff, self.k, torch.float32, torch.device("cpu"))
            draw = np.rint(rows["draw"].to_numpy() * DRAWS).clip(0, MOST_DRAW) if kind == "sample" else 0 * rows["draw"]
            columns = (rows["value"], draw, rows["sequence"], rows["position"], window[chosen])
            for item, column in zip(fields(Kept), columns, strict=True):
                target = getattr(empty, item.name)
                values = torch.from_numpy(np.ascontiguousarray(np.asarray(column)[keep])).to(target.dtype)
                target.view(-1, *target.shape[3:])[index] = values
            self._join(kind, Kept(*(getattr(empty, item.name).to(device) for item in fields(Kept))))
        self._bounds = Bounds(self._kept["top"].bound_values(), self._kept["sample"].bound_draws())

    def tables(self) -> Callable[[], Iterator[Callable[[], dict[str, Any]]]]:
        """Return a function that yields, for one layer and kind after the other, what makes the columns of its rows of
        the `examples` table, of the examples kept by now.

        Calling it waits for the device to have come to this moment, and for the copy, beside what it has to do.
        """
        host = {kind: ToHost([getattr(one, item.name) for item in fields(one)]) for kind, one in self._kept.items()}

        def tables() -> Iterator[Callable[[], dict[str, Any]]]:
            arrays = {kind: Kept(*copies.wait()) for kind, copies in host.items()}
            for layer in range(self.layers):
                for kind, one in arrays.items():
                    if (one.sequence[layer].numpy() >= 0).any():
                        yield partial(one.table, layer, kind)

        return tables


class ToHost:
    """Tensors on their way to the host, beside what their device is given meanwhile."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors, self._ready = tensors, None
        if tensors and tensors[0].is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def wait(self) -> list[Tensor]:
        """Return them on the host, once the device has made them."""
        if self._ready is None:
            return self._tensors
        device = self._tensors[0].device
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            copies = [tensor.to("cpu", non_blocking=True) for tensor in self._tensors]
        stream.synchronize()
        return copies


def lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    """Return an Arrow array of lists of these lengths, whose entries are `values` one after another."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
