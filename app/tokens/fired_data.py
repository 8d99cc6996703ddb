"""The neurons that a word or a token fires, over its places in the text.

From the table `fired` of a run, or of readings of some of its passages, which the model makes where the run keeps no
firings of them. Cost: one pass over the run's text until PLACES are found, then over the firings of their passages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from twell.analysis.neurons.at_token import beside, firings_at
from twell.app.tokens.word_data import word_tokens
from twell.workbench.run.store import Run

PLACES = 100  # of a word or a token that are read
WHERE = ["place", "sequence", "position"]
ORDERS = {"excess": "more often than elsewhere", "value": "greatest value", "layer": "layer"}  # of `firing_order`


def fired_by_word(runs: Run | Sequence[Run], word: str) -> pd.DataFrame:
    """Return the neurons that a word's first PLACES fire, the greatest mean value first; columns as `firings_at` has
    them."""
    runs = [runs] if isinstance(runs, Run) else runs
    return firings_at(runs, [word_tokens(run, word).query("place < @PLACES")[WHERE] for run in runs])


def fired_by_token(runs: Run | Sequence[Run], token: int) -> pd.DataFrame:
    """Return the neurons that a token's first PLACES fire, the greatest mean value first; columns as `firings_at` has
    them."""
    runs = [runs] if isinstance(runs, Run) else runs
    return firings_at(runs, [token_places(run, token)[WHERE] for run in runs])


def token_places(run: Run, token: int) -> pd.DataFrame:
    """Return the first PLACES of a token, in the order of the text. Columns: place; sequence; position."""
    rows = run.rows("activity", [("token_id", "=", token)], ["sequence", "position"]).to_pandas()
    rows = rows.sort_values(["sequence", "position"], ignore_index=True).head(PLACES)
    return rows.assign(place=np.arange(len(rows)))


def firing_order(table: pd.DataFrame, run: Run, order: str) -> pd.DataFrame:
    """Return rows of `firings_at` with what the whole run knows of each neuron, in one of ORDERS.

    Columns more: share, density (as `beside` has them); excess (the share of the places that fire it less the share of
    the run's tokens that do).
    """
    rows = beside(table, run)
    rows = rows.assign(excess=rows["fired"] / rows["places"] - rows["density"])
    keys, rising = (["layer", "value"], [True, False]) if order == "layer" else ([order, "value"], [False, False])
    return rows.sort_values(keys, ascending=rising, kind="stable", ignore_index=True)
