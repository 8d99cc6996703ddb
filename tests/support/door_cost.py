"""Measure what the checks of a run's files cost: opening, the first questions and the first paint, in fresh processes.

    PYTHONPATH=.ns:tests python tests/support/door_cost.py RUN [TURNS]      print a table of the least of TURNS turns
    PYTHONPATH=.ns:tests python tests/support/door_cost.py RUN make TOKENS  write such a run of 28 layers of 5632 first

Turns with the checks and without them alternate. Without them, no checksum is compared, neither of a file nor of a
page, and no column is held against its declaration. Times are of the processor, without imports, in milliseconds: on a
machine with other work they vary less than those of the clock. What a process finds is kept for later ones, so the
first turn with the checks, which hashes every file that is read, is printed by itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CODE = "import sys; from support.door_cost import one_turn; one_turn(sys.argv[1], sys.argv[2] == 'checked')"
CHECKED, UNCHECKED = "checked", "unchecked"
SEQUENCES = 2730  # of a part of about 2^20 tokens


def one_turn(path: str, checked: bool) -> None:
    """Ask in this process, and print the milliseconds of each step as JSON."""
    import pyarrow.parquet as pq
    from streamlit.testing.v1 import AppTest

    from twell import analysis
    from twell.analysis import passage
    from twell.analysis.summaries import read
    from twell.app.server.serve import LATER, MAIN, PAGES, load
    from twell.workbench.run.checks import left_out, verified
    from twell.workbench.run.store import open_run

    load(*PAGES, *LATER)  # imports are no part of what is measured
    if not checked:
        verified.faults = lambda *given, **named: {}
        left_out._lost_losses = lambda *given: {}
        read.summary_fault = lambda *given: ""
        for name in ("ParquetFile", "read_table"):
            setattr(pq, name, partial(_without_pages, getattr(pq, name)))
    steps: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        begun = time.process_time()
        result = step()
        steps[name] = 1000 * (time.process_time() - begun)
        return result

    run = timed("open", lambda: open_run(path))
    timed("by_layer", lambda: analysis.by_layer(run))
    timed("overview", lambda: analysis.overview(run))
    timed("passage", lambda: passage.passage(run, 3))
    sys.argv = ["main.py", str(Path(path).parent)]
    page = AppTest.from_file(str(MAIN), default_timeout=120)
    page.query_params["run"] = Path(path).name
    timed("first paint", page.run)
    assert not page.exception, page.exception
    print(json.dumps(steps))


def _without_pages(
    read: Callable[..., Any], *given: Any, page_checksum_verification: bool = False, **named: Any
) -> Any:
    """Call a reader of Parquet without comparing the checksums of pages."""
    return read(*given, **named)


def turn(path: str, how: str) -> dict[str, float]:
    """Ask in a fresh process; return the milliseconds of each step."""
    done = subprocess.run([sys.executable, "-c", CODE, path, how], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(path: str, turns: int) -> None:
    """Print the least of some turns with the checks and without them, and their ratio."""
    first = turn(path, CHECKED)
    results: dict[str, list[dict[str, float]]] = {CHECKED: [], UNCHECKED: []}
    for _ in range(turns):
        for how, times in results.items():
            times.append(turn(path, how))
    print(f"{'ms of the processor':<20} {'first':>9} {'checked':>9} {'unchecked':>9} {'ratio':>7}")
    for step, once in first.items():
        checked, unchecked = (min(times[step] for times in results[how]) for how in (CHECKED, UNCHECKED))
        print(f"{step:<20} {once:9.1f} {checked:9.1f} {unchecked:9.1f} {checked / unchecked:7.3f}")


def make(path: Path, tokens: int) -> None:
    """Write a run of 28 layers of 5632 neurons, a part at a time, and summarise it."""
    import numpy as np
    from support import synthetic_runs as made

    from twell.analysis import ensure
    from twell.workbench.run.store import open_run
    from twell.workbench.run.writer import RunWriter

    shape = made.Shape(layers=28, d_ff=5632, vocab=20_000, sequences=SEQUENCES, length=512, tiles=False)
    writer, written, losses = RunWriter(path, made.manifest(shape, path.name)), 0, []
    writer.add("vocab", made.vocabulary(shape.vocab))
    while written < tokens:
        columns = made.draw(made.Shape(**{**vars(shape), "seed": len(losses)}))
        if not losses:
            writer.add("timings", made.timings(shape, columns, np.random.default_rng(0)))
        columns["sequence"] = columns["sequence"] + np.int32(SEQUENCES * len(losses))
        made.add_part(writer, shape, columns, np.random.default_rng(1 + len(losses)))
        loss = columns["loss"].astype(np.float64)
        losses.append((float(loss.sum()), int(loss.count())))
        written += len(columns["sequence"])
        writer.drain()
    writer.finish(loss_sum=sum(total for total, _ in losses), loss_tokens=sum(count for _, count in losses))
    with contextlib.redirect_stdout(io.StringIO()):
        ensure(open_run(path))
    print(f"{path}: {written:,} tokens")


if __name__ == "__main__":
    if sys.argv[2:3] == ["make"]:
        make(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7)
