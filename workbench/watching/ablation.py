"""Silence neurons of a model while code of yours runs it.

The idea: a neuron whose row in the FFN's first map is zero has the pre-activation 0, so it fires nowhere and its hidden
value is 0, in the model's own code, in the sparse kernels, in compiled code and in a watch alike. The rows are put back
afterwards, to the bit. An FFN whose first map is not known loses the neurons' columns in its map back.

Cost: copies of the rows.

    with ablate(model, {3: [17, 42]}), watch(model, tokenizer) as w:
        model.generate(**inputs)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import hardshrink
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from twell.workbench.errors import UserError
from twell.workbench.models import own_code
from twell.workbench.models.attach import refuse_unnamed, unwrapped
from twell.workbench.models.families import FAMILIES
from twell.workbench.models.find_ffns import FFNs, named, named_maps, of_family
from twell.workbench.models.sizes import decoder_layers, own_sizes
from twell.workbench.models.threshold_ffn import maps_back

Neurons = Sequence[int] | Tensor
NeuronTensors = list[tuple[Tensor, int]]  # weights and biases of an FFN, each with the dimension that neurons lie along


@contextmanager
def ablate(model: nn.Module, neurons: Mapping[int, Neurons], *, ffns: FFNs | None = None) -> Iterator[None]:
    """Keep neurons from firing inside this context; afterwards the weights are what they were, to the bit.

    neurons: by layer, their numbers, or a mask of bools [d_ff], of which what fills a narrower layer up is left out;
    ffns: as in `watch`, for a module of yours
    Raises UserError for a layer or a neuron that is not there.
    """
    if not isinstance(neurons, Mapping):
        got = type(neurons).__name__
        raise UserError(f"Expected neurons by layer, as in {{3: [17, 42]}}, got a {got}: name the layer of each.")
    inner = unwrapped(model)
    name = type(inner).__name__
    layers = _layers(name, inner, ffns)
    own = own_sizes(inner)[0]
    with ExitStack() as stack:
        chosen: dict[int, tuple[Tensor, NeuronTensors, nn.Module | None]] = {}
        for layer, given in neurons.items():
            if isinstance(layer, bool) or not isinstance(layer, Integral) or not 0 <= layer < len(layers):
                raise UserError(f"Expected a layer from 0 to {len(layers) - 1} of {name}, got {layer!r}.")
            rows, down = layers[layer]
            weight, axis = rows[0]
            if weight.is_meta:
                raise UserError(
                    f"Expected the weights of layer {layer} of {name} in memory, got them offloaded: load all of it "
                    'onto devices, as device_map="cpu" or "cuda:0" does.'
                )
            d_ff = weight.shape[axis]
            width = own[layer] if len(own) == len(layers) else d_ff
            chosen[layer] = _numbers(given, layer, d_ff, width, weight.device), rows, down
        for index, rows, down in chosen.values():
            if down is not None:
                stack.callback(down.register_forward_pre_hook(_silenced(index)).remove)
            for weight, axis in rows:
                stack.callback(_restored, weight, axis, index, weight.detach().index_select(axis, index))
                with torch.no_grad():
                    weight.index_fill_(axis, index, 0)
        yield


@contextmanager
def threshold(model: nn.Module, values: float | Sequence[float], *, ffns: FFNs | None = None) -> Iterator[None]:
    """Set hidden values with |hidden| up to a threshold to 0 inside this context, in a model of any activation.

    values: one for all layers, or one for each; ffns: as in `watch`, for a module of yours. A watch counts what is
    left; of an activation without zeros, one with `threshold=0`.
    Raises UserError for a value below 0, or another number of them than layers.
    """
    inner: Any = unwrapped(model)
    name = type(inner).__name__
    refuse_unnamed(name, inner, ffns)
    downs = own_code.maps_back(name, inner) if ffns is None else named_maps(name, inner, ffns)
    try:
        given: Any = [values] * len(downs) if _is_one(values) else values
        each = [float(value) for value in given]
    except (TypeError, ValueError):
        each = []
    if len(each) != len(downs) or not all(0 <= value < math.inf for value in each):
        raise UserError(f"Expected a threshold of at least 0, or {len(downs)} of them, one a layer, got {values}.")
    with ExitStack() as stack:
        for down, value in zip(downs, each, strict=True):
            stack.callback(down.register_forward_pre_hook(_shrunk(value)).remove)
        yield


def _is_one(values: Any) -> bool:
    """Return whether a number is given, be it numpy's or a tensor without dimensions."""
    return isinstance(values, int | float) or getattr(values, "ndim", None) == 0


def _shrunk(value: float) -> Any:
    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (hardshrink(args[0], value), *args[1:])

    return before


def _layers(name: str, model: Any, ffns: FFNs | None) -> list[tuple[NeuronTensors, nn.Module | None]]:
    """Return for each layer what is zeroed, and the map back whose input is silenced too, where that is needed."""
    refuse_unnamed(name, model, ffns)
    if ffns is not None:
        matching = named(name, model, ffns)
    else:
        config = model.config.get_text_config()
        family = FAMILIES.get(config.model_type)
        if family is None or float(ACT2FN[getattr(config, family.act)](torch.zeros(1))) != 0:
            blocks = decoder_layers(model)
            paths = zip(blocks, maps_back(name, model, blocks), strict=True)
            return [(_columns(down), down) for down in (block.get_submodule(path) for block, path in paths)]
        matching = of_family(name, model, any_activation=True)
    layers: list[tuple[NeuronTensors, nn.Module | None]] = []
    for one in matching:
        ours = (one.entry.w_gate, one.entry.b_gate) if not one.maps else (one.maps[0].weight, one.maps[0].bias)
        layers.append(([(tensor, 0) for tensor in ours if tensor is not None], None))
    return layers


def _columns(down: nn.Module) -> NeuronTensors:
    weight: Any = down.weight
    return [(weight, 0 if isinstance(down, Conv1D) else 1)]


def _numbers(given: Neurons, layer: int, d_ff: int, width: int, device: torch.device) -> Tensor:
    """Return the neurons of a layer, int64. Raises UserError for one that is not there.

    d_ff: of the layer's matrices; width: the layer's own, without neurons of zeros that fill it up
    """
    try:
        index = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(0, device=device)
    if index.is_floating_point() and (index.numel() or not _is_empty(given)):
        raise UserError(f"Expected neurons of layer {layer} as whole numbers, or a mask of bools, got {given!r}.")
    if index.dtype is torch.bool:
        if index.shape != (d_ff,):
            raise UserError(f"Expected a mask of {d_ff} neurons for layer {layer}, got {list(index.shape)}.")
        index = index[:width].nonzero().squeeze(1)
    index = index.reshape(-1).long().unique()
    if len(index) and not (int(index[0]) >= 0 and int(index[-1]) < width):
        raise UserError(
            f"Expected neurons from 0 to {width - 1} of layer {layer}, which has {width:,}, got {index.tolist()}."
        )
    return index


def _is_empty(given: Any) -> bool:
    return not isinstance(given, str) and hasattr(given, "__len__") and not len(given)


def _silenced(index: Tensor) -> Any:
    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].index_fill(-1, index.to(args[0].device), 0), *args[1:])

    return before


def _restored(weight: Tensor, axis: int, index: Tensor, rows: Tensor) -> None:
    with torch.no_grad():
        weight.index_copy_(axis, index.to(weight.device), rows.to(weight.device))
