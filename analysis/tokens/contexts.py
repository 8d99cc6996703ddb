"""Contexts: where a token stands in the text, and how many neurons it fires there.

    contexts(run, token_id)                    its loudest places
    contexts(run, token_id, order="quietest")  or its quietest, or the first in text order
    loudest(run)                               the loudest places of the whole run, whatever token stands there
    passages(run, width=32)                    its loudest stretches of text

Reads the rows of single tokens, so a summary-only run cannot answer. Cost: 0.1 s a million tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import histogram, layer_moments
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.analysis.tokens.by_token import token_text
from twell.analysis.tokens.text_around import sides, token_windows
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run
from twell.workbench.run.uncounted import no_counted_token

if TYPE_CHECKING:
    import ibis.expr.types as ir

    from twell.analysis.engines.base import Engine

Order = Literal["loudest", "quietest", "text"]


def contexts(
    run: Run, token_id: int, limit: int = 50, order: Order = "loudest", width: int = 16, flagged: bool = False
) -> pd.DataFrame:
    """Return the positions at which a token occurs. Columns:

    sequence; position; document; source; before, token, after (text, `width` tokens either side); nnz (sum over
    layers); z (mean over layers, see by_token); loss (nats, of the next token; empty where there is none); percentile
    (of the run's tokens, those with at most this nnz, in %).
    """
    summaries = open_summaries(run)
    found = _places(summaries, token_id, limit, order, flagged)
    if found.empty:
        raise Missing(f"Token {token_id} does not occur in {run.name}{'' if flagged else ' unflagged'}.")
    return _dressed(summaries, found, width, flagged, {"token_id": token_id, "order": order})


def loudest(
    run: Run, limit: int = 50, order: Order = "loudest", width: int = 16, flagged: bool = False
) -> pd.DataFrame:
    """Return the positions of the whole run at which most neurons fire, by z, or fewest. Columns: token_id, then as in
    contexts."""
    summaries = open_summaries(run)
    found = _places(summaries, None, limit, order, flagged)
    if found.empty:
        raise no_counted_token(run)
    return _dressed(summaries, found, width, flagged, {"order": order})


def passages(run: Run, width: int = 32, limit: int = 20, order: Order = "loudest") -> pd.DataFrame:
    """Return stretches of `width` tokens of one sequence by their mean z, cut at multiples of `width`. Columns:

    sequence; position (of the first token); document; source; text; z (mean over its tokens); nnz (mean over its
    tokens, sum over layers); loss (mean, nats). Stretches with a flagged token are left out.
    """
    if width < 2:
        raise UserError(f"Expected passages of at least 2 tokens, got {width}.")
    import ibis
    from ibis import _

    from twell.analysis.engines.open import open_engine

    with open_engine() as engine:
        rows = _scored(engine, open_summaries(run), order).filter(_.flags == 0)
        rows = rows.mutate(position=(rows.position // width * width).cast("int32"))
        means = {"n": _.count(), "z": _.z.mean(), "nnz": _.nnz.mean(), "loss": _.loss.mean()}
        rows = rows.group_by("sequence", "position").agg(**means).filter(_.n == width).drop("n")
        found = engine.arrow(rows.order_by([*_first(ibis, order), "sequence", "position"]).limit(limit)).to_pandas()
    if found.empty:
        raise Missing(f"{run.name} has no {width} consecutive unflagged tokens: ask for shorter passages.")
    windows = token_windows(run, found, width)
    found["text"] = [run.decode(window.ids[window.here : window.here + width].tolist()) for window in windows]
    frame = _sourced(run, found)[["sequence", "position", "document", "source", "text", "z", "nnz", "loss"]]
    frame.attrs = {"definition": run.manifest.nnz_definition, "width": width, "order": order}
    return frame


def _dressed(
    summaries: Summaries, found: pd.DataFrame, width: int, flagged: bool, about: dict[str, object]
) -> pd.DataFrame:
    """Return positions with their percentile, the text around, document and source; about: more `attrs`."""
    run, counted = summaries.run, histogram(summaries, flagged)
    counted = counted[counted["layer"] == -1]
    up_to = np.cumsum(counted["tokens"].to_numpy())
    reached = np.searchsorted(counted["nnz"].to_numpy(), found["nnz"].to_numpy(), side="right") - 1
    found["percentile"] = 100 * up_to[reached] / up_to[-1]
    around = sides(run, found, width)
    found["before"], found["after"] = [left for left, _, _ in around], [right for _, _, right in around]
    found["token"] = token_text(run, found["token_id"])
    found = _sourced(run, found)
    columns = ["sequence", "position", "document", "source", "before", "token", "after", "nnz", "z", "loss"]
    frame = found[[*([] if "token_id" in about else ["token_id"]), *columns, "percentile"]]
    frame.attrs = {"definition": run.manifest.nnz_definition, **about}
    return frame


def _sourced(run: Run, found: pd.DataFrame) -> pd.DataFrame:
    """Return rows by sequence with its document and source; -1 and "" where the run does not list its sequences."""
    if not run.has("sequences"):
        return found.assign(document=-1, source="")
    return found.merge(run.frame("sequences", ["sequence", "document", "source"]), on="sequence", how="left")


def _places(summaries: Summaries, token_id: int | None, limit: int, order: Order, flagged: bool) -> pd.DataFrame:
    """Return the first `limit` occurrences of a token, or of any, in this order: sequence, position, token_id, nnz, z,
    loss."""
    import ibis

    from twell.analysis.engines.open import open_engine

    with open_engine() as engine:
        rows = _scored(engine, summaries, order, token_id)
        rows = (rows if flagged else rows.filter(rows.flags == 0)).drop("flags")
        return engine.arrow(rows.order_by([*_first(ibis, order), "sequence", "position"]).limit(limit)).to_pandas()


def _scored(engine: Engine, summaries: Summaries, order: Order, token_id: int | None = None) -> ir.Table:
    """Return the run's tokens with nnz and z over layers, as an expression. UserError for an unknown order."""
    import ibis

    if order not in get_args(Order):
        raise UserError(f"Expected an order of {', '.join(get_args(Order))}, got {order!r}.")
    run, (mean, sd) = summaries.run, layer_moments(summaries)
    names = nnz_columns(run.layers)
    rows = engine.read(run.parts("activity"))
    rows = rows if token_id is None else rows.filter(rows.token_id == token_id)
    return rows.select(
        "sequence",
        "position",
        "token_id",
        "flags",
        nnz=_sum_of([rows[name].cast("int64") for name in names]),
        z=_standardised(ibis, rows, names, mean, sd),
        loss=_finite_loss(ibis, rows.loss),
    )


def _sum_of(terms: Sequence[ir.NumericValue]) -> ir.NumericValue:
    """Return the sum of expressions, as a balanced tree: a long chain would nest too deeply."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = [left + right for left, right in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(terms) - len(terms) % 2 :]
    return terms[0]


def _finite_loss(ibis: ModuleType, loss: ir.FloatingColumn) -> ir.FloatingValue:
    """Return the loss where it is a finite number, else null."""
    wide = loss.cast("float64")
    return ibis.ifelse(wide.isnan() | wide.isinf(), ibis.null("float64"), wide)


def _standardised(
    ibis: ModuleType, rows: ir.Table, counts: Sequence[str], mean: NDArray, sd: NDArray
) -> ir.FloatingValue:
    """Return z of a token: the mean over layers of (nnz - layer mean) / layer sd; layers without spread are left
    out."""
    spread = [layer for layer in range(len(counts)) if sd[layer] > 0]
    if not spread:
        return ibis.literal(0.0)
    weight = {layer: float(1 / (sd[layer] * len(spread))) for layer in spread}
    level = sum(weight[layer] * float(mean[layer]) for layer in spread)
    return _sum_of([rows[counts[layer]].cast("float64") * weight[layer] for layer in spread]) - level


def _first(ibis: ModuleType, order: Order) -> list[ir.Value]:
    """Return the sort keys of an order, before sequence and position."""
    return {"loudest": [ibis.desc("z")], "quietest": [ibis.asc("z")], "text": []}[order]
