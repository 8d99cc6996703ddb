"""Going on with a run where it ends.

The idea: the parts that the manifest lists are the truth, and they end with a window of batches. The text is read again
from the beginning and cut into the same batches; those that are recorded are compared, token by token, with what the
run holds, and skipped. All else that is recorded adds up over parts, so nothing has to be remembered. A run of another
model, other text or other options is refused, and the difference named.

Cost: tokenising once more what was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np

from twell.workbench.capturing.distributed import Ranks
from twell.workbench.capturing.prefetch import Texts
from twell.workbench.errors import UserError
from twell.workbench.options import CaptureOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import RECORDING, Manifest
from twell.workbench.run.schema import PREFILL
from twell.workbench.run.store import Run, open_run, read_part
from twell.workbench.text.batches import Batch

SAME = ("nnz_definition", "dtype", "kernel", "layout", "tokenizer")  # fields of the manifest that must be


class Recorded:
    """What a run holds already."""

    def __init__(self, run: Run) -> None:
        self.run, self.sequences = run, run.manifest.sequences

    @classmethod
    def find(cls, options: CaptureOptions, ranks: Ranks) -> Recorded | None:
        """The run to go on with, claimed: with --resume, and a run in --out. UserError where one records it still."""
        if not options.resume:
            return None
        if not (options.out / manifests.FILE).exists():
            with suppress(NotADirectoryError):  # which is refused in a moment
                (options.out / (manifests.FILE + ".tmp")).unlink(missing_ok=True)  # a run that was killed as it began
            return None
        ranks.claim(options.out)
        return cls(open_run(options.out))

    def goes_on(self, planned: Manifest) -> Manifest:
        """The run's manifest as it stands, to be recorded on.

        planned: the manifest that a new run would begin with. UserError where the two are of different captures.
        """
        ours = self.run.manifest
        if ours.summary_only:
            raise UserError(
                f"Expected a run with its rows in {self.run.path}, got a summary-only copy: choose another."
            )
        for name, before, now in _differences(ours, planned):
            raise UserError(
                f"Expected to go on with {self.run.path} as it began, got another {name} "
                f"({now!r} now, {before!r} then): give what was given then, or choose another --out."
            )
        ours.status = RECORDING
        return ours

    def skip(self, texts: Texts) -> Texts:
        """The batches that are not recorded yet. UserError where the recorded ones are not those of this text."""
        ids = _Ids(self.run)
        done = 0
        window: list[Batch] = []
        try:
            for batch in texts:
                if done >= self.sequences:
                    yield batch
                    continue
                window.append(batch)
                if batch.ends:
                    done += self._compare(window, ids)
                    window = []
        finally:
            texts.close()
        if done < self.sequences:
            raise self._other(f"only {done:,} of its {self.sequences:,} sequences")

    def _compare(self, window: list[Batch], ids: _Ids) -> int:
        """The sequences of a window that is recorded. UserError where the run has other tokens, or ends within it."""
        numbers = np.concatenate([batch.numbers for batch in window])
        sequences = [sequence for batch in window for sequence in batch.sequences]
        for place in np.argsort(numbers):
            sequence = sequences[place]
            if not np.array_equal(ids.take(len(sequence.ids)), sequence.ids):
                raise self._other(f"other tokens in document {sequence.document} of {sequence.source}")
        return len(numbers)

    def _other(self, got: str) -> UserError:
        return UserError(
            f"Expected the text that {self.run.path} was recorded from, got {got}: give the same --text, "
            "or choose another --out."
        )


class _Ids:
    """The token ids that a run read, from the beginning, a part in memory at a time; not those it generated."""

    def __init__(self, run: Run) -> None:
        self._files = iter(run.parts("activity") if run.has("activity") else [])
        self._held = np.empty(0, dtype=np.int32)

    def take(self, tokens: int) -> np.ndarray:
        """The next so many, or as many as are left."""
        while len(self._held) < tokens and (path := next(self._files, None)) is not None:
            ids = read_part(path, columns=["token_id"], filters=[("phase", "==", PREFILL)])["token_id"]
            self._held = np.concatenate([self._held, ids.to_numpy()])
        taken, self._held = self._held[:tokens], self._held[tokens:]
        return taken


def _differences(ours: Manifest, planned: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """What two manifests differ in: name, what ours says, what the other says."""
    defaults = {item.name: item.default for item in fields(CaptureOptions)}
    for name, now in planned.model.items():
        if ours.model.get(name) != now:
            yield f"model ({name})", ours.model.get(name), now
    for name, now in planned.options.items():
        before = ours.options.get(name, defaults.get(name))
        now = list(now) if isinstance(now, tuple) else now
        if before != now:
            yield f"--{name.replace('_', '-')}", before, now
    if len(ours.ranks) != len(planned.ranks):
        yield "number of ranks", max(1, len(ours.ranks)), max(1, len(planned.ranks))
    for name in SAME:
        if getattr(ours, name) != getattr(planned, name):
            yield name, getattr(ours, name), getattr(planned, name)
