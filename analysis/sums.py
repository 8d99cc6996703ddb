"""Queries over a run's parts, as ibis expressions: the sums, counts and extremes that most tables derive from.

Each is taken over a chunk of parts and adds up over chunks, because a sequence is never cut in two. All are integers,
so that they come out the same in any order and on any engine. `clusters` has the sums by token. Cost, 1 M tokens of 28
layers on 2 cores: about 1.5 s and 0.2 GB.

Flagged tokens: rows with `flagged` true hold what those tokens add to each sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ibis
import ibis.expr.types as ir
import pyarrow as pa
from ibis import _

from twell.analysis.engine import Engine
from twell.workbench.schema import FLAG_NOT_FINITE

TOTAL = -1  # the layer number under which the sum over all layers goes
REPLICATES = 20
LOSS_UNIT = 2.0**24  # a float16 is a whole number of 2^-24
LOSS_SCALE, LOSS_BINS_A_CLASS = 24, 4
EXACT_COUNTS = 8
COARSE_LOSS, COARSE_COUNT, COARSE_REPLICATES = 3, 8, 10  # classes floor(3·√loss) and floor(8·⁴√nnz)


@dataclass(frozen=True)
class Chunk:
    """Some parts of a run's activity, held while sums are taken: with `total` (nnz over layers), `loss` where it is
    finite, its band and class, and replicates."""

    activity: ir.Table
    counts: Sequence[str]  # names of the nnz columns, in the order of layers

    @property
    def names(self) -> dict[int, str]:
        """The columns of counts by the layer number that they go under."""
        return {**dict(enumerate(self.counts)), TOTAL: "total"}


@contextmanager
def chunk(engine: Engine, activity: ir.Table, counts: Sequence[str]) -> Iterator[Chunk]:
    """Hold a chunk while its sums are taken."""
    rows = activity.select("sequence", "position", "token_id", "flags", *counts, loss=finite_loss(activity.loss))
    bands = rows.loss.sqrt() * LOSS_SCALE
    rows = rows.mutate(
        total=sum_of([rows[name].cast("int64") for name in counts]),
        replicate=(rows.sequence % REPLICATES).cast("int32"),
        loss_bin=bands.floor().cast("int32"),
        loss_class=(bands / LOSS_BINS_A_CLASS).floor().cast("int32"),
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


def used(activity: ir.Table, names: Sequence[str]) -> ir.Table:
    """Tokens, and a layer's sum of how many fired neurons have a product that is not zero (s0, s1, …)."""
    sums = {f"s{layer}": activity[name].cast("int64").sum() for layer, name in enumerate(names)}
    return activity.group_by(flagged=activity.flags != 0).agg(tokens=_.count(), **sums)


def surprisal(this: Chunk) -> ir.Table:
    """nnz by band of the next token's loss and replicate: tokens, and s0, s1, … a layer."""
    rows = _predicted(this)
    sums = {f"s{layer}": rows[name].cast("int64").sum() for layer, name in enumerate(this.counts)}
    return rows.group_by("replicate", "loss_bin").agg(tokens=_.count(), **sums)


def surprisal_ranks(this: Chunk, every: int) -> ir.Table:
    """Tokens by class of loss and class of nnz, both fine enough to keep a rank correlation; of 20 sequences in every
    20 · `every`."""
    rows = _predicted(this).filter(_group(_.sequence) % every == 0)
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


def surprisal_classes(engine: Engine, this: Chunk, kinds: ir.Table, every: int) -> pa.Table:
    """Tokens and their nnz by class of token, of loss (the next token's; with `own`, the token's) and of nnz.

    Coarser than `surprisal_ranks`, since there are so many more rows, and of 20 sequences in every 20 · `every` alone.
    `kinds` has token_id and kind, the number of its class.
    """
    some = this.activity.filter(_group(_.sequence) % every == 0)
    earlier = some.select("sequence", position=(some.position + 1).cast("int32"), own=some.loss)
    rows = some.filter(_.flags == 0).inner_join(kinds, "token_id").left_join(earlier, ["sequence", "position"])
    rough = {f"c{name}": _coarse(rows[name].cast("float64").sqrt(), COARSE_COUNT) for name in this.counts}
    rows = rows.select(
        "kind",
        *this.counts,
        **rough,
        replicate=(rows.replicate % COARSE_REPLICATES).cast("int32"),
        later=_coarse(rows.loss, COARSE_LOSS),
        own=_coarse(rows.own, COARSE_LOSS),
    )
    with engine.keep(rows) as held:
        found = [
            held.filter(held[loss].notnull())
            .group_by("kind", "replicate", loss_class=held[loss], nnz_class=held[f"c{name}"])
            .agg(tokens=_.count(), nnz_sum=held[name].cast("int64").sum())
            .mutate(layer=layer, own=loss == "own")
            for layer, name in enumerate(this.counts)
            for loss in ("later", "own")
        ]
        return engine.arrow(stack(found))


def _group(sequence: ir.IntegerValue) -> ir.IntegerValue:
    """Groups of as many sequences as there are replicates, so that a choice of groups leaves none of these empty."""
    return sequence // REPLICATES


def _coarse(number: ir.FloatingValue, scale: int) -> ir.IntegerValue:
    """floor(scale · √number)."""
    return (number.sqrt() * scale).floor().cast("int16")


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
    return rows.group_by("replicate", band=position_band(rows.position)).agg(tokens=_.count(), **sums)


def position_band(position: ir.IntegerValue) -> ir.IntegerValue:
    """The band of a position: each below 8 its own, then floor(√(8·position))."""
    return _class(position)


def added(parts: ir.Table, keys: Sequence[str], how: Mapping[str, str]) -> ir.Table:
    """The rows of parts that hold sums already, added up: `how` names sum, min or max for each column."""
    return parts.group_by(*keys).agg(**{name: getattr(parts[name], function)() for name, function in how.items()})
