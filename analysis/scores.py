"""Scores: z of every token of a part, added up by token and by word. The second reading of a run.

z needs the means of the whole run, so its sums over sequences are taken once these are known, and again when they
change: z depends on a weight a layer, so the square of a sequence's z is no sum that was there before. A function of
one part and numpy alone: it runs where the part lies, in a thread here or in a worker of a cluster, and carries all
that it needs. What parts give adds up, because a sequence is never cut in two. Cost, 1 M tokens of 28 layers: 0.5 CPU
seconds and 0.2 GB.

A piece that begins with a letter, digit or byte of a longer character joins the piece before it if that one ends with
such. A word that holds a flagged token is left out, as is what has no letter or digit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

BLOCK = 2**14  # rows whose z is taken at a time: they stay in the core's cache
EACH_BAND = 8  # positions below it are bands of their own
LETTER = rb"[0-9A-Za-z\x80-\xff]"

WORDS = ("occurrences", "sequences", "occurrences_square", "pieces", "nnz_sum", "z_sum", "z_square", "z_cross")
TOKENS = ("z_sum", "z_square", "z_cross", "z_position_sum", "z_position_square", "z_position_cross")
COUNTS = WORDS[:4]
ROWS = pa.schema(
    [
        pa.field("word", pa.binary()),  # null: the row is of a token
        pa.field("token_id", pa.int32()),  # null: the row is of a word
        pa.field("flagged", pa.bool_()),
        *(pa.field(name, pa.int64() if name in COUNTS else pa.float64()) for name in dict.fromkeys(WORDS + TOKENS)),
    ]
)

Pair = tuple[NDArray, NDArray]


@dataclass(frozen=True)
class Scale:
    """What z is taken with: weight [layer] and level of the whole run; band_weight [layer, band] and band_level [band]
    of the layer at each band of positions."""

    weight: NDArray
    level: float
    band_weight: NDArray
    band_level: NDArray

    @classmethod
    def of(cls, whole: Pair, places: Pair) -> Scale:
        """From mean and sd [layer] of the run's unflagged tokens, and those at each band of positions [band, layer].

        z is the mean over layers of (nnz - mean) / sd; layers without spread are left out.
        """
        (weight, level), (band_weight, band_level) = _standard(*whole), _standard(*places)
        return cls(weight, float(level), band_weight.T.copy(), band_level)


def _standard(mean: NDArray, sd: NDArray) -> Pair:
    """weight [..., layer] and level [...]: Σ weight·nnz - level is the mean over layers of (nnz - mean) / sd."""
    spread = sd > 0
    weight = np.where(spread, 1 / np.where(spread, sd, 1), 0) / np.maximum(spread.sum(axis=-1, keepdims=True), 1)
    return weight, (weight * np.where(spread, mean, 0)).sum(axis=-1)


@dataclass(frozen=True)
class Spelling:
    """The vocabulary by token id, and a last entry for ids that it lacks: whether a piece begins with a letter, ends
    with one, holds any; and its bytes, four times: as they are, stripped on the left, on the right, on both sides."""

    begins: NDArray
    ends: NDArray
    holds: NDArray
    pieces: pa.Array

    @classmethod
    def of(cls, token_ids: NDArray, pieces: Sequence[bytes]) -> Spelling:
        known = [b""] * (int(max(token_ids, default=-1)) + 2)
        for number, piece in zip(token_ids.tolist(), pieces, strict=True):
            known[number] = piece
        begins, ends, holds = (
            np.array([pattern.search(piece) is not None for piece in known])
            for pattern in (re.compile(form) for form in (rb"\A" + LETTER, LETTER + rb"\Z", LETTER))
        )
        stripped = [*known, *(p.lstrip() for p in known), *(p.rstrip() for p in known), *(p.strip() for p in known)]
        return cls(begins, ends, holds, pa.array(stripped, pa.binary()))


def of_part(path: Path, counts: Sequence[str], scale: Scale, spelling: Spelling | None) -> pa.Table:
    """The sums of one part by token and, with a `spelling`, by word: columns as ROWS.

    `counts` names the nnz columns. By token, rows with `flagged` hold what flagged tokens add to each sum.
    """
    names = ["sequence", "position", "token_id", "flags", *counts]
    blocks = [_scored(rows, scale) for rows in pq.ParquetFile(path).iter_batches(BLOCK, columns=names)]
    sequence, token, flags, z, z_position, nnz = (np.concatenate(column) for column in zip(*blocks, strict=True))
    found = [by_token(sequence, token, flags, z, z_position)]
    if spelling is not None:
        found.append(by_word(sequence, token, flags, z, nnz, spelling))
    empty = ROWS.empty_table()
    return pa.concat_tables([empty, *found], promote_options="default")


def _scored(rows: pa.RecordBatch, scale: Scale) -> tuple[NDArray, ...]:
    """sequence, token id, flags, z, z_position, and nnz over layers, of a few rows."""
    sequence, position, token, flags, *counts = (column.to_numpy() for column in rows.columns)
    band = np.where(position < EACH_BAND, position, np.floor(np.sqrt(EACH_BAND * position.astype(float)))).astype(
        np.intp
    )
    z, z_position, nnz = np.full(len(band), -scale.level), -scale.band_level[band], np.zeros(len(band))
    for layer, column in enumerate(counts):
        values = column.astype(float)
        nnz += values
        z_position += values * scale.band_weight[layer].take(band)
        values *= scale.weight[layer]
        z += values
    return sequence, token, flags, z, z_position, nnz


def by_token(sequence: NDArray, token: NDArray, flags: NDArray, z: NDArray, z_position: NDArray) -> pa.Table:
    """Σ over sequences of z there, of its square, and of its product with the token's occurrences there; and so for
    z_position. Rows are those of one part."""
    order, starts = _groups(sequence, token)
    token = token[order][starts]
    plain = (flags == 0)[order]
    n, n0 = np.diff(np.append(starts, len(order))).astype(float), np.add.reduceat(plain, starts, dtype=float)
    there, touched = n0 > 0, n0 < n
    base: dict[str, NDArray] = {"token_id": token[there]}
    added: dict[str, NDArray] = {"token_id": token[touched]}
    for name, values in (("z", z[order]), ("z_position", z_position[order])):
        y, y0 = np.add.reduceat(values, starts), np.add.reduceat(np.where(plain, values, 0), starts)
        for part, all_of, unflagged in (("sum", y, y0), ("square", y * y, y0 * y0), ("cross", y * n, y0 * n0)):
            base[f"{name}_{part}"] = unflagged[there]
            added[f"{name}_{part}"] = (all_of - unflagged)[touched]
    tables = []
    for flagged, each in ((False, base), (True, added)):
        ids, place = np.unique(each.pop("token_id"), return_inverse=True)
        sums = {name: np.bincount(place, values, len(ids)).astype(float) for name, values in each.items()}
        tables.append(pa.table({"token_id": ids, "flagged": np.full(len(ids), flagged), **sums}))
    return pa.concat_tables(tables)


def by_word(
    sequence: NDArray, token: NDArray, flags: NDArray, z: NDArray, nnz: NDArray, spelling: Spelling
) -> pa.Table:
    """Occurrences of each word, the sequences it occurs in, the square of its occurrences in each, its pieces; sums of
    nnz (over layers) and of z, each the mean over the pieces of an occurrence; and the squares and products of z as in
    `by_token`. Rows are those of one part, in the order of the text."""
    unknown = len(spelling.begins) - 1
    token = np.where((token >= 0) & (token < unknown), token, unknown)
    joins = np.zeros(len(token), bool)
    joins[1:] = spelling.begins[token[1:]] & spelling.ends[token[:-1]] & (sequence[1:] == sequence[:-1])
    starts = np.flatnonzero(~joins)
    bounds = np.append(starts, len(token))
    pieces = np.diff(bounds)
    kept = (np.add.reduceat(flags, starts, dtype=np.int64) == 0) & np.logical_or.reduceat(spelling.holds[token], starts)
    text = _text(token, bounds, spelling, len(spelling.begins)).filter(pa.array(kept)).dictionary_encode()
    z, nnz = np.add.reduceat(z, starts)[kept] / pieces[kept], np.add.reduceat(nnz, starts)[kept] / pieces[kept]
    word = text.indices.to_numpy()
    order, groups = _groups(sequence[starts][kept], word)
    n = np.diff(np.append(groups, len(order)))
    y = np.add.reduceat(z[order], groups)
    inside = word[order][groups]
    size = len(text.dictionary)
    columns = (
        np.bincount(word, minlength=size),
        np.bincount(inside, minlength=size),
        np.bincount(inside, n * n, size),
        np.bincount(word, pieces[kept], size),
        np.bincount(word, nnz, size),
        *(np.bincount(inside, values, size) for values in (y, y * y, y * n)),
    )
    sums = {
        name: values.astype(np.int64 if name in COUNTS else float) for name, values in zip(WORDS, columns, strict=True)
    }
    return pa.table({"word": text.dictionary, **sums})


def _text(token: NDArray, bounds: NDArray, spelling: Spelling, size: int) -> pa.Array:
    """Each word's bytes, stripped: its first piece on the left, its last on the right."""
    piece = token.astype(np.int64)
    piece[bounds[:-1]] += size
    piece[bounds[1:] - 1] += 2 * size
    return pc.binary_join(pa.ListArray.from_arrays(bounds.astype(np.int32), spelling.pieces.take(pa.array(piece))), b"")


def _groups(sequence: NDArray, unit: NDArray) -> tuple[NDArray, NDArray]:
    """The rows in an order where those of one unit in one sequence stand together, and where each such group starts."""
    key = (sequence.astype(np.int64) - sequence.min(initial=0)) * (int(unit.max(initial=0)) + 1) + unit
    order = np.argsort(key)
    key = key[order]
    return order, np.flatnonzero(np.diff(key, prepend=key[:1] - 1))
