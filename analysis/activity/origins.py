"""Origins: by source of the text, by phase of generation, and what begins a sequence.

    by_source(run)         mean nnz and loss of each text source, by layer
    by_phase(run)          prompts and generated tokens apart, by layer
    first_positions(run)   position 0 against later ones: that of a document, and that of a cut in one
    first_over_all(run)    the same, summed over layers: the one ratio of position 0 that pages and claims name

Tables over a whole run mix these. Intervals leave out one twentieth of the documents at a time; a difference between
two of them is taken within the same replicates. Cost: 5 ms, from the summary `origins`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.positions import by_position
from twell.analysis.statistics import distinct, effective, jackknife_error, t_half
from twell.analysis.summaries.documents import CUT, LATER, REPLICATES, START, UNKNOWN
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.columns import LOSS_UNITS_PER_NAT
from twell.workbench.run.schema import DECODE, PREFILL
from twell.workbench.run.store import Run

PHASES = {PREFILL: "prefill", DECODE: "decode"}
STARTS = {START: "document", CUT: "cut", UNKNOWN: "not known"}
ALL = "all"


def by_source(run: Run) -> pd.DataFrame:
    """Return mean nnz by text source and layer, after position 0. Columns:

    source; layer (-1: the sum over all layers); tokens; mean, low, high (nnz in neurons a token, 95 %); ratio,
    ratio_low, ratio_high (mean over that of all other sources; empty where there is one source); loss_mean (nats, of
    the predictions made there).
    """
    summaries = open_summaries(run)
    rows = _later(summaries)
    names, number = np.unique(rows["source"].astype(str), return_inverse=True)
    return _compared(summaries, rows, "source", names.astype(object), number)


def by_phase(run: Run) -> pd.DataFrame:
    """Return mean nnz by phase and layer, after position 0. Columns:

    phase (prefill, decode); layer (-1: the sum over all layers); tokens; mean, low, high (nnz in neurons a token, 95
    %); ratio, ratio_low, ratio_high (mean over that of the other phase); loss_mean (nats, of the predictions made
    there).
    """
    summaries = open_summaries(run)
    rows = _later(summaries)
    phases, number = distinct(rows["phase"])
    return _compared(summaries, rows, "phase", np.array([PHASES[int(phase)] for phase in phases], object), number)


def first_positions(run: Run) -> pd.DataFrame:
    """Return mean nnz at position 0 over that of later positions. Columns:

    layer (-1: the sum over all layers); start (all; document: the first token of one; cut: of a later sequence of one,
    which has no context either, but no special token; not known); tokens; mean (nnz); ratio, low, high (mean over that
    of all later positions, 95 %).

    Missing where the run has no position 0, or nothing else.
    """
    summaries = open_summaries(run)
    rows = _rows(summaries)
    n, y = _cells(summaries, rows, rows["place"], UNKNOWN + 1)
    pieces = []
    for place, name in [(None, ALL), *STARTS.items()]:
        first = [each[1:].sum(axis=0) if place is None else each[place] for each in (n, y)]
        if not first[0].any() or (place == UNKNOWN and not n[[START, CUT]].any()):
            continue
        ratio, half = _ratio(first, [n[LATER], y[LATER]])
        columns = {"tokens": first[0].sum(axis=-1).astype(np.int64), "mean": _mean(*first)}
        columns |= {"ratio": ratio, "low": ratio * np.exp(-half), "high": ratio * np.exp(half)}
        pieces.append(pd.DataFrame({"layer": _layers(run), "start": name, **columns}))
    if not pieces or not n[LATER].any():
        raise Missing("No position 0, or nothing after it, was counted.")
    frame = pd.concat(pieces, ignore_index=True)
    frame.attrs = _about(summaries)
    return frame


def first_over_all(run: Run) -> pd.DataFrame:
    """Return mean nnz at position 0 over that of later positions, of the sum over layers: ratio, low, high (95 %) by
    start, as `first_positions` names it. Summaries without origins tell "all" alone, with an interval by sequences."""
    try:
        rows = first_positions(run)
        return rows[rows["layer"] == -1].set_index("start")
    except Missing:
        pass
    rows = by_position(run, total=True)
    starts, later = rows[rows["first"]], rows[~rows["first"]]
    if starts.empty or later.empty:
        raise Missing(f"{run.name} holds no unflagged token at position 0, or none after it, to compare.")
    first, rest = starts.iloc[0], (later["mean"] * later["tokens"]).sum() / later["tokens"].sum()
    ratio, half = first["mean"] / rest, (first["high"] - first["mean"]) / rest
    columns = {"tokens": first["tokens"], "ratio": ratio, "low": ratio - half, "high": ratio + half}
    return pd.DataFrame(columns, index=["all"])


def _rows(summaries: Summaries) -> dict[str, NDArray]:
    names = ("layer", "source", "phase", "place", "replicate", "tokens", "nnz_sum", "loss_sum", "loss_tokens")
    return summaries.columns("origins", *names)


def _later(summaries: Summaries) -> dict[str, NDArray]:
    """Return the rows of tokens after position 0. Missing where there are none."""
    rows = _rows(summaries)
    later = rows["place"] == LATER
    if not later.any():
        raise Missing(f"{summaries.run.name} holds no unflagged token after position 0.")
    return {name: values[later] for name, values in rows.items()}


def _cells(summaries: Summaries, rows: dict[str, NDArray], key: NDArray, size: int) -> list[NDArray]:
    """Return sums of tokens and of nnz [key, layer, replicate], layer -1 the last."""
    shape = (size, summaries.run.layers + 1, REPLICATES)
    index = np.ravel_multi_index((key, rows["layer"] % shape[1], rows["replicate"]), shape)
    return [np.bincount(index, rows[name], np.prod(shape)).reshape(shape) for name in ("tokens", "nnz_sum")]


def _compared(
    summaries: Summaries, rows: dict[str, NDArray], name: str, labels: NDArray, number: NDArray
) -> pd.DataFrame:
    """Return mean nnz of each label, compared with all others together; number [row]: the index of its label."""
    run, layers = summaries.run, _layers(summaries.run)
    n, y = _cells(summaries, rows, number, len(labels))
    one = rows["layer"] == -1
    loss, known = (np.bincount(number[one], rows[name][one], len(labels)) for name in ("loss_sum", "loss_tokens"))
    pieces = []
    for index, label in enumerate(labels):
        half = _half(n[index], y[index])
        mean = _mean(n[index], y[index])
        columns = {"tokens": n[index].sum(axis=-1).astype(np.int64), "mean": mean, "low": mean - half}
        columns["high"] = mean + half
        ratio, reach = _ratio([n[index], y[index]], [each.sum(axis=0) - each[index] for each in (n, y)])
        columns |= {"ratio": ratio, "ratio_low": ratio * np.exp(-reach), "ratio_high": ratio * np.exp(reach)}
        columns["loss_mean"] = loss[index] / LOSS_UNITS_PER_NAT / known[index] if known[index] else np.nan
        pieces.append(pd.DataFrame({name: label, "layer": layers, **columns}))
    frame = pd.concat(pieces, ignore_index=True)
    frame.attrs = {"definition": run.manifest.nnz_definition, **_about(summaries)}
    return frame


def _layers(run: Run) -> NDArray:
    return np.append(np.arange(run.layers), -1)


def _mean(n: NDArray, y: NDArray) -> NDArray:
    """Return Σy / Σn over the last axis."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return y.sum(axis=-1) / n.sum(axis=-1)


def _without(n: NDArray, y: NDArray) -> NDArray:
    """Return the mean of each layer without each replicate that has tokens [replicate, layer]."""
    used = n[0] > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        return ((y.sum(axis=-1, keepdims=True) - y) / (n.sum(axis=-1, keepdims=True) - n))[:, used].T


def _t(n: NDArray) -> float:
    """Return half of a 95 % interval in standard errors, by the effective number of replicates."""
    size = n[0]
    return float(t_half(effective(size.sum(), (size**2).sum()) - 1))


def _half(n: NDArray, y: NDArray) -> NDArray:
    """Return half of the 95 % interval of the mean of each layer; n, y [layer, replicate]."""
    return _t(n) * jackknife_error(_mean(n, y), _without(n, y))


def _ratio(one: list[NDArray], other: list[NDArray]) -> tuple[NDArray, NDArray]:
    """Return the ratio of two means by layer, and half of the 95 % interval of its logarithm, jackknifed over the
    replicates of both; NaN where either has no tokens. one, other: tokens and nnz [layer, replicate]."""
    either = one[0][0] + other[0][0] > 0
    a, b = ([each[:, either] for each in pair] for pair in (one, other))

    def logs(pair: list[NDArray]) -> tuple[NDArray, NDArray]:
        n, y = pair
        left = (y.sum(axis=-1, keepdims=True) - y).T / (n.sum(axis=-1, keepdims=True) - n).T
        return np.log(_mean(n, y)), np.log(left)

    with np.errstate(divide="ignore", invalid="ignore"):
        (top, top_without), (bottom, bottom_without) = logs(a), logs(b)
        half = np.maximum(_t(a[0]), _t(b[0]))  # NaN where either is
        return np.exp(top - bottom), half * jackknife_error(top - bottom, top_without - bottom_without)


def _about(summaries: Summaries) -> dict[str, str]:
    return {"note": f"intervals from groups of {summaries.clustered_by}, each left out once"}
