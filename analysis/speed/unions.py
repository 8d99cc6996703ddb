"""Unions: how many different neurons a block of consecutive tokens asks for, and how far tokens share them.

    union_sizes(run)   a row a layer and block size

A kernel that gathers weight rows once a block reads `mean` of them; one that reads them token by token reads
block × nnz. Unions come from the summary `unions`, counted on the device. Cost: 10 ms.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import layer_moments
from twell.analysis.statistics import quantiles
from twell.analysis.summaries.read import open_summaries
from twell.workbench.run.store import Run


def union_sizes(run: Run) -> pd.DataFrame:
    """Return how many different neurons blocks of tokens fire. Columns: layer; block (tokens); blocks; mean, p50, p90,
    max (different neurons fired in a block); share (mean / d_ff); overlap (mean over block × mean nnz: 1 where no two
    tokens share a neuron, 1 / block where all share all)."""
    summaries = open_summaries(run)
    rows = summaries.columns("unions", "layer", "block", "neurons", "blocks")
    nnz, _ = layer_moments(summaries)
    starts = np.flatnonzero(np.diff(rows["layer"], prepend=-1) | np.diff(rows["block"], prepend=-1))
    groups = (np.split(rows[name], starts[1:]) for name in ("neurons", "blocks"))
    records = []
    for layer, block, count, blocks in zip(
        rows["layer"][starts].tolist(), rows["block"][starts].tolist(), *groups, strict=True
    ):
        mean = float((count * blocks).sum() / blocks.sum())
        p50, p90 = quantiles(count, blocks, [0.5, 0.9])
        unshared = block * nnz[layer]
        records.append(
            {
                "layer": layer,
                "block": block,
                "blocks": int(blocks.sum()),
                "mean": mean,
                "p50": p50,
                "p90": p90,
                "max": int(count[-1]),
                "share": mean / run.widths[layer],
                "overlap": mean / unshared if unshared else np.nan,
            }
        )
    frame = pd.DataFrame(records)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "over blocks of consecutive tokens of one sequence",
    }
    return frame
