"""Run many cases of one fuzzer and print a table of their outcomes; exit 1 if any failed.

Cases run in a child process, CHUNK at a time: a case that crashes it, or that hangs in code which cannot be
interrupted, is a failure with its number, and the next ones go on in a new child.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.fuzz import FAILED, OMITTED, REFUSED, SAME, SECONDS, SUBJECTS, Outcome

CHUNK = 250  # cases of a child
UNPREPARED = 3  # exit code of a child that has begun no case


def main() -> int:
    """Parse the command line, run the cases, print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this number alone, here, and print all of its outcomes")
    options = parser.parse_args()
    if options.only is not None:
        return alone(options.subject, options.seed, options.only)
    begun, cases, kinds, failures = time.monotonic(), 0, Counter[str](), list[tuple[int, Outcome]]()
    for number, outcomes in run(options.subject, options.seed, options.first, options.cases):
        cases += 1
        kinds.update(outcome.kind for outcome in outcomes)
        for outcome in outcomes:
            if outcome.kind == FAILED:
                failures.append((number, outcome))
                _print_failure(number, outcome)
        if cases % CHUNK == 0:
            print(f"  {cases} cases, {kinds[FAILED]} failures, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    numbers = ", ".join(str(number) for number in sorted({number for number, _ in failures}))
    print(f"\n| {options.subject}, seed {options.seed}, from case {options.first} | |\n|---|---|")
    print(f"| cases | {cases} |\n| seconds | {time.monotonic() - begun:.0f} |")
    for kind in (SAME, REFUSED, OMITTED, FAILED):
        print(f"| {kind} | {kinds[kind]} |")
    print(f"failed cases: {numbers or 'none'}")
    return 1 if failures else 0


def _print_failure(number: int, outcome: Outcome) -> None:
    """Print a failure on standard error: what was asked of what, and the first and the last line of its details."""
    lines = outcome.details.strip().splitlines() or [""]
    print(f"FAILED case {number}: {outcome.where}\n    {lines[0]}\n    {lines[-1]}", file=sys.stderr, flush=True)


def alone(subject: str, seed: int, number: int) -> int:
    """Run one case in this process and print its outcomes."""
    with tempfile.TemporaryDirectory(prefix="twell-fuzz-") as folder:
        outcomes = importlib.import_module(f"support.fuzz.{subject}").cases(Path(folder), seed)(number)
    for outcome in outcomes:
        print(f"{outcome.kind}: {outcome.where} {outcome.details}")
    return int(any(outcome.kind == FAILED for outcome in outcomes))


def run(subject: str, seed: int, first: int, cases: int) -> Iterator[tuple[int, list[Outcome]]]:
    """Yield the number and the outcomes of each case, in order."""
    number, end = first, first + cases
    while number < end:
        for done, outcomes in _chunk(subject, seed, number, min(CHUNK, end - number)):
            yield done, outcomes
            number = done + 1


def _chunk(subject: str, seed: int, first: int, cases: int) -> Iterator[tuple[int, list[Outcome]]]:
    """Run cases in a child; yield those that it ended, and the one that it crashed or hung in as a failure."""
    with tempfile.TemporaryDirectory(prefix="twell-fuzz-") as folder:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _child(subject, seed, first, cases, Path(folder), writer)
        os.close(writer)
        number = first
        for message in _messages(reader, child):
            yield number, [Outcome(**fields) for fields in message]
            number += 1
        os.close(reader)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == UNPREPARED:
            sys.exit(f"The subject {subject} could not be prepared.")
        if number < first + cases:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
            yield number, [Outcome(FAILED, "the whole case", f"the process ended with {how}")]


def _child(subject: str, seed: int, first: int, cases: int, folder: Path, writer: int) -> None:
    """Run cases and write the outcomes of each as a line of JSON. Never returns."""
    code = UNPREPARED
    try:
        case = importlib.import_module(f"support.fuzz.{subject}").cases(folder, seed)
        code = 1
        with open(writer, "w", encoding="utf-8") as out:
            for number in range(first, first + cases):
                print(json.dumps([asdict(outcome) for outcome in case(number)]), file=out, flush=True)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def _messages(reader: int, child: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of a child, decoded; kill it if it is silent for as long as no case of many questions takes."""
    pending = b""
    while True:
        ready, _, _ = select.select([reader], [], [], 10 * SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
            return
        block = os.read(reader, 2**16)
        if not block:
            return
        *lines, pending = (pending + block).split(b"\n")
        yield from (json.loads(line) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
