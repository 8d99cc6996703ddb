"""Have the FFNs of a model object count, and give the model back as it was.

The idea: `load` makes a model of a checkpoint's folder; here the model is there already, and someone else's. Its FFNs
are found by its family, or by the names that the caller gives, and each is compared with ours on a few random inputs
before it is covered (`slots/`) or replaced (`replace.py`). So an FFN that computes something else is
refused and never miscounted.

Cost: a pass over the FFN's weights, and one of a few rows through each FFN, ours and the model's own.

    with attached(model, tokenizer) as loaded:
        with loaded.probing(Probe(on_stats=lambda layer, x, stats: counts.append(stats.nnz))):
            model(**batch)
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from twell.kernels.dispatch import Choice
from twell.kernels.modules import CountedMap, Probe, SparseFFN
from twell.workbench.errors import UserError, first_line, utf8
from twell.workbench.models import threshold_ffn
from twell.workbench.models.comparison import ours
from twell.workbench.models.find_ffns import (
    COUNT,
    FFNs,
    FoundFFN,
    evaluating,
    maps_back,
    named,
    named_maps,
    of_family,
    refuse_shared,
    refuse_widths,
)
from twell.workbench.models.load import CONTEXT, LoadedModel
from twell.workbench.models.sizes import decoder_layers, refuse_own_widths
from twell.workbench.models.slots.ffn_slot import SLOTS, MapSlot, Slot

# What runs densely, as a manifest names it. The name is PyTorch's, whose products it is made of.
OWN_CODE = Choice("torch", "the model's own code runs; its firings are counted beside it")
SAMPLED = 64  # numbers of each parameter that identify the weights


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
    def runs_own_code(self) -> bool:
        """Whether hooks or code of others are in an FFN, so that it runs as it is, and is counted."""
        return any(isinstance(slot, Slot) and slot.is_altered() for slot in self.slots)

    def choice(self, rows: int) -> Choice:
        return OWN_CODE if self.runs_own_code else super().choice(rows)

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
    called = utf8(name) if name else name_of(inner)
    refuse_places(called, inner)
    slots: list[Slot | MapSlot] = []
    try:
        with torch.inference_mode(False), torch.no_grad():
            with refusing(called):
                for slot in _slots(called, inner, ffns, threshold, kernel, Probe()):
                    slots.append(slot)  # one by one, so that those before a refused one are given back
            loaded = _loaded(called, inner, tokenizer, kernel, threshold, tuple(slots))
        yield loaded
    finally:
        for slot in reversed(slots):
            slot.remove()


def warn_of_another(kernel: str, ffns: Sequence[SparseFFN]) -> None:
    """Warn where a kernel that was asked for by name gives way to another."""
    if kernel != "auto" and ffns and (choice := ffns[0].choice(1)).kernel != kernel:
        warnings.warn(f"kernel={kernel!r} gives way to {choice.kernel}: {choice.reason}", stacklevel=3)


def name_of(model: nn.Module) -> str:
    """Return what a model is called: its folder's, or its class's name."""
    return utf8(getattr(model, "name_or_path", "").rstrip("/").rpartition("/")[2] or type(model).__name__)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn what a kernel or a model's own code raises into a UserError."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError, AssertionError, AttributeError, LookupError) as error:
        raise UserError(f"{name} cannot run: {first_line(error)}.") from None


def unwrapped(model: Any) -> nn.Module:
    """Return the module inside what torch.compile, data parallelism or adapters put around it."""
    if not isinstance(model, nn.Module):
        held = attribute_of(model, nn.Module)
        way = f"give what it holds as .{held}" if held else "load the model first"
        raise UserError(f"Expected a torch module, or a model of transformers, got a {type(model).__name__}: {way}.")
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        elif hasattr(inner, "get_base_model") and not isinstance(inner, PreTrainedModel):
            inner = inner.get_base_model()
        else:
            return inner


def refuse_places(name: str, model: Any) -> None:
    """Raise UserError for a model that is nowhere, in several places, or quantised."""
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(places) != 1 or places[0] == "meta":
        raise UserError(
            f"Expected {name} on one device, got {' and '.join(places) or 'no parameters'}: load all of it onto one, "
            'as device_map="cpu" or "cuda:0" does.'
        )
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise UserError(
            f"Expected weights in floating point in {name}, got quantised ones: load it in bfloat16, float16 or "
            "float32."
        )


def _slots(
    name: str, model: Any, ffns: FFNs | None, threshold: float | None, kernel: str, probe: Probe
) -> Iterator[Slot | MapSlot]:
    """Find the FFNs, check and cover them, one after another; all are found before the first is covered."""
    refuse_unnamed(name, model, ffns)
    if ffns is None:
        refuse_own_widths(name, model)
    if threshold is not None:
        maps = maps_back(name, model) if ffns is None else named_maps(name, model, ffns)
        refuse_shared(name, [[down] for down in maps])
        for layer, down in enumerate(maps):
            yield MapSlot(_counted(down, threshold, layer, probe), down)
        return
    all_ffns = found_ffns(name, model, ffns)
    refuse_shared(name, [list(one.maps) or [one.entry] for one in all_ffns])
    refuse_widths(name, all_ffns)
    for layer, one in enumerate(all_ffns):
        ffn = ours(name, one, layer, kernel, Probe())
        yield Slot(ffn, one.entry, one.maps, one.idle, probe)


def _counted(down: nn.Module, threshold: float, layer: int, probe: Probe) -> CountedMap:
    d_ff, d_model = threshold_ffn.sizes(down)
    return CountedMap(nn.Identity(), d_model, d_ff, threshold=threshold, layer=layer, probe=probe)


def found_ffns(name: str, model: Any, ffns: FFNs | None, advice: str = COUNT) -> list[FoundFFN]:
    """Find a model's FFNs. Raises UserError for one that is covered already."""
    found = of_family(name, model, advice=advice) if ffns is None else named(name, model, ffns)
    covered = {slot.entry for slot in SLOTS.values() if isinstance(slot, Slot)}
    if any(one.entry in covered for one in found):
        raise UserError(f"Expected a model that is not watched yet, {name} is: leave the first watch before the next.")
    return found


def refuse_unnamed(name: str, model: nn.Module, ffns: FFNs | None) -> None:
    """Raise UserError for a module that is no model of transformers and whose FFNs the caller does not name."""
    if ffns is None and not isinstance(model, PreTrainedModel):
        if inside := path_inside(model):
            kind = type(model).__name__
            raise UserError(
                f"Expected a model of transformers, or ffns=, got a {kind} around one: give what it holds as .{inside},"
                f" and call the {kind} as before."
            )
        raise UserError(
            f"Expected ffns= for {name}, which is no model of transformers: name its FFNs, as in "
            'ffns={"blocks.0.mlp": ("gate_proj", "up_proj", "down_proj")}.'
        )


def path_inside(model: nn.Module) -> str:
    """Return the path of the model of transformers that a module of the caller's holds, or "" if it holds none."""
    paths = (path for path, one in model.named_modules() if isinstance(one, PreTrainedModel))
    return next(paths, "") or attribute_of(model, PreTrainedModel)


def attribute_of(holder: Any, kind: type[nn.Module]) -> str:
    """Return the name of an object's attribute that is a module of a kind, the public one of two; "" without one."""
    held = [(name, one) for name, one in getattr(holder, "__dict__", {}).items() if isinstance(one, kind)]
    for name, one in held:
        public = name.lstrip("_")
        return public if inspect.getattr_static(type(holder), public, None) and getattr(holder, public) is one else name
    return ""


def _loaded(
    name: str,
    model: Any,
    tokenizer: PreTrainedTokenizerFast | None,
    kernel: str,
    threshold: float | None,
    slots: tuple[Slot | MapSlot, ...],
) -> AttachedModel:
    ffns = tuple(slot.ffn for slot in slots if isinstance(slot, Slot))
    warn_of_another(kernel, ffns)
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
