"""Contexts: where a token stands in the text, and how many neurons it fires there.

    contexts(run, token_id)                    its loudest places
    contexts(run, token_id, order="quietest")  or its quietest, or the first in text order

Reads the rows of single tokens, so a summary-only run cannot answer. Cost: 0.1 s a million tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pandas as pd

from twell.analysis import summary
from twell.analysis.layers import histogram, moments
from twell.analysis.tokens import token_text
from twell.workbench.errors import Missing, UserError
from twell.workbench.schema import nnz_columns
from twell.workbench.store import Run

Order = Literal["loudest", "quietest", "text"]


def contexts(
    run: Run, token_id: int, limit: int = 50, order: Order = "loudest", width: int = 16, flagged: bool = False
) -> pd.DataFrame:
    """The places where a token stands. Columns:

    sequence; position; document; source; before, token, after (text, `width` tokens either side); nnz (sum over
    layers); z (mean over layers, see by_token); loss (nats, of the next token; empty where there is none); percentile
    (of the run's tokens, those with at most this nnz, in %).
    """
    if order not in get_args(Order):
        raise UserError(f"Expected an order of {', '.join(get_args(Order))}, got {order!r}.")
    run.parts("activity")
    found = _places(run, token_id, limit, order, flagged)
    if found.empty:
        raise Missing(f"Token {token_id} does not occur in {run.name}{'' if flagged else ' unflagged'}.")
    counted = histogram(run, flagged)
    counted = counted[counted["layer"] == -1]
    up_to = np.cumsum(counted["tokens"].to_numpy())
    reached = np.searchsorted(counted["nnz"].to_numpy(), found["nnz"].to_numpy(), side="right") - 1
    found["percentile"] = 100 * up_to[reached] / up_to[-1]
    sides = _sides(run, found, width)
    found["before"], found["after"] = [left for left, _ in sides], [right for _, right in sides]
    found["token"] = token_text(run, pd.Series([token_id]))[0]
    if run.has("sequences"):
        about = run.frame("sequences", ["sequence", "document", "source"])
        found = found.merge(about, on="sequence", how="left")
    else:
        found["document"], found["source"] = -1, ""
    columns = ["sequence", "position", "document", "source", "before", "token", "after", "nnz", "z", "loss"]
    frame = found[[*columns, "percentile"]]
    frame.attrs = {"definition": run.manifest.nnz_definition, "token_id": token_id, "order": order}
    return frame


def _places(run: Run, token_id: int, limit: int, order: Order, flagged: bool) -> pd.DataFrame:
    """The first `limit` occurrences in the order asked for: sequence, position, nnz, z, loss."""
    import ibis

    from twell.analysis import sums
    from twell.analysis.engine import Engine

    mean, sd = moments(summary.read(run, "layers"), run.layers)
    names = nnz_columns(run.layers)
    with Engine() as engine:
        rows = engine.read(run.parts("activity"))
        rows = rows.filter(rows.token_id == token_id)
        rows = rows if flagged else rows.filter(rows.flags == 0)
        rows = rows.select(
            "sequence",
            "position",
            nnz=sums.sum_of([rows[name].cast("int64") for name in names]),
            z=sums.standardised(rows, names, mean, sd),
            loss=sums.finite_loss(rows.loss),
        )
        first = {"loudest": [ibis.desc("z")], "quietest": [ibis.asc("z")], "text": []}[order]
        return engine.arrow(rows.order_by([*first, "sequence", "position"]).limit(limit)).to_pandas()


def _sides(run: Run, places: pd.DataFrame, width: int) -> list[tuple[str, str]]:
    """The text before and after each place."""
    from twell.analysis.engine import Engine

    wanted = sorted(set(places["sequence"].tolist()))
    with Engine() as engine:
        rows = engine.read(run.parts("activity"))
        rows = rows.filter(rows.sequence.isin(wanted)).select("sequence", "position", "token_id")
        near = engine.arrow(rows).to_pandas().sort_values(["sequence", "position"])
    by_sequence = {number: group for number, group in near.groupby("sequence")}
    sides = []
    for sequence, position in zip(places["sequence"], places["position"], strict=True):
        there = by_sequence[sequence]
        offset = there["position"].to_numpy() - position
        ids = there["token_id"].to_numpy()
        left, right = ids[(offset < 0) & (offset >= -width)], ids[(offset > 0) & (offset <= width)]
        sides.append((run.decode(left.tolist()), run.decode(right.tolist())))
    return sides
