"""Contexts: where a token occurs in the text, and how many neurons it fires there.

    contexts(run, token_id)                    its loudest occurrences
    contexts(run, token_id, order="quietest")  its quietest occurrences; order="text": the first ones in the text
    loudest(run)                               the loudest positions of the whole run, whichever token is there
    passages(run, width=32)                    the loudest stretches of text
    one_place_each(run, token_ids)             the first place of each of many tokens

Contexts come from the rows of single tokens, so a summary-only run has none. Cost for a million tokens
of 28 layers, in seconds of processor time: a token 0.2 to 0.4, the loudest positions 0.6, the loudest stretches 0.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import counted_tokens, histogram, layer_moments
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.analysis.tokens.text_around import sides, token_windows
from twell.analysis.tokens.token_text import token_text
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.checks.uncounted import no_counted_token
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

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

    limit: positions, at most; order: loudest or quietest first, by z, or that of the text; flagged: whether special,
    first and non-finite tokens count. Missing where the token does not occur, or the run has no rows of single tokens.
    """
    summaries = open_summaries(run)
    occurrences = _occurrences(summaries, token_id, limit, order, flagged)
    if occurrences.empty:
        raise Missing(f"Token {token_id} does not occur in {run.name}{'' if flagged else ' unflagged'}.")
    return _with_context(summaries, occurrences, width, flagged, {"token_id": token_id, "order": order})


def loudest(
    run: Run, limit: int = 50, order: Order = "loudest", width: int = 16, flagged: bool = False
) -> pd.DataFrame:
    """Return the positions of the whole run at which most neurons fire, by z, or fewest. Columns: token_id, then as in
    contexts sequence, position, document, source, before, token, after, nnz, z, loss and percentile.

    limit, order, width, flagged: as in contexts. Missing where no token is counted, or the run has no rows of
    single tokens.
    """
    summaries = open_summaries(run)
    occurrences = _occurrences(summaries, None, limit, order, flagged)
    if occurrences.empty:
        raise no_counted_token(run)
    return _with_context(summaries, occurrences, width, flagged, {"order": order})


def one_place_each(run: Run, token_ids: tuple[int, ...], width: int = 10) -> pd.DataFrame:
    """Return the first unflagged position of each token, in the order of the ids. Columns: token_id, sequence,
    position, before, token, after (text, `width` tokens either side). Missing where the run has no rows of tokens."""
    run.parts("activity")  # raises Missing where the query would say that there is no such table
    listed = ", ".join(str(int(token)) for token in token_ids) or "-1"
    rows = run.sql(
        "select token_id, min(sequence) as sequence, arg_min(position, (sequence, position)) as position "
        f"from activity where flags = 0 and token_id in ({listed}) group by token_id"
    )
    rows = rows.set_index("token_id").reindex([token for token in token_ids if token in set(rows["token_id"])])
    rows = rows.astype("int64").reset_index()
    texts = sides(run, rows, width) if len(rows) else []
    return rows.assign(**{name: [text[n] for text in texts] for n, name in enumerate(("before", "token", "after"))})


def passages(run: Run, width: int = 32, limit: int = 20, order: Order = "loudest") -> pd.DataFrame:
    """Return stretches of `width` tokens of one sequence by their mean z, cut at multiples of `width`. Columns:

    sequence; position (of the first token); document; source; text; z (mean over its tokens); nnz (mean over its
    tokens, sum over layers); loss (mean, nats). Stretches with a flagged token are left out.

    limit: stretches, at most; order: as in contexts. UserError for a width under 2; Missing where no stretch is that
    long, or the run has no rows of single tokens.
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
        stretches = engine.arrow(rows.order_by([*_first(ibis, order), "sequence", "position"]).limit(limit)).to_pandas()
    if stretches.empty:
        raise Missing(f"{run.name} has no {width} consecutive unflagged tokens: ask for shorter passages.")
    windows = token_windows(run, stretches, width)
    stretches["text"] = [run.decode(window.ids[window.center : window.center + width].tolist()) for window in windows]
    frame = _with_source(run, stretches)[["sequence", "position", "document", "source", "text", "z", "nnz", "loss"]]
    note = f"stretches of {width} tokens, none of them flagged; {counted_tokens(run)}"
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": note, "width": width, "order": order}
    return frame


def _with_context(
    summaries: Summaries, occurrences: pd.DataFrame, width: int, flagged: bool, attrs: dict[str, object]
) -> pd.DataFrame:
    """Return occurrences with their percentile, the text around them, document and source.

    occurrences: as `_occurrences` returns them; width: tokens of text on either side; attrs: entries to add to the
    frame's `attrs`, among them token_id where all occurrences are of one token.
    """
    run, counted = summaries.run, histogram(summaries, flagged)
    counted = counted[counted["layer"] == -1]
    up_to = np.cumsum(counted["tokens"].to_numpy())
    index = np.searchsorted(counted["nnz"].to_numpy(), occurrences["nnz"].to_numpy(), side="right") - 1
    occurrences["percentile"] = 100 * up_to[index] / up_to[-1]
    around = sides(run, occurrences, width)
    occurrences["before"], occurrences["after"] = [left for left, _, _ in around], [right for _, _, right in around]
    occurrences["token"] = token_text(run, occurrences["token_id"], spelled=True)
    occurrences = _with_source(run, occurrences)
    columns = ["sequence", "position", "document", "source", "before", "token", "after", "nnz", "z", "loss"]
    frame = occurrences[[*([] if "token_id" in attrs else ["token_id"]), *columns, "percentile"]]
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": counted_tokens(run, flagged), **attrs}
    return frame


def _with_source(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the document and source of their sequence; -1 and "" where the run does not list sequences."""
    if not run.has("sequences"):
        return rows.assign(document=-1, source="")
    return rows.merge(run.frame("sequences", ["sequence", "document", "source"]), on="sequence", how="left")


def _occurrences(summaries: Summaries, token_id: int | None, limit: int, order: Order, flagged: bool) -> pd.DataFrame:
    """Return the first `limit` occurrences in an order. Columns: sequence, position, token_id, nnz, z, loss.

    token_id: the token whose occurrences are returned, None for every token; flagged: whether flagged rows count.
    """
    import ibis

    from twell.analysis.engines.open import open_engine

    with open_engine() as engine:
        rows = _scored(engine, summaries, order, token_id)
        rows = (rows if flagged else rows.filter(rows.flags == 0)).drop("flags")
        return engine.arrow(rows.order_by([*_first(ibis, order), "sequence", "position"]).limit(limit)).to_pandas()


def _scored(engine: Engine, summaries: Summaries, order: Order, token_id: int | None = None) -> ir.Table:
    """Return the run's tokens as an expression, with nnz summed over layers and z averaged over them.

    token_id: keeps one token alone, if not None. Raises UserError for an unknown order.
    """
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
    """Return the sum of expressions as a balanced tree, because a long chain would nest too deeply."""
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
