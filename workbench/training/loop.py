"""Train a sparse language model: a Llama whose gate is a ReLU, and a little L1 on what passes it.

The idea: the loss is cross-entropy plus a small multiple of sum |h|, and that is all it takes: within some hundred
steps most of h is exactly zero. `sparse_llama.py` holds the model and that loss, `recipes.py` the numbers, this
file the rest, which is common practice: AdamW, a linear warm-up of the rate and of the coefficient, a constant rate,
a linear decay to zero, float32 weights under bf16 autocast.

Cost: on one H200 the recipe `h200-8x2048` (445 M parameters, 50 M tokens) takes about 4.5 minutes.

    twell train --config demo --text corpus.txt.zst --out models/demo
    AutoModelForCausalLM.from_pretrained("models/demo")     # plain transformers, nothing of ours

A run that was killed continues when the same command is given again.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from twell.workbench.errors import UserError
from twell.workbench.models.load import pick_device
from twell.workbench.options import TrainOptions
from twell.workbench.text.sources import open_sources
from twell.workbench.training.corpus import Corpus, Rows, in_order, prepare, source_name, unigram_loss
from twell.workbench.training.folder import Row, TrainingFolder, writing
from twell.workbench.training.recipes import Recipe, load_recipe
from twell.workbench.training.sparse_llama import build, evaluate, forward

PACE = (10, 30)  # steps: with a limit in minutes, the step time is measured from the first to the second
EVALUATION_TOKENS = 131_072  # held-out tokens of the log's losses; the final figures are over all of them


def rate_factor(recipe: Recipe, step: int, total: int | None) -> float:
    """The share of the peak rate at a step; while the total is not known yet, only the warm-up shapes it."""
    rise = min(1.0, (step + 1) / max(1, recipe.warmup))
    if total is None:
        return rise
    if recipe.schedule == "cosine":
        return rise * 0.5 * (1 + math.cos(math.pi * step / total))
    return rise * min(1.0, (total - step) / max(1.0, recipe.decay * total))


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=fused)


# ---- the loop


class Training:
    """One run of a recipe: its model, its place, and the sums of the log's current window."""

    def __init__(self, recipe: Recipe, corpus: Corpus, device: torch.device, compiled: bool) -> None:
        self.recipe, self.corpus, self.device, self.compiled = recipe, corpus, device, compiled
        self.model = build(recipe, corpus.mark, device)
        self.optimizer = make_optimizer(recipe, self.model)
        for name, ids in {"held-out text": corpus.heldout, **corpus.valid}.items():
            if len(ids) <= recipe.seq_len:
                raise UserError(
                    f"The {name} must fill a row of {recipe.seq_len} tokens, but has {len(ids)}; give more."
                )
        self.rows = Rows(corpus.train, recipe.seq_len, recipe.rows, recipe.seed, corpus.mark)
        self.forward: Callable = torch.compile(forward, fullgraph=True, dynamic=False) if compiled else forward
        self.step, self.seconds = 0, 0.0
        self.total = recipe.steps or (math.ceil(recipe.tokens / recipe.step_tokens) if recipe.tokens else None)
        self._began, self._paced = time.monotonic(), (0.0, 0)  # of the loop; of the pace: seconds and step
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, l1 term, gradient norm
        self._fires = torch.zeros(self.recipe.layers, self.recipe.d_ff, dtype=torch.int64, device=self.device)
        self._window = 0

    def one_step(self) -> None:
        """One optimizer step; nothing here waits for the device."""
        recipe = self.recipe
        step, rise = self.step, min(1.0, (self.step + 1) / max(1, recipe.l1_warmup))
        rate, coefficient = recipe.rate * rate_factor(recipe, step, self.total), recipe.l1 * rise
        rows = self.rows.batch(step)
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        loss, l1, fires = self.forward(self.model, rows)
        (loss + coefficient * l1).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._sums += torch.stack([loss.detach(), l1.detach(), norm.detach()])
        self._fires += fires
        self._window, self._used, self.step = self._window + 1, (rate, coefficient), step + 1

    def log_row(self) -> Row:
        """The window's means, and a fresh window; this waits for the device."""
        loss, l1, norm = (self._sums / self._window).tolist()
        tokens = self._window * self.recipe.step_tokens
        nnz, dead = (self._fires.sum(1) / tokens).tolist(), (self._fires == 0).double().mean(1).tolist()
        row = {
            "step": self.step,
            "tokens": self.step * self.recipe.step_tokens,
            "loss": loss,
            "l1": l1,
            "gradient_norm": norm,
            "rate": self._used[0],
            "l1_coefficient": self._used[1],
        }
        self._clear()
        return row | {f"nnz_{i:02}": n for i, n in enumerate(nnz)} | {f"dead_{i:02}": d for i, d in enumerate(dead)}

    def warm_up(self) -> None:
        """Compile, on a batch that changes nothing, so that the clock sees training alone."""
        loss, l1, _ = self.forward(self.model, self.rows.batch(self.step).to(self.device))
        (loss + l1).backward()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def plan(self, ran: int, at_row: bool) -> None:
        """With a limit in minutes: the number of steps that fills it, from the pace so far, until the decay begins."""
        recipe = self.recipe
        if recipe.minutes is None or not (ran in PACE or (at_row and ran > PACE[1])):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if ran == PACE[0]:
            self._paced = (now, self.step)
        elif self.total is None or (recipe.schedule == "wsd" and self.step < (1 - recipe.decay) * self.total):
            pace = (now - self._paced[0]) / (self.step - self._paced[1])
            left = 60 * recipe.minutes - (now - self._began)
            self.total = self.step + max(1, int(left / pace))

    def run(self, folder: TrainingFolder, checkpoint_minutes: float) -> None:
        """All steps that are left, with the log and the checkpoints."""
        recipe, ran = self.recipe, 0
        if self.compiled:
            folder.say("Compiling.")
            self.warm_up()
        saved = time.monotonic()
        self._began = saved - self.seconds
        window = (self.seconds, self.step)
        with folder.progress() as show:
            while self.total is None or self.step < self.total:
                self.one_step()
                ran += 1
                at_row = self.step % recipe.log_every == 0 or self.step == self.total
                self.plan(ran, at_row)
                if not at_row:
                    continue
                row = self.log_row()
                self.seconds = time.monotonic() - self._began
                speed = (self.step - window[1]) * recipe.step_tokens / (self.seconds - window[0])
                row |= {"seconds": self.seconds, "tokens_per_second": speed, "total_steps": self.total}
                if not math.isfinite(row["loss"]):
                    raise UserError(f"The loss is {row['loss']} at step {self.step}; lower the rate and start again.")
                if self.total and recipe.evaluations * self.step >= (folder.evaluations + 1) * self.total:
                    row["heldout_loss"] = evaluate(self.model, self.heldout(EVALUATION_TOKENS))["loss"]
                folder.append(row)
                show(row)
                self.seconds = time.monotonic() - self._began
                window = (self.seconds, self.step)
                if time.monotonic() - saved >= 60 * checkpoint_minutes and self.step != self.total:
                    with writing(folder.out):
                        folder.save(self)
                    saved = time.monotonic()

    def heldout(self, tokens: int | None = None) -> Iterable[Tensor]:
        return in_order(self.corpus.heldout, self.recipe.seq_len, self.recipe.rows, tokens)


def train(options: TrainOptions) -> Path:
    """Train, or continue, as the options say; returns the model's folder. Raises UserError."""
    names = ("tokens", "steps", "minutes", "l1", "rate", "rows", "seed")
    recipe = load_recipe(options.config).override(**{name: getattr(options, name) for name in names})
    device = pick_device(options.device)
    if not 0 < options.holdout < 1:
        raise UserError(f"Expected --holdout between 0 and 1, a share of the text, got {options.holdout}.")
    folder = TrainingFolder(options.out)
    if not folder.record:  # a source that is not there leaves no folder behind
        open_sources([*options.text, *options.valid])
    folder.claim(recipe=recipe.as_dict(), holdout=options.holdout)
    if folder.complete:
        folder.say(f"{options.out} holds this model, complete; nothing to do.")
        return options.out
    with folder.console.status("Reading and tokenising the text"):
        corpus = prepare(
            options.text,
            options.prepared or folder.work / "corpus",
            vocab=recipe.vocab,
            holdout=options.holdout,
            bpe_megabytes=recipe.bpe_megabytes,
            valid=options.valid,
        )
    folder.claim(corpus=corpus.record)
    with tf32(device):
        training = Training(recipe, corpus, device, compiled=options.compile and device.type == "cuda")
        folder.restore(training)
        size = sum(p.numel() for p in training.model.parameters())
        seen = f"{len(corpus.train):,} training tokens, {recipe.step_tokens:,} a step"
        folder.say(f"{size:,} parameters, {seen}, on {device}.")
        training.run(folder, options.checkpoint_minutes)
        with writing(options.out):
            finish(training, folder, options)
    return options.out


@contextmanager
def tf32(device: torch.device) -> Iterator[None]:
    """On a GPU, products of float32 in TF32 for a while: a setting of the process's, which counts must not have."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def finish(training: Training, folder: TrainingFolder, options: TrainOptions) -> None:
    """Measure the model as it is saved (weights rounded to bf16), save it, and write what was measured beside it."""
    recipe, corpus, model = training.recipe, training.corpus, training.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    heldout = evaluate(model, training.heldout())
    valid = {
        name: evaluate(model, in_order(ids, recipe.seq_len, recipe.rows))
        | {"unigram_loss": unigram_loss(corpus.train, ids, recipe.vocab)}
        for name, ids in corpus.valid.items()
    }
    model.bfloat16().config.dtype = torch.bfloat16
    folder.finish(
        training,
        {
            "status": "complete",
            "steps": training.step,
            "tokens": training.step * recipe.step_tokens,
            "epochs": training.step / training.rows.steps,
            "minutes": training.seconds / 60,
            "parameters": sum(p.numel() for p in model.parameters()),
            "device": torch.cuda.get_device_name() if training.device.type == "cuda" else "CPU",
            "heldout": heldout,
            "unigram_loss": unigram_loss(corpus.train, corpus.heldout, recipe.vocab),
            "valid": valid,
            "licences": options.licences,
            "command": command(options),
        },
    )


def command(options: TrainOptions) -> str:
    """The command line that gives these options, with files by their names alone."""
    words = ["twell", "train"]
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), "--" + field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append("--no-" + flag[2:] if not value else flag)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            plain = isinstance(item, Path) or field.name in ("config", "text", "valid")
            words += [flag, source_name(str(item)) if plain else str(item)]
    return shlex.join(words)
