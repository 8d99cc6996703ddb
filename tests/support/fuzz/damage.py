"""Damaged runs: one file of a run is damaged, and some 30 questions are asked of it.

A case copies a small run (or its copy without rows of tokens), damages one thing and asks. Allowed are the same answer,
one sentence in its place, and an answer that names what it leaves out. CONSENTED of the questions are asked of the run
as it is used without its damaged parts. Damage that a re-written manifest covers (`listed`) is a file that other
software wrote: of another type, or with values that no run has.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from support import synthetic_runs
from support.fuzz import Outcome, generator, outcome, run_questions
from support.fuzz.damaged_manifests import Case
from support.fuzz.kinds_of_damage import damage

import twell.analysis as analysis
from twell.workbench.errors import UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.store import Run, open_run

ASKED = 12  # questions of a case, drawn from all, beside the listing; at most one of the slow ones
CONSENTED = 0.3  # share of the questions
NAME = "damaged"  # of the run's folder, and so in its answers
SHAPE = synthetic_runs.Shape(layers=4, d_ff=64, vocab=60, sequences=48, length=40, parts=2, fired=True, bench=True)


def cases(folder: Path, seed: int, asked: int = ASKED) -> Callable[[int], list[Outcome]]:
    """Record the runs that all cases damage copies of, and what these answer while they are whole.

    asked: questions of a case; fewer than ASKED are none of the slow ones
    """
    whole = synthetic_runs.make(folder / "runs" / "whole", replace(SHAPE, seed=1))
    full = synthetic_runs.make(folder / "full" / NAME, SHAPE)
    copy = folder / "copy" / NAME
    with redirect_stdout(io.StringIO()):
        analysis.summarize(SummarizeOptions(runs=(full.path, whole.path)))
        analysis.summarize(SummarizeOptions(runs=(full.path,), summary_only=copy))
    originals = {"full": full, "copy": open_run(copy)}
    answers = {kind: _answers(run) for kind, run in originals.items()}

    def case(number: int) -> list[Outcome]:
        rng = generator(seed, number)
        kind = "copy" if rng.random() < 0.25 else "full"
        path = folder / "runs" / NAME
        shutil.copytree(originals[kind].path, path)
        try:
            made = Case(path, folder / "runs" / "whole", rng)
            return _asked(made, f"{kind}: {damage(made)}", answers[kind], folder, asked)
        finally:
            shutil.rmtree(path)

    return case


def _answers(run: Run) -> dict[str, object]:
    """Return the answer to every question that the whole run answers, or the error in its place."""
    answers: dict[str, object] = {}
    for name, ask in run_questions.ALL.items():
        try:
            answers[name] = ask(run)
        except UserError as error:
            answers[name] = error
    return answers


def _asked(case: Case, what: str, answers: dict[str, object], folder: Path, asked: int) -> list[Outcome]:
    """Ask a damaged run some questions, and list it beside the whole one."""
    outcomes = [
        outcome(
            f"listing, {what}",
            lambda: run_questions.listed(folder / "runs", "whole", NAME),
            lambda wrong: str(wrong),
            lambda _: False,
        )
    ]
    drawn = case.rng.permutation(list(answers)).tolist()
    slow = [name for name in drawn if name in run_questions.SLOW][:1] if asked == ASKED else []
    fast = [name for name in drawn if name not in run_questions.SLOW][: asked - len(slow)]
    for name in [*fast, *slow]:
        expected, consent = answers[name], bool(case.rng.random() < CONSENTED)

        def ask(name: str = name, consent: bool = consent) -> object:
            run = open_run(case.run, without_damaged=consent)
            answer = run_questions.ALL[name](run)
            return Unnamed(answer, run.left_out) if name in run_questions.WITHOUT_WORDS else answer

        def differs(answer: object, expected: object = expected) -> str:
            if isinstance(expected, Exception):
                return f"an answer, where the whole run says: {expected}"
            return run_questions.difference(expected, answer.value if isinstance(answer, Unnamed) else answer)

        where = f"{name}{' without damaged parts' if consent else ''}, {what}"
        outcomes.append(outcome(where, ask, differs, lambda answer: ".parquet" in run_questions.words(answer)))
    return outcomes


@dataclass(frozen=True)
class Unnamed:
    """An answer that has no place for the names of what is left out, and what its run says of that."""

    value: object
    left_out: str
