"""Measure what issue 27 asks of one GPU: what a capture with live timings and examples costs, and whether it is right.

    python tests/support/live_timings.py MODEL TEXT [TOKENS [BENCH]]

MODEL: a folder, best of 28 layers of 2048 × 5632 trained for some minutes; TEXT: of at least TOKENS, default 9 000 000,
about a minute of one H200; BENCH: `bench` compares with `twell bench` too, at the end. Prints a line before each of
its parts begins, and one for each row of the table as soon as it is known. Train first:

    twell train --config RECIPE --text TEXT --out MODEL --minutes 4

The capture is set against passes of a fourth of its tokens before it and after it, whose steady part is scaled to as
many tokens. Cost: 2.5 minutes of one H200, and half a minute more for the bench.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.capture_cost import Turn, read_again, recorded_turn, unwatched_turn

from twell.analysis import ffn_speedup, speedup
from twell.workbench.capturing.batch_size import batch_rows
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.store import Run, open_run

EXAMPLES = 8
ROWS = 131_072  # of a large batch
SHORT, WARM = 14, 6  # batches of a turn that is only compared in its steady part, and those before it
PART = 4  # the passes without a capture read this part of its tokens
SECONDS = 20.0  # after which every layer is to have dense times


def layers_timed(run: Run) -> str:
    """Return how many layers had dense times SECONDS after the beginning, how often at least, and the sparse calls."""
    rows = run.frame("timings")
    dense = rows[(rows["op"] == "ffn_dense") & (rows["seconds"] <= SECONDS)]
    often = dense.groupby("layer").size()
    calls, expected = int((rows["op"] == "ffn_sparse").sum()), run.layers * int(rows["batch"].nunique())
    return f"{len(often)} of {run.layers}, {often.min() if len(often) else 0} times; sparse calls {calls} of {expected}"


def bench_sums(model: str, text: str, rows: int, kernel: str, out: Path) -> tuple[float, float]:
    """Return the sums of all layers' dense times and of a kernel's, in ms, by `twell bench` on the same text."""
    options = ["--text", text, "--rows", str(rows), "--inputs", "text", "--no-compile", "--out", str(out)]
    command = [sys.executable, "-m", "twell.workbench", "bench", model, *options, "--kernel", kernel]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    import pandas as pd

    frame = pd.read_parquet(out)
    ours = (frame["op"] == "ffn_sparse") & (frame["kernel"] == kernel)
    frame = frame[(frame["metric"] == "microseconds") & (ours | (frame["op"] == "ffn_dense"))]
    sums = frame.groupby("op")["value"].sum() / 1e3
    return float(sums["ffn_dense"]), float(sums["ffn_sparse"])


class Measured:
    """Turns of one model, each into a folder of its own. options: of the capture that is measured"""

    def __init__(self, loaded: LoadedModel, options: CaptureOptions, folder: Path) -> None:
        self.loaded, self.options = loaded, options
        self._folders = (folder / f"run-{number}" for number in count())
        self.folder = folder

    def unwatched(self, tokens: int | None) -> Turn:
        """Run passes alone; tokens: None for those of the options."""
        options = replace(self.options, tokens=tokens or self.options.tokens, examples=0)
        return unwatched_turn(self.loaded, read_again(self.loaded, options), options.loss)

    def recorded(self, batches: int | None = None, **changes: object) -> Turn:
        """Capture, whole or the first batches, with options changed."""
        self.folder = next(self._folders)
        options = replace(self.options, out=self.folder, **changes)  # type: ignore[arg-type]
        return recorded_turn(self.loaded, options, islice(read_again(self.loaded, options), batches))

    def steady_rate(self, rows: int, **changes: object) -> float:
        """Return tokens a second of a short capture once its dense layers were timed, without its end."""
        return self.recorded(tokens=SHORT * ROWS, batch_tokens=rows, **changes).tokens_a_second(WARM * ROWS // rows)


def lines(model: str, text: str, tokens: int = 9_000_000, bench: str = "") -> Iterator[str]:
    """Yield a line for each row of the table."""
    with tempfile.TemporaryDirectory() as place:
        options = CaptureOptions(
            model=model, text=(text,), out=Path(place), tokens=tokens, batch_tokens=ROWS, examples=EXAMPLES
        )
        loaded = load(model)
        measured = Measured(loaded, options, Path(place))
        yield f"{loaded.name} is loaded; two batches of each kind first"
        measured.recorded(2)
        measured.unwatched(2 * ROWS)
        yield f"passes of {tokens // PART:,} tokens alone"
        before = measured.unwatched(tokens // PART)
        yield f"  {before.tokens_a_second():,.0f} tokens/s; capture of {tokens:,} tokens"
        whole = measured.recorded()
        rate = whole.tokens_a_second()
        yield f"  {rate:,.0f} tokens/s of {sum(whole.batches):,}, end {whole.end:.2f} s; passes alone again"
        after = measured.unwatched(tokens // PART)
        run = open_run(measured.folder)

        passes = [before.tokens_a_second(), after.tokens_a_second()]
        yield f"passes alone {passes[0]:,.0f} and {passes[1]:,.0f} tokens/s"
        yield f"steady state with everything over the plain pass: {rate / mean(passes):.4f}"
        alone = before.start + before.end + sum(whole.batches[:-1]) / mean(passes)
        yield (
            f"whole capture over unwatched: {whole.whole / alone:.4f} ({whole.whole:.1f} s: start {whole.start:.2f}, "
            f"end {whole.end:.2f}, calibrations {whole.timings:.2f}; alone {alone:.1f} s)"
        )
        yield f"dense times after {SECONDS:.0f} s: {layers_timed(run)}"
        total = ffn_speedup(run)
        sums = speedup(run)[["dense_us", "sparse_us"]].sum() / 1e3
        yield (
            f"headline speedup: {total['speedup']:.3f} ({total['low']:.3f} to {total['high']:.3f}), "
            f"{sums['dense_us']:.1f} over {sums['sparse_us']:.1f} ms"
        )

        plain = {"examples": 0, "timings_share": 1e-9}  # no dense layer once each was timed
        timed = [measured.steady_rate(ROWS, timings=often, **plain) for often in (0, 1, 1, 0)]
        cost = mean(timed[::3]) / mean(timed[1:3]) - 1
        yield f"timing every call costs {cost:.4f} (tokens/s {[round(rate) for rate in timed]})"
        for size in (None, 2_240_000):  # bytes of text: none known, and those of 560 000 tokens
            chosen = batch_rows(loaded, replace(options, batch_tokens=None, tokens=None), [size])
            share = 1.0 if chosen == ROWS else measured.steady_rate(chosen, timings=0, **plain) / mean(timed[::3])
            yield f"default batch of {chosen} rows (text of {size} bytes) over {ROWS}: {share:.4f}"
        if bench:
            dense, ours = bench_sums(model, text, ROWS, run.manifest.kernel["name"], Path(place) / "bench.parquet")
            yield f"`twell bench`: {dense / ours:.3f}, {dense:.1f} over {ours:.1f} ms"


if __name__ == "__main__":
    for line in lines(*sys.argv[1:3], *map(int, sys.argv[3:4]), *sys.argv[4:5]):
        print(line, flush=True)
