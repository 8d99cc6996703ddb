"""Describe a run that begins, and resume one where it ends.

The idea: the parts that the manifest lists are what was recorded, and they end with a window of batches. The text is
read again from the beginning and cut into the same batches; those that are recorded are compared, token by token, with
what the run holds, and skipped. All else that is recorded adds up over parts, so nothing has to be remembered. A run of
another model, other text or other options is refused, and the difference named.

Cost: tokenising once more what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from twell.workbench import doctor
from twell.workbench.capturing.distributed import Ranks
from twell.workbench.capturing.prefetch import sequence_length
from twell.workbench.errors import UserError
from twell.workbench.models.checkpoint import DEMO
from twell.workbench.models.load import LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import RECORDING, Manifest
from twell.workbench.run.part_files import read_part
from twell.workbench.run.schema import PREFILL
from twell.workbench.run.store import Run, open_run
from twell.workbench.text.batches import Batch

SAME = ("nnz_definition", "dtype", "kernel", "layout", "tokenizer")  # fields of the manifest that must be equal
NOT_COMPARED = {"out", "resume"}  # options that do not change what is recorded
NEWER = ("norm", "ffn_parameters", "widths")  # keys of the manifest's `model` that runs of older versions lack


def new_manifest(loaded: LoadedModel, options: CaptureOptions, names: Iterable[str]) -> Manifest:
    """Return the manifest of a run that begins. names: of the text sources; no other path is in it."""
    choice = loaded.choice(options.rows_of_batch)
    layout = loaded.layout
    return Manifest(
        name=options.out.name,
        model=loaded.describe(),
        tokenizer={"name": loaded.name, "vocab_size": 0 if loaded.tokenizer is None else len(loaded.tokenizer)},
        nnz_definition=loaded.nnz_definition,
        dtype=loaded.dtype,
        device=doctor.device_name(loaded.device),
        driver=doctor.driver(loaded.device),
        kernel={"name": choice.kernel, "reason": choice.reason},
        layout={"tile": layout.tile, "compression": layout.compression, "slots": layout.slots},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        text=[{"source": name} for name in names],
        options={name: value for name, value in asdict(options).items() if name not in NOT_COMPARED}
        | {"batch_tokens": options.rows_of_batch}
        | {"model": loaded.name, "seq_len": sequence_length(loaded, options.seq_len)},
        versions=doctor.versions(),
    )


class ResumePoint:
    """A run that is to be continued; sequences: how many it holds already."""

    def __init__(self, run: Run) -> None:
        self.run, self.sequences = run, run.manifest.sequences

    @classmethod
    def find(cls, options: CaptureOptions, ranks: Ranks) -> ResumePoint | None:
        """Find the run in --out and claim its folder; None without --resume, and where there is no run.

        Raises UserError where another capture still records it.
        """
        if not options.resume:
            return None
        if not (options.out / manifests.FILE).exists():
            with suppress(NotADirectoryError):  # --out is a file, which the caller refuses
                (options.out / (manifests.FILE + ".tmp")).unlink(missing_ok=True)  # a run that was killed as it began
            return None
        ranks.claim(options.out)
        return cls(open_run(options.out))

    def resume_manifest(self, planned: Manifest) -> Manifest:
        """Return the run's manifest, set to `recording` again.

        planned: the manifest that a new run would begin with. Raises UserError where the two record different things,
        and where a part is damaged.
        """
        recorded = self.run.manifest
        if recorded.summary_only:
            raise UserError(
                f"Expected a run with its rows in {self.run.path}, got a summary-only copy: choose another."
            )
        for name, before, now in _differences(recorded, planned):
            raise UserError(
                f"Expected to go on with {self.run.path} as it began, got another {name} "
                f"({now!r} now, {before!r} then): give what was given then, or choose another --out."
            )
        if damaged := self.run.damaged():
            raise UserError(
                f"Expected every part of {self.run.path} as it was recorded, but {damaged[0].rstrip('.')}: copy it "
                "again from where it was recorded, or choose another --out."
            )
        recorded.status = RECORDING
        return recorded

    def refuse_other_options(self, options: CaptureOptions) -> None:
        """Raise UserError where a complete run is asked for with other options, or of a model of another name.

        It costs no loading of the model, so that weights are not compared.
        """
        recorded = self.run.manifest
        names = {"demo-model"} if options.model == DEMO else {options.model, Path(options.model).resolve().name}
        given = {name: value for name, value in asdict(options).items() if name not in NOT_COMPARED | {"model"}}
        chosen_later = {name for name in ("batch_tokens", "seq_len") if given[name] is None}
        planned = replace(
            recorded,
            model=recorded.model
            | {"name": recorded.model["name"] if recorded.model["name"] in names else options.model},
            options={name: value for name, value in given.items() if name not in chosen_later},
        )
        for name, before, now in _differences(recorded, planned):
            raise UserError(
                f"Expected what the complete run {self.run.path} was recorded with, got another {name} "
                f"({now!r} now, {before!r} then): give what was given then, or choose another --out."
            )

    def skip_recorded(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches that are not recorded yet.

        Raises UserError where the run holds other tokens than the batches that are skipped.
        """
        ids = _RecordedIds(self.run)
        done = 0
        window: list[Batch] = []
        for batch in batches:
            if done >= self.sequences:
                yield batch
                continue
            window.append(batch)
            if batch.ends:
                done += self._compare(window, ids)
                window = []
        if done < self.sequences:
            raise self._other_text(f"only {done:,} of its {self.sequences:,} sequences")

    def _compare(self, window: list[Batch], ids: _RecordedIds) -> int:
        """Compare a window of batches with what is recorded; return how many sequences it has.

        Raises UserError where the run has other tokens, or ends within the window.
        """
        numbers = np.concatenate([batch.numbers for batch in window])
        sequences = [sequence for batch in window for sequence in batch.sequences]
        for index in np.argsort(numbers):
            sequence = sequences[index]
            if not np.array_equal(ids.take(len(sequence.ids)), sequence.ids):
                raise self._other_text(f"other tokens in document {sequence.document} of {sequence.source}")
        return len(numbers)

    def _other_text(self, got: str) -> UserError:
        return UserError(
            f"Expected the text that {self.run.path} was recorded from, got {got}: give the same --text, "
            "or choose another --out."
        )


class _RecordedIds:
    """The token ids that a run read, in order, without those it generated. One part is in memory at a time."""

    def __init__(self, run: Run) -> None:
        self._files = iter(run.parts("activity") if run.has("activity") else [])
        self._held = np.empty(0, dtype=np.int32)

    def take(self, tokens: int) -> np.ndarray:
        """Return the next ids, int32 [tokens], or as many as are left."""
        while len(self._held) < tokens and (path := next(self._files, None)) is not None:
            ids = read_part(path, columns=["token_id"], filters=[("phase", "==", PREFILL)])["token_id"]
            self._held = np.concatenate([self._held, ids.to_numpy()])
        taken, self._held = self._held[:tokens], self._held[tokens:]
        return taken


def _differences(recorded: Manifest, planned: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yield each difference of two manifests: its name, the recorded value, the planned value."""
    defaults = {item.name: item.default for item in fields(CaptureOptions)}
    for name, now in planned.model.items():
        before = recorded.model.get(name)
        if before != now and (name in recorded.model or name not in NEWER):
            yield f"model ({name})", before, now
    for name, now in planned.options.items():
        before = recorded.options.get(name, defaults.get(name))
        now = list(now) if isinstance(now, tuple) else now
        if before != now:
            yield f"--{name.replace('_', '-')}", before, now
    if len(recorded.ranks) != len(planned.ranks):
        yield "number of ranks", max(1, len(recorded.ranks)), max(1, len(planned.ranks))
    for name in SAME:
        if getattr(recorded, name) != getattr(planned, name):
            yield name, getattr(recorded, name), getattr(planned, name)
