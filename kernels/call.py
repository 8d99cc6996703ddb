"""One call of the FFN op: what every kernel is handed, checked, and what every kernel hands back.

A plain FFN is a call without `w_up`. A call is checked once, here, on the host, in one order (device, dtype,
rank, shape, contiguity); kernels take it as it is. `Stats` carries the counts and, when asked, sums over rows
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

AXES = {  # of every tensor of a call; x may have more before its last
    "x": ("n", "d_model"),
    "w_gate": ("d_ff", "d_model"),
    "w_up": ("d_ff", "d_model"),
    "w_down": ("d_model", "d_ff"),
    "b_gate": ("d_ff",),
    "b_up": ("d_ff",),
    "b_down": ("d_model",),
    "rows": ("n",),
    "tokens": ("n",),
    "sequences": ("n",),
}
REQUIRED = ("x", "w_gate", "w_down")
PLAIN_NAMES = {"w_gate": "w_in", "w_down": "w_out", "b_gate": "b_in", "b_down": "b_out"}
INFO_DTYPES = {"rows": torch.uint8, "tokens": torch.int32, "sequences": torch.int32}


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
class Asks:
    """What a call asks for beside its shape, of which a kernel may lack something. As in `gated_ffn`."""

    activation: str = "relu"
    up_relu: bool = False
    threshold: float | None = None
    layout: Layout | None = None
    want_packed: bool = False


@dataclass(frozen=True)
class Call:
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
    def asks(self) -> Asks:
        return Asks(self.activation, self.up_relu, self.threshold, self.layout, self.want_packed)

    @property
    def down_by_neuron(self) -> Tensor:
        """w_down as [d_ff, d_model], contiguous: a neuron a row. A copy, unless that is how it is held."""
        return self.w_down.t().contiguous()

    def checked(self) -> Call:
        """This call with x as [n, d_model].

        Raises TypeError or ValueError that names the argument, what was expected and what came.
        """
        _check_options(self)
        _check_tensors(self)
        return replace(self, x=self.x.view(-1, self.x.shape[-1]))


def _check_options(call: Call) -> None:
    for name, got, expected in (
        ("activation", call.activation, ACTIVATIONS),
        ("probes", call.probes, PROBES),
    ):
        if got not in expected:
            raise ValueError(f"{name}: expected one of {', '.join(expected)}, got {got!r}")
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


def _check_tensors(call: Call) -> None:
    plain = {} if call.w_up is not None else PLAIN_NAMES
    own: dict[str, Tensor] = {}  # by the name the caller knows
    axes: dict[str, tuple[str, ...]] = {}
    for field, axis in AXES.items():
        tensor, name = getattr(call, field), plain.get(field, field)
        if tensor is None and field not in REQUIRED:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        own[name], axes[name] = tensor, axis
    x = call.x
    for name, tensor in own.items():
        if tensor.device != x.device:
            raise ValueError(f"{name}: expected device {x.device}, that of x, got {tensor.device}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    for name, tensor in own.items():
        dtype = INFO_DTYPES.get(name, x.dtype)
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if x.dim() == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    for name, tensor in own.items():
        if name != "x" and tensor.dim() != len(axes[name]):
            raise ValueError(f"{name}: expected {len(axes[name])} dimensions, got {tensor.dim()}")
    sizes = {"n": math.prod(x.shape[:-1]), "d_model": x.shape[-1], "d_ff": call.w_gate.shape[0]}
    for axis_name in ("d_model", "d_ff"):
        if sizes[axis_name] == 0 or sizes[axis_name] % 8:
            raise ValueError(f"{axis_name}: expected a positive multiple of 8, got {sizes[axis_name]}")
    for name, tensor in own.items():
        shape = [sizes[axis_name] for axis_name in axes[name]]
        if name != "x" and list(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
    for name, tensor in own.items():
        by_neuron = name in ("w_down", "w_out") and tensor.t().is_contiguous()
        if not (tensor.is_contiguous() or by_neuron):
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    for name, tensor in own.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected no gradient to follow, as the op is for inference, "
                "got requires_grad=True; call it under torch.inference_mode()"
            )
