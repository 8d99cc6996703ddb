"""Measure what issue 27 asks of one GPU: what a capture with live timings and examples costs, and whether it is right.

    python tests/support/live_timings.py MODEL TEXT [TOKENS [BENCH]]

MODEL: a folder, best of 28 layers of 2048 × 5632 trained for some minutes; TEXT: held back from its training; TOKENS:
of a turn, default 600 000. BENCH: a .parquet file for the figures of `twell bench`. Prints one JSON object: each row of
the issue's table under its name. Train first:

    twell train --config RECIPE --text TEXT --out MODEL --minutes 4

Cost: ten turns of TOKENS and a bench of every layer; about four minutes on one H200.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.capture_cost import in_turns, ratios

from twell.analysis import ffn_speedup
from twell.workbench.capturing.command import capture
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.store import Run, open_run

EXAMPLES = 8
SMALL, LARGE = 8_192, 131_072  # rows of a batch
ROUNDS = 2
SECONDS = 20.0  # after which every layer is to have dense times


def tokens_per_second(run: Run) -> float:
    """Return the rate between the end of the third batch and the end of the last one."""
    rows = run.frame("timings").query("op == 'pass'").sort_values("seconds")
    return float(rows["tokens"].iloc[3:].sum() / (rows["seconds"].iloc[-1] - rows["seconds"].iloc[2]))


def layers_timed(run: Run) -> dict[str, Any]:
    """Return how many layers had dense times SECONDS after the beginning, how often at least, and all sparse calls."""
    rows = run.frame("timings")
    dense = rows[(rows["op"] == "ffn_dense") & (rows["seconds"] <= SECONDS)]
    often = dense.groupby("layer").size()
    calls = rows[rows["op"] == "ffn_sparse"]
    return {
        "layers": len(often),
        "least_turns": int(often.min()) if len(often) else 0,
        "sparse_calls": len(calls),
        "calls_expected": run.layers * int(rows["batch"].nunique()),
    }


def bench_speedup(model: str, text: str, rows: int, kernel: str, out: Path) -> float:
    """Return the sum of dense over the sum of a kernel's times of all layers, by `twell bench` on the same text."""
    command = [
        "bench",
        model,
        "--text",
        text,
        "--rows",
        str(rows),
        "--inputs",
        "text",
        "--no-compile",
        "--out",
        str(out),
    ]
    subprocess.run([sys.executable, "-m", "twell.workbench", *command], check=True, stdout=sys.stderr)
    import pandas as pd

    frame = pd.read_parquet(out)
    ours = (frame["op"] == "ffn_sparse") & (frame["kernel"] == kernel)
    frame = frame[(frame["metric"] == "microseconds") & (ours | (frame["op"] == "ffn_dense"))]
    sums = frame.groupby("op")["value"].sum()
    return float(sums["ffn_dense"] / sums["ffn_sparse"])


def main(model: str, text: str, tokens: int = 600_000, bench: str | None = None) -> dict[str, Any]:
    """Return every figure of the table by its name."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        options = CaptureOptions(
            model=model, text=(text,), out=folder / "x", tokens=tokens, batch_tokens=LARGE, examples=EXAMPLES
        )
        loaded = load(model)
        with_all = ratios(in_turns(loaded, options, probes=("all",), run_dense=False, rounds=ROUNDS))
        plain = ratios(in_turns(loaded, replace(options, examples=0), probes=("all",), run_dense=False, rounds=ROUNDS))
        silent = replace(options, examples=0, timings=0)
        untimed = ratios(in_turns(loaded, silent, probes=("all",), run_dense=False, rounds=ROUNDS))
        del loaded
        large = capture(replace(options, out=folder / "large"))
        small = capture(replace(options, out=folder / "small", batch_tokens=SMALL))
        chosen = capture(replace(options, out=folder / "chosen", batch_tokens=None))
        total = ffn_speedup(open_run(large.path))
        benched = bench_speedup(
            model, text, LARGE, large.manifest.kernel["name"], Path(bench) if bench else folder / "bench.parquet"
        )
        return {
            "steady state with everything over the plain pass": 1 / with_all["all_over_unwatched_steady"],
            "small over large batches, tokens/s": tokens_per_second(small) / tokens_per_second(large),
            "default over large batches, tokens/s": tokens_per_second(chosen) / tokens_per_second(large),
            "default batch": chosen.manifest.options["batch_tokens"],
            "timed after 20 s": layers_timed(large),
            "cost of timing every call": plain["all_over_unwatched_steady"] / untimed["all_over_unwatched_steady"] - 1,
            "headline speedup": {
                "capture": total["speedup"],
                "low": total["low"],
                "high": total["high"],
                "bench": benched,
            },
            "whole captures over unwatched ones": with_all["all_over_unwatched"],
        }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:3], *map(int, sys.argv[3:4]), *sys.argv[4:5]), indent=1))
