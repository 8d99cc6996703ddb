"""Count any FFN by a threshold: find its map back to d_model, and watch the map as the model runs it.

The idea: families differ in what an FFN computes, and hardly in how it ends: of a decoder layer's linear maps outside
attention, only one leads from another width to d_model, and its input is the hidden values. A layer with several such
maps, or none, is refused. So is a model whose tokens see later ones, because sequences are padded at their ends; this
is checked by running the model on a few tokens.

Cost: a forward pass of 16 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from twell.kernels.modules import CountedMap, Probe
from twell.workbench.errors import UserError

TOKENS = 8  # of a sequence that is tried
MERGE = "merge adapters first, as PEFT's merge_and_unload() does"
ADAPTED = ".base_layer"  # a map beside which an adapter runs on the same input, as PEFT names it


def watch(
    name: str, model: PreTrainedModel, blocks: list[nn.Module], threshold: float, probe: Probe
) -> tuple[CountedMap, ...]:
    """Replace each layer's map back by one that counts. Raises UserError where a layer has none, or several."""
    counted: list[CountedMap] = []
    d_model = int(model.config.get_text_config().hidden_size)
    for layer, (block, path) in enumerate(zip(blocks, maps_back(name, model, blocks), strict=True)):
        holder, _, last = path.rpartition(".")
        down = block.get_submodule(path)
        counted.append(CountedMap(down, d_model, sizes(down)[0], threshold=threshold, layer=layer, probe=probe))
        setattr(block.get_submodule(holder), last, counted[-1])
    return tuple(counted)


def maps_back(name: str, model: PreTrainedModel, blocks: list[nn.Module], beside_adapters: bool = False) -> list[str]:
    """Return the path of each layer's map back. Raises UserError where a layer has none, or several.

    beside_adapters: also of one that an adapter runs beside, for who reads what goes into it and changes nothing
    """
    d_model = int(model.config.get_text_config().hidden_size)
    paths = []
    for layer, block in enumerate(blocks):
        back = [path for path, module in block.named_modules() if _leads_back(path, module, d_model)]
        adapters = tuple(path.removesuffix(ADAPTED) + "." for path in back if path.endswith(ADAPTED))
        if adapters and not beside_adapters:
            raise adapted(name, layer)
        back = [path for path in back if path.endswith(ADAPTED) or not path.startswith(adapters)]
        attends = any("att" in path for path, _ in block.named_modules())
        if len(back) != 1 or not attends:
            got = f"{len(back)} maps back from one" if attends else "no attention"
            raise _refusal(name, model, f"{got} in layer {layer}")
        paths += back
    widths = sorted({sizes(block.get_submodule(path))[0] for block, path in zip(blocks, paths, strict=True)})
    if len(widths) != 1:
        raise _refusal(name, model, f"FFNs of {' and '.join(map(str, widths))} neurons" if widths else "no such layers")
    return paths


def _leads_back(path: str, module: nn.Module, d_model: int) -> bool:
    """Return whether a module is a linear map from another width to d_model, outside attention. path: its name."""
    width, out = sizes(module)
    return out == d_model and width != d_model and "att" not in path


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return a linear map's input and output width; 0, 0 for other modules."""
    if isinstance(module, Conv1D):
        return int(module.nx), int(module.nf)
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (0, 0)


def ffn_parameters(blocks: list[nn.Module]) -> int:
    """Return how many numbers stand in the FFNs' matrices of decoder layers: in linear maps outside attention."""
    maps = [one for block in blocks for path, one in block.named_modules() if "att" not in path and any(sizes(one))]
    return sum(weight.numel() for one in maps for weight in one.parameters() if weight.dim() > 1)


def adapted(name: str, layer: int) -> UserError:
    """Return the refusal of an FFN whose map back is more than a linear map."""
    return UserError(f"Expected FFNs without adapters in {name}, got one in layer {layer}: {MERGE}.")


def _refusal(name: str, model: PreTrainedModel, got: str) -> UserError:
    return UserError(
        f"Expected decoder layers of attention and one FFN in {name}, all of one width, got {got} (model_type "
        f"{model.config.model_type}): models with experts, for one, cannot be counted."
    )


@torch.inference_mode()
def refuse_unless_causal(name: str, model: Any) -> None:
    """Raise UserError for a model in which a token changes the outputs of earlier tokens."""
    ids = torch.arange(2 * TOKENS, device=model.device).view(2, TOKENS) % TOKENS
    ids[1, -1] = 0
    one, other = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].float()
    if not torch.allclose(one, other, rtol=0, atol=1e-2 * float(one.abs().max())):
        raise UserError(
            f"Expected a causal model in {name}, got one whose tokens see later ones (model_type "
            f"{model.config.model_type}): it is no language model that predicts the next token."
        )


@torch.inference_mode()
def head_is_all(model: Any) -> bool:
    """Return whether logits are the head's product with the last hidden state and nothing else."""
    if model.get_output_embeddings() is None:
        return False
    ids = torch.arange(TOKENS, device=model.device)[None]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = model.get_output_embeddings()(hidden).float(), model(input_ids=ids, use_cache=False).logits.float()
    return bool((ours - theirs).abs().max() <= 8 * torch.finfo(model.dtype).eps * theirs.abs().max())
