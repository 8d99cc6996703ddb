"""Refuse a configuration whose sizes the weights beside it do not have, before memory is taken for them.

The idea: transformers makes a network as large as config.json says, and only then misses its weights. So the network is
made once on torch's meta device, which holds shapes alone, and its parameters are compared with the elements that the
headers of the safetensors files name. Layers are compared first, as each of them takes time even there.

Cost: the headers, and a few milliseconds a layer.

A checkpoint of `twell prune --per-layer` has FFNs of several widths, where transformers knows one: config.json names
the widest, and each layer's own in `ffn_widths`; weights lie as narrow as they are. For the kernels, for a study and to
go on training, layers are filled up with neurons of zeros, which fire nowhere and change no output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from twell.workbench.errors import UserError, first_line
from twell.workbench.models.families import FAMILIES, Family

MOST_LAYERS = 10_000
TIED = 2  # times as many parameters as a file that stores one of two tied matrices
SLACK = 2**22  # parameters, of masks and positions that a file need not store
NOT_CAUSAL = "Unrecognized configuration class"  # of transformers, for a family without a causal language model
WIDTHS = "ffn_widths"  # the field of config.json
FILLED = "filled_up"  # the attribute of a network: widths before it was filled up, and how many numbers that took
MULTIPLE = 8  # of neurons, as the kernels take them


def refuse_too_many_layers(fields: dict[str, Any], name: str) -> None:
    """Raise UserError for a configuration with more layers than any model has: some classes list them all.

    fields: config.json; name: the model's
    """
    for field, value in _numbers(fields):
        if "layer" in field and value > MOST_LAYERS:
            raise UserError(
                f"Expected at most {MOST_LAYERS:,} layers in {name}, got {field}: {value:.6g} in its config.json: "
                "correct it."
            )


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a configuration and of those nested in it, with their fields' names."""
    pending = [fields]
    while pending:
        for field, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield field, value


def refuse_other_sizes(folder: Path, name: str, config: Any, make: Callable[[], torch.nn.Module]) -> None:
    """Raise UserError for a configuration that asks for many more parameters than its weights have.

    make: makes the network, on the device that is the default
    """
    tensors, elements = _stored(folder)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not tensors:
        return  # files that cannot be read are refused where the weights are read
    if isinstance(layers, int) and layers > tensors:
        raise UserError(
            f"Expected in {name} the weights that its config.json asks for, got {tensors:,} tensors for "
            f"num_hidden_layers: {layers:,}: copy the checkpoint again, or correct its config.json."
        )
    try:
        with torch.device("meta"):
            wanted = sum(parameter.numel() for parameter in make().parameters())
    except Exception as error:  # each class checks itself in its own ways
        why = first_line(error)
        if why.startswith(NOT_CAUSAL):
            raise UserError(
                f"Expected a causal language model in {name}, got model_type {config.model_type}, of which "
                "transformers has none: give a model that predicts the next token from those before it."
            ) from None
        raise UserError(
            f"Expected a config.json in {name} of which transformers can make a network, got an error ({why}): "
            "correct it."
        ) from None
    if wanted > TIED * elements + SLACK:
        raise UserError(
            f"Expected in {name} the weights that its config.json asks for, {wanted:,} parameters, got {elements:,}: "
            "copy the checkpoint again, or correct the sizes in its config.json."
        )


def _stored(folder: Path) -> tuple[int, int]:
    """Return how many tensors and elements the safetensors files of a folder hold; 0, 0 if one is unreadable."""
    tensors = elements = 0
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # it is no mapping
                    tensors += 1
                    size = 1
                    for side in file.get_slice(key).get_shape():
                        size *= side
                    elements += size
    except (SafetensorError, OSError):
        return 0, 0
    return tensors, elements


def decoder_layers(network: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, in order; none if the model has no list of them."""
    depth = network.config.get_text_config().num_hidden_layers
    lists = [module for module in network.get_decoder().children() if isinstance(module, nn.ModuleList)]
    return next((list(layers) for layers in lists if len(layers) == depth), [])


def check_widths(widths: Any, layers: int, d_ff: int, name: str) -> None:
    """Raise UserError for widths that are not one of each layer. name: the model's"""
    whole = isinstance(widths, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in widths)
    if not whole or len(widths) != layers or not all(0 < one <= d_ff and one % MULTIPLE == 0 for one in widths):
        raise UserError(
            f"Expected {layers} widths of FFNs in the config.json of {name}, multiples of {MULTIPLE} up to {d_ff:,}, "
            f"got {WIDTHS}: {str(widths)[:80]}: copy the model again."
        )


def refuse_own_widths(name: str, network: PreTrainedModel) -> None:
    """Raise UserError for a model whose layers have widths of their own: a run has one for all."""
    widths = getattr(network.config.get_text_config(), WIDTHS, None) or [0]
    if len(set(widths)) > 1:
        raise UserError(
            f"Expected one number of neurons for all layers of {name}, got {min(widths):,} to {max(widths):,}, as "
            "`twell prune --per-layer` wrote it: load it by load_pruned(FOLDER, widened=True), which fills layers up "
            "with neurons of zeros, or give capture its folder."
        )


def select(layer: nn.Module, family: Family, index: Tensor) -> None:
    """Keep some neurons of a decoder layer's FFN. index: their numbers, int64"""
    holder: Any = getattr(layer, family.holder) if family.holder else layer
    for name in family.maps:
        _resize(getattr(holder, name), name == family.maps[-1], lambda weight, axis: weight.index_select(axis, index))
    if hasattr(holder, "intermediate_size"):
        holder.intermediate_size = len(index)


def narrow(network: Any) -> None:
    """Make room for each layer's own width in a network whose weights are not read yet."""
    _cut(network, getattr(network.config.get_text_config(), WIDTHS))


def unfill(network: Any) -> None:
    """Take the neurons of zeros that `widen` put in away again, in place, to run the network as narrow as it is stored;
    one that has none stays."""
    widths, _ = own_sizes(network)
    if widths:
        _cut(network, widths)
        setattr(network, FILLED, (widths, 0))


def _cut(network: Any, widths: Sequence[int]) -> None:
    """Keep the first neurons of each layer. widths: how many"""
    family = FAMILIES[network.config.get_text_config().model_type]
    for layer, width in zip(decoder_layers(network), widths, strict=True):
        select(layer, family, torch.arange(width, device=network.device))


def own_sizes(network: nn.Module) -> tuple[list[int], int]:
    """Return each layer's width before it was filled up, none where they are alike, and the number of parameters
    without those that were filled in."""
    known = (vars(module)[FILLED] for module in network.modules() if FILLED in vars(module))
    widths, filled = next(known, ([], 0))
    return widths, sum(parameter.numel() for parameter in network.parameters()) - filled


def widen(network: Any) -> None:
    """Fill narrower layers up to the widest with neurons of zeros, in place; a network of one width stays."""
    config = network.config.get_text_config()
    if getattr(config, WIDTHS, None) is None:
        return
    widths, (_, before) = list(getattr(config, WIDTHS)), own_sizes(network)
    family = FAMILIES[config.model_type]
    width = getattr(config, family.d_ff)

    def filled(weight: Tensor, axis: int) -> Tensor:
        missing = width - weight.shape[axis]
        return nn.functional.pad(weight, (0, missing) if axis == weight.dim() - 1 else (0, 0, 0, missing))

    for layer in decoder_layers(network):
        holder: Any = getattr(layer, family.holder) if family.holder else layer
        for name in family.maps:
            _resize(getattr(holder, name), name == family.maps[-1], filled)
        if hasattr(holder, "intermediate_size"):
            holder.intermediate_size = width
    delattr(config, WIDTHS)
    if len(set(widths)) > 1:
        setattr(network, FILLED, (widths, own_sizes(network)[1] - before))


@torch.no_grad()
def _resize(linear: nn.Linear, last: bool, change: Any) -> None:
    """Change a map's neurons: columns if it is the last one, else rows and bias. change: of a tensor along an axis"""
    linear.weight = nn.Parameter(change(linear.weight, 1 if last else 0), linear.weight.requires_grad)
    if last:
        linear.in_features = linear.weight.shape[1]
        return
    linear.out_features = linear.weight.shape[0]
    if linear.bias is not None:
        linear.bias = nn.Parameter(change(linear.bias, 0), linear.bias.requires_grad)
