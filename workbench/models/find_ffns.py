"""Find the FFNs of a model object: by its family, by the names that the caller gives, or by their maps back.

An FFN that is found is not yet known to compute what its names suggest: `comparison.ours` makes one that does, and
compares the two. One that two layers share, or that is more than linear maps around an activation, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from twell.kernels.modules import SparseFFN
from twell.workbench.errors import UserError
from twell.workbench.models import threshold_ffn
from twell.workbench.models.families import ACTIVATIONS, FAMILIES, GATED, PLAIN
from twell.workbench.models.own_code import has_zeros
from twell.workbench.models.sizes import decoder_layers

EXACT = "count what is above a threshold=0, which is all that fires"  # of an FFN with zeros, but not of ours
COUNT = "count what is above a threshold=, such as 0.01"  # what to do with an FFN that our op does not compute
KNOWN_MAPS = (GATED, ("fc1", "fc2"), PLAIN, ("w1", "w3", "w2"), ("c_fc", "c_proj"))


@dataclass(frozen=True)
class FFN:
    """Description of an FFN in a module of yours, for `ffns=`.

    maps: names of its linear maps within it: gate, up, down, or of a plain FFN in, out; with a threshold the last alone
    activation: relu | relu2, on the gate; up_relu: whether the up branch has a ReLU too
    """

    maps: tuple[str, ...]
    activation: str = "relu"
    up_relu: bool = False


FFNs = Mapping[str, FFN | Sequence[str] | str] | Sequence[str | nn.Module]


@dataclass(frozen=True)
class FoundFFN:
    """An FFN in the model: its path, the module that is called, its maps, what runs after it, what it computes."""

    path: str
    entry: Any
    maps: tuple[Any, ...]
    idle: tuple[Any, ...]
    activation: str
    up_relu: bool | None  # None: to be found out


def of_family(name: str, model: Any, any_activation: bool = False, advice: str = COUNT) -> list[FoundFFN]:
    """Return the FFNs of a model of a family that the kernels run; any_activation: also with one that they do not;
    advice: what to do with another model, in a refusal."""
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    layers = decoder_layers(model)
    fires = has_zeros(model)
    way = EXACT if fires and advice == COUNT else advice
    if family is None or not layers:
        if not any(isinstance(module, Conv1D) for module in model.modules()):  # which our op does not run
            way = f"{way}, or name its FFNs with ffns="
        if any(path.endswith(".experts") for path, _ in model.named_modules()):
            way = "models with experts cannot be counted"
        raise UserError(
            f"Expected a model of model_type {', '.join(FAMILIES)} with ReLU, got {config.model_type} in {name}: {way}."
        )
    activation = getattr(config, family.act, None)
    if activation not in ACTIVATIONS and not any_activation:
        what = "which the kernels do not compute" if fires else "which has no zeros to count"
        raise UserError(f"Expected a ReLU in the FFNs of {name}, got {family.act} {activation!r}, {what}: {way}.")
    ffns = []
    for number, layer in enumerate(layers):
        holder = getattr(layer, family.holder) if family.holder else layer
        path = f"layer {number}"
        entry = holder if family.holder else getattr(layer, family.maps[0])
        if isinstance(entry, SparseFFN):  # of a model that `load` made
            ffns.append(FoundFFN(path, entry, (), (), entry.activation, entry.up_relu))
            continue
        names = family.maps if hasattr(holder, family.maps[0]) else PLAIN
        maps = _children(name, path, holder, names, f", or {way}" if advice == COUNT and not any_activation else "")
        idle = () if family.holder else (layer.activation_fn, maps[-1])
        ffns.append(FoundFFN(path, entry, maps, idle, ACTIVATIONS.get(str(activation), ""), None))
    return ffns


def named(name: str, model: nn.Module, ffns: FFNs) -> list[FoundFFN]:
    """Return the FFNs that the caller names, in that order."""
    result = []
    for path, given in _items(name, model, ffns):
        entry = _module(name, model, path)
        if given is None:
            given = _usual_maps(entry)
            if given is None:
                children = [child for child, _ in entry.named_children()]
                linear = _linear_maps(entry)
                own = linear if len(linear) == 3 else ("gate", "up", "down")  # in their order
                raise UserError(
                    f"Expected maps of a known name in {path} of {name}, got {', '.join(children) or 'none'}: name "
                    f"them, as in ffns={{{json.dumps(path)}: ({', '.join(map(json.dumps, own))})}}."
                )
        ffn = given if isinstance(given, FFN) else FFN(tuple(given.split() if isinstance(given, str) else given))
        up_relu = True if ffn.up_relu else None
        result.append(FoundFFN(path, entry, _children(name, path, entry, ffn.maps), (), ffn.activation, up_relu))
    return result


def _usual_maps(entry: nn.Module) -> Sequence[str] | None:
    """Return the names of an FFN's maps: usual ones, or those of the two that it has, however deep; None of others."""
    linear = _linear_maps(entry)
    usual = next((maps for maps in KNOWN_MAPS if all(hasattr(entry, one) for one in maps)), None)
    return usual or (linear if len(linear) == 2 else None)


def _linear_maps(entry: nn.Module) -> list[str]:
    return [path for path, module in entry.named_modules() if path and isinstance(module, nn.Linear)]


def _items(name: str, model: nn.Module, ffns: FFNs) -> list[tuple[str, Any]]:
    """Return each FFN's path and what the caller says of it. Modules may stand in a list in place of their paths."""
    if isinstance(ffns, (str, nn.Module)):  # each is a sequence too, of letters or of layers
        got = repr(ffns) if isinstance(ffns, str) else f"a {type(ffns).__name__}"
        raise UserError(f"Expected a list of FFNs in ffns=, or a dict of their maps, got {got}: put it in a list.")
    if isinstance(ffns, Mapping):
        pairs: list[tuple[str, Any]] = list(ffns.items())
    else:
        paths = {id(module): path for path, module in model.named_modules()}
        strange = next((one for one in ffns if isinstance(one, nn.Module) and id(one) not in paths), None)
        if strange is not None:
            raise UserError(f"Expected modules of {name} in ffns=, got a {type(strange).__name__} that is none of its.")
        pairs = [(paths[id(one)] if isinstance(one, nn.Module) else one, None) for one in ffns]
    if not pairs:
        raise UserError("Expected at least one FFN in ffns=, got none: name their paths in the model.")
    return pairs


def _module(name: str, model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UserError(f"Expected a module at {path} in {name}, got nothing there: check ffns=.") from None


def _children(
    name: str, path: str, holder: nn.Module, names: Sequence[str], otherwise: str | None = None
) -> tuple[nn.Linear, ...]:
    """Return an FFN's linear maps. Raises UserError for one that is missing, or is more than a linear map.

    otherwise: what else may be done with a model whose family names the maps, in the sentence; None: the caller does
    """
    maps = []
    for child in names:
        linear = next((module for each, module in holder.named_modules() if each == child), None)
        if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
            kind = type(linear)
            whose = f" of {kind.__module__.partition('.')[0]}" if kind.__name__ == nn.Linear.__name__ else ""
            got = f"a {kind.__name__}{whose} as {child}"
            advice = f"{threshold_ffn.MERGE}{otherwise or ''}; experts and quantised weights the kernels cannot run"
            if linear is None:
                children = ", ".join(each for each, _ in holder.named_children()) or "none"
                got = f"no {child} among its modules ({children})"
                way = "check the names in ffns=" if otherwise is None else f"load it by from_pretrained{otherwise}"
                advice = f"{way}; models with experts cannot be counted"
            elif isinstance(linear, Conv1D):
                advice = f"{EXACT} where the activation is a ReLU"
            raise UserError(
                f"Expected linear maps {', '.join(map(str, names))} in the FFN at {path} of {name}, got {got}: "
                f"{advice}."
            )
        maps.append(linear)
    if len(maps) not in (2, 3):
        raise UserError(f"Expected two or three maps for the FFN at {path} of {name}, got {len(maps)}: check ffns=.")
    return tuple(maps)


def maps_back(name: str, model: Any) -> list[nn.Module]:
    """Return each layer's map back to d_model, for a threshold."""
    layers = decoder_layers(model)
    with evaluating(model):
        threshold_ffn.refuse_unless_causal(name, model)
    return [
        layer.get_submodule(path)
        for layer, path in zip(layers, threshold_ffn.maps_back(name, model, layers, True), strict=True)
    ]


def named_maps(name: str, model: nn.Module, ffns: FFNs) -> list[nn.Module]:
    """Return the last maps of the FFNs that the caller names, for a threshold."""
    maps = []
    for path, given in _items(name, model, ffns):
        if given is None:
            given = _usual_maps(_module(name, model, path)) or ("",)
        names = given.maps if isinstance(given, FFN) else given if not isinstance(given, str) else (given,)
        last = ".".join(filter(None, (path, names[-1])))
        maps.append(_module(name, model, last))
        if not isinstance(maps[-1], (nn.Linear, Conv1D)):
            raise UserError(
                f"Expected a linear map at {last} in {name}, got a {type(maps[-1]).__name__}: with a threshold, name "
                "each FFN's last map."
            )
    return maps


def refuse_shared(name: str, ffns: list[list[Any]]) -> None:
    """Raise UserError where two layers have one FFN or one weight between them: each layer's counts are its own."""
    seen: set[int] = set()
    for maps in ffns:
        for module in maps:
            weight = getattr(module, "weight", None)
            mark = id(module) if weight is None else weight.data_ptr()
            if mark in seen:
                raise UserError(
                    f"Expected weights of its own in each FFN of {name}, got one that two share: such a model cannot "
                    "be counted layer by layer."
                )
            seen.add(mark)


def refuse_widths(name: str, ffns: list[FoundFFN]) -> None:
    """Raise UserError for FFNs of several sizes or dtypes, or of a size that the kernels do not take."""
    shapes = {one.maps[0].weight.shape if one.maps else one.entry.w_gate.shape for one in ffns}
    kinds = {weight.dtype for one in ffns for weight in (each.weight for each in one.maps)}
    if len(shapes) > 1 or len(kinds) > 1:
        several = (" × ".join(map(str, shape)) for shape in shapes) if len(shapes) > 1 else map(str, kinds)
        got = " and ".join(sorted(several))
        raise UserError(f"Expected FFNs of one size and dtype in {name}, got {got}: give those of one by ffns=.")
    refuse_odd_sizes(name, ffns, "count what is above a threshold=0 instead")


def refuse_odd_sizes(name: str, ffns: list[FoundFFN], advice: str) -> None:
    """Raise UserError for an FFN of a size that the kernels do not take. advice: what to do then"""
    for shape in (one.maps[0].weight.shape for one in ffns if one.maps):
        if any(size % 8 for size in shape):
            raise UserError(
                f"Expected FFN sizes in multiples of 8 in {name}, as the kernels take, got "
                f"{' × '.join(map(str, shape))}: {advice}."
            )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run a module without dropout inside this context, and leave each part's mode as it was."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training
