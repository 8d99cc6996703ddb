"""`twell prune`: a smaller checkpoint, without the neurons that never fired on a run's text.

The idea: a neuron whose hidden value is 0 on every token adds nothing to the FFN's output, so its row of the first maps
and its column of the map back can go, and logits on that text stay what they were. Plain transformers has one width for
all layers: the widest that any layer needs, in multiples of 8; layers that need less keep their busiest others. With
--per-layer each has its own, and the checkpoint is read by this package alone: by every command, and by `load_pruned`.

A run leaves first and special tokens out of its counts of neurons. So the text is read again by the model's own code,
every token of it, and logits are compared on it afterwards; --text is text that the run did not see. Cost: three
forward passes over the run's text, two over the other.

    twell prune path/to/model runs/mine --out models/smaller
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from twell.workbench.ablations.before_after import Interval, Pruned, compare, report
from twell.workbench.ablations.command import BATCH_TOKENS, TOKENS, model_of, refuse_other_model, text_sequences
from twell.workbench.ablations.options import PruneOptions
from twell.workbench.ablations.passes import AblationRunner
from twell.workbench.capturing.forward import Inputs
from twell.workbench.errors import UserError, path_of
from twell.workbench.models import weights
from twell.workbench.models.checkpoint import find, understood
from twell.workbench.models.families import FAMILIES, Family
from twell.workbench.models.own_code import OwnModel, own_of
from twell.workbench.models.sizes import FILLED, MULTIPLE, WIDTHS, decoder_layers, own_sizes, select, unfill, widen
from twell.workbench.option_fields import check_bounds
from twell.workbench.run.store import Run, open_run, refuse_existing
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.recorded import recorded_sequences
from twell.workbench.text.sequences import Sequence
from twell.workbench.text.sources import open_sources

Model = TypeVar("Model", bound=PreTrainedModel)
EVERYTHING = 10**15  # tokens


def prune(model: Model, keep: NDArray | Tensor, per_layer: bool = False) -> Model:
    """Return a copy of a model of transformers without some neurons, with one width for all layers.

    keep: bool [layers, d_ff]. Where a layer keeps fewer than its width, its first others fill it up. per_layer: whether
    each layer has its own width, a multiple of 8, instead of the widest, as a model that has such widths keeps them;
    what is saved then is read by `load_pruned`.
    Logits stay where the others fire on no token at all. `analysis.dead_mask` tells less: a run's counts leave first
    and special tokens out, which need neurons of their own, so `twell prune` reads the text again.
    Raises UserError for a mask of another shape, for one that takes all of a layer, and for other families.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"Expected a model of transformers to prune, got a {type(model).__name__}: load it first.")
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is None or family.base:
        known = ", ".join(name for name, one in FAMILIES.items() if not one.base)
        raise UserError(f"Expected a model of model_type {known} to prune, got {config.model_type}.")
    _refuse_other_ffns(model, family)
    smaller = copy.deepcopy(model)
    if getattr(config, WIDTHS, None):
        widen(smaller)
    own = own_sizes(smaller)[0]
    per_layer = per_layer or bool(own)
    mask = np.asarray(keep.cpu() if isinstance(keep, torch.Tensor) else keep)
    shape = (len(decoder_layers(model)), getattr(config, family.d_ff))
    if mask.shape != shape or mask.dtype != bool:
        raise UserError(f"Expected a mask of bools {list(shape)}, got {mask.dtype} {list(mask.shape)}.")
    if own:  # neurons of zeros that fill a layer up are none
        mask = mask & (np.arange(shape[1]) < np.array(own)[:, None])
    if not mask.any(1).all():
        raise UserError(f"Expected neurons left in every layer, got none in layer {int(np.argmin(mask.any(1)))}.")
    widths = [min(shape[1], -(-int(count) // MULTIPLE) * MULTIPLE) for count in mask.sum(1)]
    if own:
        delattr(smaller, FILLED)
    settings = smaller.config.get_text_config()
    setattr(settings, family.d_ff, max(widths))
    if per_layer:
        setattr(settings, WIDTHS, widths)
    for layer, kept, needed in zip(decoder_layers(smaller), mask, widths, strict=True):
        width = needed if per_layer else max(widths)
        index = torch.from_numpy(np.sort(np.argsort(~kept, kind="stable")[:width]))
        select(layer, family, index.to(model.device))
    return smaller


def _refuse_other_ffns(model: PreTrainedModel, family: Family) -> None:
    """Raise UserError for FFNs that transformers does not make of a configuration, as for a model that was saved."""
    for layer in decoder_layers(model):
        ffn = getattr(layer, family.holder) if family.holder else layer
        if not type(ffn).__module__.startswith("transformers."):  # Bamboo's, say, of whose second ReLU nothing tells
            raise UserError(
                f"Expected FFNs of transformers to prune, as a saved {type(model).__name__} has them, got a "
                f"{type(ffn).__name__}, which would be lost: models of this kind cannot be pruned."
            )


def load_pruned(folder: str | Path, dtype: torch.dtype | None = None, widened: bool = False) -> PreTrainedModel:
    """Load a checkpoint of `twell prune` as a model of transformers, each layer as narrow as it is.

    dtype: default: the one that it is stored in; widened: whether narrower layers are filled up to the widest with
    neurons of zeros, as `watch` and `capture` take a model. Raises UserError for a checkpoint that cannot be read.
    """
    path_of(folder, "the folder of a pruned model")
    path, name, _ = find(str(folder), None, 0.0)
    checkpoint = understood(path, name, 0.0)
    stored = checkpoint.config.dtype
    kept = stored if isinstance(stored, torch.dtype) else torch.float32
    return weights.read(checkpoint, dtype or kept, widened)


def command(options: PruneOptions, interval: Interval | None = None) -> Pruned:
    """Prune a checkpoint by a run, write the smaller one, and print what it saves. Raises UserError.

    interval: returns a mean change a token and the ends of its interval, from tokens and changes by document
    """
    check_bounds(options)
    run = open_run(options.run)
    refuse_existing(options.out)
    own = model_of(run, options.model, options.device)
    refuse_other_model(run, own)
    if not own.has_zeros:
        raise UserError(f"Expected a ReLU in the FFNs of {own.name}, whose neurons may never fire, got another.")
    unseen = _unseen(run, own, options)
    sequences = recorded_sequences(run, options.tokens or EVERYTHING, spread=options.tokens is not None)
    size = BATCH_TOKENS[own.device.type]
    cut = list(batches(sequences, size, []))
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"Reading {sum(len(one.ids) for one in sequences):,} tokens with {own.name} …")
    fires, tokens = nonzero_counts(own, cut)
    needed = (fires > 0) & (fires >= options.least * tokens)
    per_layer = options.per_layer or min(own.widths) < own.d_ff  # a model that has widths of its own keeps them
    smaller = prune(own.model, wanted(fires, needed, per_layer), per_layer)
    unfill(own.model)  # what it is compared with is the model as it is stored
    result = compare(own, own_of(own.name, smaller), cut, needed, list(batches(unseen, size, [])))
    smaller.to(torch.bfloat16 if own.checkpoint is None else own.checkpoint.config.dtype or smaller.dtype)
    smaller.save_pretrained(options.out)
    folder = own.checkpoint.folder if own.checkpoint else own.model.name_or_path
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    tokenizer.save_pretrained(options.out)
    console.print("\n".join(report(result, own, options.out, interval)))
    return result


def _unseen(run: Run, own: OwnModel, options: PruneOptions) -> list[Sequence]:
    """Return the text that the run did not see, as sequences. Raises UserError for one of the run's own sources."""
    if not options.text:
        return []
    for name in options.text:
        if name in [source["source"] for source in run.manifest.text]:
            raise UserError(f"Expected text that {run.path} did not see, got {name}, which it read: name another.")
    return text_sequences(run, own, open_sources(options.text), options.tokens or TOKENS[own.device.type])


def wanted(fires: NDArray, needed: NDArray, per_layer: bool = False) -> NDArray:
    """Return the neurons to keep, bool [layers, d_ff]: those that are needed, and the busiest others up to the width.

    fires, needed [layers, d_ff]; per_layer: whether each layer has its own width, not that of the widest
    """
    keep = needed.copy()
    for layer, counts in enumerate(fires):
        width = int((needed[layer] if per_layer else needed).sum(-1).max())
        keep[layer, np.argsort(-counts, kind="stable")[: max(MULTIPLE, -(-width // MULTIPLE) * MULTIPLE)]] = True
    return keep


def nonzero_counts(own: OwnModel, cut: list[Batch]) -> tuple[NDArray, int]:
    """Return on how many tokens each neuron's hidden value is not 0, int64 [layers, d_ff], and how many tokens."""
    fires = torch.zeros((own.layers, own.d_ff), dtype=torch.int64, device=own.device)
    tokens = 0
    with AblationRunner(own, count=False) as runner:
        for batch in cut:
            inputs = Inputs.of(batch, own.device)
            rows = inputs.row_of.long()

            def count(layer: int, hidden: Tensor, rows: Tensor = rows) -> None:
                fires[layer] += (hidden.reshape(-1, own.d_ff)[rows] != 0).sum(0)

            runner.on_hidden = count
            with torch.inference_mode():
                own.body(input_ids=inputs.ids.view(-1, inputs.longest), use_cache=False)
            tokens += len(rows)
    return fires.cpu().numpy(), tokens
