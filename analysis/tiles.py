"""Tiles: would a packed row have held what fired, and what would fixed slots have got wrong?

    tile_audit(run)   a row a layer, tile size and compression: tokens whose fullest tile exceeds the slots
    peer_audit(run)   what the published kernels, whose slots do not overflow into anything, would have lost on this run

A tile of T neurons at compression C has T/C - 1 slots. The workbench's kernels keep what overflows, so there it costs
time alone. From the summary `tiles`, which the kernel counted while the model ran. Cost: 10 ms.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis import summary
from twell.analysis.layers import layer_histogram
from twell.workbench.errors import Missing
from twell.workbench.store import Run

COUNTS = ("occupancy", "pairs", "rows")
COMPRESSIONS = (2, 4, 8, 16)
PEER_TILE, PEER_SLOTS = 256, 31  # the published inference kernels, default settings
PEER_ROW, PEER_TAIL = 128, 2048  # the published training format: non-zeros a row, and rows in its dense tail
PEER_BATCH = 16_384  # tokens in one launch of the training kernels


def tile_audit(run: Run) -> pd.DataFrame:
    """A row a layer, tile size and compression. Columns:

    layer; tile (neurons); compression; slots; in_use (the run's own layout); tokens; occupancy_mean,
    occupancy_max (neurons fired in a tile); rows_over, rows_over_share (tokens whose fullest tile exceeds the slots);
    tiles_over_share (of pairs of token and tile); lost, lost_share (firings past the slots, and their share of all:
    what a kernel without overflow would drop).
    """
    rows = summary.read(run, "tiles")
    layout = run.manifest.layout
    found = []
    for (layer, tile), group in rows.groupby(["layer", "tile"]):
        fired, pairs, tokens = (group[name].to_numpy() for name in COUNTS)
        for compression in COMPRESSIONS:
            slots = int(tile) // compression - 1
            found.append(
                {
                    "layer": layer,
                    "tile": tile,
                    "compression": compression,
                    "slots": slots,
                    "in_use": (tile, compression) == (layout.get("tile"), layout.get("compression")),
                    "occupancy_mean": fired @ pairs / pairs.sum(),
                    "occupancy_max": int(fired[pairs > 0].max()),
                    **_over(fired, pairs, tokens, slots),
                }
            )
    frame = pd.DataFrame(found)
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": "over unflagged tokens; slots are T/C - 1"}
    return frame


def _over(fired: NDArray, pairs: NDArray, rows: NDArray, slots: int) -> dict[str, float]:
    """What exceeds the slots, of pairs and rows by occupancy, in one layer and tile size."""
    past = np.maximum(fired - slots, 0)
    lost, every = int(past @ pairs), int(fired @ pairs)
    return {
        "tokens": int(rows.sum()),
        "rows_over": int(rows[past > 0].sum()),
        "rows_over_share": rows[past > 0].sum() / rows.sum(),
        "tiles_over_share": pairs[past > 0].sum() / pairs.sum(),
        "lost": lost,
        "lost_share": lost / every if every else 0.0,
    }


def peer_audit(run: Run) -> pd.DataFrame:
    """A row a layer. Columns:

    layer; tokens; wrong, wrong_share (tokens with a tile of 256 past 31 slots: their output is wrong, unannounced);
    lost_share (of all firings); long, long_share (tokens past 128 non-zeros, which the training format moves to a dense
    tail of 2 048 rows); tail_full (whether that share of 16 384 tokens overflows the tail). `wrong` and `lost_share`
    are empty where the run's tiles are of another size than 256, or none were counted.
    """
    counted = layer_histogram(run)
    found = []
    try:
        tiles = summary.read(run, "tiles", tile=PEER_TILE)
        why = "" if len(tiles) else f"the run counted no tiles of {PEER_TILE}"
    except Missing as reason:
        tiles, why = pd.DataFrame({"layer": [], **{name: [] for name in COUNTS}}), str(reason)
    for layer, group in counted.groupby("layer"):
        tokens = int(group["tokens"].sum())
        long = int(group.loc[group["nnz"] > PEER_ROW, "tokens"].sum())
        here = tiles[tiles["layer"] == layer]
        fired, pairs, rows = (here[name].to_numpy() for name in COUNTS)
        over = _over(fired, pairs, rows, PEER_SLOTS) if len(here) else {}
        found.append(
            {
                "layer": layer,
                "tokens": tokens,
                "wrong": over.get("rows_over"),
                "wrong_share": over.get("rows_over_share"),
                "lost_share": over.get("lost_share"),
                "long": long,
                "long_share": long / tokens,
                "tail_full": long / tokens * PEER_BATCH > PEER_TAIL,
            }
        )
    frame = pd.DataFrame(found).astype({"wrong": "Int64", "wrong_share": float, "lost_share": float})
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": why or "over unflagged tokens"}
    return frame
