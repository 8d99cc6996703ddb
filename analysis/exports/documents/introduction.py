"""The sentences that introduce a run to a reader who has seen none of it: page Overview and the exported page begin so.

Cost: none beside `overview` and `bench_beside`.
"""

from __future__ import annotations

from typing import Any

from twell.analysis.figures.labels import SPACE, number, percent, plural, times, whole
from twell.analysis.figures.speed.bench_beside import beside_capture
from twell.workbench.run.manifest import spelled
from twell.workbench.run.store import Run


def introduction(run: Run, numbers: dict[str, Any]) -> str:
    """Return in a few sentences what was run and what came out, for a reader who has seen none of it.

    Args:
        run: the run.
        numbers: its `analysis.overview`.
    """
    layers = "its only layer" if run.layers == 1 else f"each of its {run.layers} layers"
    wrote = " and wrote" if run.manifest.options.get("generate") else ""  # both are counted
    text = (
        f"{run.manifest.model['name']} read{wrote} {plural(run.manifest.tokens, 'token')}. In "
        f"{layers} a token meets {spelled(run.manifest.widths, whole)} neurons and fires "
        f"{number(numbers['nnz_mean'])} of them on average, its nnz; the other {percent(numbers['sparsity'])}"
    )
    if (threshold := run.manifest.options.get("threshold")) is not None:
        return f"{text} have values of at most {threshold:g} in size, and the model ran densely, as it is."
    text += " give zeros, which a sparse kernel skips."
    speedup = numbers["speedup"]
    if speedup is None:
        bench = beside_capture(run)
        return f"{text} What skipping them saves was not timed{f' in the capture; {bench}' if bench else '.'}"
    if numbers["speedup_turns"] > 1 and numbers["speedup_low"] <= 1 <= numbers["speedup_high"]:
        return f"{text} Whether skipping them saves time here, the timings of this run do not tell."
    some = numbers["speedup_layers"].endswith("alone")
    if numbers["speedup_turns"] < 2 or some:
        rest = "; the other layers were not timed" if some else ""
        once = "Timed once" if numbers["speedup_turns"] < 2 else "Timed"
        return f"{text} {once}, in {numbers['speedup_layers']}, that ran {times(speedup)} as fast as dense{rest}."
    if speedup < 1:
        return f"{text} Here skipping them does not pay: that part of the model ran {times(speedup)} as fast as dense."
    rest = f", and a whole pass {pass_in_words(numbers)}" if numbers["pass_speedup"] is not None else ""
    return f"{text} That made these parts, the feed-forward networks (FFN), {times(speedup)} as fast here{rest}."


def pass_in_words(numbers: dict[str, Any]) -> str:
    """Return how fast a whole pass ran and how sure that is, as the end of a sentence. numbers: `analysis.overview`"""
    sure, speedup = numbers["pass_low"] == numbers["pass_low"], times(numbers["pass_speedup"])
    if not sure:
        batches = plural(numbers["pass_repeats"], "timed batch", "es")
        return f"{speedup} as fast, in {batches}, too few to tell how much that varies"
    interval = f"{times(numbers['pass_low'])} to {times(numbers['pass_high'])} with 95{SPACE}% confidence"
    return f"{speedup} as fast ({interval}, {plural(numbers['pass_repeats'], 'batch', 'es')})"
