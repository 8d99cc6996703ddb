"""Count a part's tokens by class of nnz, of loss and of entropy, from which rank correlations are computed.

In runs past a million tokens, only some groups of 20 whole documents are counted (`class_step`). Cost for 1 M tokens of
28 layers, an eighth of them counted: 0.25 CPU seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.statistics import band
from twell.analysis.summaries.part_rows import PartRows
from twell.workbench.run.store import Run

LOSS_SCALE = 24  # a band of loss is floor(24·√loss) (`part_sums.loss_bins`),
BINS_A_CLASS, BINS_A_COARSE_CLASS = 4, 8  # and so many of them are a class: floor(6·√loss), floor(3·√loss)
OF_LOSS = -1  # in place of a layer, of classes of the loss in place of nnz
COARSE_COUNT, COARSE_REPLICATES = 8, 10
CLASS_TOKENS = 2**19  # rank correlations come from one to two times as many, of a run that has them


def class_step(run: Run) -> int:
    """Return n where the tables of rank correlations count one in n groups of 20 documents: a power of two that grows
    with the run."""
    return 2 ** max(0, (run.manifest.tokens // CLASS_TOKENS).bit_length() - 1)


def ranks(rows: PartRows, replicate: NDArray, bins: NDArray) -> pa.Table:
    """Count tokens by class of the next token's loss and class of nnz, both fine enough for a rank correlation.

    replicate [row]; bins [row]: the band of the loss, -1 where there is none.
    """
    counted = (rows.flags == 0) & (bins >= 0)
    keys = {"replicate": replicate[counted], "loss_class": bins[counted] // BINS_A_CLASS}
    return _counted(rows.counts[counted], keys, band(_possible(rows.counts)))


def entropy_ranks(rows: PartRows, replicate: NDArray, bins: NDArray, entropy: NDArray) -> pa.Table:
    """Count tokens by class of the entropy of the next token's prediction and class of nnz, or (in the rows of layer
    OF_LOSS) of that token's loss; both are those of `ranks`.

    replicate [row]; bins, entropy [row]: the bands of the loss and of the entropy, -1 where there is none.
    """
    counted = (rows.flags == 0) & (entropy >= 0)
    keys = {"replicate": replicate[counted], "entropy_class": entropy[counted] // BINS_A_CLASS}
    loss = bins[counted, None] // BINS_A_CLASS
    of_loss = _counted(loss, keys, _possible(loss))
    of_loss = of_loss.set_column(of_loss.schema.names.index("layer"), "layer", pa.array(np.full(len(of_loss), OF_LOSS)))
    joined = pa.concat_tables([of_loss, _counted(rows.counts[counted], keys, band(_possible(rows.counts)))])
    return joined.rename_columns([name.replace("nnz_class", "rank_class") for name in joined.schema.names])


def ranks_by_class(rows: PartRows, losses: Mapping[str, NDArray], kind: NDArray) -> pa.Table:
    """Count tokens, and sum their nnz, by class of token, class of loss and class of nnz.

    losses: the band of each row by name of the loss, `later` (the next token's) and `own` (the token's own); kind: the
    class of each row, as `Classes.of_rows` returns it. Classes are coarser than in `ranks`, since there are many more
    rows. The column `class` holds indices into CLASSES.
    """
    coarse = coarse_band(_possible(rows.counts))
    tables = []
    for name, bins in losses.items():
        counted = (rows.flags == 0) & (bins >= 0)
        keys = {
            "class": kind[counted],
            "replicate": rows.unit[counted] % COARSE_REPLICATES,
            "loss_class": bins[counted] // BINS_A_COARSE_CLASS,
        }
        tokens = _counted(rows.counts[counted], keys, coarse, sums=True)
        tables.append(tokens.append_column("own", pa.array(np.full(tokens.num_rows, name == "own"))))
    return pa.concat_tables(tables)


def coarse_band(number: NDArray) -> NDArray:
    """Return the coarse class of each count: floor(8·⁴√count)."""
    return np.floor(COARSE_COUNT * np.sqrt(np.sqrt(number.astype(float)))).astype(np.int32)


def _possible(counts: NDArray) -> NDArray:
    """Return every count from 0 to the greatest."""
    return np.arange(1 + int(counts.max(initial=0)))


def _counted(counts: NDArray, keys: Mapping[str, NDArray], classes: NDArray, sums: bool = False) -> pa.Table:
    """Count tokens, and with `sums` add up their nnz, by layer, by the keys and by class of nnz.

    counts [row, layer]: nnz; keys: by name, a whole number from 0 for each row; classes [nnz]: the class of each count.
    """
    shape = [*(1 + int(key.max(initial=0)) for key in keys.values()), 1 + int(classes[-1])]
    base = np.zeros(len(counts), np.int64)
    for key, size in zip(keys.values(), shape[1:], strict=True):
        base = (base + key) * size
    tables = []
    for layer, nnz in enumerate(np.ascontiguousarray(counts.T)):
        cell = base + classes[nnz]
        tokens = np.bincount(cell, minlength=1)
        occurring = np.flatnonzero(tokens)
        key_columns = dict(zip((*keys, "nnz_class"), np.unravel_index(occurring, shape), strict=True))
        columns = {**key_columns, "layer": np.full(len(occurring), layer), "tokens": tokens[occurring]}
        if sums:  # in float64, exact for as many rows as are held at a time
            columns["nnz_sum"] = np.bincount(cell, nnz, 1)[occurring].astype(np.int64)
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)
