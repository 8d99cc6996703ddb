"""Every query over a run's parts, as ibis expressions: the sums, counts and extremes that all tables derive from.

Each is taken over a chunk of parts and adds up over chunks, because a sequence is never cut in two. All are integers,
so that they come out the same in any order, but for `scores`, which needs the layers' means and is therefore taken
over again once these change. Cost, 1 M tokens of 28 layers on 2 cores: about 3 s and 0.8 GB.

Flagged tokens: rows with `flagged` true hold what those tokens add to each sum. For plain sums that is the sum over
them; for sums of squares over sequences it is the difference that they make.

Standard errors, clustered by sequence, come from the sums over sequences g of a token's count n_g and its nnz y_g:
Σ n_g, Σ n_g², Σ y_g, Σ y_g², Σ y_g n_g (see `statistics.ratio_error`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ibis
import ibis.expr.types as ir
import numpy as np
from ibis import _

from twell.analysis.engine import Engine
from twell.workbench.schema import FLAG_NOT_FINITE

TOTAL = -1  # the layer number under which the sum over all layers goes
REPLICATES = 20
LOSS_UNIT = 2.0**24  # a float16 is a whole number of 2^-24
LOSS_SCALE, LOSS_BINS_A_CLASS = 24, 4
EXACT_COUNTS = 8


@dataclass(frozen=True)
class Chunk:
    """Some parts of a run's activity, held in memory: with `total`, `loss` where it is finite, its band, replicates."""

    activity: ir.Table
    counts: Sequence[str]  # names of the nnz columns, in the order of layers

    @property
    def names(self) -> dict[int, str]:
        """The columns of counts by the layer number that they go under."""
        return {**dict(enumerate(self.counts)), TOTAL: "total"}


@contextmanager
def chunk(engine: Engine, activity: ir.Table, counts: Sequence[str]) -> Iterator[Chunk]:
    """Hold a chunk while its sums are taken."""
    rows = activity.drop("phase").mutate(
        total=sum_of([activity[name].cast("int64") for name in counts]),
        loss=finite_loss(activity.loss),
        replicate=(activity.sequence % REPLICATES).cast("int32"),
    )
    bands = rows.loss.sqrt() * LOSS_SCALE
    rows = rows.mutate(
        loss_bin=bands.floor().cast("int32"), loss_class=(bands / LOSS_BINS_A_CLASS).floor().cast("int32")
    )
    with engine.keep(rows) as held:
        yield Chunk(held, counts)


def sum_of(terms: Sequence[ir.NumericValue]) -> ir.NumericValue:
    """The sum of expressions, as a balanced tree: a long chain would nest too deeply."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = [left + right for left, right in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(terms) - len(terms) % 2 :]
    return terms[0]


def stack(tables: Sequence[ir.Table]) -> ir.Table:
    """The rows of all."""
    return tables[0] if len(tables) == 1 else ibis.union(*tables)


def finite_loss(loss: ir.FloatingColumn) -> ir.FloatingValue:
    """The loss where there is one and it is a number, else null."""
    wide = loss.cast("float64")
    return ibis.ifelse(wide.isnan() | wide.isinf(), ibis.null("float64"), wide)


def layers(this: Chunk) -> ir.Table:
    """The histogram of nnz in each layer."""
    rows = this.activity
    return stack(
        [
            rows.group_by(flagged=rows.flags != 0, nnz=rows[name].cast("int32"))
            .agg(tokens=_.count())
            .mutate(layer=layer)
            for layer, name in this.names.items()
        ]
    )


def surprisal(this: Chunk) -> ir.Table:
    """nnz by band of the next token's loss and replicate: tokens, and s0, s1, … a layer."""
    rows = _predicted(this)
    sums = {f"s{layer}": rows[name].cast("int64").sum() for layer, name in enumerate(this.counts)}
    return rows.group_by("replicate", "loss_bin").agg(tokens=_.count(), **sums)


def surprisal_ranks(this: Chunk) -> ir.Table:
    """Tokens by class of loss and class of nnz: both fine enough to keep a rank correlation."""
    rows = _predicted(this)
    return stack(
        [
            rows.group_by("replicate", "loss_class", nnz_class=_class(rows[name]))
            .agg(tokens=_.count())
            .mutate(layer=layer)
            for layer, name in enumerate(this.counts)
        ]
    )


def _class(number: ir.IntegerValue) -> ir.IntegerValue:
    """Whole numbers in classes that widen with the square root: each below 8 its own, then floor(√(8·number))."""
    rough = (number.cast("float64") * EXACT_COUNTS).sqrt().floor().cast("int32")
    return ibis.ifelse(number < EXACT_COUNTS, number.cast("int32"), rough)


def _predicted(this: Chunk) -> ir.Table:
    return this.activity.filter(_.flags == 0, _.loss_bin.notnull())


def positions(this: Chunk) -> ir.Table:
    """By position: tokens, and a layer's sum of nnz (s0, s1, …; s-1 the total) and of its square (q0, q1, …).

    A sequence has one token at a position, so clustering by sequence changes nothing there. Position 0 is always
    flagged, and counts as unflagged here unless it is not finite: it stands apart by its number.
    """
    rows = this.activity
    sums: dict[str, ir.IntegerScalar] = {}
    for layer, name in this.names.items():
        wide = rows[name].cast("int64")
        sums |= {f"s{layer}": wide.sum(), f"q{layer}": (wide * wide).sum()}
    finite = (rows.flags.cast("int32") & FLAG_NOT_FINITE) == 0
    counted = (rows.flags == 0) | ((rows.position == 0) & finite)
    return rows.group_by("position", flagged=~counted).agg(tokens=_.count(), **sums)


def position_bands(this: Chunk) -> ir.Table:
    """By band of positions and replicate: tokens, and a layer's sum of nnz (s0, s1, …; s-1 the total)."""
    rows = this.activity.filter(_.flags == 0, _.position > 0)
    sums = {f"s{layer}": rows[name].cast("int64").sum() for layer, name in this.names.items()}
    return rows.group_by("replicate", band=_class(rows.position)).agg(tokens=_.count(), **sums)


def clustered(rows: ir.Table, values: Mapping[str, ir.NumericValue], kind: str) -> ir.Table:
    """Sums over sequences by token: tokens, sequences, tokens_square, and NAME_sum, _square, _cross of each value.

    `rows` has sequence, token_id and flags. `kind` is the type of the sums: "int64" or "float64". Sums within a
    sequence are taken in float64, which holds integers to 2^53 exactly and is twice as fast.
    """
    plain = rows.mutate(**values)
    inside = {name: plain[name].cast("float64").sum().cast(kind) for name in values}
    unflagged = plain.filter(_.flags == 0).group_by("sequence", "token_id").agg(n=_.count(), **inside)
    square = {"tokens": unflagged.n.sum(), "sequences": unflagged.count(), "tokens_square": (_.n * _.n).sum()}
    for name in values:
        y = unflagged[name]
        square |= {f"{name}_sum": y.sum(), f"{name}_square": (y * y).sum(), f"{name}_cross": (y * unflagged.n).sum()}
    base = unflagged.group_by("token_id").agg(**square).mutate(flagged=ibis.literal(False))
    return base.union(_added(plain, values, kind).select(base.columns))


def _added(plain: ir.Table, values: Mapping[str, ir.NumericValue], kind: str) -> ir.Table:
    """What flagged tokens add to each sum of `clustered`: over the sequences where a token stands flagged."""
    touched = plain.filter(_.flags != 0).select("sequence", "token_id").distinct()
    both = plain.semi_join(touched, ["sequence", "token_id"])
    sums = {"n": both.count(), "n0": both.count(where=both.flags == 0)}
    for name in values:
        y = both[name].cast("float64")
        sums[name] = y.sum().cast(kind)
        sums[f"{name}_0"] = ibis.coalesce(y.sum(where=both.flags == 0), 0.0).cast(kind)
    g = both.group_by("sequence", "token_id").agg(**sums)
    added = {
        "tokens": (g.n - g.n0).sum(),
        "sequences": (g.n0 == 0).cast("int64").sum(),
        "tokens_square": (g.n * g.n - g.n0 * g.n0).sum(),
    }
    for name in values:
        y, y0 = g[name], g[f"{name}_0"]
        added[f"{name}_sum"] = (y - y0).sum()
        added[f"{name}_square"] = (y * y - y0 * y0).sum()
        added[f"{name}_cross"] = (y * g.n - y0 * g.n0).sum()
    return g.group_by("token_id").agg(**added).mutate(flagged=ibis.literal(True))


def tokens(this: Chunk) -> ir.Table:
    """`clustered` for every layer (0_sum, 0_square, 0_cross, …) and for the total (nnz_sum, …)."""
    values = {str(layer): this.activity[name] for layer, name in enumerate(this.counts)}
    return clustered(this.activity, {**values, "nnz": this.activity.total}, "int64")


def losses(this: Chunk) -> ir.Table:
    """By token: the sum and number of the losses of predictions made at it, and of its own, one position earlier."""
    rows = this.activity.select("sequence", "position", "token_id", "flags", "loss")
    order = ibis.window(group_by="sequence", order_by="position")
    rows = rows.mutate(before=_.loss.lag().over(order), came_from=_.position.lag().over(order))
    own = ibis.ifelse(rows.came_from == rows.position - 1, rows.before, ibis.null("float64"))
    return rows.group_by("token_id", flagged=rows.flags != 0).agg(
        loss_sum=ibis.coalesce((_.loss * LOSS_UNIT).cast("int64").sum(), 0),
        loss_tokens=_.loss.count(),
        surprisal_sum=ibis.coalesce((own * LOSS_UNIT).cast("int64").sum(), 0),
        surprisal_tokens=own.count(),
    )


def standardised(rows: ir.Table, counts: Sequence[str], mean: np.ndarray, sd: np.ndarray) -> ir.FloatingValue:
    """z of a token: the mean over layers of (nnz - layer mean) / layer sd; layers without spread are left out."""
    spread = [layer for layer in range(len(counts)) if sd[layer] > 0]
    if not spread:
        return ibis.literal(0.0)
    terms = [(rows[counts[i]].cast("float64") - float(mean[i])) * float(1 / (sd[i] * len(spread))) for i in spread]
    return sum_of(terms)


def scores(activity: ir.Table, counts: Sequence[str], mean: np.ndarray, sd: np.ndarray) -> ir.Table:
    """Sums of z over sequences by token; `mean` and `sd` are those of the whole run's unflagged tokens, by layer."""
    sums = clustered(activity, {"z": standardised(activity, counts, mean, sd)}, "float64")
    return sums.select("token_id", "flagged", "z_sum", "z_square", "z_cross")


def added(parts: ir.Table, keys: Sequence[str], how: Mapping[str, str]) -> ir.Table:
    """The rows of parts that hold sums already, added up: `how` names sum, min or max for each column."""
    return parts.group_by(*keys).agg(**{name: getattr(parts[name], function)() for name, function in how.items()})
