"""Read the tokens of a run again, as sequences with the documents that they come from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twell.workbench.errors import UserError
from twell.workbench.run.store import Run
from twell.workbench.text.sequences import Sequence


def recorded_sequences(
    run: Run, tokens: int, spread: bool = False, or_else: str = "capture its model on a text, and give that run"
) -> list[Sequence]:
    """Return the run's first sequences, up to the one in which the token of that number is.

    spread: take as many tokens from sequences all over the run. Raises UserError for a run that holds no tokens.
    or_else: what to do then
    """
    if run.manifest.summary_only or not run.has("activity"):
        got = "a training" if run.manifest.only_trains else "one without"
        raise UserError(f"Expected a run with its tokens in {run.path}, got {got}: {or_else}.")
    return list(_spread(_sequences(run, run.manifest.tokens), tokens, run) if spread else _sequences(run, tokens))


def _spread(sequences: Iterator[Sequence], tokens: int, run: Run) -> Iterator[Sequence]:
    """Yield sequences so that their share of the tokens seen so far is that of `tokens` in the run."""
    seen = taken = 0
    for sequence in sequences:
        if taken * run.manifest.tokens <= seen * tokens and taken < tokens:
            taken += len(sequence.ids)
            yield sequence
        seen += len(sequence.ids)


def _sequences(run: Run, tokens: int) -> Iterator[Sequence]:
    origins: dict[int, tuple[int, str, int]] = {}
    if run.has("sequences"):
        rows = run.arrow("sequences", ["sequence", "document", "source", "start"]).to_pydict()
        columns = zip(rows["document"], rows["source"], rows["start"], strict=True)
        origins = dict(zip(rows["sequence"], columns, strict=True))
    for rows in run.pieces("activity", ["sequence", "token_id"]):
        numbers, ids = (rows[name].to_numpy() for name in ("sequence", "token_id"))
        begins = np.append(0, np.flatnonzero(np.diff(numbers)) + 1)
        for number, piece in zip(numbers[begins], np.split(ids, begins[1:]), strict=True):
            document, source, start = origins.get(int(number), (int(number), run.name, 0))
            yield Sequence(document, source, start, piece)
            tokens -= len(piece)
            if tokens <= 0:
                return
