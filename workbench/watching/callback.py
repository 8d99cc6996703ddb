"""Count in Hugging Face's `Trainer`: how sparse each layer is, in the trainer's own logs and in a run.

The idea: a watch without rows, in which the model's own code runs, so that training computes what it did without. Of
one step in `every` the firings are counted, three launches a layer, without waiting for the device; in the others the
layers are not covered, and evaluation is not counted. What is logged is over the steps counted since the log before,
and fetched at once. The callback moves to the front of the trainer's, so that those which send logs elsewhere find the
numbers there.

    trainer = Trainer(model, args, train_dataset=texts, callbacks=[TwellCallback(out="runs/mine")])

A training that goes on from a checkpoint goes on in its run: rows after the checkpoint are dropped, and its tokens and
seconds count on from those at the checkpoint.

A loop of one's own does it in two lines: `watch(model, rows=False, dense=True)` around it, and `w.metrics()`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from twell.workbench.capturing.resume import new_manifest
from twell.workbench.errors import UserError, path_of
from twell.workbench.models.attach import FFNs
from twell.workbench.options import CaptureOptions
from twell.workbench.run.manifest import COMPLETE, FILE
from twell.workbench.run.rank_share import RankShare
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import open_run, refuse_existing
from twell.workbench.training.log import TrainingLog
from twell.workbench.watching.session import KERNEL, OUT, watch

TRAINER = "transformers.Trainer"  # as a run says what its training was
SAVED = "checkpoints"  # of its manifest's `training`: tokens trained on and seconds, by step


def _holds_training(out: Path) -> bool:
    """Return whether a folder holds a run that a callback here has begun."""
    training = open_run(out).manifest.training if (out / FILE).exists() else None
    return training is not None and training.get("recipe", {}).get("trainer") == TRAINER


class TwellCallback(TrainerCallback):
    """Log nnz, sparsity and the share of dead neurons, by layer and over all.

    every: count one step in so many, and the last before a log if none was counted since the log before
    prefix: before the names in the logs
    out: a folder for a run with the table `training`, which the dashboard shows while it grows; default: none. The loss
    of an evaluation stands in the row of its step, or in the one before where no log is due then. The folder must
    be new or empty, or hold the run of the training that is resumed, else UserError as it begins. Of several processes
    the first one writes it, and each counts its own tokens alone
    ffns, threshold: as in `watch`
    """

    def __init__(
        self,
        every: int = 10,
        *,
        out: str | Path | None = None,
        prefix: str = "twell/",
        ffns: FFNs | None = None,
        threshold: float | None = None,
    ) -> None:
        self.watch: watch | None = None
        self._log: TrainingLog | None = None  # both are closed also where an argument is refused
        if not isinstance(every, int) or every < 1:
            raise UserError(f"Expected every= of at least 1 step, got {every!r}.")
        self.every, self.prefix = every, prefix
        self._out = None if out is None else path_of(out, OUT)
        self._unfinished = False  # whether the folder holds a run that this object began and has not completed
        self._given: dict[str, Any] = {"ffns": ffns, "threshold": threshold}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Begin to watch the trainer's model."""
        self.close()
        self._come_first(sys._getframe(1).f_locals.get("self"))
        assert model is not None
        out = self._out if state.is_world_process_zero else None
        # with a batch that turned out to be too large the trainer begins anew
        goes_on = state.global_step > 0 and out is not None and _holds_training(out)
        if out is not None and not goes_on and not (self._unfinished and args.auto_find_batch_size):
            refuse_existing(out)
        self.watch = watch(model, rows=False, dense=True, **self._given).__enter__()
        self.watch.tracker.count_calls(False)
        self._counts = self._counted = False  # whether this step is counted, and any since the last log
        self._began = self._stepped = time.monotonic()
        self._evaluating = 0.0  # seconds of evaluations so far
        self._last = (self._began, 0)  # of the row before: when, without evaluations, and tokens trained on until then
        self._before = (0, 0.0)  # tokens and seconds of the training that this one goes on from
        if out is not None:
            try:
                self._log = self._new_log(out, state.global_step, goes_on)
            except BaseException:
                self.close()  # a model of another training, or a full disk
                raise
            self._unfinished = True

    def _come_first(self, handler: Any) -> None:
        """Stand before the callbacks that send logs elsewhere. handler: the object that calls this one's methods"""
        if isinstance(handler, CallbackHandler) and self in handler.callbacks:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)

    def _new_log(self, out: Path, step: int, goes_on: bool) -> TrainingLog:
        """Begin the run at a step, or continue the one in the folder. Raises UserError if its model is another."""
        assert self.watch is not None
        loaded = self.watch.loaded
        options = CaptureOptions(model=loaded.name, text=("training",), out=out, loss=False, timings=0)
        manifest = new_manifest(loaded, options, ["training"])
        counted = f"one step in {self.every}"
        if goes_on:
            earlier = open_run(out).manifest
            if (earlier.layers, earlier.d_ff) != (manifest.layers, manifest.d_ff):
                raise UserError(
                    f"Expected the model of {out}, with {earlier.layers} layers of {earlier.d_ff} neurons, got "
                    f"{manifest.layers} of {manifest.d_ff}: choose another folder for this training."
                )
            known = (earlier.training or {}).get(SAVED, {})
            saved = {at: values for at, values in known.items() if int(at) <= step}
        else:
            saved, counted = {}, counted + f", from step {step} on" * (step > 0)
        manifest.training = {"recipe": {"trainer": TRAINER, "counted": counted}, SAVED: saved}
        manifest.kernel = dict(KERNEL)
        log = TrainingLog(out, manifest, RankShare(), step if goes_on else 0)
        last = log.rows[-1] if log.rows else {"tokens": 0, "seconds": 0.0}  # where nothing is known of the checkpoint
        tokens, seconds = saved.get(str(step), (last["tokens"], last["seconds"]))
        self._before = (int(tokens), float(seconds))
        return log

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep what a training that goes on from this checkpoint begins with."""
        if self.watch is not None and self._log is not None:
            self._log.record[SAVED][str(state.global_step)] = self._tokens_and_seconds()
            self._log.write()

    def _tokens_and_seconds(self) -> tuple[int, float]:
        assert self.watch is not None
        return self._before[0] + int(self.watch.tracker.tokens), self._before[1] + time.monotonic() - self._began

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count this step, if it is its turn."""
        if self.watch is not None:
            is_logged = state.logging_steps and (state.global_step + 1) % state.logging_steps == 0
            self._counts = state.global_step % self.every == 0 or (is_logged and not self._counted)
            self.watch.tracker.count_calls(self._counts)
            self.watch.tracker.adds_tokens = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count nothing between steps, as an evaluation."""
        if self.watch is not None:
            self._counted = self._counted or self._counts
            self.watch.tracker.count_calls(False)
            self.watch.tracker.adds_tokens = False
            self._stepped = time.monotonic()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Leave an evaluation out of the speed of training, and add its loss to the run's last row."""
        loss = (metrics or {}).get("eval_loss")
        if self._log is not None and self._log.rows and loss is not None:
            self._log.rows[-1]["heldout_loss"] = float(loss)
        if self.watch is not None:
            before, self._stepped = self._stepped, time.monotonic()  # several may follow one step
            self._evaluating += self._stepped - before

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add the numbers to the logs of a step, and a row to the run."""
        if self.watch is None or not logs or "loss" not in logs:
            return
        metrics, self._counted = self.watch.metrics(), False
        if not metrics["tokens"]:
            return
        named = {self.prefix + name: value for name, value in metrics.items()}
        logs.update(named)
        if state.log_history:
            state.log_history[-1].update(named)
        if self._log is not None:
            self._log.append(self._row(state, logs, metrics))

    def _row(self, state: Any, logs: dict[str, Any], metrics: dict[str, float]) -> dict[str, Any]:
        assert self.watch is not None
        now, (tokens, seconds) = time.monotonic(), self._tokens_and_seconds()
        before, self._last = self._last, (now - self._evaluating, tokens - self._before[0])
        layers = range(self.watch.loaded.layers)
        row = {
            "step": state.global_step,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": (self._last[1] - before[1]) / max(self._last[0] - before[0], 1e-9),
            "total_steps": state.max_steps,
            "loss": float(logs["loss"]),
            "l1": float("nan"),
            "rate": float(logs.get("learning_rate", "nan")),
            "gradient_norm": None if logs.get("grad_norm") is None else float(logs["grad_norm"]),
        }
        for kind in ("nnz", "dead"):
            columns = nnz_columns(len(layers), kind)
            row |= {name: metrics[f"{kind}/layer_{layer:02}"] for layer, name in zip(layers, columns, strict=True)}
        return row

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give the model back, and end the run."""
        self.close(complete=True)

    def close(self, complete: bool = False) -> None:
        """Give the model back where a training raised; harmless at any time."""
        watched, self.watch = self.watch, None
        log, self._log = self._log, None
        if watched is not None:
            watched.__exit__(None, None, None)
        if log is not None and complete:
            log.finish(status=COMPLETE)
            self._unfinished = False
        elif log is not None:
            log.interrupt()

    def __del__(self) -> None:
        self.close()
