"""Seeded fuzzers: damaged runs, odd texts and models, random kernel calls; every case is told by its number.

    python -m support.fuzz damage --cases 10000 --seed 0     many cases, and a table of their outcomes
    python -m support.fuzz damage --only 4711 --seed 0       one case again, with its traceback
    make fuzz                                                thousands of each subject

A subject is a module of this package with a function `cases(folder, seed)`: it prepares what all cases share in an
empty folder and returns a function from a case's number to its outcomes. Number and seed alone decide a case
(`generator`), so a failure is run again by its number. `outcome` asks one question and judges the answer.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np

from twell.workbench.errors import UserError

SUBJECTS = ("damage", "texts", "models", "kernel_calls", "kills", "model_kills", "clicks")  # modules of this package
SAME, REFUSED, OMITTED, FAILED = "same answer", "one sentence", "named omission", "FAILED"
SECONDS = 30  # that one case may take
LONGEST = 1000  # characters of a sentence


@dataclass(frozen=True)
class Outcome:
    """The outcome of one question of a case. kind: SAME, REFUSED, OMITTED or FAILED; where: the question and what the
    case did, in words; details: the answer's error or difference, with the traceback of a failure."""

    kind: str
    where: str
    details: str = ""


def generator(seed: int, number: int) -> np.random.Generator:
    """Return the source of all random choices of one case."""
    return np.random.default_rng([seed, number])


def outcome(
    where: str, ask: Callable[[], object], differs: Callable[[object], str], omits: Callable[[object], bool]
) -> Outcome:
    """Ask a question and return its outcome.

    differs: returns the difference of an answer to the expected one in words, "" if there is none; omits: returns
    whether an answer that differs names what it leaves out
    """
    try:
        with at_most(SECONDS):
            answer = ask()
    except UserError as error:
        fault = sentence_fault(str(error))
        return Outcome(FAILED if fault else REFUSED, where, f"{fault}{error}")
    except Exception as error:
        return Outcome(FAILED, where, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    difference = differs(answer)
    if not difference:
        return Outcome(SAME, where)
    return Outcome(OMITTED if omits(answer) else FAILED, where, difference)


def sentence_fault(text: str) -> str:
    """Return what is wrong with the message of a refusal, "" if it is one sentence that can be printed."""
    if "\n" in text or not text.isprintable():
        return "more than a line, or characters that cannot be printed: "
    if not text.endswith((".", "?")):
        return "no sentence: "
    return f"longer than {LONGEST} characters: " if len(text) > LONGEST else ""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer; what waits in the system is interrupted too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
