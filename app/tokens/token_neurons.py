"""A token's neurons: those whose greatest values stand at it, and those that nothing else fires.

From the examples that a run keeps of each neuron, its greatest values and some of its firings drawn at random; each is
at one token. Cost: one pass over the token's rows and the examples, without their windows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell import analysis
from twell.analysis.neurons.values import missing
from twell.analysis.summaries.read import open_summaries
from twell.app.ui.formatting import number, percent, plural
from twell.app.ui.url_state import link
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SHOWN = 12
PLACE = 2**32  # more than any position: sequence and position as one key


def neurons_of(run: Run, token: int) -> pd.DataFrame:
    """The neurons that keep an example at the token, those with most of their greatest values there first. Columns:

    label; layer; neuron; top, top_kept (of its greatest values, those at the token, and how many are kept); drawn,
    drawn_kept (the same of its firings drawn at random); value (its greatest at the token); density (share of the run's
    tokens that fire it); only (no other token of the vocabulary fires it).

    Missing where the run keeps no examples.
    """
    if not run.has("examples"):
        raise missing(run)
    kept = run.frame("examples", ["layer", "neuron", "kind", "value", "sequence", "position"])
    rows = run.frame("activity", ["sequence", "position", "token_id"])
    rows = rows[rows["token_id"] == token]
    here = np.isin(_places(kept), _places(rows))
    kept = kept.assign(here=here, top=kept["kind"] == "top")
    near = kept[here].groupby(["layer", "neuron"])["value"].max()
    if near.empty:
        raise Missing("No neuron keeps an example at this token: it fires none strongly enough, or stands too rarely.")
    kept = kept.set_index(["layer", "neuron"])
    kept = kept[kept.index.isin(near.index)]
    found = near.to_frame("value")
    for name, part in (("top", kept[kept["top"]]), ("drawn", kept[~kept["top"]])):
        counted = (
            part.groupby(level=["layer", "neuron"])["here"].agg(["sum", "size"]).reindex(found.index, fill_value=0)
        )
        found[[name, f"{name}_kept"]] = counted.to_numpy()
    every = analysis.by_neuron(run).set_index(["layer", "neuron"])
    alone = open_summaries(run).frame("neurons").set_index(["layer", "neuron"])
    found[["label", "density"]] = every.loc[found.index, ["label", "density"]]
    found["only"] = (alone.loc[found.index, ["token_min", "token_max"]] == token).all(axis=1)
    found["share"] = found["top"] / found["top_kept"].clip(lower=1)
    found = found.sort_values(["share", "drawn", "value"], ascending=False, kind="stable").reset_index()
    names = ["label", "layer", "neuron", "top", "top_kept", "drawn", "drawn_kept", "value", "density", "only"]
    return found[names]


def _places(rows: pd.DataFrame) -> np.ndarray:
    return rows["sequence"].to_numpy(np.int64) * PLACE + rows["position"].to_numpy(np.int64)


def neurons_html(frame: pd.DataFrame) -> str:
    """A line a neuron, the first SHOWN of them, each a link to its page; a bar for the share of its greatest values."""
    lines = ['<div class="tw-neurons"><div class="tw-neuron names"><span>neuron</span><span></span>']
    lines.append("<span>of its greatest values</span><span>value here</span><span>density</span></div>")
    for row in frame.head(SHOWN).itertuples():
        width = 100 * row.top / max(row.top_kept, 1)
        only = ", fires for nothing else" if row.only else ""
        lines.append(
            f'<a class="tw-neuron" href="{link("neuron", neuron=row.label)}"><span class="name">{row.label}</span>'
            f'<i><b style="width:{width:.0f}%"></b></i><span>{row.top} of {row.top_kept} are here{only}</span>'
            f'<span class="number">{number(float(row.value))}</span>'
            f'<span class="number">{percent(float(row.density))}</span></a>'
        )
    return "".join([*lines, "</div>"])


def said(frame: pd.DataFrame) -> str:
    """How many there are, in a sentence."""
    most = int((frame["top"] * 2 > frame["top_kept"]).sum())
    cut = f", the first {SHOWN} shown" if len(frame) > SHOWN else ""
    return (
        f"{plural(len(frame), 'neuron')} with an example at this token{cut}; {most} of them with more than half of "
        "their greatest values. Choose one to see all its examples."
    )
