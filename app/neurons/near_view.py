"""How near the neurons that never fired came to firing: read on demand, by the run's model, on the run's first tokens.

A run records values above 0 only, so this is the one answer about silent neurons that takes the model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import streamlit as st

from twell.app.jobs.asking import begin, model_request, wait_for
from twell.app.ui.formatting import plural, whole
from twell.app.ui.query import fetch
from twell.app.ui.url_state import url_param
from twell.workbench.run.store import Run

READ = 4096  # tokens of the run that the model reads for it
NEAR = 1.0  # standard deviations below 0 up to which a neuron counts as near
NAMES = ["layer", "neuron"]


def first_tokens(run: Run, most: int = READ) -> pd.DataFrame:
    """Return the run's first tokens, at most `most`, in the order of the text. Columns: sequence, position, token_id,
    flags."""
    lengths = run.frame("sequences", ["sequence", "tokens"]).sort_values("sequence")
    ahead = lengths["tokens"].cumsum() - lengths["tokens"]
    chosen = lengths.loc[ahead < most, "sequence"].tolist()
    names = ["sequence", "position", "token_id", "flags"]
    rows = run.rows("activity", [("sequence", "in", chosen)], names).to_pandas()
    return rows.sort_values(names[:2], ignore_index=True).head(most)


def near_values(run: Run) -> str:
    """Draw the switch, and have the model read if it is on; return the path of its table, empty if there is none.

    Raises UserError if the model cannot read.
    """
    request = model_request(run)
    if request is None or not run.has("activity") or not run.has("sequences"):
        return ""
    if not st.toggle("How near did they come to firing?", **url_param("near", False, {"True": True}.get)):
        return ""
    by_sequence = fetch(run, first_tokens).groupby("sequence")
    texts = [ids.tolist() for _, ids in by_sequence["token_id"]]
    counted = [(flags == 0).tolist() for _, flags in by_sequence["flags"]]
    reading = begin({**request, "texts": texts, "counted": counted})
    wait_for(reading)
    return str(reading.out / "nearest.parquet")


def with_nearest(frame: pd.DataFrame, path: str) -> pd.DataFrame:
    """Return the list of neurons that never fired with columns more, the nearest first: largest (its greatest
    pre-activation); below (how far that is below 0, in standard deviations of its pre-activations); why (weights gone,
    near or far).

    path: the table of `workbench/worker/nearest.py`
    """
    rows = pd.DataFrame({name: values.to_numpy() for name, values in _columns(path).items()})
    rows["below"] = -rows["largest"] / rows["sd"].clip(lower=1e-12)
    joined = frame.merge(rows[[*NAMES, "largest", "below"]], on=NAMES, how="left")
    gone = joined.get("gone", False)
    joined["why"] = np.where(gone, "weights gone", np.where(joined["below"] <= NEAR, "near", "far"))
    joined = joined.sort_values("below", kind="stable", ignore_index=True)
    joined.attrs = dict(frame.attrs)
    return joined


def _columns(path: str) -> dict[str, pd.Series]:
    table = pq.read_table(Path(path))
    return {name: table[name].to_pandas() for name in table.column_names}


def nearness(frame: pd.DataFrame, run: Run) -> str:
    """Return what `with_nearest` says of the listed neurons, in sentences that name the text."""
    counts = frame["why"].value_counts()
    near, far = int(counts.get("near", 0)), int(counts.get("far", 0))
    tokens = min(READ, run.manifest.tokens)
    return (
        f" Of the others, on the first {plural(tokens, 'token')} of this run, read by its model, {whole(near)} came "
        f"within one standard deviation of firing, {whole(far)} did not."
    )
