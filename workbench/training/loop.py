"""The training loop: steps, log rows and checkpoints of a run of `twell train`.

The idea: `sparse_llama.py` holds the model and its loss, `recipes.py` the numbers, `optimizer.py` the rates, this file
the steps. Layers run densely until few of their neurons fire, and by the sparse kernels from then on; what that gains
is measured in turns, for 1 % of the time at most.

Cost: on one H200 the recipe `h200-8x2048` (445 M parameters, 50 M tokens) takes about 4.5 minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from twell.kernels.training import SPARSE_SHARE
from twell.workbench.errors import UserError
from twell.workbench.interrupt import Interrupt
from twell.workbench.models.pretrained import Pretrained, Teacher
from twell.workbench.training.checkpoint import TrainingState
from twell.workbench.training.corpus import Corpus, TrainingBatches, in_order
from twell.workbench.training.ffn import SparseLayers
from twell.workbench.training.folder import TrainingFolder, writing
from twell.workbench.training.log import Display, Row
from twell.workbench.training.optimizer import Clock, make_optimizer, rate_factor, restart_dead
from twell.workbench.training.ranks import TrainingRanks, gathered
from twell.workbench.training.recipes import Recipe
from twell.workbench.training.sparse_llama import Objective, build, continued, evaluate, ffns

EVALUATION_TOKENS = {"cuda": 131_072, "cpu": 16_384}  # held-out, of the log's losses; final figures are over all
TIMED_SHARE = 0.01  # of the time, for steps that are timed dense and sparse in turns
EVALUATED_SHARE = 0.1  # of a CPU's time, for held-out losses
STEP_COST = 3  # tokens of a held-out loss that take as long as one of a step


class TrainingLoop:
    """One run of a recipe: its state, and sums over the steps since the log's last row.

    compiled: by torch.compile; kernel: auto, dense or sparse, as in `SparseLayers`; ranks: the processes that share it
    start: a model that it goes on from; teacher: one whose logits it follows too
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        device: torch.device,
        compiled: bool,
        kernel: str = "auto",
        ranks: TrainingRanks | None = None,
        start: Pretrained | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.recipe, self.corpus, self.device, self.compiled = recipe, corpus, device, compiled
        self.ranks = ranks or TrainingRanks()
        self.ranks.share_rows(recipe.rows, recipe.micro_batches)
        for name, ids in {"held-out text": corpus.heldout, **corpus.valid}.items():
            if len(ids) <= recipe.seq_len:
                raise UserError(
                    f"The {name} must fill a row of {recipe.seq_len} tokens, but has {len(ids)}; give more."
                )
        model = (
            build(recipe, corpus.mark, device) if start is None else continued(start.network, recipe.activation, device)
        )
        total = recipe.steps or (math.ceil(recipe.tokens / recipe.step_tokens) if recipe.tokens else None)
        teach = None if teacher is None else teacher.to(device).logits
        self.objective = Objective(model, recipe.l1_weights, recipe.checkpointing, compiled, teach=teach)
        self.module = self.ranks.wrap(self.objective)
        self.state = TrainingState(model, make_optimizer(recipe, model), total=total)
        self.batches = TrainingBatches(corpus.train, recipe.seq_len, recipe.rows, recipe.seed, corpus.mark)
        tokens = recipe.step_tokens // (self.ranks.world * recipe.micro_batches)
        self.layers = SparseLayers(ffns(model), kernel, device, tokens)
        self.clock = Clock(recipe, device, self.ranks.agreed)
        self._comparing = self._evaluating = 0.0  # seconds spent on timing steps in turns, and on held-out losses
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, l1 term, gradient norm
        self._fires = torch.zeros(self.recipe.layers, self.recipe.d_ff, dtype=torch.int64, device=self.device)
        self._window = 0

    # ---- a step

    def one_step(self) -> None:
        """Do one optimizer step, without waiting for the device."""
        recipe, state = self.recipe, self.state
        rise = min(1.0, (state.step + 1) / max(1, recipe.l1_warmup))
        rate, coefficient = recipe.rate * rate_factor(recipe, state.step, state.total), recipe.l1 * rise
        loss, l1, fires = self._backward(self._own_rows(), coefficient)
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), recipe.clip)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        self._sums += torch.stack([loss, l1, gathered(norm.detach())])
        self._fires += fires
        self._window, self._used, state.step = self._window + 1, (rate, coefficient), state.step + 1

    def _own_rows(self) -> Tensor:
        """Return this rank's rows [rows, seq_len + 1] of the next step, on the device."""
        rows = self.ranks.share(self.batches.batch(self.state.step))
        return rows.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else rows

    def _backward(self, rows: Tensor, coefficient: float) -> tuple[Tensor, Tensor, Tensor]:
        """Add the gradients of some rows, averaged over the ranks; return their mean loss and L1 term, and firings."""
        pieces = rows.chunk(self.recipe.micro_batches)
        sums, fires = torch.zeros(2, device=self.device), torch.zeros_like(self._fires)
        for number, piece in enumerate(pieces, start=1):
            with ExitStack() as stack:
                if number < len(pieces):
                    stack.enter_context(self.ranks.without_averaging(self.module))
                loss, l1, fired = self.module(piece)
                ((loss + coefficient * l1) / len(pieces)).backward()
            sums += torch.stack([loss.detach(), l1.detach()]) / len(pieces)
            fires = fires + fired
        return sums[0], sums[1], fires

    # ---- the log

    def log_row(self) -> Row:
        """Return the means over the steps since the last row, and begin anew; this waits for the device.

        From its counts, the layers that run by the sparse kernels are chosen anew, and dead neurons may start anew.
        """
        recipe, state = self.recipe, self.state
        loss, l1, norm = (self.ranks.total(self._sums) / (self._window * self.ranks.world)).tolist()
        fires = self.ranks.total(self._fires)
        tokens = self._window * recipe.step_tokens
        nnz, dead = (fires.sum(1) / tokens).tolist(), (fires == 0).double().mean(1).tolist()
        row = {
            "step": state.step,
            "tokens": state.step * recipe.step_tokens,
            "loss": loss,
            "l1": l1,
            "gradient_norm": norm,
            "rate": self._used[0],
            "l1_coefficient": self._used[1],
            "sparse_layers": self.layers.count,
            "peak_bytes": self._peak_bytes(),
        }
        if recipe.restart_every and state.step % recipe.restart_every == 0 and state.step != state.total:
            draw = torch.Generator().manual_seed(recipe.seed * 2**32 + state.step)
            restart_dead(self.layers.ffns, fires, state.optimizer, state.model.config.initializer_range, draw)
        self._clear()
        return row | {f"nnz_{i:02}": n for i, n in enumerate(nnz)} | {f"dead_{i:02}": d for i, d in enumerate(dead)}

    def _peak_bytes(self) -> int | None:
        """Return the greatest memory in use on a GPU since the last call; None on a CPU."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def choose_layers(self, row: Row, folder: TrainingFolder) -> None:
        """Choose anew which layers run by the sparse kernels, and report it. row: of the log, just made"""
        if self.layers.update([row[f"nnz_{layer:02}"] for layer in range(self.recipe.layers)]):
            backend, count = self.layers.choice.kernel, self.layers.count
            reason = (
                f"from step {self.state.step} on in {count} of {self.recipe.layers} layers, "
                f"which fire at most {SPARSE_SHARE:.0%} of their neurons"
            )
            folder.say(f"Kernel {backend} {reason}.")
            folder.note(kernel={"name": backend, "reason": f"{reason}; before, dense"})

    def compare(self) -> Row:
        """Time one step with every layer dense and one as it runs now; return both, in microseconds.

        Empty where no layer is sparse, and where TIMED_SHARE of the time is used up. Weights do not change.
        """
        if not self.ranks.agreed(self.layers.count > 0 and self._comparing <= TIMED_SHARE * self.clock.seconds):
            return {}
        begun, rows, times = time.monotonic(), self._own_rows(), Row()
        for name in ("dense_step", "sparse_step"):
            with ExitStack() as stack:
                if name == "dense_step":
                    stack.enter_context(self.layers.all_dense())
                if not self._comparing:
                    self._timed(rows)  # compiled, if it was not yet
                times[name] = self._timed(rows)
        self._comparing += time.monotonic() - begun
        return times

    def _timed(self, rows: Tensor) -> float:
        """Return the microseconds of a forward and backward pass, whose gradients are dropped."""
        self._synchronize()
        begun = time.perf_counter()
        self._backward(rows, self.recipe.l1)
        self._synchronize()
        self.state.optimizer.zero_grad(set_to_none=True)
        return 1e6 * (time.perf_counter() - begun)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # ---- the whole

    def warm_up(self) -> None:
        """Compile on a batch that changes nothing, so that the clock measures training alone."""
        self._timed(self._own_rows())

    @property
    def _at_row(self) -> bool:
        step, total = self.state.step, self.state.total
        return step % self.recipe.row_every(total) == 0 or step == total

    def run(self, folder: TrainingFolder, checkpoint_minutes: float, interrupt: Interrupt) -> None:
        """Run the steps that are left, and write the log and the checkpoints.

        interrupt: once requested, a step's end is kept as checkpoint, and KeyboardInterrupt raised
        """
        state = self.state
        if self.compiled:
            folder.say("Compiling.")
            self.warm_up()
        saved = time.monotonic()
        self.clock.start(state.step, state.seconds)
        window = (state.seconds, state.step)
        with Display(folder.console, self.recipe, state.step) as display:
            while state.total is None or state.step < state.total:
                self.one_step()
                state.total = self.clock.plan(state.step, state.total, self._at_row)
                display.step(state.step, state.total, self.clock.seconds)
                stops = interrupt.requested and state.step != state.total
                if self.recipe.restart_every:  # which neurons start anew depends on where rows end
                    stops = stops and self._at_row
                if not (self._at_row or stops):
                    continue
                row = self.log_row()
                state.seconds = self.clock.seconds
                speed = (state.step - window[1]) * self.recipe.step_tokens / (state.seconds - window[0])
                row |= {"seconds": state.seconds, "tokens_per_second": speed, "total_steps": state.total}
                self._end_row(row, folder, stops)
                display.row(row)
                state.seconds = self.clock.seconds
                window = (state.seconds, state.step)
                due = time.monotonic() - saved >= 60 * checkpoint_minutes and state.step != state.total
                if self.ranks.agreed(due or stops):
                    with writing(folder.out):
                        folder.save(state)
                    saved = time.monotonic()
                if stops:
                    raise KeyboardInterrupt

    def _end_row(self, row: Row, folder: TrainingFolder, stops: bool) -> None:
        """Complete a row of the log with what is measured beside the steps, and add it to the log.

        stops: whether nothing is to be measured, as the training stops here
        """
        state = self.state
        if not math.isfinite(row["loss"]):
            raise UserError(f"The loss is {row['loss']} at step {state.step}; lower the rate and start again.")
        if not stops:
            row |= self.compare()
            self.choose_layers(row, folder)
            due = state.total and self.recipe.evaluations * state.step >= (folder.evaluations + 1) * state.total
            if self.ranks.agreed(due and self._has_time_to_evaluate(folder.evaluations)) and self.ranks.evaluates:
                begun, tokens = time.monotonic(), EVALUATION_TOKENS[self.device.type]
                row["heldout_loss"] = evaluate(self.objective, self.heldout(tokens))["loss"]
                self._evaluating += time.monotonic() - begun
        folder.append(row)

    def _has_time_to_evaluate(self, evaluations: int) -> bool:
        """Return whether a held-out loss leaves a CPU's time to the steps; a GPU's it does.

        Without a limit in minutes tokens stand for time, so that a command logs the same whenever it is given.
        evaluations: held-out losses before
        """
        state, recipe = self.state, self.recipe
        if self.device.type != "cpu" or state.step == state.total:
            return True
        if recipe.minutes is not None:
            return self._evaluating <= EVALUATED_SHARE * self.clock.seconds
        tokens = evaluations * min(EVALUATION_TOKENS["cpu"], len(self.corpus.heldout))
        return tokens <= EVALUATED_SHARE * STEP_COST * state.step * recipe.step_tokens

    def loss_with(self, activation: str) -> float:
        """Return the loss of the held-out text with another activation in the FFNs, as they are now."""
        for ffn in self.layers.ffns:
            ffn.activation = activation
        try:
            return float(evaluate(self.objective, self.heldout())["loss"])
        finally:
            for ffn in self.layers.ffns:
                ffn.activation = self.recipe.activation

    def heldout(self, tokens: int | None = None) -> Iterable[Tensor]:
        """Return rows [n, seq_len + 1] of the held-out text, of its first `tokens` tokens or of all."""
        return in_order(self.corpus.heldout, self.recipe.seq_len, self.recipe.rows, tokens)
