"""Put sparse FFNs in the place of a model object's own, for good.

The idea: what `attach` finds and compares is replaced in place of being covered, so that nothing is left to look at
when the model runs. What a replaced FFN would lose is refused: hooks, code around it, more arguments than its input.
Its input keeps the name that the model's own FFN had for it.

    model = use_sparse_ffns(model)
    model.compile(backend="twell")
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twell.kernels.modules import Probe, SparseFFN
from twell.workbench.errors import UserError
from twell.workbench.models.attach import (
    found_ffns,
    name_of,
    refuse_places,
    refuse_unnamed,
    refusing,
    unwrapped,
    warn_of_another,
)
from twell.workbench.models.comparison import ours
from twell.workbench.models.find_ffns import FFNs, FoundFFN, refuse_odd_sizes
from twell.workbench.option_fields import check_type
from twell.workbench.options import KernelName

TRAIN = "make a model of FFNs with a ReLU, as `twell train --from MODEL --teacher MODEL` does"  # to run it sparse
Model = TypeVar("Model", bound=nn.Module)


def use_sparse_ffns(model: Model, *, ffns: FFNs | None = None, kernel: KernelName = "auto") -> Model:
    """Put sparse FFNs in the place of a model's own, for good, and return the model; outputs stay, to rounding.

    They are for inference, under torch.no_grad(), and do not count; their weights have names of their own, so the model
    cannot be saved. With torch.compile(model, backend="twell") their kernels add the residual too.

    ffns: as in `watch`, for a module of yours; kernel: which FFN kernel runs, as `twell capture --kernel` names it

    Raises UserError for a model whose FFNs the kernels cannot run; it is then as it was.
    """
    inner = unwrapped(model)
    called = name_of(inner)
    check_type("kernel", kernel, KernelName)
    refuse_places(called, inner)
    refuse_unnamed(called, inner, ffns)
    with torch.inference_mode(False), torch.no_grad(), refusing(called):
        found = found_ffns(called, inner, ffns, TRAIN)
        refuse_odd_sizes(called, found, "fill them up with neurons of zeros first")
        for one in found:
            _refuse_wrapped(called, one)
        if any(one.entry is inner for one in found):
            raise UserError(f"Expected FFNs within {called}, got its own path in ffns=: put it into a module first.")
        places: dict[nn.Module, nn.Module] = {}  # what comes into the place of each
        for layer, one in enumerate(found):
            places |= {one.entry: _with_its_name(ours(called, one, layer, kernel, Probe(), TRAIN), one)}
            places |= {module: nn.Identity() for module in one.idle}
        warn_of_another(kernel, [one for one in places.values() if isinstance(one, SparseFFN)])
    for path, module in list(inner.named_modules(remove_duplicate=False)):
        if module in places:
            inner.set_submodule(path, places[module])
    if isinstance(inner, PreTrainedModel):
        inner.save_pretrained = _refuse_saving  # type: ignore[method-assign]
    return model


class NamedInputFFN(SparseFFN):
    """A SparseFFN whose input has another name, too; only where it has, as every call pays for looking."""

    takes: str

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        if self.takes in named:
            named["x"] = named.pop(self.takes)
        return super().forward(*given, **named)


def _with_its_name(ffn: SparseFFN, one: FoundFFN) -> SparseFFN:
    """Have an FFN take its input by the name of the model's own, where that is another. Layers that call the maps one
    by one, with others after the entry, give it by position."""
    name = next(iter(inspect.signature(one.entry.forward).parameters))
    if one.maps and not one.idle and name != "x":
        renamed: Any = ffn
        renamed.__class__, renamed.takes = NamedInputFFN, name
    return ffn


def _refuse_wrapped(name: str, one: FoundFFN) -> None:
    """Raise UserError for an FFN that is more than its code, which a sparse one in its place would not run."""
    for module in (one.entry, *one.maps, *one.idle):
        if one.maps and (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)):
            raise UserError(
                f"Expected FFNs in {name} without hooks and with their class's forward, got others at {one.path}: "
                "first leave the watch, or remove what another library has put there."
            )
    takes = ", ".join(inspect.signature(one.entry.forward).parameters)
    if one.maps and "," in takes:
        raise UserError(
            f"Expected FFNs in {name} that take their input alone, got forward({takes}) at {one.path}: what else they "
            "are given the kernels would not heed."
        )


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise UserError(
        "Expected a model with FFNs of its own to save, got one in which use_sparse_ffns has replaced them: load the "
        "model again, and save that."
    )
