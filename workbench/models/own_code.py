"""Run a model by its own dense code, with each FFN's map back to d_model at hand.

The idea: what is done to an FFN's hidden values is done at the entrance of its last linear map, which every decoder
layer has. For the families that the kernels run the map is found by name, for all others by its shape.

    own = open_own("builtin:demo", device="cpu")
    own.downs[3]  # the map back of layer 3, a linear map of transformers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from twell.kernels.modules import SparseFFN
from twell.workbench.devices import pick_device
from twell.workbench.errors import UserError
from twell.workbench.models import threshold_ffn, weights
from twell.workbench.models.checkpoint import Checkpoint, find, fingerprint, understood
from twell.workbench.models.families import FAMILIES, PLAIN
from twell.workbench.models.sizes import decoder_layers, own_sizes
from twell.workbench.run.homes.model_home import model_home
from twell.workbench.run.store import Run


@dataclass(frozen=True)
class OwnModel:
    """A model of transformers that runs by its own code.

    name, weights: as in `LoadedModel`; checkpoint: its files, None for a model object; downs: the map back of each
    layer; has_zeros: whether its activation is a ReLU, whose zeros are neurons that do not fire
    """

    name: str
    model: Any
    weights: str
    checkpoint: Checkpoint | None
    downs: tuple[nn.Module, ...]
    has_zeros: bool

    @property
    def layers(self) -> int:
        return len(self.downs)

    @property
    def d_ff(self) -> int:
        return threshold_ffn.sizes(self.downs[0])[0]

    @property
    def widths(self) -> list[int]:
        """How many neurons each layer has, without those of zeros that fill it up."""
        return own_sizes(self.model)[0] or [self.d_ff] * self.layers

    @property
    def blocks(self) -> list[nn.Module]:
        return decoder_layers(self.model)

    @property
    def body(self) -> Callable[..., Any]:
        """The network below the head."""
        body: Callable[..., Any] = self.model.get_decoder()
        return body

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device


def open_own(
    model: str, revision: str | None = None, device: str = "auto", dtype: torch.dtype | None = None
) -> OwnModel:
    """Load a checkpoint of any family with one FFN a layer, by its own code.

    model, revision, device, dtype: as in `load`. Raises UserError for a model that cannot be read.
    """
    torch_device = pick_device(device)
    folder, name, revision = find(model, revision, 0.0)
    checkpoint = understood(folder, name, 0.0)
    if dtype is None:
        stored = checkpoint.config.dtype
        dtype = stored if torch_device.type == "cuda" and isinstance(stored, torch.dtype) else torch.float32
    network: Any = weights.read(checkpoint, dtype)
    network.to(torch_device)
    return _own(name, network, fingerprint(folder), checkpoint)


def own_of(name: str, model: Any, weights: str = "") -> OwnModel:
    """Describe a model object of transformers. Raises UserError for one whose FFNs cannot be found."""
    return _own(name, model, weights, None)


def _own(name: str, model: Any, sha256: str, checkpoint: Checkpoint | None) -> OwnModel:
    threshold_ffn.refuse_unless_causal(name, model)
    if not threshold_ffn.head_is_all(model):
        raise UserError(
            f"Expected logits that are the head's product with the last hidden state, got others in {name}, as by a "
            "cap or a scale: its loss cannot be computed here."
        )
    downs = maps_back(name, model)
    for layer, down in enumerate(downs):
        if not any(threshold_ffn.sizes(down)):  # what an adapter adds would be missing under every condition
            raise threshold_ffn.adapted(name, layer)
    return OwnModel(name, model, sha256, checkpoint, tuple(downs), has_zeros(model))


def maps_back(name: str, model: Any) -> list[nn.Module]:
    """Return each layer's map back to d_model. Raises UserError where a layer has none, or several."""
    layers = decoder_layers(model)
    family = FAMILIES.get(model.config.get_text_config().model_type)
    if family is None or not layers:
        paths = threshold_ffn.maps_back(name, model, layers)
        return [layer.get_submodule(path) for layer, path in zip(layers, paths, strict=True)]
    downs = []
    for layer in layers:
        holder: Any = getattr(layer, family.holder) if family.holder else layer
        if isinstance(holder, SparseFFN) or not isinstance(getattr(holder, family.maps[-1], None), nn.Module):
            raise UserError(
                f"Expected {name} as transformers makes it, got FFNs that were replaced: load it by from_pretrained."
            )
        downs.append(getattr(holder, family.maps[-1] if hasattr(holder, family.maps[-1]) else PLAIN[-1]))
    return downs


def has_zeros(model: Any) -> bool:
    """Return whether a model's activation is 0 for negative numbers, so that neurons fire or do not."""
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    fields = ("hidden_act", "activation_function", "hidden_activation") if family is None else (family.act,)
    named = next((value for field in fields if isinstance(value := getattr(config, field, None), str)), "")
    return named in ACT2FN and float(ACT2FN[named](torch.full((1,), -1.0))) == 0


def unread_table_rows(model: Any) -> int:
    """Return how many numbers of its tables a model does not read for a token: all rows but one of each embedding.

    A table that the head is tied to is read whole.
    """
    head = model.get_output_embeddings().weight
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head}
    return sum(table[1:].numel() for table in tables)


def masked_map(down: nn.Module, hidden: Tensor, keep: Tensor | None) -> Tensor:
    """Return what a map back gives for hidden [..., d_ff] with some neurons at 0.

    keep: bool [d_ff]; None: no neuron is kept
    """
    given: Any = down
    transposed = isinstance(down, Conv1D)
    bias = given.bias
    if keep is None:
        y = hidden.new_zeros((*hidden.shape[:-1], threshold_ffn.sizes(down)[1]))
        return y if bias is None else y + bias
    weight = given.weight.t() if transposed else given.weight
    return nn.functional.linear(hidden, weight * keep, bias)


def where_of(run: Run, given: str | None) -> tuple[str, str | None]:
    """Return the folder or name of the model that a run was recorded with, and its revision.

    given: the folder that the caller names, if any. Raises UserError where this machine remembers none.
    """
    manifest = run.manifest
    name, revision = str(manifest.model["name"]), manifest.model["revision"]
    packaged = Path(str(files("twell.data"))) / name
    place = given or model_home(manifest) or (str(packaged) if packaged.is_dir() else name)
    if not given and revision is None and not Path(place).is_dir():  # no model of the hub
        raise UserError(
            f"Expected to find the model {name} that {run.path} was recorded with, but this machine remembers no "
            "folder with its weights: give it by --model."
        )
    return place, revision if not Path(place).is_dir() else None


def refuse_other_weights(run: Run, weights: str, name: str) -> None:
    """Raise UserError for weights that a run was not recorded with."""
    if "weights" in run.manifest.model and run.manifest.model["weights"] != weights:
        raise UserError(
            f"Expected the weights that {run.path} was recorded with, got others in {name}: give "
            "the folder of that model."
        )
