"""Highest places: where the text has the greatest counts and the greatest losses.

    fullest_tokens(run, layer)     the tokens that fire most neurons; layer -1: in all layers
    most_surprising(run)           the positions of greatest surprisal
    loss_quantiles(run, shares)    quantiles of the losses

Cost: 10 ms for counts, from the run's summaries; 0.1 CPU seconds for losses of a million tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.summaries.built import covered_parts, parts_of, read_built
from twell.analysis.summaries.part_rows import text_order
from twell.analysis.summaries.read import Summaries
from twell.analysis.summaries.token_sums import fullest, greatest
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run
from twell.workbench.run.tables.highest import HIGHEST_TOKENS

SEEN = HIGHEST_TOKENS  # how many of the highest tokens are listed
ORDER = ["value", "sequence", "position"]  # of the highest places: by falling value, then as in the text
MOST_LOSS = 1e4  # nats, above any that a model has: infinite ones are left out


def fullest_tokens(run: Run, layer: int, phase: int | None = None) -> pd.DataFrame:
    """Return the SEEN tokens that fire most neurons in a layer, in all for -1, each at its first position of greatest
    nnz. Columns: sequence, position, value (nnz).

    From the run's summaries, or where these are of other parts from the rows: 0.3 CPU seconds for a million tokens of
    28 layers.
    """
    run.parts("activity")  # raises Missing where the rows are not kept, and UserError where they are damaged
    kept = Summaries(run, scored=False).frame("highest", layer=layer) if _summarised(run) else None
    if kept is None or not _summarised(run):  # others may replace what is being read while a run is recorded
        found = pd.concat(_fullest_of_parts(run, layer, phase))
    else:
        found = kept.rename(columns={"nnz": "value"})
        found = found if phase is None else found[found["phase"] == phase]
    found = found.sort_values(ORDER, ascending=[False, True, True]).drop_duplicates("token_id")
    return found.head(SEEN)[["sequence", "position", "value"]].reset_index(drop=True)


def _summarised(run: Run) -> bool:
    """Return whether the run's summaries cover its parts, and no part that this reader does not know."""
    return covered_parts(run, read_built(run)) == parts_of(run)


def _fullest_of_parts(run: Run, layer: int, phase: int | None) -> Iterator[pd.DataFrame]:
    """Yield the SEEN tokens that fire most neurons of each part. Columns: sequence, position, token_id, value."""
    columns, places = nnz_columns(run.layers), ["sequence", "position", "token_id"]
    columns = columns if layer == -1 else [columns[layer]]
    for rows in run.pieces("activity", [*places, "phase", "flags", *columns]):
        value = np.zeros(rows.num_rows, np.int64)
        for name in columns:
            value += rows[name].to_numpy()
        used = rows["flags"].to_numpy() == 0
        if phase is not None:
            used &= rows["phase"].to_numpy() == phase
        sequence, position, token = (rows[name].to_numpy() for name in places)
        index = np.flatnonzero(used)
        index = index[text_order(sequence[index], position[index])]
        index = index[fullest(value[index], token[index])]
        yield rows.select(places).take(index).to_pandas().assign(value=value[index])


def most_surprising(run: Run, phase: int | None = None) -> pd.DataFrame:
    """Return the positions of greatest surprisal, four times as many as are listed, since tokens may repeat. Columns:
    sequence, position, value (nats)."""
    best = []
    for rows in run.pieces("activity", ["sequence", "position", "phase", "loss"]):
        sequence, position, phases = (rows[name].to_numpy() for name in ("sequence", "position", "phase"))
        order = text_order(sequence, position)
        sequence, position, phases, loss = sequence[order], position[order], phases[order], _losses(rows["loss"])[order]
        # The loss at a position is the surprisal of the next token, which the last position of a sequence lacks, and of
        # which the phase is: the first generated token is predicted at the last of the prompt.
        followed = (loss < MOST_LOSS) & (np.append(sequence[1:], -1) == sequence)
        if phase is not None:
            followed &= np.append(phases[1:], 0) == phase
        index = np.flatnonzero(followed)
        index = index[greatest(loss[index], 4 * SEEN)]
        values = loss[index].astype(float)
        best.append(pd.DataFrame({"sequence": sequence[index], "position": position[index] + 1, "value": values}))
    found = pd.concat(best).sort_values(ORDER, ascending=[False, True, True])
    return found.head(4 * SEEN).reset_index(drop=True)


def loss_quantiles(run: Run, shares: Sequence[float]) -> list[float]:
    """Return quantiles of the run's losses, in nats, between neighbours where they fall between two.

    Losses are half floats, of which there are few: they are counted, not sorted. Raises Missing where all are
    MOST_LOSS or more.
    """
    tokens = np.zeros(2**16, np.int64)
    for rows in run.pieces("activity", ["loss"]):
        loss = _losses(rows["loss"])
        tokens += np.bincount(loss[loss < MOST_LOSS].view(np.uint16), minlength=len(tokens))
    if not tokens.any():
        raise Missing(
            f"{run.name} has no loss under {MOST_LOSS:,.0f} nats, so that surprisal has no scale: shade by counts."
        )
    values = np.arange(len(tokens), dtype=np.uint16).view(np.float16)[tokens > 0].astype(float)
    order = np.argsort(values)
    up_to = np.cumsum(tokens[tokens > 0][order])
    rank = np.asarray(shares) * (up_to[-1] - 1)
    below, above = (values[order][np.searchsorted(up_to, each, side="right")] for each in (rank // 1, np.ceil(rank)))
    return (below * (1 - rank % 1) + above * (rank % 1)).tolist()


def _losses(column: pa.ChunkedArray) -> NDArray:
    """Return losses as half floats, NaN where there is none."""
    return column.to_numpy()
