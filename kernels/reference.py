"""The reference: the FFN op in plain torch, on any device and in any of its dtypes. Every other kernel is held to it.

It is the dense computation with a mask: two full products, ReLU by selection, a third product; what it adds is counting.
Firing is read from the gate product in float32 (float64 for float64) before anything is rounded. Sixteen-bit inputs get
such a product on CUDA from a matmul with a float32 output, elsewhere by widening the operands, in which every product of
two of them is exact. The gate's values are then rounded once, to the input's dtype, as TwELL would hold them.

Cost: rows go through in chunks that stay in cache, and counting is a few passes over them: no branch on data, no host
synchronisation unless `want_packed`. Everything counted is an exact integer, in whatever order rows arrive: indicators
are summed as floats below 2^24, values as float64 multiples of 2^-20 below 2^53.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twell.kernels.call import FIXED_POINT, SPARSE_ACTIVATIONS, VALUE_CAP, Call, NeuronSums, Stats, TileCounts
from twell.kernels.layout import Layout, TwELL, pack, tile_view

CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}  # hidden elements at a time; on a CPU they fit its cache
MIN_ROWS, MAX_ROWS = (
    512,
    2**13,
)  # fewer would read the weights too often; 2^13 values of 2^40 steps sum below 2^53

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}
where_positive = (
    torch.ops.aten.threshold_backward
)  # (t, g, 0): t where g > 0 (or is NaN), else 0, in one pass


def run(call: Call) -> tuple[Tensor, Stats]:
    """Runs a checked call: y [n, d_model] and its Stats."""
    n, d_ff = call.x.shape[0], call.w_gate.shape[0]
    step = CHUNK_ELEMENTS.get(call.x.device.type, 2**19) // d_ff
    step = min(max(step, MIN_ROWS), MAX_ROWS)
    weights = _Weights.of(call)
    parts = [_run_rows(call, weights, slice(at, at + step)) for at in range(0, max(n, 1), step)]
    y, stats = parts[0]
    if len(parts) > 1:
        y = torch.cat([part for part, _ in parts])
        stats = _join([part for _, part in parts])
    return y, stats


@dataclass
class _Weights:
    """A call's weights, as the products read them."""

    gate: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None] | None
    down: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, call: Call) -> _Weights:
        narrow = call.x.element_size() == 2
        widen = narrow and not call.x.is_cuda

        def pair(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return weight.float() if widen else weight, bias.float() if narrow and bias is not None else bias

        up = None if call.w_up is None else pair(call.w_up, call.b_up)
        return cls(pair(call.w_gate, call.b_gate), up, pair(call.w_down, call.b_down))


def _product(x: Tensor, pair: tuple[Tensor, Tensor | None]) -> Tensor:
    """x [n, k] times a weight [m, k] plus its bias, in float32 (float64 for float64), never rounded to 16 bits."""
    weight, bias = pair
    if weight.element_size() > 2:
        return functional.linear(x.to(weight.dtype), weight, bias)
    out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out.add_(bias)


def _run_rows(call: Call, weights: _Weights, at: slice) -> tuple[Tensor, Stats]:
    x, dtype = call.x[at], call.x.dtype
    gate = _product(x, weights.gate)
    up = None if weights.up is None else _product(x, weights.up)
    value, hidden = _hidden(call, gate, up)
    narrow = hidden.to(dtype)
    finite = _finite(gate) & _finite(narrow)
    if call.up_relu:
        narrow = narrow.relu_()
    y = _product(narrow, weights.down).to(dtype)
    y.masked_fill_(~finite[:, None], torch.nan)
    if call.probes == "none" and not call.want_packed:
        return y, Stats(torch.empty(0, dtype=torch.int32, device=x.device), finite)

    fired = _indicator(call, gate, hidden, finite)
    stats = Stats(torch.empty(0, dtype=torch.int32, device=x.device), finite)
    if call.probes != "none":
        _count(call, stats, at, fired, up)
    if call.probes == "neurons":
        counted = fired * _counted(call, at, finite)[:, None]
        assert call.tokens is not None and call.sequences is not None  # as checked
        stats.neurons = neuron_sums(
            counted, value.to(dtype).to(value.dtype), call.tokens[at], call.sequences[at]
        )
    if call.want_packed:
        stats.packed = pack(value.to(dtype), fired > 0, call.layout or Layout())
    return y, stats


def _hidden(call: Call, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values and the hidden state [n, d_ff] in float32; what is zero by ReLU is never multiplied."""
    dtype = call.x.dtype
    if call.activation not in SPARSE_ACTIVATIONS:
        hidden = ACTIVATION[call.activation](gate)
        hidden = hidden if up is None else hidden.mul_(up)
    else:
        value = gate if call.activation == "relu" else gate * gate
        value = value.to(dtype).to(gate.dtype)
        hidden = where_positive(value if up is None else value * up, gate, 0)
    if call.threshold is not None:
        value = hidden.abs()
    return value, hidden


def _finite(matrix: Tensor) -> Tensor:
    """bool [n]: rows without inf or nan, which the extremes carry along."""
    return matrix.amax(1).isfinite() & matrix.amin(1).isfinite()


def _indicator(call: Call, gate: Tensor, hidden: Tensor, finite: Tensor) -> Tensor:
    """1.0 where a neuron fired, else 0.0, [n, d_ff]; as floats, which torch compares and sums faster than bools."""
    fired = torch.empty_like(gate)
    if call.threshold is None:
        torch.gt(gate, 0, out=fired)
    else:
        torch.gt(hidden.abs(), call.threshold, out=fired)
    return fired.mul_(finite[:, None])


def _counted(call: Call, at: slice, finite: Tensor) -> Tensor:
    """bool [n]: the rows that enter statistics other than their own nnz."""
    return finite if call.rows is None else finite & (call.rows[at] != 0)


def _count(call: Call, stats: Stats, at: slice, fired: Tensor, up: Tensor | None) -> None:
    if call.layout is None:
        stats.nnz = fired.sum(1).int()
    else:
        tiles = tile_view(fired, call.layout).sum(-1).int()  # [n, tiles]
        stats.nnz = tiles.sum(1, dtype=torch.int32)
        stats.tiles = tile_counts(tiles, _counted(call, at, stats.finite), call.layout)
    if call.up_relu:
        assert up is not None  # plain FFNs have no such option
        stats.nnz_used = torch.gt(up, 0, out=torch.empty_like(up)).mul_(fired).sum(1).int()


def tile_counts(tiles: Tensor, counted: Tensor, layout: Layout) -> TileCounts:
    """Histograms of fired neurons a tile, int32 [n, tiles], over the rows that `counted` (bool [n]) keeps."""

    def histogram(bins: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros(layout.tile + 1, dtype=torch.int64, device=bins.device).index_add_(0, bins, weight)

    weight = counted.long()
    pairs = histogram(tiles.flatten(), weight[:, None].expand_as(tiles).flatten())
    return TileCounts(layout, pairs, histogram(tiles.amax(1), weight))


def neuron_sums(fired: Tensor, value: Tensor, tokens: Tensor, sequences: Tensor) -> NeuronSums:
    """Sums a neuron over at most 2^13 rows.

    fired: 1.0 or 0.0 [n, d_ff], 0.0 throughout in rows that do not count; value [n, d_ff], read where it fired;
    tokens, sequences: int32 [n].
    """
    sums = NeuronSums.empty(fired.shape[1], fired.device)
    if not len(fired):
        return sums
    sums.fires = fired.sum(0).long()
    value = where_positive(value, fired, 0)
    sums.value_max = value.amax(0).float()
    steps = value.mul_(FIXED_POINT).clamp_(max=VALUE_CAP * FIXED_POINT).round_()
    sums.value_sum = steps.sum(0, dtype=torch.float64).long()
    sums.token_max, ever = _greatest(fired, tokens)
    sums.token_max = torch.where(ever, sums.token_max, -1)
    sums.token_min = torch.where(ever, -1 - _greatest(fired, -1 - tokens)[0], sums.token_min)
    sums.first_sequence = torch.where(ever, -1 - _greatest(fired, -1 - sequences)[0], -1)
    return sums


def _greatest(fired: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest int32 `number` [n] among the rows that fired each column, and whether any did.

    Through ranks, which a float32 holds exactly whatever the numbers.
    """
    ordered, order = number.sort()
    rank = torch.empty_like(fired[:, 0])
    rank[order] = torch.arange(1, len(number) + 1, dtype=rank.dtype, device=rank.device)
    best = (fired * rank[:, None]).amax(0).long()
    return ordered[(best - 1).clamp_(min=0)], best > 0


def _join(parts: list[Stats]) -> Stats:
    """The Stats of consecutive chunks as those of one call."""
    first = parts[0]
    for part in parts[1:]:
        if first.tiles is not None and part.tiles is not None:
            first.tiles.merge(part.tiles)
        if first.neurons is not None and part.neurons is not None:
            first.neurons.merge(part.neurons)
    used = [part.nnz_used for part in parts if part.nnz_used is not None]
    packed = [part.packed for part in parts if part.packed is not None]
    return Stats(
        torch.cat([part.nnz for part in parts]),
        torch.cat([part.finite for part in parts]),
        torch.cat(used) if used else None,
        first.tiles,
        first.neurons,
        TwELL.cat(packed) if packed else None,
    )
