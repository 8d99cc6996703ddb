"""The folder that a training run leaves behind, and what is in it while the run lasts.

config.json, model.safetensors, tokenizer.json, …   the model, for plain transformers
training.json       recipe, corpus, and once complete what was measured; `status` says which
run.json, training/ the run: a row every `log_every` steps in its table `training`, more where the training is short
README.md           the model card, written from these
work/               checkpoint and token ids; removed when the training is complete
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from twell.workbench.errors import UserError, escaped, first_line, print_error, usable
from twell.workbench.run import locks
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import Manifest
from twell.workbench.run.rank_share import RankShare
from twell.workbench.training import checkpoint
from twell.workbench.training.checkpoint import TrainingState
from twell.workbench.training.log import Row, TrainingLog
from twell.workbench.training.model_card import model_card
from twell.workbench.training.recipes import spelled

TEMPORARY = "training.json.tmp"  # all there is of a training that was killed as it began
MODELS = {"origin": "--from", "teacher": "--teacher"}  # what the record names a model by, and its option


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise UserError in one sentence where the disk is full, or may not be written to."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} could not be written ({error}); make room and give the same command again.") from error


class TrainingFolder:
    """A run's folder. Its `training.json` decides what may continue here, once a step was kept.

    writes: whether this process writes it and prints; others, that train with it, only read
    """

    def __init__(self, out: Path, writes: bool = True) -> None:
        self.out, self.work, self.writes = Path(out), Path(out) / "work", writes
        self.console = Console(quiet=not writes, markup=False)
        self._log: TrainingLog | None = None
        self._kept = 0  # steps that the checkpoint has
        self._lock: Callable[[], object] | None = None
        self._path = self.out / "training.json"
        usable(self.out)
        self._existed, self._was_empty = self.out.exists(), not self._path.exists()
        self._found: dict[str, Any] = {} if self._was_empty else _read_json(self._path)
        self.record = dict(self._found)
        if not self._was_empty or not self._existed:
            return
        if not self.out.is_dir() or {path.name for path in self.out.iterdir()} - {TEMPORARY}:
            raise UserError(
                f"Expected --out to be new, empty or a training's folder, got {self.out}, which is none: name another."
            )

    @property
    def complete(self) -> bool:
        return self.record.get("status") == "complete"

    @property
    def log(self) -> TrainingLog:
        """The log of the training, once `begin` has been called."""
        assert self._log is not None, "begin comes first"
        return self._log

    @property
    def evaluations(self) -> int:
        """The number of held-out losses in the log."""
        return 0 if self._log is None else sum(row.get("heldout_loss") is not None for row in self._log.rows)

    def start_over(self) -> None:
        """Forget a training that was killed before a step was kept, so that it refuses no corrected command.

        Raises UserError where another process is at it.
        """
        if not self.record or self.complete or self.has_steps():
            return
        if self.writes:
            self._hold()
            (self.out / manifests.FILE).unlink(missing_ok=True)
        self.record = {}

    def claim(self, **settings: Any) -> None:
        """Record the settings of this run, by name, and lock the folder.

        Raises UserError that names the difference if the folder belongs to another run, and if another process writes
        to it.
        """
        if self.writes:
            self._hold()  # first: two that begin at once must not write into each other's record
        for name, setting in settings.items():
            if name in self.record and self.record[name] != setting:
                began, got = difference(name, self.record[name], setting)
                raise UserError(
                    f"Expected {began}, with which the training in {self.out} began, got {got}: give what it began "
                    "with, or name another --out."
                )
        if not settings.keys() <= self.record.keys():
            self.record = {"status": "training", **self.record, **settings}
            if self.writes:
                self._write_json()

    def _hold(self) -> None:
        """Lock the folder, made where it is missing. Raises UserError where another process has it, or had it since the
        record was read: that may have ended the training which this one would begin anew."""
        if self._lock is not None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        release = locks.claim(self.out, self)
        if release is None:
            raise UserError(
                f"Expected a folder that no other training writes to, one is at {self.out}: wait for its end, or stop "
                "it first."
            )
        if (_read_json(self._path) if self._path.exists() else {}) != self._found:
            release()
            raise UserError(
                f"Expected the record in {self.out} as it was when this command began, another training has changed it "
                "since: give the same command again."
            )
        self._lock = release

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, soft_wrap=True)

    # ---- checkpoints and log

    def begin(self, manifest: Manifest, state: TrainingState) -> None:
        """Load the checkpoint, if there is one, and begin the run's log or continue it from there.

        manifest: of the run, should it be a new one
        """
        resumes = checkpoint.restore(self.work, state)
        self._kept = state.step
        if self.writes:
            self._log = TrainingLog(self.out, manifest, RankShare(release=self._lock), state.step)
        if resumes:
            self.say(f"Continuing {self.out} from step {state.step}.")

    def append(self, row: Row) -> None:
        """Add a row to the log."""
        if self._log is not None:
            self._log.append(row)

    def note(self, **fields: Any) -> None:
        """Set fields of the run's manifest."""
        if self._log is not None:
            self._log.note(**fields)

    def tell_what_is_kept(self) -> None:
        """Print, for a training that was stopped, how many steps it keeps and how it goes on; once for all ranks."""
        if self.writes and self._log is not None and not self.complete:
            kept = f"{self.out} was interrupted and keeps {self._kept:,} steps"
            print_error(escaped(f"{kept}: give the same command again to go on with it."))

    def interrupt(self, refused: bool) -> None:
        """Mark the run as interrupted, with the rows that were written; never raises.

        refused: for what the user gave. What such a start has written is removed if it came to no step, so that it
        refuses no corrected command.
        """
        with contextlib.suppress(Exception):
            if self._log is not None:
                self._log.interrupt()
        with contextlib.suppress(OSError):
            if refused and self._lock is not None and self._was_empty and not self.has_steps():
                self._lock()  # the log may have unlocked the folder, and another training may have it by now
                if locks.claim(self.out, self) is not None:
                    self._remove()

    def save(self, state: TrainingState) -> None:
        """Write the log so far, then the checkpoint; ranks that do not write give their shares of it."""
        if self.writes:
            self.log.write()
        checkpoint.save(self.work, state, self.writes)
        self._kept = state.step

    # ---- the end

    def finish(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, results: dict[str, Any]) -> None:
        """Write model, tokenizer, run and card, and `training.json` last, which makes the training complete.

        results: what was measured, added to the record
        """
        disable_progress_bar()
        self.record = {**self.record, **results}
        finished = self.work / "finished"  # from where each file is renamed into place, whole
        shutil.rmtree(finished, ignore_errors=True)
        model.save_pretrained(finished, max_shard_size="100GB")
        (finished / "model.safetensors").chmod(0o644)  # written for the owner alone
        tokenizer.save_pretrained(finished)
        (finished / "README.md").write_text(model_card(self.record, self.log.rows), encoding="utf-8")
        for path in sorted(finished.iterdir()):
            _move(path, self.out / path.name)
        self.log.finish(training={name: value for name, value in self.record.items() if name != "status"})
        self._write_json()
        shutil.rmtree(self.work, ignore_errors=True)
        size = (self.out / "model.safetensors").stat().st_size
        heldout = self.record["heldout"]
        origin = f", the original {self.record['origin_loss']:.4f}" if "origin_loss" in self.record else ""
        self.say(
            f"{self.out}: {size:,} bytes, held-out loss {heldout['loss']:.4f} nats "
            f"(unigram {self.record['unigram_loss']:.4f}{origin}), nnz {' '.join(f'{n:.1f}' for n in heldout['nnz'])}."
        )

    def has_steps(self) -> bool:
        """Return whether a step was logged or kept, also by a process before; True where that cannot be read."""
        if (self._log is not None and self._log.rows) or (self.work / checkpoint.FILE).exists():
            return True
        try:
            return (self.out / manifests.FILE).exists() and bool(manifests.read(self.out).parts)
        except UserError:
            return True

    def _remove(self) -> None:
        """Remove what a start wrote into an empty folder, and the folder too if this process made it."""
        if not self._existed:
            shutil.rmtree(self.out)
            return
        for path in self.out.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _write_json(self) -> None:
        temporary = self.out / TEMPORARY
        temporary.write_text(json.dumps(self.record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        _move(temporary, self._path)
        manifests.sync_folder(self.out)  # before `finish` removes the checkpoint


def _move(path: Path, target: Path) -> None:
    """Rename a file into place once it is on disk."""
    manifests.sync_file(path)
    os.replace(path, target)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"Expected a training's record at {path}, got a file that cannot be read ({first_line(error)}): name "
            "another folder, or remove this one."
        ) from None


def difference(name: str, held: Any, given: Any) -> tuple[str, str]:
    """Return the first difference of two records of a setting: what each has, as the command line gives it."""
    key = ""
    if isinstance(held, dict) and isinstance(given, dict):
        key = next(key for key in {**held, **given} if held.get(key) != given.get(key))
    return _spelled(name, held, key), _spelled(name, given, key)


def _spelled(name: str, record: Any, key: str) -> str:
    """Return a setting as the command line gives it. key: of its record, where that is a dictionary"""
    if name == "recipe":
        return spelled(record, key)
    if flag := MODELS.get(name):
        other = f" with {key} {str(record[key])[:8]}" if record and key != "name" else ""
        return f"{flag} {record['name']}{other}" if record else f"no {flag}"
    if key == "sources":
        return " ".join(f"--text {text['source']} (sha256 {text['sha256'][:8]})" for text in record[key])
    value, word = (record[key] if key else record), key or name
    if name not in ("options", "holdout"):
        return f"{word} {value}"
    return f"--{word} {value}" if not isinstance(value, bool) else f"--{word}" if value else f"--no-{word}"
