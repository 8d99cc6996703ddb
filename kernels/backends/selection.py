"""Select the firings of a batch that may be kept as examples, and count every firing by its value, from packed TwELL.

The idea: of each neuron two lists of k firings are wanted. `top` has the greatest values; of equal values those of
earlier rows. `sample` is drawn at random and spread over the range of values: a firing's draw is a number that depends
on sequence, position, layer and neuron alone, values lie in BANDS that double, and the list has the least draw of every
band, then the second least, and so on, greater values first, until it is full. Either list of a union of batches
follows from those of the batches. So earlier batches bound what a later one need look at: a value or a draw past the
bound of its neuron can be in no list. All else is counted and forgotten.

A firing is one int64 key, whose greater half is its value's bits or its draw, and whose lesser half is its row.

Cost: a pass over the firings, and a sort of those within the bounds; `selection_native.py` does it in C++ and in CUDA,
ten times as fast. On a GPU this waits for the host, as the number of firings is data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twell.kernels.layout import TwELL, entries

BINS = 32  # of values: two to a doubling, at 2^e and 1.5 * 2^e, as a float's first bits tell
BANDS = BINS // 2  # doublings
LOWEST = 2.0**-9  # where bin 1's doubling begins; lesser values are in bin 0 too, and all from 96 in the last
REACH = 16  # tokens of a window before its firing, and after
WINDOW = 2 * REACH + 1
MOST_DRAW = 2**31 - 1
_FIRST_BITS = 2 * (127 - 9)  # exponent and first bit of the mantissa of LOWEST, as one number
_ROW = 2**32 - 1
_KEY = 2**63 - 1
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed numbers


@dataclass(frozen=True)
class RowMetadata:
    """The rows of a batch, each field [n] on its device.

    counted: uint8, 1 where firings are counted; eligible: uint8, 1 where they may be kept too
    sequence, position: int32, of the token; length: int32, the tokens of its sequence, which lie in consecutive rows
    """

    counted: Tensor
    eligible: Tensor
    sequence: Tensor
    position: Tensor
    length: Tensor


@dataclass(frozen=True)
class Bounds:
    """The bounds within which a further firing of a layer is kept.

    value: float32 [d_ff], the least value; draw: int32 [d_ff, BANDS], the greatest draw; -1 where none can be kept
    """

    value: Tensor
    draw: Tensor

    @classmethod
    def none(cls, d_ff: int, device: torch.device) -> Bounds:
        """Return the bounds before the first batch, which every firing is within."""
        draw = torch.full((d_ff, BANDS), MOST_DRAW, dtype=torch.int32, device=device)
        return cls(torch.zeros(d_ff, device=device), draw)


@dataclass(frozen=True)
class Selection:
    """The firings of a layer that are selected from a batch, and how many there are.

    keys: int64 [2, d_ff, k], of `top` and of `sample`, 0 where there is none; see `row_of_top` and those after it
    windows: [2, d_ff, k, WINDOW], the neuron's values from REACH tokens before to REACH after, 0 where it did not fire
    and NaN outside the sequence; undefined where there is no key
    fires: int32 [d_ff, BINS], firings of counted rows by their value
    """

    keys: Tensor
    windows: Tensor
    fires: Tensor

    @classmethod
    def empty(cls, layers: int, d_ff: int, k: int, dtype: torch.dtype, device: torch.device) -> Selection:
        """Return room for the selections of all layers, whose fields have one dimension more, in front."""
        return cls(
            torch.zeros(layers, 2, d_ff, k, dtype=torch.int64, device=device),
            torch.empty(layers, 2, d_ff, k, WINDOW, dtype=dtype, device=device),
            torch.zeros(layers, d_ff, BINS, dtype=torch.int32, device=device),
        )

    def of_layer(self, layer: int) -> Selection:
        """Return the views of one layer."""
        return Selection(self.keys[layer], self.windows[layer], self.fires[layer])


def bin_of(value: Tensor) -> Tensor:
    """Return the bin, int64 from 0 to BINS - 1, of each value, float32 of at least 0."""
    return ((value.view(torch.int32) >> 22) - _FIRST_BITS).clamp(0, BINS - 1).long()


def bin_begins() -> list[float]:
    """Return the least value of each bin; of the first one 0."""
    begins = [LOWEST * 2.0 ** (index // 2) * (1.5 if index % 2 else 1.0) for index in range(BINS)]
    return [0.0, *begins[1:]]


def mixed(state: Tensor, number: Tensor | int) -> Tensor:
    """Return splitmix64's next state, int64, from one state and a number."""
    state = state + number + _ODD[0]
    for shift, odd in ((30, _ODD[1]), (27, _ODD[2]), (31, 1)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * odd
    return state


def draw_of(state: Tensor) -> Tensor:
    """Return the draw of a state, int64 from 0 to MOST_DRAW."""
    return (state >> 33) & MOST_DRAW


def top_keys(value: Tensor, row: Tensor) -> Tensor:
    """Return keys, int64, that are greater for greater values (float32, at least 0), then for lesser rows."""
    return (value.view(torch.int32).long() << 32) | (_ROW - row)


def sample_keys(draws: Tensor, row: Tensor) -> Tensor:
    """Return keys, int64, that are greater for lesser draws, then for lesser rows."""
    return _KEY - ((draws << 32) | row)


def rows_of(keys: Tensor) -> Tensor:
    """Return the rows of keys [2, …], int64, of `top` and of `sample`; of no firing anything."""
    return torch.stack([_ROW - (keys[0] & _ROW), (_KEY - keys[1]) & _ROW])


def values_of_top(keys: Tensor) -> Tensor:
    """Return the values, float32, of keys of `top`; 0 of no firing."""
    return (keys >> 32).int().view(torch.float32)


def draws_of_sample(keys: Tensor) -> Tensor:
    """Return the draws, int32, of keys of `sample`; the greatest one of no firing."""
    return ((_KEY - keys) >> 32).int()


@torch.no_grad()
def select(packed: TwELL, rows: RowMetadata, layer: int, bounds: Bounds, out: Selection) -> None:
    """Select a layer's firings in a batch, in torch alone.

    out: of the layer, its keys and fires zero
    """
    d_ff, k = out.keys.shape[1:]
    row, neuron, value = entries(packed)
    values = value.float()
    chosen = (rows.eligible[row] != 0).nonzero().squeeze(1)
    chosen_row, chosen_neuron, chosen_value = row[chosen], neuron[chosen], values[chosen]
    bins = bin_of(chosen_value)
    fires = (chosen_neuron * BINS + bins).bincount(minlength=d_ff * BINS).view(d_ff, BINS)
    other = ((rows.eligible[row] == 0) & (rows.counted[row] != 0)).nonzero().squeeze(1)
    repeated = (neuron[other] * BINS + bin_of(values[other])).bincount(minlength=d_ff * BINS)
    out.fires.copy_(fires + repeated.view(d_ff, BINS))

    within = (bins >= _least_bin(fires, k)[chosen_neuron]) & (chosen_value >= bounds.value[chosen_neuron])
    top = within.nonzero().squeeze(1)
    _place(out.keys[0], chosen_neuron[top], top_keys(chosen_value[top], chosen_row[top]))
    _select_sample(out, rows, layer, bounds, chosen_row, chosen_neuron, bins // 2, fires)
    _fill_windows(out, rows, row * d_ff + neuron, value)


def _least_bin(fires: Tensor, k: int) -> Tensor:
    """Return int64 [d_ff]: the greatest bin that has k firings in it and above; -1 where there are fewer."""
    above = fires.flip(1).cumsum(1).flip(1)
    return (above >= k).sum(1) - 1


def _select_sample(
    out: Selection,
    rows: RowMetadata,
    layer: int,
    bounds: Bounds,
    row: Tensor,
    neuron: Tensor,
    band: Tensor,
    fires: Tensor,
) -> None:
    """Place the sample of the batch. row, neuron, band: of eligible firings; fires: int64 [d_ff, BINS], of these."""
    k = out.keys.shape[2]
    counts = fires.view(len(fires), BANDS, 2).sum(2)
    wanted = _shared_out(counts, k)
    # Of c draws about w + 4√w + 4 are below that share of all, so w are but for one in a million, which is seen.
    share = (wanted + 4 * wanted.sqrt() + 4) / counts.clamp(min=1)
    limit = torch.where(wanted > 0, (share * MOST_DRAW).clamp(max=MOST_DRAW).long(), -1).flatten()
    state = mixed(mixed(mixed(row.new_zeros(()), rows.sequence.long()), rows.position.long()), layer)  # of each row
    draws = draw_of(mixed(state[row], neuron))
    group = neuron * BANDS + band
    below = draws <= limit[group]
    lacking = group[below].bincount(minlength=len(limit)) < wanted.flatten()
    within = (below | lacking[group]) & (draws <= bounds.draw.flatten()[group])
    index = within.nonzero().squeeze(1)
    index = index[draws[index].argsort(stable=True)]
    index = index[group[index].argsort(stable=True)]
    index = index[_rank(group[index]) < wanted.flatten()[group[index]]]
    slot = _rank(neuron[index])
    out.keys[1][neuron[index], slot] = sample_keys(draws[index], row[index])


def _shared_out(counts: Tensor, k: int) -> Tensor:
    """Return float64 [d_ff, BANDS]: how many of each band's firings a sample of k has.

    counts: [d_ff, BANDS]
    """
    wanted, total = torch.zeros_like(counts), counts.new_zeros(len(counts), 1)
    for rank in range(k):
        there = counts > rank
        if not there.any():
            break
        before = there.flip(1).cumsum(1).flip(1) - there.long()  # greater values first
        wanted += there & (total + before < k)
        total += there.sum(1, keepdim=True)
    return wanted.double()


def _place(out: Tensor, neuron: Tensor, keys: Tensor) -> None:
    """Write the greatest keys of each neuron into out, int64 [d_ff, k], greatest first."""
    order = keys.argsort(descending=True)
    order = order[neuron[order].argsort(stable=True)]
    neuron, keys = neuron[order], keys[order]
    rank = _rank(neuron)
    best = rank < out.shape[1]
    out[neuron[best], rank[best]] = keys[best]


def _rank(groups: Tensor) -> Tensor:
    """Return the index of each among the equal ones, in ascending groups."""
    return torch.arange(len(groups), device=groups.device) - torch.searchsorted(groups, groups)


def _fill_windows(out: Selection, rows: RowMetadata, places: Tensor, value: Tensor) -> None:
    """Write the windows of the firings that were selected.

    places: row * d_ff + neuron of every firing of the layer, ascending; value: of these
    """
    d_ff = out.keys.shape[1]
    kind, neuron, slot = out.keys.nonzero(as_tuple=True)
    row = rows_of(out.keys)[kind, neuron, slot]
    order = row.argsort()  # so that neighbours look where neighbours looked
    kind, neuron, slot, row = kind[order], neuron[order], slot[order], row[order]
    reach = torch.arange(-REACH, REACH + 1, device=row.device)
    position = rows.position[row].long()[:, None] + reach
    inside = (position >= 0) & (position < rows.length[row][:, None])
    wanted = ((row[:, None] + reach) * d_ff + neuron[:, None]).clamp(min=0)
    index = torch.searchsorted(places, wanted).clamp(max=max(0, len(places) - 1))
    values = value.new_zeros(wanted.shape)
    if len(places):
        values = torch.where(places[index] == wanted, value[index], values)
    out.windows[kind, neuron, slot] = torch.where(inside, values, torch.nan).to(out.windows.dtype)
