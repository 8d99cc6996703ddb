"""The parameters of one call of the FFN op: what every kernel is handed, and how it is checked.

A plain FFN is a call without `w_up`. Parameters are checked once, here, on the host, tensor by tensor in one order
(device, dtype, rank, shape, contiguity); kernels take them as they are. Cost: about 6 microseconds a call, which a call
outside a CUDA graph waits for. So other layouts than dense ones, which fail somewhere, are looked for once they have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from twell.kernels.layout import Layout

PROBES = ("none", "counts", "neurons")
SPARSE_ACTIVATIONS = ("relu", "relu2")
ACTIVATIONS = (*SPARSE_ACTIVATIONS, "silu", "gelu", "gelu_tanh")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

DIFFERENTIABLE = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")  # what a gradient could be asked of
TENSORS = (*DIFFERENTIABLE, "rows", "tokens", "sequences")
PLAIN_NAMES = {"w_gate": "w_in", "w_down": "w_out", "b_gate": "b_in", "b_down": "b_out"}


@dataclass(frozen=True)
class Requirements:
    """Options of a call that a kernel may not support, beside its shape; each as in `gated_ffn`."""

    activation: str = "relu"
    up_relu: bool = False
    threshold: float | None = None
    layout: Layout | None = None
    want_packed: bool = False
    gated: bool = True


NO_REQUIREMENTS = Requirements()


@dataclass(slots=True)  # not frozen: that would triple the time it takes to make one
class FFNParams:
    """The arguments of `gated_ffn`; those of `plain_ffn` with w_up None, w_in as w_gate and w_out as w_down."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor | None
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None
    rows: Tensor | None = None
    tokens: Tensor | None = None
    sequences: Tensor | None = None
    activation: str = "relu"
    up_relu: bool = False
    threshold: float | None = None
    probes: str = "counts"
    layout: Layout | None = None
    want_packed: bool = False

    @property
    def down_by_neuron(self) -> Tensor:
        """w_down as [d_ff, d_model], contiguous: a row per neuron. A copy, unless that is how it is held."""
        return self.w_down.t().contiguous()

    @property
    def gated(self) -> bool:
        """Whether the FFN has an up branch."""
        return self.w_up is not None

    @property
    def n(self) -> int:
        """Rows of x."""
        return self.x.numel() // self.x.shape[-1]

    def flat(self) -> FFNParams:
        """Return these parameters with x as [n, d_model]."""
        return self if self.x.dim() == 2 else replace(self, x=self.x.view(-1, self.x.shape[-1]))

    def checked(self) -> FFNParams:
        """Return itself. Raises TypeError or ValueError that names the argument, what was expected and what came."""
        _check_options(self)
        _check_tensors(self)
        if torch.is_grad_enabled():
            _refuse_gradients(self)
        return self

    def refuse_other_layouts(self) -> None:
        """Raise ValueError for the first tensor that is sparse, nested, or laid out for a library."""
        names = PLAIN_NAMES if self.w_up is None else {}
        for name in TENSORS:
            tensor = getattr(self, name)
            if isinstance(tensor, Tensor) and (tensor.layout is not torch.strided or tensor.is_nested):
                got = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
                raise ValueError(f"{names.get(name, name)}: expected a dense tensor, got {got}")


def not_sparse(requirements: Requirements | FFNParams) -> str | None:
    """Return why a call cannot be run over the fired neurons alone; None if it can."""
    if requirements.activation in SPARSE_ACTIVATIONS and requirements.threshold is None:
        return None
    got, threshold = requirements.activation, requirements.threshold
    got = got if threshold is None else f"{got} with threshold {threshold}"
    return f"expected {' or '.join(SPARSE_ACTIVATIONS)} and no threshold, got {got}"


def _check_options(params: FFNParams) -> None:
    """Check what is no tensor."""
    activation, threshold, probes, layout = params.activation, params.threshold, params.probes, params.layout
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if probes not in PROBES:
        raise ValueError(f"probes: expected one of {', '.join(PROBES)}, got {probes!r}")
    if threshold is None and activation not in SPARSE_ACTIVATIONS:
        raise ValueError(f"threshold: expected a number, as {activation} has no zeros to leave uncounted, got None")
    if threshold is not None:
        if not isinstance(threshold, Real):
            raise TypeError(f"threshold: expected a number, got {type(threshold).__name__}")
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ValueError(f"threshold: expected a finite number of at least 0, got {threshold!r}")
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout: expected a Layout, got {type(layout).__name__}")
    for name, switch in (("up_relu", params.up_relu), ("want_packed", params.want_packed)):
        if switch is not True and switch is not False:
            raise TypeError(f"{name}: expected True or False, got {type(switch).__name__}")
    if probes == "neurons":
        for name, tensor in (("tokens", params.tokens), ("sequences", params.sequences)):
            if tensor is None:
                raise ValueError(f'{name}: expected an int32 tensor with probes="neurons", got None')


def _check_tensors(params: FFNParams) -> None:
    """Check each tensor, in the order of the arguments. One pass, as calls outside CUDA graphs wait for it."""
    x, w_gate = params.x, params.w_gate
    names = PLAIN_NAMES if params.w_up is None else {}
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    device, dtype = x.device, x.dtype
    if dtype not in DTYPES:
        raise TypeError(f"x: expected one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if x.layout is not torch.strided:  # a jagged one looks like a longer dense one
        raise _not_contiguous("x", x)
    if x.dim() == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    d_model = check_size("d_model", x.shape[-1])
    n = x.numel() // d_model
    if not x.is_contiguous():
        raise _not_contiguous("x", x)
    d_ff = w_gate.shape[0] if isinstance(w_gate, Tensor) and w_gate.dim() == 2 else 0
    _check(names.get("w_gate", "w_gate"), w_gate, device, dtype, (d_ff, d_model))
    check_size("d_ff", d_ff)
    if params.w_up is not None:
        _check("w_up", params.w_up, device, dtype, (d_ff, d_model))
    _check(names.get("w_down", "w_down"), params.w_down, device, dtype, (d_model, d_ff), by_neuron=True)
    b_gate, b_up, b_down, rows = params.b_gate, params.b_up, params.b_down, params.rows
    if b_gate is b_up is b_down is rows is params.tokens is params.sequences is None:
        return  # the usual call, spared a loop
    for name, tensor, wanted, size in (
        ("b_gate", b_gate, dtype, d_ff),
        ("b_up", b_up, dtype, d_ff),
        ("b_down", b_down, dtype, d_model),
        ("rows", rows, torch.uint8, n),
        ("tokens", params.tokens, torch.int32, n),
        ("sequences", params.sequences, torch.int32, n),
    ):
        if tensor is not None:
            _check(names.get(name, name), tensor, device, wanted, (size,))


def _refuse_gradients(params: FFNParams) -> None:
    """Refuse tensors that require a gradient. This is the one place that says that the op has no backward pass."""
    names = PLAIN_NAMES if params.w_up is None else {}
    for name in DIFFERENTIABLE:
        tensor = getattr(params, name)
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{names.get(name, name)}: expected no gradient to follow, as the op is for inference, "
                "got requires_grad=True; call it under torch.inference_mode()"
            )


def check_size(axis: str, size: int) -> int:
    """Return the size of an axis; raise ValueError for one that is not a positive multiple of 8."""
    if size == 0 or size % 8:
        raise ValueError(f"{axis}: expected a positive multiple of 8, got {size}")
    return size


def _check(
    name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], by_neuron: bool = False
) -> None:
    """Check one tensor against what is expected of it; by_neuron: it may be the transpose of a contiguous tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, that of x, got {tensor.device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tensor.shape != shape:
        if tensor.dim() != len(shape):
            raise ValueError(f"{name}: expected {len(shape)} dimensions, got {tensor.dim()}")
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if not (tensor.is_contiguous() or (by_neuron and tensor.stride() == (1, shape[0]))):
        raise _not_contiguous(name, tensor)


def _not_contiguous(name: str, tensor: Tensor) -> ValueError:
    """Return the error that names the strides, or the layout, of a tensor that is not contiguous."""
    if tensor.layout is not torch.strided:
        return ValueError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    return ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
