"""The speedup of the FFN over all layers that were timed, and what a reader must know to believe it.

    ffn_speedup(run)   the one number under the words "FFN speedup", on every page, in exports and on the command line
    conditions(run)    the rows and the device that it holds for

Turn t of a layer is the t-th batch in which it ran both dense and sparse. A turn's ratio is that of the sums over
layers; the number is the ratios' geometric mean, and the interval is that of the same mean: turns that differ, because
the machine was busy or the text changed, widen it. On a busy machine turns in a row are alike, so their error is taken
over blocks; where they are too few for that, a sentence says so. Under two turns it is the ratio of the summed medians.
Cost: that of `speedup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twell.analysis.memo import memoized
from twell.analysis.speed.speedup import BLOCKS, REFERENCE, geometric, pairs, sizes, speedup, timings
from twell.workbench.run.store import Run

LEAST_TURNS = 2  # for an interval of the mean over turns, each of which has every layer
BUSY_LOAD = 1.5  # of the machine, per core, from which other work has slowed a capture
SHORT_CALL = 300.0  # µs of a dense FFN on a GPU, up to which what surrounds the kernels weighs beside them
UNSTEADY_CLOCK = 0.1  # of the GPU's clock, between the least and the greatest of nine readings in ten


@memoized
def ffn_speedup(run: Run) -> dict[str, Any]:
    """Return dense time over sparse time of all layers that were timed together, mean over turns. Keys:

    speedup; low, high (95 %, over turns; NaN under two turns); turns (that every such layer had); layers (their
    numbers); all_layers; calls (sparse calls timed); tells (whether the interval leaves 1 out); busy (a clause, "" if
    the machine was quiet, as far as is known); kernel; comparable; note (why not comparable, else ""); filled (a
    clause, "" where all layers have one width); short (µs of a dense FFN, where that is so little that what surrounds
    it weighs, else NaN).

    Raises Missing where no batch was timed both dense and sparse.
    """
    frame = speedup(run)
    ratios = turn_ratios(run)
    mean, low, high = geometric(ratios, LEAST_TURNS)
    comparable = bool(frame.attrs["comparable"])
    rows, sums = timings(run), frame[["dense_us", "sparse_us"]].sum()
    return {
        "speedup": mean if len(ratios) >= LEAST_TURNS else float(sums["dense_us"] / sums["sparse_us"]),
        "low": low,
        "high": high,
        "turns": len(ratios),
        "layers": [int(layer) for layer in frame["layer"]],
        "all_layers": len(frame) == run.layers,
        "calls": int((rows["op"] == "ffn_sparse").sum()),
        "tells": not low <= 1 <= high,
        "busy": busy(run),
        "kernel": ", ".join(sorted(set(frame["kernel"]))),
        "comparable": comparable,
        "note": "" if comparable else REFERENCE,
        "filled": filled(run),
        "short": short(run),
    }


def turn_ratios(run: Run) -> NDArray:
    """Return the sum of dense over the sum of sparse times of all timed layers, turn by turn, as far as all had one."""
    layer, _, times = pairs(run)
    first = np.searchsorted(layer, layer)  # layers are ascending, batches in each too
    turn = np.arange(len(layer)) - first
    turns = int(np.bincount(np.unique(layer, return_inverse=True)[1]).min())
    dense, sparse = (np.bincount(turn, values)[:turns] for values in times[:2])
    return dense / sparse


def busy(run: Run) -> str:
    """Return in a clause how the machine was busy, or its clock unsteady, while layers were timed; "" if neither is
    known."""
    rows = timings(run)
    load, clock = rows["load"].dropna(), rows["sm_mhz"].dropna()
    clauses = []
    if len(load) and load.median() > BUSY_LOAD:
        clauses.append(f"the machine was busy (load {load.median():.1f} per core)")
    low, high = (float(clock.quantile(share)) if len(clock) else np.nan for share in (0.05, 0.95))  # a dip is no sign
    if low < (1 - UNSTEADY_CLOCK) * high:
        clauses.append(f"the GPU's clock moved between {low:.0f} and {high:.0f} MHz")
    return " and ".join(clauses)


def filled(run: Run) -> str:
    """Return in a clause what both sides ran beyond the model's neurons; "" where all layers have one width."""
    share = run.neurons / (run.layers * run.d_ff)
    if share == 1:
        return ""
    return f"at {run.d_ff:,} neurons; a dense FFN as narrow as each layer has {share:.0%} of that work"


def short(run: Run) -> float:
    """Return the median time of the dense calls, in µs, if they ran on a GPU and took no more than SHORT_CALL; else
    NaN."""
    rows = timings(run)
    dense = float(rows.loc[rows["op"] == "ffn_dense", "microseconds"].median())
    on_gpu = bool(rows["kernel"].isin(["hopper", "cuda"]).any())
    return dense if on_gpu and dense <= SHORT_CALL else float("nan")


def layer_names(speed: dict[str, Any]) -> str:
    """Return the layers of `ffn_speedup` in words: all 8 layers; layers 0, 3-5 of 8 where they are not all."""
    layers = speed["layers"]
    if speed["all_layers"]:
        return f"all {len(layers)} layers" if len(layers) > 1 else "the only layer"
    return f"{numbered(layers)} alone"


def numbered(layers: Sequence[int]) -> str:
    """Return layers, ascending, in words: layer 3; layers 0, 3-5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' * (len(layers) > 1)} {names}"


def conditions(run: Run, op: str = "ffn_sparse") -> str:
    """Return what every speed of a run holds for, in words: rows that times are brought to, number format and device.

    op: the operation that was timed, as the table `timings` names it
    """
    rows = sizes(run).get(op)
    count = "an unknown number of" if rows is None else f"{rows:,.0f}"
    return f"{count} rows a batch, {run.manifest.dtype}, on {run.manifest.device}"


def caveats(speed: dict[str, Any]) -> list[str]:
    """Return the sentences that must stand beside the number of `ffn_speedup`; none where it can be believed."""
    sentences = []
    if speed["turns"] < LEAST_TURNS:
        sentences.append("Timed once, so how much it varies is not known.")
    elif not speed["tells"]:
        sentences.append("The interval includes 1: this run does not tell sparse from dense.")
    if speed["busy"]:
        few = LEAST_TURNS <= speed["turns"] < 2 * BLOCKS
        narrow = " Turns in a row are then alike, and of so few the interval holds nearer 90 % than 95." * few
        sentences.append(
            f"While it was timed {speed['busy']}: the ratio, of turns side by side, says more than a time.{narrow}"
        )
    if speed["filled"]:
        sentences.append(f"Dense and sparse ran every layer {speed['filled']}.")
    if speed["short"] > 0:
        sentences.append(
            f"A dense FFN took {speed['short'] / 1e3:.2f} ms: beside calls this short, handing one over and the "
            "counting weigh much; `twell bench` times the kernels."
        )
    return sentences


def sentence(speed: dict[str, Any]) -> str:
    """Return the number of `ffn_speedup` as the command line prints it."""
    if not speed["comparable"]:
        return f"FFN speedup: {speed['note']}."
    span = f" (95 % {speed['low']:.2f} to {speed['high']:.2f}, {speed['turns']} turns)" if speed["turns"] > 1 else ""
    text = f"FFN speedup {speed['speedup']:.2f} × dense{span}, {layer_names(speed)}, {speed['kernel']} kernel."
    return " ".join([text, *caveats(speed)])
