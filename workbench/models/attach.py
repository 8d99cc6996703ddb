"""Have the FFNs of a model object count, and give the model back as it was.

The idea: `load` makes a model of a checkpoint's folder; here the model is there already, and someone else's. Its FFNs
are found by its family, or by the names that the caller gives, and each is compared with ours on a few random inputs
before it is covered (`ffn_slot.py`), so that an FFN which computes something else is refused and never miscounted.

Cost: a pass over the FFN's weights, and one of ROWS rows through each FFN, ours and the model's own.

    with attached(model, tokenizer) as loaded:
        with loaded.probing(Probe(on_stats=lambda layer, x, stats: counts.append(stats.nnz))):
            model(**batch)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from twell.kernels.modules import CountedMap, Probe, SparseFFN
from twell.workbench.errors import UserError, first_line, utf8
from twell.workbench.models import threshold_ffn
from twell.workbench.models.families import ACTIVATIONS, FAMILIES, GATED, PLAIN
from twell.workbench.models.ffn_slot import SLOTS, MapSlot, Slot
from twell.workbench.models.load import CONTEXT, LoadedModel, decoder_layers

ROWS = 8  # random inputs that an FFN is compared on
KNOWN_MAPS = (GATED, ("fc1", "fc2"), PLAIN, ("w1", "w3", "w2"), ("c_fc", "c_proj"))
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of outputs, by their greatest; of 16-bit types 3e-2
SAMPLED = 64  # numbers of each parameter that identify the weights


@dataclass(frozen=True)
class FFN:
    """What an FFN of a module of yours computes, for `ffns=`.

    maps: names of its linear maps within it: gate, up, down, or of a plain FFN in, out; with a threshold the last alone
    activation: relu | relu2, on the gate; up_relu: whether the up branch has a ReLU too
    """

    maps: tuple[str, ...]
    activation: str = "relu"
    up_relu: bool = False


FFNs = Mapping[str, FFN | Sequence[str] | str] | Sequence[str]


@dataclass(frozen=True)
class AttachedModel(LoadedModel):
    """A model object whose FFNs count for a while. `model` is any torch module."""

    slots: tuple[Slot | MapSlot, ...] = ()

    @property
    def is_transformers(self) -> bool:
        return isinstance(self.model, PreTrainedModel)

    @property
    def body(self) -> nn.Module:
        return self.model.get_decoder() if self.is_transformers else self.model

    @property
    def blocks(self) -> list[nn.Module]:
        return decoder_layers(self.model) if self.is_transformers else []

    @property
    def context(self) -> int:
        return super().context if self.is_transformers else CONTEXT

    @property
    def vocab_size(self) -> int:
        return super().vocab_size if self.is_transformers else 0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> str:
        weights: Any = self.ffns[0].w_gate if self.ffns else next(self.model.parameters())
        return str(weights.dtype).removeprefix("torch.")


@contextmanager
def attached(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    ffns: FFNs | None = None,
    threshold: float | None = None,
    kernel: str = "auto",
    name: str | None = None,
) -> Iterator[AttachedModel]:
    """Have a model's FFNs count inside this context; outputs are unchanged.

    model: a causal language model of transformers, or with `ffns` any module; the FFNs' paths in it, each with its FFN,
    or the names of its maps
    threshold, kernel: as in `load`; name: what the model is called in a run, default its folder's or its class's name

    Raises UserError for a model whose FFNs cannot be counted; it is then as it was.
    """
    inner = unwrapped(model)
    called = utf8(name or getattr(inner, "name_or_path", "").rstrip("/").rpartition("/")[2] or type(inner).__name__)
    _refuse(called, inner)
    slots: list[Slot | MapSlot] = []
    try:
        with torch.inference_mode(False), torch.no_grad():
            try:
                for slot in _slots(called, inner, ffns, threshold, kernel, Probe()):
                    slots.append(slot)  # one by one, so that those before a refused one are given back  # noqa: PERF402
            except ValueError as error:
                raise UserError(f"{called} cannot run: {first_line(error)}.") from None
            loaded = _loaded(called, inner, tokenizer, kernel, threshold, tuple(slots))
        yield loaded
    finally:
        for slot in reversed(slots):
            slot.remove()


def unwrapped(model: Any) -> nn.Module:
    """Return the module inside what torch.compile, data parallelism or adapters put around it."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"Expected a torch module, or a model of transformers, got a {type(model).__name__}: load the model first."
        )
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "get_base_model") and not isinstance(model, PreTrainedModel):
            model = model.get_base_model()
        else:
            return model


def _refuse(name: str, model: Any) -> None:
    """Raise UserError for a model that is nowhere, in several places, or quantised."""
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(places) != 1 or places[0] == "meta":
        raise UserError(
            f"Expected {name} on one device, got {' and '.join(places) or 'no parameters'}: move it to one first."
        )
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise UserError(
            f"Expected weights in floating point in {name}, got quantised ones: load it in bfloat16, float16 or float32."
        )


def _slots(
    name: str, model: Any, ffns: FFNs | None, threshold: float | None, kernel: str, probe: Probe
) -> Iterator[Slot | MapSlot]:
    """Find the FFNs, check and cover them, one after another; all are found before the first is covered."""
    if ffns is None and not isinstance(model, PreTrainedModel):
        raise UserError(
            f"Expected ffns= for {name}, which is no model of transformers: name its FFNs, as in "
            'ffns={"blocks.0.mlp": ("gate_proj", "up_proj", "down_proj")}.'
        )
    if threshold is not None:
        maps = _maps_back(name, model) if ffns is None else _named_maps(name, model, ffns)
        _refuse_shared(name, [[down] for down in maps])
        for layer, down in enumerate(maps):
            yield MapSlot(_counted(down, threshold, layer, probe), down)
        return
    found = _of_family(name, model) if ffns is None else _named(name, model, ffns)
    _refuse_shared(name, [list(one.maps) or [one.entry] for one in found])
    _refuse_widths(name, found)
    for layer, one in enumerate(found):
        yield _covered(name, one, layer, kernel, probe)


@dataclass(frozen=True)
class _Found:
    """An FFN in the model: its path, the module that is called, its maps, what runs after the entry, what it computes."""

    path: str
    entry: Any
    maps: tuple[Any, ...]
    idle: tuple[Any, ...]
    activation: str
    up_relu: bool | None  # None: to be found out


def _of_family(name: str, model: Any) -> list[_Found]:
    """Return the FFNs of a model of a family that the kernels run."""
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    layers = decoder_layers(model)
    if family is None or not layers:
        raise UserError(
            f"Expected a model of model_type {', '.join(FAMILIES)} with ReLU, got {config.model_type} in {name}: count "
            "what is above a threshold=, such as 0.01, or name its FFNs with ffns=."
        )
    activation = getattr(config, family.act, None)
    if activation not in ACTIVATIONS:
        raise UserError(
            f"Expected a ReLU in the FFNs of {name}, got {family.act} {activation!r}, which has no zeros to count: count "
            "what is above a threshold=, such as 0.01."
        )
    found = []
    for number, layer in enumerate(layers):
        holder = getattr(layer, family.holder) if family.holder else layer
        path = f"layer {number}"
        entry = holder if family.holder else getattr(layer, family.maps[0])
        if isinstance(entry, SparseFFN):  # of a model that `load` made
            found.append(_Found(path, entry, (), (), entry.activation, entry.up_relu))
            continue
        maps = _children(name, path, holder, family.maps if hasattr(holder, family.maps[0]) else PLAIN)
        idle = () if family.holder else (layer.activation_fn, maps[-1])
        found.append(_Found(path, entry, maps, idle, ACTIVATIONS[activation], None))
    return found


def _named(name: str, model: nn.Module, ffns: FFNs) -> list[_Found]:
    """Return the FFNs that the caller names, in that order."""
    found = []
    for path, given in _items(ffns):
        entry = _module(name, model, path)
        if given is None:
            known = next((maps for maps in KNOWN_MAPS if all(hasattr(entry, one) for one in maps)), None)
            if known is None:
                raise UserError(
                    f"Expected maps of a known name in {path} of {name}, got "
                    f"{', '.join(child for child, _ in entry.named_children()) or 'none'}: name them, as in "
                    f'ffns={{"{path}": ("gate", "up", "down")}}.'
                )
            given = known
        ffn = given if isinstance(given, FFN) else FFN(tuple(given.split() if isinstance(given, str) else given))
        up_relu = True if ffn.up_relu else None
        found.append(_Found(path, entry, _children(name, path, entry, ffn.maps), (), ffn.activation, up_relu))
    return found


def _items(ffns: FFNs) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = list(ffns.items()) if isinstance(ffns, Mapping) else [(path, None) for path in ffns]
    if not pairs:
        raise UserError("Expected at least one FFN in ffns=, got none: name their paths in the model.")
    return pairs


def _module(name: str, model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UserError(f"Expected a module at {path} in {name}, got nothing there: check ffns=.") from None


def _children(name: str, path: str, holder: nn.Module, names: Sequence[str]) -> tuple[nn.Linear, ...]:
    """Return an FFN's linear maps. Raises UserError for one that is missing, or is more than a linear map."""
    maps = []
    for child in names:
        found = next((module for each, module in holder.named_modules() if each == child), None)
        if type(found) is not nn.Linear or not found.weight.is_floating_point():
            got = "nothing" if found is None else f"a {type(found).__name__}"
            raise UserError(
                f"Expected linear maps {', '.join(names)} in the FFN at {path} of {name}, got {got} as {child}: models "
                "with experts, adapters or quantised weights cannot be counted; merge adapters first."
            )
        maps.append(found)
    if len(maps) not in (2, 3):
        raise UserError(f"Expected two or three maps for the FFN at {path} of {name}, got {len(maps)}: check ffns=.")
    return tuple(maps)


def _maps_back(name: str, model: Any) -> list[nn.Module]:
    """Return each layer's map back to d_model, for a threshold."""
    layers = decoder_layers(model)
    with evaluating(model):
        threshold_ffn.refuse_unless_causal(name, model)
    return [
        layer.get_submodule(path) for layer, path in zip(layers, threshold_ffn.maps_back(name, model, layers), strict=True)
    ]


def _named_maps(name: str, model: nn.Module, ffns: FFNs) -> list[nn.Module]:
    """Return the last maps of the FFNs that the caller names, for a threshold."""
    maps = []
    for path, given in _items(ffns):
        names = given.maps if isinstance(given, FFN) else (given or ("",)) if not isinstance(given, str) else (given,)
        last = f"{path}.{names[-1]}" if names[-1] else path
        maps.append(_module(name, model, last))
        if not isinstance(maps[-1], (nn.Linear, Conv1D)):
            raise UserError(
                f"Expected a linear map at {last} in {name}, got a {type(maps[-1]).__name__}: with a threshold, name "
                "each FFN's last map."
            )
    return maps


def _counted(down: nn.Module, threshold: float, layer: int, probe: Probe) -> CountedMap:
    d_ff, d_model = threshold_ffn.sizes(down)
    return CountedMap(nn.Identity(), d_model, d_ff, threshold=threshold, layer=layer, probe=probe)


def _refuse_shared(name: str, ffns: list[list[Any]]) -> None:
    """Raise UserError where two layers have one FFN or one weight between them: each layer's counts are its own."""
    seen: set[int] = set()
    for maps in ffns:
        for module in maps:
            weight = getattr(module, "weight", None)
            mark = id(module) if weight is None else weight.data_ptr()
            if mark in seen:
                raise UserError(
                    f"Expected weights of its own in each FFN of {name}, got one that two share: such a model cannot be "
                    "counted layer by layer."
                )
            seen.add(mark)


def _refuse_widths(name: str, found: list[_Found]) -> None:
    """Raise UserError for FFNs of several sizes or dtypes, or of a size that the kernels do not take."""
    shapes = {one.maps[0].weight.shape if one.maps else one.entry.w_gate.shape for one in found}
    kinds = {weight.dtype for one in found for weight in (each.weight for each in one.maps)}
    if len(shapes) > 1 or len(kinds) > 1:
        raise UserError(f"Expected FFNs of one size and dtype in {name}, got several: watch some of them with ffns=.")
    if any(size % 8 for size in next(iter(shapes))):
        raise UserError(
            f"Expected FFN sizes in multiples of 8 in {name}, as the kernels take, got "
            f"{' × '.join(map(str, next(iter(shapes))))}: count what is above a threshold=0 instead."
        )


def _covered(name: str, one: _Found, layer: int, kernel: str, probe: Probe) -> Slot:
    """Make our FFN on the weights of one that was found, compare the two, and cover it."""
    if any(slot.entry is one.entry for slot in SLOTS.values() if isinstance(slot, Slot)):
        raise UserError(f"Expected a model that is not watched yet, {name} is: leave the first watch before the next.")
    if not one.maps:
        return Slot(one.entry, one.entry, (), (), probe)
    make = SparseFFN.gated if len(one.maps) == 3 else SparseFFN.plain
    own = _own_outputs(one)
    for up_relu in (False, True) if one.up_relu is None and len(one.maps) == 3 else (bool(one.up_relu),):
        given = {"up_relu": up_relu} if len(one.maps) == 3 else {}
        ffn = make(*one.maps, layer=layer, kernel=kernel, probe=Probe(), activation=one.activation, **given)
        if _agrees(ffn(own[0]), own[1]):
            return Slot(ffn, one.entry, one.maps, one.idle, probe)
    raise UserError(
        f"Expected the FFN at {one.path} of {name} to compute {'down(act(gate) * up)' if len(one.maps) == 3 else 'out(act(in))'} "
        f"with {one.activation}, got other outputs on the same inputs: name what it computes with ffns=, or count what "
        "is above a threshold=."
    )


def _own_outputs(one: _Found) -> tuple[Tensor, Tensor]:
    """Return random inputs, and what the model's own FFN makes of them; no generator of torch is moved on."""
    weight = one.maps[0].weight
    x = torch.randn(1, ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    with evaluating(one.entry), torch.autocast(weight.device.type, enabled=False):
        y = one.entry.forward(x)
        for module in one.idle:
            y = module.forward(y)
    return x, y


def _agrees(ours: Tensor, own: Any) -> bool:
    if not isinstance(own, Tensor) or own.shape != ours.shape:
        return False
    most = TOLERANCE.get(own.dtype, 3e-2) * float(own.float().abs().max())
    return bool((ours.float() - own.float()).abs().max() <= most)


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


def _loaded(
    name: str,
    model: Any,
    tokenizer: PreTrainedTokenizerFast | None,
    kernel: str,
    threshold: float | None,
    slots: tuple[Slot | MapSlot, ...],
) -> AttachedModel:
    ffns = tuple(slot.ffn for slot in slots if isinstance(slot, Slot))
    watched = tuple(slot.counted for slot in slots if isinstance(slot, MapSlot))
    is_transformers = isinstance(model, PreTrainedModel)
    family = str(model.config.get_text_config().model_type) if is_transformers else type(model).__name__
    head_is_all = is_transformers
    if is_transformers and threshold is not None:
        with evaluating(model):
            head_is_all = threshold_ffn.head_is_all(model)
    given: Any = tokenizer  # None: without text
    return AttachedModel(
        name, None, model, given, family, ffns, watched, kernel, fingerprint(model), head_is_all, slots
    )  # fmt: skip


def fingerprint(model: nn.Module) -> str:
    """Return a sha256 over each parameter's name, shape and some of its numbers: equal weights have the same one."""
    digest, pieces = hashlib.sha256(), []
    for path, parameter in model.named_parameters():
        digest.update(f"{path} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        flat = parameter.detach().reshape(-1)
        pieces.append(flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].double())
    digest.update(torch.cat(pieces).cpu().numpy().tobytes())
    return "object:" + digest.hexdigest()
