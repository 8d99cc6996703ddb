"""Tiles: does a packed row have room for every firing, and what would kernels lose that drop the rest?

    tile_audit(run)   a row a layer, tile size and compression: tokens whose fullest tile exceeds the slots
    peer_audit(run)   what the published kernels, which drop what exceeds the slots, would have lost on this run

A tile of T neurons at compression C has T/C - 1 slots. The workbench's kernels keep what overflows, at a cost in time
alone. All comes from the summary `tiles`, which the kernel counted while the model ran. Cost: 10 ms.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import layer_histogram
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

COUNTS = ("occupancy", "pairs", "rows")
COMPRESSIONS = (2, 4, 8, 16)
PEER_TILE, PEER_SLOTS = 256, 31  # the published inference kernels, default settings
PEER_ROW, PEER_TAIL = 128, 2048  # the published training format: non-zeros a row, and rows in its dense tail
PEER_BATCH = 16_384  # tokens in one launch of the training kernels


def tile_audit(run: Run) -> pd.DataFrame:
    """Return how many tokens and firings exceed the slots of a tile; a row a layer, tile size and compression. Columns:

    layer; tile (neurons); compression; slots; in_use (the run's own layout); tokens; occupancy_mean, occupancy_max
    (neurons fired in a tile); rows_over, rows_over_share (tokens whose fullest tile exceeds the slots);
    tiles_over_share (of pairs of token and tile); lost, lost_share (firings past the slots, and their share of all:
    what a kernel without overflow would drop).
    """
    rows = open_summaries(run).columns("tiles", "layer", "tile", *COUNTS)
    in_use = run.manifest.layout.get("tile"), run.manifest.layout.get("compression")
    starts = np.flatnonzero(np.diff(rows["layer"], prepend=-1) | np.diff(rows["tile"], prepend=-1))
    groups = (np.split(rows[name], starts[1:]) for name in COUNTS)
    records = []
    for layer, tile, fired, pairs, tokens in zip(
        rows["layer"][starts].tolist(), rows["tile"][starts].tolist(), *groups, strict=True
    ):
        mean, fullest = fired @ pairs / pairs.sum(), int(fired[pairs > 0][-1])
        for compression in COMPRESSIONS:
            slots = tile // compression - 1
            records.append(
                {
                    "layer": layer,
                    "tile": tile,
                    "compression": compression,
                    "slots": slots,
                    "in_use": (tile, compression) == in_use,
                    "occupancy_mean": mean,
                    "occupancy_max": fullest,
                    **_over(fired, pairs, tokens, slots),
                }
            )
    frame = pd.DataFrame(records)
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": "over unflagged tokens; slots are T/C - 1"}
    return frame


def _over(fired: NDArray, pairs: NDArray, rows: NDArray, slots: int) -> dict[str, float]:
    """Return how much exceeds the slots in one layer and tile size, as columns of tile_audit.

    fired [n]: occupancies that occur, in ascending order; pairs [n]: how many pairs of a token and a tile have each;
    rows [n]: how many tokens have each in their fullest tile.
    """
    fits = int(np.searchsorted(fired, slots, side="right"))  # ascending
    lost, firings = int((fired[fits:] - slots) @ pairs[fits:]), int(fired @ pairs)
    tokens, over = int(rows.sum()), int(rows[fits:].sum())
    return {
        "tokens": tokens,
        "rows_over": over,
        "rows_over_share": over / tokens,
        "tiles_over_share": pairs[fits:].sum() / pairs.sum(),
        "lost": lost,
        "lost_share": lost / firings if firings else 0.0,
    }


def peer_audit(run: Run) -> pd.DataFrame:
    """Return what the published kernels would have lost on this run; a row a layer. Columns:

    layer; tokens; wrong, wrong_share (tokens with a tile of 256 past 31 slots: their output is wrong, unannounced);
    lost_share (of all firings); long, long_share (tokens past 128 non-zeros, which the training format moves to a dense
    tail of 2 048 rows); tail_full (whether that share of 16 384 tokens overflows the tail). `wrong` and `lost_share`
    are empty where the run's tiles are of another size than 256, or none were counted.
    """
    counted = layer_histogram(run)
    layer, nnz, counts = (counted[name].to_numpy() for name in ("layer", "nnz", "tokens"))
    tokens = np.bincount(layer, counts, run.layers).astype(np.int64)
    long = np.bincount(layer, counts * (nnz > PEER_ROW), run.layers).astype(np.int64)
    try:
        tiles = open_summaries(run).columns("tiles", "layer", "tile", *COUNTS)
        why = "" if (tiles["tile"] == PEER_TILE).any() else f"the run counted no tiles of {PEER_TILE}"
    except Missing as reason:
        tiles, why = {name: np.zeros(0, int) for name in ("layer", "tile", *COUNTS)}, str(reason)
    records = []
    for number in range(run.layers):
        selected = (tiles["layer"] == number) & (tiles["tile"] == PEER_TILE)
        fired, pairs, rows = (tiles[name][selected] for name in COUNTS)
        over = _over(fired, pairs, rows, PEER_SLOTS) if selected.any() else {}
        records.append(
            {
                "layer": number,
                "tokens": tokens[number],
                "wrong": over.get("rows_over"),
                "wrong_share": over.get("rows_over_share"),
                "lost_share": over.get("lost_share"),
                "long": long[number],
                "long_share": long[number] / tokens[number],
                "tail_full": long[number] / tokens[number] * PEER_BATCH > PEER_TAIL,
            }
        )
    frame = pd.DataFrame(records).astype({"wrong": "Int64", "wrong_share": float, "lost_share": float})
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": why or "over unflagged tokens"}
    return frame
