"""Whether a call's results lie within the bounds that float64 gives them: the first difference, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from support.fuzz.float64_ffn import TINY, Array, Expected, rounded

from twell.kernels.layout import Layout, TwELL, entries, unpack
from twell.kernels.stats import NeuronSums, Stats

CAP, STEP, NO_TOKEN = 2.0**20, 2.0**20, 2**31 - 1


def difference(y: torch.Tensor, stats: Stats, expected: Expected, info: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the first difference of a call's results from what is expected, "" if there is none.

    info: rows, tokens, sequences [n], numpy or None; options: of the call
    """
    with np.errstate(all="ignore"):
        return next(_differences(y, stats, expected, info, options), "")


def _differences(
    y: torch.Tensor, stats: Stats, expected: Expected, info: dict[str, Any], options: dict[str, Any]
) -> Iterator[str]:
    finite = stats.finite.numpy()
    wrong = (finite != expected.finite) & ~expected.doubtful
    if wrong.any():
        yield f"finite: row {wrong.argmax()} is {finite[wrong.argmax()]}"
    yield from _output(y.reshape(len(finite), y.shape[-1]), finite, expected)
    fires = expected.fires & finite[:, None]
    may_fire = expected.may_fire & finite[:, None]
    if options["probes"] == "none":
        if len(stats.nnz) or stats.tiles is not None or stats.neurons is not None or stats.nnz_used is not None:
            yield "probes: counted though none was wanted"
    else:
        yield from _between("nnz", stats.nnz.numpy(), fires.sum(1), may_fire.sum(1))
        if options["up_relu"]:
            used, may = expected.used & finite[:, None], expected.may_use & finite[:, None]
            yield from _between("nnz_used", stats.nnz_used.numpy(), used.sum(1), may.sum(1))  # type: ignore[union-attr]
        elif stats.nnz_used is not None:
            yield "nnz_used: counted without up_relu"
    counted = finite if info["rows"] is None else finite & (info["rows"] != 0)
    if options["probes"] != "none" and options["layout"] is not None:
        yield from _tiles(stats, fires[counted], may_fire[counted], options["layout"])
    if options["probes"] == "neurons":
        assert stats.neurons is not None
        yield from _neurons(stats.neurons, fires, may_fire, counted, expected, info, y.dtype, finite)
    if options["want_packed"]:
        assert stats.packed is not None
        yield from _packed(
            stats.packed, stats.nnz if options["probes"] != "none" else None, fires, may_fire, expected, finite
        )


def _output(y: torch.Tensor, finite: Array, expected: Expected) -> Iterator[str]:
    """Yield what is wrong with y [n, d_model]."""
    values = y.double().numpy()
    if not np.isnan(values[~finite]).all():
        yield "y: a row that is not finite is not NaN throughout"
    with np.errstate(all="ignore"):
        off = np.abs(values - expected.y.value)
        most = float(torch.finfo(y.dtype).max)
        bounded = finite[:, None] & ~expected.y.past & (np.abs(expected.y.value) + expected.y.error < 0.99 * most)
        wrong = bounded & ~(off <= expected.y.error)
    if wrong.any():
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        yield f"y: {values[at]} at {at}, expected {expected.y.value[at]} within {expected.y.error[at]}"


def _between(name: str, got: Array, least: Array, most: Array) -> Iterator[str]:
    """Yield the first number that is not between two others, with its place."""
    wrong = (got < least) | (got > most)
    if got.shape != least.shape:
        yield f"{name}: shape {got.shape}, expected {least.shape}"
    elif wrong.any():
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        yield f"{name}: {got[at]} at {tuple(map(int, at))}, expected {least[at]} to {most[at]}"


def _in_tiles(fired: Array, layout: Layout) -> Array:
    """Return how many neurons fired in each tile, [rows, tiles]."""
    firsts = range(0, fired.shape[1], layout.tile)
    return np.stack([fired[:, first : first + layout.tile].sum(1) for first in firsts], 1)


def _tiles(stats: Stats, fires: Array, may_fire: Array, layout: Layout) -> Iterator[str]:
    """Yield what is wrong with the histograms of tiles over the counted rows."""
    assert stats.tiles is not None
    least, most = _in_tiles(fires, layout), _in_tiles(may_fire, layout)
    for name, sizes in (("pairs", (least, most)), ("rows", (least.max(1, initial=0), most.max(1, initial=0)))):
        got = getattr(stats.tiles, name).numpy()
        low, high = (np.bincount(size.ravel(), minlength=layout.tile + 1)[::-1].cumsum()[::-1] for size in sizes)
        yield from _between(f"tiles.{name}, at least so full", got[::-1].cumsum()[::-1], low, high)


def _neurons(
    sums: NeuronSums, fires: Array, may_fire: Array, counted: Array, expected: Expected, info: dict[str, Any],
    dtype: torch.dtype, finite: Array,
) -> Iterator[str]:  # fmt: skip
    """Yield what is wrong with the sums of each neuron."""
    fires, may_fire = fires & counted[:, None], may_fire & counted[:, None]
    yield from _between("fires", sums.fires.numpy(), fires.sum(0), may_fire.sum(0))
    exact = not expected.value.error.any()
    number = rounded(expected.value, dtype, exact)
    low, high = np.clip(number.value - number.error, 0, None), np.clip(number.value + number.error, 0, None)
    low, high = (np.where(fires, low, 0), np.where(may_fire, high, 0))
    most = high.max(0, initial=0)
    slack = np.zeros_like(most) if exact else most * 2.0**-22 + TINY[torch.float32]
    with np.errstate(over="ignore"):
        most = np.where(most + slack > float(torch.finfo(torch.float32).max), np.inf, most + slack)
    yield from _between("value_max", sums.value_max.double().numpy(), low.max(0, initial=0) - slack, most)
    steps = [np.minimum(np.nan_to_num(edge), CAP) * STEP for edge in (low, high)]
    rounding = may_fire.sum(0) * 0.5
    yield from _between("value_sum", sums.value_sum.numpy(), steps[0].sum(0) - rounding, steps[1].sum(0) + rounding)
    for name, least, empty in (("token_min", True, NO_TOKEN), ("token_max", False, -1), ("first_sequence", True, -1)):
        numbers = info["sequences" if name == "first_sequence" else "tokens"].astype(np.int64)[:, None]
        got = getattr(sums, name).numpy().astype(np.int64)
        far = 2**40 if least else -(2**40)
        ends = [np.where(fired, numbers, far) for fired in (fires, may_fire)]
        sure, maybe = (end.min(0, initial=far) if least else end.max(0, initial=far) for end in ends)
        never, always = ~may_fire.any(0), fires.any(0)
        right = np.where(never, got == empty, (got >= np.minimum(sure, maybe)) & (got <= np.maximum(sure, maybe)))
        right |= ~never & ~always & (got == empty)
        if not right.all():
            at = int((~right).argmax())
            yield f"{name}: {got[at]} of neuron {at}, expected {maybe[at]} to {sure[at]}, {empty} if it never fired"


def _packed(
    packed: TwELL, nnz: torch.Tensor | None, fires: Array, may_fire: Array, expected: Expected, finite: Array
) -> Iterator[str]:
    """Yield what is wrong with a packed hidden state."""
    layout, counts = packed.layout, packed.counts.numpy()
    yield from _between("packed.counts", counts, _in_tiles(fires, layout), _in_tiles(may_fire, layout))
    if nnz is not None and not np.array_equal(counts.sum(1), nnz.numpy()):
        yield "packed.counts: they do not add up to nnz"
    if not np.array_equal(packed.spill_index.numpy() >= 0, counts > layout.slots):
        yield "packed.spill_index: another tile than those past their slots"
    dense = unpack(packed).double().numpy()
    number = rounded(expected.value, packed.dtype, not expected.value.error.any())
    with np.errstate(all="ignore"):
        right = np.abs(dense - number.value) <= number.error
        right |= (number.value + number.error > 0.99 * float(torch.finfo(packed.dtype).max)) & (dense > 0)
    right = np.where(fires, right, np.where(may_fire, right | (dense == 0), dense == 0))
    if not right.all():
        at = np.unravel_index(int((~right).argmax()), right.shape)
        yield f"packed: {dense[at]} at {tuple(map(int, at))}, expected {number.value[at]} within {number.error[at]}"
    row, neuron, value = entries(packed)
    listed = np.zeros_like(dense)
    listed[row.numpy(), neuron.numpy()] = value.double().numpy()
    if not np.array_equal(listed, dense):
        yield "packed: entries differ from the unpacked state"
    in_use = np.arange(layout.slots) < counts[..., None]
    columns = np.where(in_use, packed.words.numpy()[..., 1:] & 0xFFFF, layout.tile + np.arange(layout.slots))
    if (np.diff(columns) <= 0).any() or (packed.words.numpy()[..., 1:][~in_use] != 0).any():
        yield "packed.words: slots out of order, or not empty past the count"
