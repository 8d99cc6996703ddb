"""The reference: the FFN op in plain torch, on any device. Every other kernel is tested against it.

It is the dense computation with counting added: two full products, ReLU by selection, a third product. Firing is read
from the gate product in float32 (float64 for float64) before anything is rounded. For 16-bit inputs that product is a
matmul with a float32 output on CUDA, and elsewhere a product of widened operands, in which the product of any two
numbers is exact. The gate's values are then rounded once, to the input's dtype, as in TwELL.

Cost: rows are computed in chunks that stay in cache, and counting is a few passes over them, without branches on data
and without waiting for the host unless `want_packed`. Counts are exact in any order of rows: indicators are summed as
floats below 2^24, values as float64 multiples of 2^-20 below 2^53.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from twell.kernels.layout import Layout, pack, tile_view
from twell.kernels.params import SPARSE_ACTIVATIONS, FFNParams
from twell.kernels.stats import FIXED_POINT, VALUE_CAP, NeuronSums, Stats, TileCounts

# Elements of the hidden state that are computed at a time (on a CPU they stay in its cache), and the bounds on rows:
# fewer would read the weights too often, and the sum of more than 2^13 values of at most 2^40 steps may exceed 2^53.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**26
MIN_ROWS, MAX_ROWS = 2**8, 2**13

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}
where_positive = torch.ops.aten.threshold_backward  # (t, g, 0): t where g > 0 (or is NaN), else 0, in one pass


class Linear:
    """A linear map whose result is float32 (float64 for float64) and is never rounded to 16 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        narrow = weight.element_size() == 2
        self.weight = weight.float() if narrow and not weight.is_cuda else weight
        self.bias = bias.float() if narrow and bias is not None else bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.element_size() > 2:
            return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        out = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return out if self.bias is None else out.add_(self.bias)


def run(params: FFNParams) -> tuple[Tensor, Stats]:
    """Run a call of checked parameters: y [..., d_model] and its Stats."""
    x, params = params.x, params.flat()
    gate = Linear(params.w_gate, params.b_gate)
    up = None if params.w_up is None else Linear(params.w_up, params.b_up)
    down = Linear(params.w_down, params.b_down)
    with torch.autocast(x.device.type, enabled=False):  # which would round the operands of the products
        chunks = [_run_chunk(params, chunk, gate, up, down) for chunk in _chunks(params.x, params.w_gate.shape[0])]
    y, stats = chunks[0]
    if len(chunks) > 1:
        y, stats = torch.cat([y for y, _ in chunks]), Stats.cat([stats for _, stats in chunks])
    return y.view(x.shape), stats


def count(params: FFNParams) -> Stats:
    """Return the Stats of hidden values that were computed elsewhere, by the call's threshold.

    params.x: those values [n, d_ff]; its weights are not read
    """
    chunks = []
    for chunk in _chunks(params.x, params.x.shape[1]):
        hidden = params.x[chunk] if params.x.element_size() > 4 else params.x[chunk].float()
        stats = Stats(torch.empty(0, dtype=torch.int32, device=hidden.device), _finite(hidden))
        if params.probes != "none" or params.want_packed:
            _count(params, chunk, stats, hidden, None, hidden, hidden.abs())
        chunks.append(stats)
    return Stats.cat(chunks)


def count_dense(params: FFNParams, gate: Tensor, hidden: Tensor, up: Tensor | None = None) -> Stats:
    """Return the Stats of a dense pass that other code ran, without a product.

    gate, hidden [n, d_ff]: its gate pre-activations, and what it multiplied by w_down
    up [n, d_ff]: with up_relu, its up pre-activations; params: the call, of which x is not read
    """
    chunks = []
    for chunk in _chunks(gate, gate.shape[1]):
        z, h = (matrix[chunk] if matrix.element_size() > 4 else matrix[chunk].float() for matrix in (gate, hidden))
        stats = Stats(torch.empty(0, dtype=torch.int32, device=gate.device), _finite(z) & _finite(h))
        if params.probes != "none" or params.want_packed:
            value = (z if params.activation == "relu" else z * z).to(gate.dtype).to(z.dtype)
            _count(params, chunk, stats, z, None if up is None else up[chunk].to(z.dtype), h, value)
        chunks.append(stats)
    return Stats.cat(chunks)


def _chunks(x: Tensor, d_ff: int) -> list[slice]:
    """Return slices of the rows of x so small that [rows, d_ff] stays small; one empty slice if there are no rows."""
    step = (GPU_CHUNK if x.is_cuda else CPU_CHUNK) // d_ff
    step = min(max(step, MIN_ROWS), MAX_ROWS)
    return [slice(at, at + step) for at in range(0, max(x.shape[0], 1), step)]


def _run_chunk(
    params: FFNParams, chunk: slice, gate_map: Linear, up_map: Linear | None, down_map: Linear
) -> tuple[Tensor, Stats]:
    x = params.x[chunk]
    gate = gate_map(x)
    up = None if up_map is None else up_map(x)
    if up is not None and params.up_relu:
        up.relu_()
    hidden, value = _hidden(params, gate, up)
    narrow = hidden.to(x.dtype)
    finite = _finite(gate) & _finite(narrow)
    y = down_map(narrow).to(x.dtype).masked_fill_(~finite[:, None], torch.nan)
    stats = Stats(torch.empty(0, dtype=torch.int32, device=x.device), finite)
    if params.probes != "none" or params.want_packed:
        _count(params, chunk, stats, gate, up, hidden, value)
    return y, stats


def _count(
    params: FFNParams, chunk: slice, stats: Stats, gate: Tensor, up: Tensor | None, hidden: Tensor, value: Tensor
) -> None:
    """Set in `stats` all that the call requests besides `finite`. gate, up, hidden, value: [rows of chunk, d_ff]."""
    # 1.0 where a neuron fired, else 0.0: torch compares and sums floats faster than bools.
    compared, bound = (gate, 0.0) if params.threshold is None else (hidden.abs(), params.threshold)
    fired = torch.gt(compared, bound, out=torch.empty_like(gate)).mul_(stats.finite[:, None])
    if params.want_packed:
        stats.packed = pack(value.to(params.x.dtype), fired > 0, params.layout or Layout())
    if params.probes == "none":
        return
    counted = stats.finite if params.rows is None else stats.finite & (params.rows[chunk] != 0)
    if params.layout is None:
        stats.nnz = fired.sum(1).int()
    else:
        tiles = tile_view(fired, params.layout).sum(-1).int()  # [n, tiles]
        stats.nnz = tiles.sum(1, dtype=torch.int32)
        stats.tiles = tile_counts(tiles, counted, params.layout)
    if up is not None and params.up_relu:
        stats.nnz_used = torch.gt(up, 0, out=torch.empty_like(up)).mul_(fired).sum(1).int()
    if params.probes == "neurons" and params.tokens is not None and params.sequences is not None:
        fired.mul_(counted[:, None])
        rounded = value.to(params.x.dtype).to(fired.dtype)
        stats.neurons = neuron_sums(fired, rounded, params.tokens[chunk], params.sequences[chunk])


def _hidden(params: FFNParams, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the hidden state and the neurons' values, both [n, d_ff] in the dtype of the products.

    Values are valid only where a neuron fired.
    """
    if params.activation in SPARSE_ACTIVATIONS:
        value = gate if params.activation == "relu" else gate * gate
        value = value.to(params.x.dtype).to(gate.dtype)
        hidden = where_positive(value if up is None else value * up, gate, 0)
    else:
        value = ACTIVATION[params.activation](gate)
        hidden = value if up is None else value * up
    return hidden, value if params.threshold is None else hidden.abs()


def _finite(matrix: Tensor) -> Tensor:
    """Return which rows have neither inf nor nan, bool [n]: the extremes of a row propagate both."""
    return matrix.amax(1).isfinite() & matrix.amin(1).isfinite()


def tile_counts(tiles: Tensor, counted: Tensor, layout: Layout) -> TileCounts:
    """Return histograms of fired neurons in a tile, over the rows where `counted` (bool [n]) is true.

    tiles: int32 [n, tiles], the number of fired neurons in each
    """

    def histogram(bins: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros(layout.tile + 1, dtype=torch.int64, device=bins.device).index_add_(0, bins, weight)

    weight = counted.long()
    pairs = histogram(tiles.flatten(), weight[:, None].expand_as(tiles).flatten())
    return TileCounts(layout, pairs, histogram(tiles.amax(1), weight))


def neuron_sums(fired: Tensor, value: Tensor, tokens: Tensor, sequences: Tensor) -> NeuronSums:
    """Return the sums of each neuron over at most 2^13 rows.

    fired: [n, d_ff], 1.0 or 0.0, and all 0.0 in rows that are not counted; value: [n, d_ff], read where a neuron fired;
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
    """Return the greatest int32 `number` [n] among the rows that fired each neuron, and whether any row did: [d_ff].

    It compares ranks, which float32 represents exactly for any numbers.
    """
    ordered, order = number.sort()
    rank = torch.empty_like(fired[:, 0])
    rank[order] = torch.arange(1, len(number) + 1, dtype=rank.dtype, device=rank.device)
    best = (fired * rank[:, None]).amax(0).long()
    return ordered[(best - 1).clamp_(min=0)], best > 0
