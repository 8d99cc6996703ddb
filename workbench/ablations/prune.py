"""`twell prune`: a smaller checkpoint, without the neurons that never fired on a run's text.

The idea: a neuron whose hidden value is 0 on every token adds nothing to the FFN's output, so its row of the first maps
and its column of the map back can go, and logits on that text stay what they were. Plain transformers has one width for
all layers: the widest that any layer needs, in multiples of 8; layers that need less keep their busiest others.

A run leaves first and special tokens out of its counts of neurons. So the text is read again by the model's own code,
every token of it, and logits are compared on it afterwards. Cost: three forward passes over the text.

    twell prune path/to/model runs/mine --out models/smaller
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoTokenizer

from twell.workbench.ablations.command import model_of, refuse_other_model
from twell.workbench.ablations.options import PruneOptions
from twell.workbench.ablations.passes import Passes
from twell.workbench.capturing.forward import Inputs
from twell.workbench.errors import UserError
from twell.workbench.models.families import FAMILIES
from twell.workbench.models.load import decoder_layers
from twell.workbench.models.own_code import OwnModel, own_of
from twell.workbench.option_fields import check_bounds
from twell.workbench.run.store import open_run, refuse_existing
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.recorded import recorded_sequences

MULTIPLE = 8  # of neurons, as the kernels take them
EVERYTHING = 10**15  # tokens


@dataclass(frozen=True)
class Pruned:
    """What a pruning did. loss, seconds: before and after, in nats a token and of a pass over the text; error: greatest
    difference of logits over the greatest logit"""

    width: int
    kept: list[int]
    parameters: tuple[int, int]
    loss: tuple[float, float]
    seconds: tuple[float, float]
    error: float


def prune(model: Any, keep: NDArray | Tensor) -> Any:
    """Return a copy of a model of transformers without some neurons, with one width for all layers.

    keep: bool [layers, d_ff]. Where a layer keeps fewer than the widest one, its first others fill it up. Raises
    UserError for a mask of another shape, for one that takes all of a layer, and for other families.
    """
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is None or family.base:
        known = ", ".join(name for name, one in FAMILIES.items() if not one.base)
        raise UserError(f"Expected a model of model_type {known} to prune, got {config.model_type}.")
    mask = np.asarray(torch.as_tensor(keep).cpu())
    shape = (len(decoder_layers(model)), getattr(config, family.d_ff))
    if mask.shape != shape or mask.dtype != bool:
        raise UserError(f"Expected a mask of bools {list(shape)}, got {mask.dtype} {list(mask.shape)}.")
    if not mask.any(1).all():
        raise UserError(f"Expected neurons left in every layer, got none in layer {int(np.argmin(mask.any(1)))}.")
    width = min(shape[1], -(-int(mask.sum(1).max()) // MULTIPLE) * MULTIPLE)
    smaller = copy.deepcopy(model)
    setattr(smaller.config.get_text_config(), family.d_ff, width)
    for layer, kept in zip(decoder_layers(smaller), mask, strict=True):
        holder: Any = getattr(layer, family.holder) if family.holder else layer
        index = torch.from_numpy(np.sort(np.argsort(~kept, kind="stable")[:width]))
        for name in family.maps:
            _narrow(getattr(holder, name), index.to(model.device), last=name == family.maps[-1])
        if hasattr(holder, "intermediate_size"):
            holder.intermediate_size = width
    return smaller


@torch.no_grad()
def _narrow(linear: nn.Linear, index: Tensor, last: bool) -> None:
    """Keep some neurons of a map: its columns if it is the last one, else its rows and its bias."""
    linear.weight = nn.Parameter(linear.weight.index_select(1 if last else 0, index), linear.weight.requires_grad)
    if last:
        linear.in_features = len(index)
        return
    linear.out_features = len(index)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[index], linear.bias.requires_grad)


def command(options: PruneOptions) -> Pruned:
    """Prune a checkpoint by a run, write the smaller one, and print what it saves. Raises UserError."""
    check_bounds(options)
    run = open_run(options.run)
    refuse_existing(options.out)
    own = model_of(run, options.model, options.device)
    refuse_other_model(run, own)
    if not own.has_zeros:
        raise UserError(f"Expected a ReLU in the FFNs of {own.name}, whose neurons may never fire, got another.")
    sequences = recorded_sequences(run, options.tokens or EVERYTHING, spread=options.tokens is not None)
    cut = list(batches(sequences, 4096 if own.device.type == "cpu" else 32_768, []))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Reading {sum(len(one.ids) for one in sequences):,} tokens with {own.name} …")
    fires, tokens = firings(own, cut)
    smaller = prune(own.model, wanted(fires, tokens, options.least))
    result = compare(own, own_of(own.name, smaller), cut, (fires > 0) & (fires >= options.least * tokens))
    smaller.to(torch.bfloat16 if own.checkpoint is None else own.checkpoint.config.dtype or smaller.dtype)
    smaller.save_pretrained(options.out)
    folder = own.checkpoint.folder if own.checkpoint else own.model.name_or_path
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    tokenizer.save_pretrained(options.out)
    console.print("\n".join(report(result, own, options)))
    return result


def wanted(fires: NDArray, tokens: int, least: float) -> NDArray:
    """Return the neurons to keep, bool [layers, d_ff]: those that fired on more than a share of the tokens, and in
    narrower layers the busiest others up to the widest."""
    keep = (fires > 0) & (fires >= least * tokens)
    width = int(keep.sum(1).max())
    for layer, counts in enumerate(fires):
        keep[layer, np.argsort(-counts, kind="stable")[:width]] = True
    return keep


def firings(own: OwnModel, cut: Sequence[Batch]) -> tuple[NDArray, int]:
    """Return on how many tokens each neuron's hidden value is not 0, int64 [layers, d_ff], and how many tokens."""
    fires = torch.zeros((own.layers, own.d_ff), dtype=torch.int64, device=own.device)
    tokens = 0
    with Passes(own, count=False) as passes:
        for batch in cut:
            inputs = Inputs.of(batch, own.device)
            rows = inputs.row_of.long()

            def count(layer: int, hidden: Tensor, rows: Tensor = rows) -> None:
                fires[layer] += (hidden.reshape(-1, own.d_ff)[rows] != 0).sum(0)

            passes.on_hidden = count
            with torch.inference_mode():
                own.body(input_ids=inputs.ids.view(-1, inputs.longest), use_cache=False)
            tokens += len(rows)
    return fires.cpu().numpy(), tokens


@torch.inference_mode()
def compare(own: OwnModel, smaller: OwnModel, cut: Sequence[Batch], keep: NDArray) -> Pruned:
    """Compare logits, losses and the time of a pass of a model and a smaller one on the same batches."""
    losses, seconds, error, greatest, tokens = [0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0
    for batch in cut:
        inputs = Inputs.of(batch, own.device)
        ids, outputs = inputs.ids.view(-1, inputs.longest), []
        for index, model in enumerate((own, smaller)):
            started = time.perf_counter()
            outputs.append(model.body(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1))
            if own.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[index] += time.perf_counter() - started
        targets = inputs.ids.long()
        for rows in inputs.predicts.long().split(2048):
            ours, theirs = (model.head(out[rows]) for model, out in zip((own, smaller), outputs, strict=True))
            error, greatest = max(error, float((ours - theirs).abs().max())), max(greatest, float(ours.abs().max()))
            for index, logits in enumerate((ours, theirs)):
                summed = nn.functional.cross_entropy(logits.float(), targets[rows + 1], reduction="sum")
                losses[index] += float(summed)
            tokens += len(rows)
    sizes = [sum(p.numel() for p in model.model.parameters()) for model in (own, smaller)]
    before, after = (loss / max(1, tokens) for loss in losses)
    kept = keep.sum(1).tolist()
    return Pruned(
        smaller.d_ff, kept, (sizes[0], sizes[1]), (before, after), (seconds[0], seconds[1]), error / max(greatest, 1e-9)
    )


def report(result: Pruned, own: OwnModel, options: PruneOptions) -> list[str]:
    """Return what a pruning saved, as lines of text."""
    before, after = result.parameters
    widest = max(range(len(result.kept)), key=result.kept.__getitem__)
    lines = [
        f"{options.out}: {result.width:,} of {own.d_ff:,} neurons a layer, {after:,} of {before:,} parameters",
        f"  needed  {', '.join(f'{count:,}' for count in result.kept)} neurons by layer",
        f"  logits  at most {result.error:.1e} of the greatest off, on the run's text",
        f"  loss    {result.loss[0]:.4f} before, {result.loss[1]:.4f} after, nats a token",
        f"  time    {result.seconds[0]:.2f} s before, {result.seconds[1]:.2f} s after, of a dense pass over the text",
    ]
    if result.width == own.d_ff:
        lines.append(f"  Layer {widest} needs all of its neurons, so one width for all layers saves nothing.")
    return lines
