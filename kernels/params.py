"""One call of the FFN op: what every kernel is handed, checked, and what every kernel hands back.

A plain FFN is a call without `w_up`. A call is checked once, here, on the host, tensor by tensor in one order (device,
dtype, rank, shape, contiguity); kernels take it as it is. `Stats` carries the counts and, when asked, sums over rows
that add up to the same bits in any order, because everything in them is an integer or an extreme.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twell.kernels.layout import Layout, TwELL

PROBES = ("none", "counts", "neurons")
SPARSE_ACTIVATIONS = ("relu", "relu2")
ACTIVATIONS = (*SPARSE_ACTIVATIONS, "silu", "gelu", "gelu_tanh")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FIXED_POINT = 2.0**20  # value sums count in steps of 2^-20
VALUE_CAP = 2.0**20  # a single value enters its sum as at most this, so that 2^22 of them fit an int64
NO_TOKEN = torch.iinfo(torch.int32).max

PLAIN_NAMES = {"w_gate": "w_in", "w_down": "w_out", "b_gate": "b_in", "b_down": "b_out"}


@dataclass
class NeuronSums:
    """Sums and extremes a neuron, over the counted rows (rows != 0, and finite).

    fires:          int64 [d_ff], rows on which it fired
    value_sum:      int64 [d_ff], its values, rounded to the dtype of x, in steps of 2^-20, each at most 2^20
    value_max:      float32 [d_ff], 0 where it never fired
    token_min, token_max: int32 [d_ff], least and greatest token id that fired it; 2^31 - 1 and -1: never
    first_sequence: int32 [d_ff], least sequence in which it fired; -1: never
    """

    fires: Tensor
    value_sum: Tensor
    value_max: Tensor
    token_min: Tensor
    token_max: Tensor
    first_sequence: Tensor

    @classmethod
    def empty(cls, d_ff: int, device: torch.device | str = "cpu") -> NeuronSums:
        """The sums of no rows: what `merge` starts from."""

        def full(fill: float, dtype: torch.dtype) -> Tensor:
            return torch.full((d_ff,), fill, dtype=dtype, device=device)

        return cls(
            full(0, torch.int64),
            full(0, torch.int64),
            full(0, torch.float32),
            full(NO_TOKEN, torch.int32),
            full(-1, torch.int32),
            full(-1, torch.int32),
        )

    def merge(self, other: NeuronSums) -> None:
        """Adds the sums of other rows, in place. Any order of merging gives the same bits."""
        self.fires += other.fires
        self.value_sum += other.value_sum
        torch.maximum(self.value_max, other.value_max, out=self.value_max)
        torch.minimum(self.token_min, other.token_min, out=self.token_min)
        torch.maximum(self.token_max, other.token_max, out=self.token_max)
        mine, theirs = self.first_sequence, other.first_sequence
        both = (mine >= 0) & (theirs >= 0)
        either = torch.maximum(mine, theirs)  # -1, never, gives way to a sequence
        mine.copy_(torch.where(both, torch.minimum(mine, theirs), either))


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
        """Adds the counts of other rows, in place; refuses another layout."""
        if other.layout != self.layout:
            raise ValueError(f"layout: expected {self.layout}, got {other.layout}")
        self.pairs += other.pairs
        self.rows += other.rows


@dataclass
class Stats:
    """What a call counted, on the device of its input. n: its rows.

    nnz:      int32 [n], neurons that fired, whatever `rows` says; 0 in a row that is not finite; int32 [0] with
              probes="none"
    finite:   bool [n], False where a gate pre-activation or a hidden value is inf or nan: y is NaN there
    nnz_used: int32 [n] with up_relu, the products that are not zero; else None
    tiles:    with a layout and probes; else None
    neurons:  with probes="neurons"; else None
    packed:   with want_packed; else None
    """

    nnz: Tensor
    finite: Tensor
    nnz_used: Tensor | None = None
    tiles: TileCounts | None = None
    neurons: NeuronSums | None = None
    packed: TwELL | None = None


@dataclass(frozen=True)
class Requirements:
    """Options of a call that a kernel may not support, beside its shape; each as in `gated_ffn`."""

    activation: str = "relu"
    up_relu: bool = False
    threshold: float | None = None
    layout: Layout | None = None
    want_packed: bool = False


@dataclass(slots=True)  # not frozen, as that makes one in three times the time
class FFNParams:
    """The arguments of `gated_ffn`; those of `plain_ffn` with w_up None, w_in as w_gate and w_out as w_down."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor | None
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    rows: Tensor | None
    tokens: Tensor | None
    sequences: Tensor | None
    activation: str
    up_relu: bool
    threshold: float | None
    probes: str
    layout: Layout | None
    want_packed: bool

    @property
    def down_by_neuron(self) -> Tensor:
        """w_down as [d_ff, d_model], contiguous: a neuron a row. A copy, unless that is how it is held."""
        return self.w_down.t().contiguous()

    @property
    def n(self) -> int:
        """Rows of x."""
        return self.x.numel() // self.x.shape[-1]

    def flat(self) -> FFNParams:
        """This call with x as [n, d_model]."""
        return self if self.x.dim() == 2 else replace(self, x=self.x.view(-1, self.x.shape[-1]))

    def checked(self) -> FFNParams:
        """Itself. Raises TypeError or ValueError that names the argument, what was expected and what came."""
        _check_options(self)
        _check_tensors(self)
        return self


def not_sparse(asks: Requirements | FFNParams) -> str | None:
    """Why a call cannot be run over the neurons that fire alone; None if it can."""
    if asks.activation in SPARSE_ACTIVATIONS and asks.threshold is None:
        return None
    got = asks.activation if asks.threshold is None else f"{asks.activation} with threshold {asks.threshold}"
    return f"expected {' or '.join(SPARSE_ACTIVATIONS)} and no threshold, got {got}"


def _check_options(call: FFNParams) -> None:
    if call.activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {call.activation!r}")
    if call.probes not in PROBES:
        raise ValueError(f"probes: expected one of {', '.join(PROBES)}, got {call.probes!r}")
    if call.threshold is None and call.activation not in SPARSE_ACTIVATIONS:
        raise ValueError(
            f"threshold: expected a number, as {call.activation} has no zeros to leave uncounted, got None"
        )
    if call.threshold is not None and not (math.isfinite(call.threshold) and call.threshold >= 0):
        raise ValueError(f"threshold: expected a finite number of at least 0, got {call.threshold!r}")
    if call.layout is not None and not isinstance(call.layout, Layout):
        raise TypeError(f"layout: expected a Layout, got {type(call.layout).__name__}")
    if call.probes == "neurons":
        for name in ("tokens", "sequences"):
            if getattr(call, name) is None:
                raise ValueError(f'{name}: expected an int32 tensor with probes="neurons", got None')


def _check_tensors(call: FFNParams) -> None:
    """One pass, as calls outside CUDA graphs wait for the host."""
    x, w_gate = call.x, call.w_gate
    own = PLAIN_NAMES if call.w_up is None else {}
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    device, dtype = x.device, x.dtype
    if dtype not in DTYPES:
        raise TypeError(f"x: expected one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if x.dim() == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    d_model = _check_size("d_model", x.shape[-1])
    n = x.numel() // d_model
    _check("x", x, device, dtype, x.shape)
    d_ff = w_gate.shape[0] if isinstance(w_gate, Tensor) and w_gate.dim() == 2 else 0
    _check(own.get("w_gate", "w_gate"), w_gate, device, dtype, (d_ff, d_model))
    _check_size("d_ff", d_ff)
    if call.w_up is not None:
        _check("w_up", call.w_up, device, dtype, (d_ff, d_model))
    _check(own.get("w_down", "w_down"), call.w_down, device, dtype, (d_model, d_ff), by_neuron=True)
    for name, tensor, wanted, size in (
        ("b_gate", call.b_gate, dtype, d_ff),
        ("b_up", call.b_up, dtype, d_ff),
        ("b_down", call.b_down, dtype, d_model),
        ("rows", call.rows, torch.uint8, n),
        ("tokens", call.tokens, torch.int32, n),
        ("sequences", call.sequences, torch.int32, n),
    ):
        if tensor is not None:
            _check(own.get(name, name), tensor, device, wanted, (size,))


def _check_size(axis: str, size: int) -> int:
    if size == 0 or size % 8:
        raise ValueError(f"{axis}: expected a positive multiple of 8, got {size}")
    return size


def _check(
    name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], by_neuron: bool = False
) -> None:
    """by_neuron: it may be the transpose of a contiguous tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, that of x, got {tensor.device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tensor.dim() != len(shape):
        raise ValueError(f"{name}: expected {len(shape)} dimensions, got {tensor.dim()}")
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if not (tensor.is_contiguous() or (by_neuron and tensor.stride() == (1, shape[0]))):
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected no gradient to follow, as the op is for inference, "
            "got requires_grad=True; call it under torch.inference_mode()"
        )
