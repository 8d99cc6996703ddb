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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from twell.kernels.modules import CountedMap, Probe, SparseFFN
from twell.workbench.errors import UserError, first_line, utf8
from twell.workbench.models import threshold_ffn
from twell.workbench.models.ffn_slot import SLOTS, MapSlot, Slot
from twell.workbench.models.find_ffns import (
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

ROWS = 8  # random inputs that an FFN is compared on
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of outputs, by their greatest; of 16-bit types 3e-2
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
                    slots.append(slot)  # one by one, so that those before a refused one are given back
            except (ValueError, RuntimeError, TypeError) as error:
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


def _refuse(name: str, model: Any) -> None:
    """Raise UserError for a model that is nowhere, in several places, or quantised."""
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(places) != 1 or places[0] == "meta":
        raise UserError(
            f"Expected {name} on one device, got {' and '.join(places) or 'no parameters'}: move it to one first."
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
    if ffns is None and not isinstance(model, PreTrainedModel):
        raise UserError(
            f"Expected ffns= for {name}, which is no model of transformers: name its FFNs, as in "
            'ffns={"blocks.0.mlp": ("gate_proj", "up_proj", "down_proj")}.'
        )
    if ffns is None:
        refuse_own_widths(name, model)
    if threshold is not None:
        maps = maps_back(name, model) if ffns is None else named_maps(name, model, ffns)
        refuse_shared(name, [[down] for down in maps])
        for layer, down in enumerate(maps):
            yield MapSlot(_counted(down, threshold, layer, probe), down)
        return
    all_ffns = of_family(name, model) if ffns is None else named(name, model, ffns)
    refuse_shared(name, [list(one.maps) or [one.entry] for one in all_ffns])
    refuse_widths(name, all_ffns)
    for layer, one in enumerate(all_ffns):
        yield _covered(name, one, layer, kernel, probe)


def _counted(down: nn.Module, threshold: float, layer: int, probe: Probe) -> CountedMap:
    d_ff, d_model = threshold_ffn.sizes(down)
    return CountedMap(nn.Identity(), d_model, d_ff, threshold=threshold, layer=layer, probe=probe)


def _covered(name: str, one: FoundFFN, layer: int, kernel: str, probe: Probe) -> Slot:
    """Make our FFN on the weights of one that was found, compare the two, and cover it."""
    if any(slot.entry is one.entry for slot in SLOTS.values() if isinstance(slot, Slot)):
        raise UserError(f"Expected a model that is not watched yet, {name} is: leave the first watch before the next.")
    if not one.maps:
        return Slot(one.entry, one.entry, (), (), probe)
    make = SparseFFN.gated if len(one.maps) == 3 else SparseFFN.plain
    own = _own_outputs(one)
    for up_relu in (False, True) if one.up_relu is None and len(one.maps) == 3 else (bool(one.up_relu),):
        given: dict[str, Any] = {"up_relu": up_relu} if len(one.maps) == 3 else {}
        ffn = make(*one.maps, layer=layer, kernel=kernel, probe=Probe(), activation=one.activation, **given)
        if _agrees(ffn(own[0]), own[1]):
            return Slot(ffn, one.entry, one.maps, one.idle, probe)
    formula = "down(act(gate) * up)" if len(one.maps) == 3 else "out(act(in))"
    raise UserError(
        f"Expected the FFN at {one.path} of {name} to compute {formula} with {one.activation}, got other outputs on "
        "the same inputs: name what it computes with ffns=, or count what is above a threshold=."
    )


def _own_outputs(one: FoundFFN) -> tuple[Tensor, Tensor]:
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
