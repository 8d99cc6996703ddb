"""The tables that probes would have recorded beside a made run's activity: tiles, unions, fired, examples."""

from __future__ import annotations

from typing import Any

import numpy as np

from twell.workbench.run.schema import nnz_columns

TILE = 256
Shape = Any  # of `made`, which imports this file


def tile_counts(shape: Shape, columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A tiles table that agrees with the counts: each token's neurons fall into tiles of 256 by chance."""
    used = columns["flags"] == 0
    pieces = []
    for layer, name in enumerate(nnz_columns(shape.layers)):
        left, fullest = columns[name][used].astype(int), np.zeros(used.sum(), int)
        pairs = np.zeros(TILE + 1, np.int64)
        for start in range(0, shape.d_ff, TILE):
            width, after = min(TILE, shape.d_ff - start), max(0, shape.d_ff - start - TILE)
            here = rng.hypergeometric(width, after, left)
            pairs += np.bincount(here, minlength=TILE + 1)
            left, fullest = left - here, np.maximum(fullest, here)
        rows = np.bincount(fullest, minlength=TILE + 1)
        there = np.flatnonzero(pairs + rows)
        pieces.append((np.full(len(there), layer), np.full(len(there), TILE), there, pairs[there], rows[there]))
    stacked = map(np.concatenate, zip(*pieces, strict=True))
    return dict(zip(("layer", "tile", "occupancy", "pairs", "rows"), stacked, strict=True))


def union_counts(shape: Shape, columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A unions table: whole blocks of each sequence fire at least their fullest token, at most the sum, or d_ff."""
    rows: dict[str, list[int]] = {name: [] for name in ("layer", "block", "neurons", "blocks")}
    starts = np.flatnonzero(columns["position"] == 0)
    lengths = np.diff(np.append(starts, len(columns["position"])))
    for layer, name in enumerate(nnz_columns(shape.layers)):
        counts = columns[name].astype(int)
        for block in (16, 64, 128):
            each = zip(starts, lengths, strict=True)
            firsts = np.concatenate([start + np.arange(0, n - block + 1, block) for start, n in each])
            there = counts[firsts[:, None] + np.arange(block)]
            low, high = there.max(axis=1), np.minimum(there.sum(axis=1), shape.d_ff)
            histogram = np.bincount((low + rng.beta(2, 5, len(low)) * (high - low)).astype(int))
            for union in np.flatnonzero(histogram):
                for column, value in zip(rows, (layer, block, union, histogram[union]), strict=True):
                    rows[column].append(int(value))
    return dict(rows)


def fired_rows(shape: Shape, columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A fired table of every fourth unflagged token, and of all in the first two sequences: as many neurons as counted;
    6 fires wherever 5 does."""
    rows: dict[str, list[Any]] = {name: [] for name in ("sequence", "position", "layer", "neuron", "value")}
    unflagged = np.flatnonzero(columns["flags"] == 0)
    kept = (np.arange(len(unflagged)) % 4 == 0) | (columns["sequence"][unflagged] < 2)
    for token in unflagged[kept]:
        for layer, name in enumerate(nnz_columns(shape.layers)):
            neurons = rng.choice(shape.d_ff, int(columns[name][token]), replace=False)
            if 5 in neurons and 6 not in neurons and len(neurons) > 1:
                neurons[np.flatnonzero(neurons != 5)[0]] = 6
            rows["sequence"].append(columns["sequence"][token])
            rows["position"].append(columns["position"][token])
            rows["layer"].append(layer)
            rows["neuron"].append(np.sort(neurons).astype(np.uint16))
            rows["value"].append(rng.gamma(2.0, 0.5, len(neurons)).astype(np.float16))
    return rows


def examples(shape: Shape, columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """An examples table: three largest values and three samples of each of ten neurons a layer."""
    used = np.flatnonzero(columns["flags"] == 0)
    names = ("layer", "neuron", "kind", "value", "sequence", "position", "draw", "window")
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for layer in range(shape.layers):
        for neuron in range(10):
            for index, value in enumerate(-np.sort(-rng.gamma(2.0, 1.0, 6))):
                token = rng.choice(used)
                around = np.arange(-16, 17) + columns["position"][token]
                window = np.where(around >= 0, rng.gamma(2.0, 0.1, 33), np.nan)
                window[16] = value
                values = (layer, neuron, "top" if index < 3 else "sample", value, columns["sequence"][token])
                values += (columns["position"][token], 0.0 if index < 3 else rng.random(), window.astype(np.float32))
                for column, entry in zip(names, values, strict=True):
                    rows[column].append(entry)
    return rows


def value_counts(neurons: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A value_bins table that agrees with a neurons table: the firings of each over five bins from 0.75 on."""
    counts = np.stack([rng.multinomial(fires, (0.1, 0.2, 0.4, 0.2, 0.1)) for fires in neurons["fires"]])
    neuron, one = np.nonzero(counts)
    columns = {name: neurons[name][neuron] for name in ("layer", "neuron")}
    return columns | {"bin": 17 + one, "fires": counts[neuron, one]}


def bench(shape: Shape) -> dict[str, Any]:
    """A bench table of layers 0 and 3, one shape and the whole model: the fastest has rows past its slots in 0."""
    rows: list[dict[str, Any]] = []
    for layer in (0, 3, -1):
        case = {"case": f"layer {layer} on text", "input": "text", "layer": layer, "rows": 64, "nnz_mean": 10.0 + layer}
        for compression, time in ((0, 100.0), (4, 60.0), (8, 50.0 + layer), (16, 40.0)):
            kind = {"op": "ffn_sparse" if compression else "ffn_dense", "kernel": "cpu" if compression else "torch"}
            kind |= {"tile": TILE if compression else 0, "compression": compression}
            figures = {"microseconds": time, "rows_past_slots": 3.0 if (compression, layer) == (16, 0) else 0.0}
            rows += [{**case, **kind, "metric": name, "value": value} for name, value in figures.items()]
    whole = {"case": "whole model on text, 64 rows", "input": "text", "layer": -1, "rows": 64, "nnz_mean": 10.0}
    for side, kernel, time in (("dense", "torch", 900.0), ("sparse", "cpu", 600.0)):
        kind = {"op": f"whole_{side}", "kernel": kernel, "tile": 0, "compression": 0}
        figures = {"microseconds": time, "tokens_per_second": 64e6 / time}
        rows += [{**whole, **kind, "metric": name, "value": value} for name, value in figures.items()]
    same = {"d_model": 64, "d_ff": shape.d_ff, "dtype": "float32", "weights": "warm", "unit": "µs", "repeats": 5}
    same |= {"device": "made up", "commit": "0", "ffn": "gated", "graph": False}
    empty = np.ma.masked_all(len(rows), np.float64)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    return {**columns, **{name: [value] * len(rows) for name, value in same.items()}, "low": empty, "high": empty}
