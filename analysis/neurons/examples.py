"""Examples: the text on which a neuron fires, at the top and across its range.

    examples(run, layer, neuron)   its largest values, and a random sample of its firings by value

Recorded with `twell capture --examples K`; the text around comes from the rows of single tokens. Cost: 0.1 s a million
tokens.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.tokens.contexts import sides
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run


def examples(run: Run, layer: int, neuron: int, width: int = 16) -> pd.DataFrame:
    """Top values first, then the sample, both by falling value. Columns:

    kind (top, sample); value; quantile (of the sample's values, those not above it; empty for top); sequence; position;
    before, token, after (text, `width` tokens either side); window (its values from 16 tokens before to 16 after).
    """
    if not 0 <= layer < run.layers or not 0 <= neuron < run.d_ff:
        raise UserError(f"Expected a neuron from L0/N0 to L{run.layers - 1}/N{run.d_ff - 1}, got L{layer}/N{neuron}.")
    wanted = [("layer", "=", layer), ("neuron", "=", neuron)]
    rows = pd.concat([pd.read_parquet(path, filters=wanted) for path in run.parts("examples")], ignore_index=True)
    if rows.empty:
        raise Missing(f"{run.name} holds no example of L{layer}/N{neuron}: it never fired, or none was kept.")
    found = rows.sort_values(["kind", "value"], ascending=[False, False], ignore_index=True)
    sample = np.sort(found.loc[found["kind"] == "sample", "value"].to_numpy())
    found["quantile"] = np.searchsorted(sample, found["value"], side="right") / max(len(sample), 1)
    found.loc[found["kind"] == "top", "quantile"] = np.nan
    around = sides(run, found, width)
    found["before"], found["token"], found["after"] = ([side[place] for side in around] for place in (0, 1, 2))
    frame = found[["kind", "value", "quantile", "sequence", "position", "before", "token", "after", "window"]]
    frame.attrs = {"definition": run.manifest.nnz_definition, "layer": layer, "neuron": neuron}
    return frame
