"""Train a sparse language model: a Llama whose gate is a ReLU, and a small L1 penalty on its hidden values.

The idea: the loss is cross-entropy plus a small multiple of sum |h|, and that is all it takes: within some hundred
steps most of h is exactly zero. This file reads the options and writes the results; `loop.py` is the training itself.

    twell train --config demo --text corpus.txt.zst --out models/demo
    AutoModelForCausalLM.from_pretrained("models/demo")     # plain transformers, nothing of ours

A run that was stopped or killed continues when the same command is given again. Ctrl-C and SIGTERM stop a training by
one process at the end of a step, which is kept.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from twell.workbench.devices import pick_device
from twell.workbench.errors import UserError
from twell.workbench.interrupt import Interrupt
from twell.workbench.models.pretrained import Pretrained, Teacher, read_pretrained, read_teacher
from twell.workbench.options import TrainOptions
from twell.workbench.text.sources import open_sources
from twell.workbench.training.corpus import Corpus, in_order, prepare, source_name, unigram_loss
from twell.workbench.training.ffn import ACTIVATIONS
from twell.workbench.training.folder import MODELS, TrainingFolder, difference, writing
from twell.workbench.training.log import new_manifest
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.ranks import TrainingRanks, gathered
from twell.workbench.training.recipes import RECIPES, Recipe, from_dict, recipe_of
from twell.workbench.training.sparse_llama import as_transformers, evaluate


def train(options: TrainOptions) -> Path:
    """Train a model, or continue one; return its folder. Raises UserError, in one rank where there are several."""
    ranks = TrainingRanks.from_environment(options.shard)
    with ranks.one_message():
        _train(options, ranks)
    return options.out


def _train(options: TrainOptions, ranks: TrainingRanks) -> None:
    recipe = recipe_of(options)
    ranks.share_rows(recipe.rows, recipe.micro_batches)
    ranks.join(options.device)
    device = pick_device(options.device)
    start = teacher = None
    if options.from_ is not None:
        start = read_pretrained(options.from_, recipe.seq_len, tuple(ACTIVATIONS))
        recipe = recipe.override(**start.recipe_fields())
        if options.teacher is not None:
            teacher = read_teacher(options.teacher, start.tokenizer, recipe.vocab, recipe.seq_len)
    folder = TrainingFolder(options.out, writes=ranks.first)
    recipe = _for_device(recipe, options, device, ranks.world, folder)
    settings = {name: getattr(options, name) for name in ("holdout", "kernel", "compile", "shard")}
    _agree(ranks, recipe=recipe.as_dict(), options=settings)
    try:
        corpus = ranks.first_then_others(lambda: _claim(folder, recipe, options, start, teacher))
        _agree(ranks, corpus=corpus and corpus.record)
        if corpus is not None:
            with tf32(device):
                _run(folder, recipe, corpus, options, device, ranks, start, teacher)
    except BaseException as error:
        folder.interrupt(refused=isinstance(error, UserError))
        if isinstance(error, KeyboardInterrupt):
            folder.tell_what_is_kept()
        raise


def _for_device(
    recipe: Recipe, options: TrainOptions, device: torch.device, world: int, folder: TrainingFolder
) -> Recipe:
    """Return the recipe with small steps on a CPU, unless --rows or a file of one's own says how many rows they have.

    A training that has begun goes on as it began. world: processes
    """
    if options.rows is not None or options.config not in RECIPES:
        return recipe
    small, begun = recipe.on_cpu(world), folder.record.get("recipe", {})
    if small.rows != begun.get("rows", small.rows) or (not begun and device.type != "cpu"):
        return recipe
    if begun:
        small = dataclasses.replace(small, warmup_share=begun.get("warmup_share"))
    folder.say(
        f"On a CPU a step has {small.rows} rows in place of {recipe.rows}, so that it takes seconds; "
        f"--rows {recipe.rows} trains as a GPU does."
    )
    return small


def _agree(ranks: TrainingRanks, **settings: Any) -> None:
    """Raise UserError, in every rank, where one has other settings than rank 0."""
    first, *others = ranks.every(settings)
    for rank, given in enumerate(others, start=1):
        for name in settings:
            if given[name] != first[name]:
                here, there = difference(name, first[name], given[name])
                raise UserError(
                    f"Expected the same {name} in all ranks, got {here} in rank 0 and {there} in rank {rank}: let all "
                    "ranks read the same files, and give them the same command."
                )


def _claim(
    folder: TrainingFolder, recipe: Recipe, options: TrainOptions, start: Pretrained | None, teacher: Teacher | None
) -> Corpus | None:
    """Claim the folder for this training and return its text; None where the training is complete."""
    models = {name: model.record() for name, model in (("origin", start), ("teacher", teacher)) if model is not None}
    folder.start_over()
    if not folder.record:  # a source that is not there leaves no folder behind
        open_sources([*options.text, *options.valid])
    elif "recipe" in folder.record:  # one of before a field came has its default
        folder.record["recipe"] = from_dict(folder.record["recipe"], str(options.out)).as_dict()
        folder.record = {name: {} for name in models} | folder.record  # it may have begun without
    models = {name: {} for name in MODELS if name in folder.record} | models
    folder.claim(**models, recipe=recipe.as_dict(), holdout=options.holdout)
    if folder.complete:
        folder.say(f"{options.out} holds this model, complete; nothing to do.")
        return None
    with folder.console.status("Reading and tokenising the text"):
        corpus = prepare(
            options.text,
            options.prepared or folder.work / "corpus",
            vocab=recipe.vocab,
            holdout=options.holdout,
            bpe_megabytes=recipe.bpe_megabytes,
            valid=options.valid,
            given=None if start is None else (start.tokenizer, start.mark, start.sha256),
            replace=options.prepared is None and not folder.has_steps(),
        )
    folder.claim(corpus=corpus.record)
    return corpus


def _run(
    folder: TrainingFolder,
    recipe: Recipe,
    corpus: Corpus,
    options: TrainOptions,
    device: torch.device,
    ranks: TrainingRanks,
    start: Pretrained | None,
    teacher: Teacher | None,
) -> None:
    """Train to the end, and write the model."""
    compiled = options.compile and device.type == "cuda"
    training = TrainingLoop(recipe, corpus, device, compiled, options.kernel, ranks, start, teacher)
    if start is not None:
        folder.record["origin_loss"] = training.loss_with(start.activation)
    size = sum(p.numel() for p in training.state.model.parameters())
    manifest = new_manifest(options.out.name, recipe, folder.record, size, device, training.layers.choice)
    folder.begin(manifest, training.state)
    _agree(ranks, checkpoint={"step": training.state.step, "seconds": training.state.seconds})
    corpus_size = f"{len(corpus.train):,} training tokens, {recipe.step_tokens:,} a step"
    processes = f" in {ranks.world} processes" if ranks.world > 1 else ""
    folder.say(f"{size:,} parameters, {corpus_size}, on {device}{processes}.")
    if start is not None:
        loss, without = folder.record["origin_loss"], training.loss_with(recipe.activation)
        folder.say(f"{start.name}: {loss:.4f} nats on held-out text with {start.activation}, the line to reach.")
        folder.say(f"With {recipe.activation} in its place: {without:.4f} nats now.")
    interrupt = Interrupt("the step in hand, so that it is kept")
    with interrupt if ranks.world == 1 else nullcontext():  # torchrun stops all of several processes itself
        training.run(folder, options.checkpoint_minutes, interrupt)
        finish(training, folder, options)


@contextmanager
def tf32(device: torch.device) -> Iterator[None]:
    """On a GPU, compute float32 products in TF32 inside this context, and no longer: counts need float32."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def finish(training: TrainingLoop, folder: TrainingFolder, options: TrainOptions) -> None:
    """Measure the model as it is saved (weights rounded to bf16), save it, and write what was measured beside it."""
    if not training.ranks.evaluates:
        return
    recipe, corpus, model = training.recipe, training.corpus, training.state.model
    folder.say(f"Measuring the model on {len(corpus.heldout):,} held-out tokens.")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    heldout = evaluate(training.objective, training.heldout())
    valid = {
        name: evaluate(training.objective, in_order(ids, recipe.seq_len, recipe.rows))
        | {"unigram_loss": unigram_loss(corpus.train, ids, recipe.vocab)}
        for name, ids in corpus.valid.items()
    }
    weights = {name: gathered(p.detach()).bfloat16() for name, p in model.named_parameters()}
    if not training.ranks.first:
        return
    results = {
        "status": "complete",
        "steps": training.state.step,
        "tokens": training.state.step * recipe.step_tokens,
        "epochs": training.state.step / training.batches.steps,
        "minutes": training.state.seconds / 60,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if training.device.type == "cuda" else "CPU",
        "heldout": heldout,
        "unigram_loss": unigram_loss(corpus.train, corpus.heldout, recipe.vocab),
        "valid": valid,
        "licences": options.licences,
        "command": command(options),
    }
    with writing(options.out):
        folder.finish(as_transformers(model, weights), corpus.tokenizer, results)


def command(options: TrainOptions) -> str:
    """Return the command line that gives these options, with files by their names alone."""
    words = ["twell", "train"]
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), "--" + field.name.rstrip("_").replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append("--no-" + flag[2:] if not value else flag)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            plain = isinstance(item, Path) or field.name in ("config", "text", "valid", "from_", "teacher")
            words += [flag, source_name(str(item)) if plain else str(item)]
    return shlex.join(words)
