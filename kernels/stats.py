"""Counts of a call of the FFN op: per row, per tile and per neuron.

Everything here is an integer or an extreme, so sums add up to the same bits in any order. Each count is declared once,
in the dataclass that holds it: a field of `Stats` with how the results of several calls become one, and a field of
`NeuronSums` with its dtype, its value over no rows, and how two sums add up. Empty sums, joining and the arguments of
the kernels' ops follow from that. For C++ and CUDA the sums per neuron are declared in csrc/common/probes.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from twell.kernels.layout import Layout, TwELL

FIXED_POINT = 2.0**20  # value sums count in steps of 2^-20
VALUE_CAP = 2.0**20  # a single value enters its sum as at most this, so that 2^22 of them fit an int64
NO_TOKEN = torch.iinfo(torch.int32).max


def _neuron_sum(dtype: torch.dtype, empty: int, add: Callable[..., Tensor]) -> dict[str, Any]:
    """Return the metadata of a sum per neuron.

    dtype: of its tensor; empty: its value over no rows; add(mine, other, out=mine): adds the sum of other rows
    """
    return {"dtype": dtype, "empty": empty, "add": add}


def _least_sequence(mine: Tensor, other: Tensor, out: Tensor) -> Tensor:
    """Return the lesser of two sequence numbers, where -1 stands for none."""
    both = (mine >= 0) & (other >= 0)
    return out.copy_(torch.where(both, torch.minimum(mine, other), torch.maximum(mine, other)))


@dataclass
class NeuronSums:
    """Sums and extremes per neuron, over the counted rows (rows != 0, and finite). Kernels' ops take and return them in
    this order.

    fires:          int64 [d_ff], rows on which the neuron fired
    value_sum:      int64 [d_ff], its values, rounded to the dtype of x, in steps of 2^-20, each at most 2^20
    value_max:      float32 [d_ff], 0 where it never fired
    token_min, token_max: int32 [d_ff], least and greatest token id that fired it; 2^31 - 1 and -1: never
    first_sequence: int32 [d_ff], least sequence in which it fired; -1: never
    """

    fires: Tensor = field(metadata=_neuron_sum(torch.int64, 0, torch.add))
    value_sum: Tensor = field(metadata=_neuron_sum(torch.int64, 0, torch.add))
    value_max: Tensor = field(metadata=_neuron_sum(torch.float32, 0, torch.maximum))
    token_min: Tensor = field(metadata=_neuron_sum(torch.int32, NO_TOKEN, torch.minimum))
    token_max: Tensor = field(metadata=_neuron_sum(torch.int32, -1, torch.maximum))
    first_sequence: Tensor = field(metadata=_neuron_sum(torch.int32, -1, _least_sequence))

    @classmethod
    def dtypes(cls) -> tuple[torch.dtype, ...]:
        """Return the dtype of each sum, in order."""
        return tuple(dtype for _, dtype, _, _ in _NEURON_SUMS)

    @classmethod
    def empty(cls, d_ff: int, device: torch.device | str = "cpu") -> NeuronSums:
        """Return the sums of no rows, from which `merge` starts."""
        return cls(*[torch.full((d_ff,), empty, dtype=dtype, device=device) for _, dtype, empty, _ in _NEURON_SUMS])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the sums in order, as the kernels' ops take them."""
        return tuple([getattr(self, name) for name, *_ in _NEURON_SUMS])

    def merge(self, other: NeuronSums) -> None:
        """Add the sums of other rows, in place. Any order of merging gives the same bits."""
        for name, _, _, add in _NEURON_SUMS:
            mine = getattr(self, name)
            add(mine, getattr(other, name), out=mine)

    @classmethod
    def stack(cls, layers: Sequence[NeuronSums]) -> NeuronSums:
        """Return the sums of several layers as one, each tensor [layers, d_ff]."""
        return cls(*(torch.stack(sums) for sums in zip(*(layer.tensors() for layer in layers), strict=True)))


_NEURON_SUMS: tuple[tuple[str, torch.dtype, int, Callable[..., Tensor]], ...] = tuple(
    (item.name, item.metadata["dtype"], item.metadata["empty"], item.metadata["add"]) for item in fields(NeuronSums)
)


@dataclass
class TileCounts:
    """Histograms of how full tiles are, over the counted rows, for one layout.

    pairs: int64 [tile + 1], how many (row, tile) pairs hold this many fired neurons
    rows:  int64 [tile + 1], how many rows have a fullest tile that holds this many
    """

    layout: Layout
    pairs: Tensor
    rows: Tensor

    def merge(self, other: TileCounts) -> None:
        """Add the counts of other rows, in place. Raises ValueError for another layout."""
        if other.layout != self.layout:
            raise ValueError(f"layout: expected {self.layout}, got {other.layout}")
        self.pairs += other.pairs
        self.rows += other.rows

    @classmethod
    def stack(cls, layers: Sequence[TileCounts]) -> TileCounts:
        """Return the histograms of several layers of one layout as one, each tensor [layers, tile + 1]."""
        pairs, rows = ([getattr(layer, name) for layer in layers] for name in ("pairs", "rows"))
        return cls(layers[0].layout, torch.stack(pairs), torch.stack(rows))


PER_ROW, SUMS, PACKED = {"joined": "rows"}, {"joined": "sums"}, {"joined": "packed"}  # kinds of fields of `Stats`


@dataclass
class Stats:
    """The counts of a call, on the device of its input. n: its rows.

    nnz:      int32 [n], neurons that fired, whatever `rows` says; 0 in a row that is not finite; int32 [0] with
              probes="none"
    finite:   bool [n], False where a gate pre-activation or a hidden value is inf or nan: y is NaN there
    nnz_used: int32 [n] with up_relu, the products that are not zero; else None
    tiles:    with a layout and probes; else None
    neurons:  with probes="neurons"; else None
    packed:   with want_packed; else None
    """

    nnz: Tensor = field(metadata=PER_ROW)
    finite: Tensor = field(metadata=PER_ROW)
    nnz_used: Tensor | None = field(default=None, metadata=PER_ROW)
    tiles: TileCounts | None = field(default=None, metadata=SUMS)
    neurons: NeuronSums | None = field(default=None, metadata=SUMS)
    packed: TwELL | None = field(default=None, metadata=PACKED)

    @classmethod
    def cat(cls, calls: Sequence[Stats]) -> Stats:
        """Return the Stats of several calls with the same options as those of one call on all their rows.

        Sums are added up in place, in those of the first call.
        """
        joined: dict[str, Any] = {}
        for name, how in _STATS:
            present = [value for call in calls if (value := getattr(call, name)) is not None]
            if not present:
                joined[name] = None
            elif how == "rows":
                joined[name] = torch.cat(present)
            elif how == "packed":
                joined[name] = TwELL.cat(present)
            else:
                joined[name] = present[0]
                for sums in present[1:]:
                    present[0].merge(sums)
        return cls(**joined)

    def take_rows(self, index: Tensor) -> Stats:
        """Return these Stats with the rows of `index` (int64 [m]) in its order; sums stay as they are."""
        taken: dict[str, Any] = {}
        for name, how in _STATS:
            value = getattr(self, name)
            if value is not None and how != "sums":
                taken[name] = value[index] if how == "rows" else value.take_rows(index)
        return replace(self, **taken)


RunAgain = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # a prepared call on x: y, and nnz and finite of its Stats
_STATS: tuple[tuple[str, str], ...] = tuple((item.name, item.metadata["joined"]) for item in fields(Stats))
