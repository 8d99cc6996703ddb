"""Reuse over time: does the next token need the neurons that the last ones fired?

    reuse(run)         by lag: the share of a token's firings that the token so far back fired too
    reuse_cache(run)   by window: the share that any of the last tokens fired, and how many neurons that is

Both decide what caching or offloading weights can save: a cache of the neurons of the last w tokens serves the share of
firings that `reuse_cache` tells, and holds as many neurons as it tells. Beside them stands the share that a token
somewhere else in the text has in common. From the sample of firings (--fired), within sequences; a window is known
where all of its tokens are in the sample, which is hardly ever so where it holds a share of them (--fired 3:0.1). Cost:
0.2 s for 10 000 tokens of 100 firings, in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from twell.analysis.neurons.coactivation import as_firings, fired_csr, sampled_layers
from twell.analysis.statistics import effective, jackknife_error, t_half
from twell.analysis.summaries.derived import drawn_interval
from twell.analysis.summaries.documents import REPLICATES, read_documents
from twell.analysis.tokens.text_around import position_keys
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run
from twell.workbench.run.tables.absent import ABSENT

LAGS = (1, 2, 4, 8, 16, 32, 64, 128)
WINDOWS = (1, 2, 4, 8, 16, 32, 64)
FAR = 2**31  # tokens: more than a sequence has
RANDOM = 0  # in place of a lag: a token of another sequence


def reuse(run: Run, lags: Sequence[int] = LAGS) -> pd.DataFrame:
    """Return how much of a token's firings an earlier token has in common; a row a layer and lag. Columns:

    layer; lag (tokens back; 0: a token of another sequence, for comparison); pairs (of tokens); shared, low, high
    (share of the later one's firings that the earlier one fired too, over all pairs, 95 % by documents). Flagged tokens
    count too, so the earlier one may be the first of its sequence. Missing where no layer's firings were sampled.

    lags: in tokens.
    """
    pieces = []
    for layer in _layers(run):
        matrix, places = _fired(run, layer)
        unit = _units(run, places)
        for lag in (RANDOM, *lags):
            earlier, later = _pairs(places, lag)
            if not len(later):
                continue
            both = np.asarray(matrix[later].multiply(matrix[earlier]).sum(axis=1)).ravel()
            row = _share(both, np.diff(matrix.indptr)[later], unit[later], unit[earlier])
            pieces.append({"layer": layer, "lag": lag, "pairs": len(later), **row})
    return _table(run, pieces)


def reuse_cache(run: Run, windows: Sequence[int] = WINDOWS) -> pd.DataFrame:
    """Return what a cache of the neurons of the last tokens would serve; a row a layer and window. Columns:

    layer; window (tokens); neurons (different ones that they fired, mean); tokens (that have so many before them, all
    of them in the sample); served, low, high (share of a token's firings that are among these, 95 % by documents).
    Flagged tokens count too. Missing where no window of any layer is known.

    windows: in tokens.
    """
    pieces = []
    for layer in _layers(run):
        matrix, places = _fired(run, layer)
        unit, total, key = _units(run, places), np.diff(matrix.indptr), position_keys(places)
        row, before, after = _gaps(matrix, key)
        for window in sorted(windows):
            earlier, later = _pairs(places, window)
            later = later[later - earlier == window]  # whose window is whole: what was not kept may have fired as well
            if not len(later):
                continue
            both = np.bincount(row[before <= window], minlength=len(places))[later]
            share = _share(both, total[later], unit[later], unit[later])
            # A neuron of the window is counted at its last firing there: by each token up to its next one, and w on.
            here, far = (np.searchsorted(key[later], key + ahead, side="right") for ahead in (0, window))
            ends = np.where(after <= window, here[np.append(row[1:], 0)], far[row])
            neurons = float((ends - here[row]).sum() / len(later))
            served = {"served": share["shared"], "low": share["low"], "high": share["high"]}
            pieces.append({"layer": layer, "window": window, "neurons": neurons, "tokens": len(later), **served})
    if not pieces:
        raise Missing(
            f"The sample of firings of {run.name} holds no token with all of the {min(windows)} before it: keep all "
            "tokens of a layer, with --fired LAYER and no share (in Python fired=[LAYER])."
        )
    return _table(run, pieces)


def _gaps(matrix: csr_matrix, key: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return, a firing each, its row, and how many tokens before it and after it in its sequence the neuron fired.

    key [row]: ascending, as `position_keys` returns it: less than FAR apart in one sequence. FAR where it fired nowhere
    in the sequence before, or after.
    """
    by_neuron = matrix.tocsc()
    row, neuron = by_neuron.indices, np.repeat(np.arange(matrix.shape[1]), np.diff(by_neuron.indptr))
    if not len(row):  # nothing fired
        return row, row, row
    apart = np.where(np.diff(neuron) == 0, np.diff(key[row]), FAR)
    apart = np.minimum(apart, FAR)
    return row, np.concatenate([[FAR], apart]), np.concatenate([apart, [FAR]])


def _layers(run: Run) -> list[int]:
    """Return the layers whose firings were sampled. Missing where there are none."""
    if not run.has("fired"):
        raise Missing(f"{run.name} holds no sample of firings: {ABSENT['fired'][1]}.")
    return sampled_layers(run)


def _fired(run: Run, layer: int) -> tuple[csr_matrix, pd.DataFrame]:
    """Return which neurons fired, 0 or 1 [token of the sample, d_ff], and where each token stands."""
    matrix, places = fired_csr(run, layer)
    return as_firings(matrix, np.int32), places


def _units(run: Run, places: pd.DataFrame) -> NDArray:
    """Return the replicate of each token of the sample."""
    sequence, position = places["sequence"].to_numpy(), places["position"].to_numpy()
    return read_documents(run).of_rows(sequence, position)["unit"] % REPLICATES


def _pairs(places: pd.DataFrame, lag: int) -> tuple[NDArray, NDArray]:
    """Return the rows of pairs of tokens of one sequence, `lag` apart: the earlier and the later ones. With lag 0 each
    token is paired with one half of the sample away, of another sequence."""
    sequence, position = places["sequence"].to_numpy(np.int64), places["position"].to_numpy(np.int64)
    rows, key = np.arange(len(places)), position_keys(places)
    if lag == RANDOM:
        other = (rows + len(rows) // 2) % max(len(rows), 1)
        apart = sequence != sequence[other]
        return other[apart], rows[apart]
    index = np.searchsorted(key, key - lag)
    paired = (key[np.minimum(index, len(key) - 1)] == key - lag) & (position >= lag)
    return index[paired], rows[paired]


def _share(shared: NDArray, total: NDArray, unit: NDArray, other: NDArray) -> dict[str, float]:
    """Return Σ shared / Σ total of pairs of tokens with its 95 % interval; unit, other: the replicates of a pair's two.

    Of pairs within sequences it is `derived.drawn_interval`. A replicate is left out with all pairs that have a token
    of it. So pairs of two replicates count with both, and their own variance is taken off once, as of dyads (Aronow,
    Samii and Assenova, 2015). Leaving out a replicate of R takes 2/R of the pairs along, which makes errors 8 to 23 %
    greater than those of the linearised ratio. They are as great as they should be: the linearised interval holds 89 %
    where documents differ, this one 93; where pairs alone do, 94 to 97 and 96 to 98.
    """
    apart = unit != other
    n, y, size = (
        np.bincount(unit, values, REPLICATES) + np.bincount(other[apart], values[apart], REPLICATES)
        for values in (total, shared, np.ones(len(unit)))
    )
    used = size > 0
    n, y, size, whole, part = n[used], y[used], size[used], total.sum(), shared.sum()
    degrees = float(effective(size.sum(), (size**2).sum())) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate, without = float(part / whole), (part - y) / (whole - n)
        if not apart.any():
            low, high = drawn_interval(np.array([estimate]), without[:, None], degrees)
            return {"shared": estimate, "low": float(low[0]), "high": float(high[0])}
        variance = float(jackknife_error(estimate, without) ** 2)
        dyad = (np.minimum(unit, other) * REPLICATES + np.maximum(unit, other))[apart]
        twice = float((np.bincount(dyad, (shared - estimate * total)[apart]) ** 2).sum() / whole**2)
    error = np.sqrt(np.maximum(variance - twice, twice))
    half = float(t_half(degrees)) * error
    return {"shared": estimate, "low": estimate - half, "high": estimate + half}


def _table(run: Run, rows: list[dict[str, float]]) -> pd.DataFrame:
    """Return rows as a table. Missing where there is none."""
    if not rows:
        raise Missing(f"The sample of firings of {run.name} holds no two tokens of one sequence: keep a greater share.")
    frame = pd.DataFrame(rows)
    note = "within the sample of firings, of flagged tokens too; 95 % by documents"
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": note}
    return frame
