"""The training loop: optimizer, schedules, log rows and checkpoints of a run of `twell train`.

The idea: `sparse_llama.py` holds the model and its loss, `recipes.py` the numbers, this file the rest, which is common
practice: AdamW, a linear warm-up of the rate and of the L1 coefficient, a constant rate, a linear decay to zero,
float32 weights under bf16 autocast.

Cost: on one H200 the recipe `h200-8x2048` (445 M parameters, 50 M tokens) takes about 4.5 minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from twell.workbench.errors import UserError
from twell.workbench.training.checkpoint import TrainingState
from twell.workbench.training.corpus import Corpus, Rows, in_order
from twell.workbench.training.folder import TrainingFolder, writing
from twell.workbench.training.log import Row
from twell.workbench.training.recipes import Recipe
from twell.workbench.training.sparse_llama import build, evaluate, forward

PACE = (10, 30)  # steps: with a limit in minutes, the step time is measured from the first to the second
EVALUATION_TOKENS = 131_072  # held-out tokens of the log's losses; the final figures are over all of them


def rate_factor(recipe: Recipe, step: int, total: int | None) -> float:
    """Return the share of the peak rate at a step. total: steps of the run, None if not yet known."""
    rise = min(1.0, (step + 1) / max(1, recipe.warmup))
    if total is None:
        return rise
    if recipe.schedule == "cosine":
        return rise * 0.5 * (1 + math.cos(math.pi * step / total))
    return rise * min(1.0, (total - step) / max(1.0, recipe.decay * total))


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices, and none on norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=fused)


class Training:
    """One run of a recipe: its state, and sums over the steps since the log's last row."""

    def __init__(self, recipe: Recipe, corpus: Corpus, device: torch.device, compiled: bool) -> None:
        self.recipe, self.corpus, self.device, self.compiled = recipe, corpus, device, compiled
        model = build(recipe, corpus.mark, device)
        total = recipe.steps or (math.ceil(recipe.tokens / recipe.step_tokens) if recipe.tokens else None)
        self.state = TrainingState(model, make_optimizer(recipe, model), total=total)
        for name, ids in {"held-out text": corpus.heldout, **corpus.valid}.items():
            if len(ids) <= recipe.seq_len:
                raise UserError(
                    f"The {name} must fill a row of {recipe.seq_len} tokens, but has {len(ids)}; give more."
                )
        self.rows = Rows(corpus.train, recipe.seq_len, recipe.rows, recipe.seed, corpus.mark)
        self.forward: Callable = torch.compile(forward, fullgraph=True, dynamic=False) if compiled else forward
        self._began, self._paced = time.monotonic(), (0.0, 0)  # of the loop; of the pace: seconds and step
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, l1 term, gradient norm
        self._fires = torch.zeros(self.recipe.layers, self.recipe.d_ff, dtype=torch.int64, device=self.device)
        self._window = 0

    def one_step(self) -> None:
        """Do one optimizer step, without waiting for the device."""
        recipe = self.recipe
        step, rise = self.state.step, min(1.0, (self.state.step + 1) / max(1, recipe.l1_warmup))
        rate, coefficient = recipe.rate * rate_factor(recipe, step, self.state.total), recipe.l1 * rise
        rows = self.rows.batch(step)
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        loss, l1, fires = self.forward(self.state.model, rows)
        (loss + coefficient * l1).backward()
        norm = nn.utils.clip_grad_norm_(self.state.model.parameters(), recipe.clip)
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        self._sums += torch.stack([loss.detach(), l1.detach(), norm.detach()])
        self._fires += fires
        self._window, self._used, self.state.step = self._window + 1, (rate, coefficient), step + 1

    def log_row(self) -> Row:
        """Return the means over the steps since the last row, and begin anew; this waits for the device."""
        loss, l1, norm = (self._sums / self._window).tolist()
        tokens = self._window * self.recipe.step_tokens
        nnz, dead = (self._fires.sum(1) / tokens).tolist(), (self._fires == 0).double().mean(1).tolist()
        row = {
            "step": self.state.step,
            "tokens": self.state.step * self.recipe.step_tokens,
            "loss": loss,
            "l1": l1,
            "gradient_norm": norm,
            "rate": self._used[0],
            "l1_coefficient": self._used[1],
        }
        self._clear()
        return row | {f"nnz_{i:02}": n for i, n in enumerate(nnz)} | {f"dead_{i:02}": d for i, d in enumerate(dead)}

    def warm_up(self) -> None:
        """Compile on a batch that changes nothing, so that the clock measures training alone."""
        loss, l1, _ = self.forward(self.state.model, self.rows.batch(self.state.step).to(self.device))
        (loss + l1).backward()
        self.state.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def plan(self, ran: int, at_row: bool) -> None:
        """With a limit in minutes, set the total number of steps from the pace so far, until the decay begins.

        ran: steps of this process; at_row: whether a row of the log ends here
        """
        recipe = self.recipe
        if recipe.minutes is None or not (ran in PACE or (at_row and ran > PACE[1])):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if ran == PACE[0]:
            self._paced = (now, self.state.step)
        elif self.state.total is None or (
            recipe.schedule == "wsd" and self.state.step < (1 - recipe.decay) * self.state.total
        ):
            pace = (now - self._paced[0]) / (self.state.step - self._paced[1])
            left = 60 * recipe.minutes - (now - self._began)
            self.state.total = self.state.step + max(1, int(left / pace))

    def run(self, folder: TrainingFolder, checkpoint_minutes: float) -> None:
        """Run the steps that are left, and write the log and the checkpoints."""
        recipe, ran = self.recipe, 0
        if self.compiled:
            folder.say("Compiling.")
            self.warm_up()
        saved = time.monotonic()
        self._began = saved - self.state.seconds
        window = (self.state.seconds, self.state.step)
        with folder.progress() as show:
            while self.state.total is None or self.state.step < self.state.total:
                self.one_step()
                ran += 1
                at_row = self.state.step % recipe.log_every == 0 or self.state.step == self.state.total
                self.plan(ran, at_row)
                if not at_row:
                    continue
                row = self.log_row()
                self.state.seconds = time.monotonic() - self._began
                speed = (self.state.step - window[1]) * recipe.step_tokens / (self.state.seconds - window[0])
                row |= {"seconds": self.state.seconds, "tokens_per_second": speed, "total_steps": self.state.total}
                if not math.isfinite(row["loss"]):
                    raise UserError(
                        f"The loss is {row['loss']} at step {self.state.step}; lower the rate and start again."
                    )
                if (
                    self.state.total
                    and recipe.evaluations * self.state.step >= (folder.evaluations + 1) * self.state.total
                ):
                    row["heldout_loss"] = evaluate(self.state.model, self.heldout(EVALUATION_TOKENS))["loss"]
                folder.append(row)
                show(row)
                self.state.seconds = time.monotonic() - self._began
                window = (self.state.seconds, self.state.step)
                if time.monotonic() - saved >= 60 * checkpoint_minutes and self.state.step != self.state.total:
                    with writing(folder.out):
                        folder.save(self.state)
                    saved = time.monotonic()

    def heldout(self, tokens: int | None = None) -> Iterable[Tensor]:
        """Return rows [n, seq_len + 1] of the held-out text, of its first `tokens` tokens or of all."""
        return in_order(self.corpus.heldout, self.recipe.seq_len, self.recipe.rows, tokens)
