"""Ranks: tokens by class of nnz and class of loss, which rank correlations come from. Functions of a part's rows.

Of runs past a million tokens, some whole groups of 20 sequences are counted alone (`class_step`). Cost,
1 M tokens of 28 layers of which an eighth are counted: 0.25 CPU seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.statistics import band
from twell.analysis.summaries.part_rows import Rows
from twell.workbench.run.store import Run

BINS_A_CLASS, BINS_A_COARSE_CLASS = 4, 8  # bands of loss (`sums.loss_bins`): floor(6·√loss), floor(3·√loss)
COARSE_COUNT, COARSE_REPLICATES = 8, 10
CLASS_TOKENS = 2**19  # rank correlations come from one to two times as many, of a run that has them


def class_step(run: Run) -> int:
    """Return of how many groups of 20 sequences the tables of rank correlations count one: a power of two that grows
    with the run."""
    return 2 ** max(0, (run.manifest.tokens // CLASS_TOKENS).bit_length() - 1)


def ranks(rows: Rows, replicate: NDArray, bins: NDArray) -> pa.Table:
    """Tokens by class of the next token's loss and class of nnz, both fine enough to keep a rank correlation, in a
    replicate. `bins`: the band of that loss, -1 where there is none."""
    counted = (rows.flags == 0) & (bins >= 0)
    keys = {"replicate": replicate[counted], "loss_class": bins[counted] // BINS_A_CLASS}
    return _counted(rows.counts[counted], keys, band(_every(rows.counts)))


def ranks_by_class(rows: Rows, losses: Mapping[str, NDArray], kinds: NDArray) -> pa.Table:
    """Tokens and their nnz by class of token, of loss (the next token's; with `own`, the token's) and of nnz.

    Coarser than `ranks`, since there are so many more rows. `losses`: bands of either, `later` and `own`; `kinds`:
    as `classes.numbers`.
    """
    kind = of_tokens(kinds, rows.token)
    coarse = np.floor(COARSE_COUNT * np.sqrt(np.sqrt(_every(rows.counts).astype(float)))).astype(np.int32)
    found = []
    for name, bins in losses.items():
        counted = (rows.flags == 0) & (bins >= 0)
        keys = {
            "kind": kind[counted],
            "replicate": rows.sequence[counted] % COARSE_REPLICATES,
            "loss_class": bins[counted] // BINS_A_COARSE_CLASS,
        }
        tokens = _counted(rows.counts[counted], keys, coarse, sums=True)
        found.append(tokens.append_column("own", pa.array(np.full(tokens.num_rows, name == "own"))))
    return pa.concat_tables(found)


def of_tokens(kinds: NDArray, token: NDArray) -> NDArray:
    """What `kinds` has for each token, by its id; last, for one that the vocabulary lacks."""
    return kinds[np.where((token >= 0) & (token < len(kinds)), token, -1)]


def _every(counts: NDArray) -> NDArray:
    """Each count up to the most there is."""
    return np.arange(1 + int(counts.max(initial=0)))


def _counted(counts: NDArray, keys: Mapping[str, NDArray], classes: NDArray, sums: bool = False) -> pa.Table:
    """Tokens, and with `sums` their nnz, by layer, by the keys and by class of nnz; `classes`: that of each count."""
    shape = [*(1 + int(key.max(initial=0)) for key in keys.values()), 1 + int(classes[-1])]
    base = np.zeros(len(counts), np.int64)
    for key, size in zip(keys.values(), shape[1:], strict=True):
        base = (base + key) * size
    found = []
    for layer, nnz in enumerate(np.ascontiguousarray(counts.T)):
        place = base + classes[nnz]
        tokens = np.bincount(place, minlength=1)
        there = np.flatnonzero(tokens)
        named = dict(zip((*keys, "nnz_class"), np.unravel_index(there, shape), strict=True))
        columns = {**named, "layer": np.full(len(there), layer), "tokens": tokens[there]}
        if sums:  # in float64, exact for as many rows as are held at a time
            columns["nnz_sum"] = np.bincount(place, nnz, 1)[there].astype(np.int64)
        found.append(pa.table(columns))
    return pa.concat_tables(found)
