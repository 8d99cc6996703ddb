"""A token's neurons: those with examples at the token, found from the examples that a run keeps of each neuron.

Examples are a neuron's largest values and a random sample of its firings; each is at one token. Cost: one pass over the
token's rows and over the examples, without their windows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell import analysis
from twell.analysis.neurons.values import missing
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.text_around import position_keys
from twell.app.ui.formatting import number, percent, plural
from twell.app.ui.url_state import link
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SHOWN = 12  # neurons


def neurons_of(run: Run, token: int) -> pd.DataFrame:
    """Return the neurons with an example at a token, those first that have most of their largest values there.

    Args:
        run: the run. Missing is raised if it keeps no examples, or none at this token.
        token: the token's id.

    Returns:
        Columns: label; layer; neuron; top_here, top_examples (how many of the neuron's largest values are at the token,
        and how many are kept); sample_here, sample_examples (the same for the random sample of its firings); value (its
        largest at the token); density (share of the run's tokens that fire it); one_token (whether no other token of
        the vocabulary fires it).
    """
    if not run.has("examples"):
        raise missing(run)
    rows = run.frame("activity", ["sequence", "position", "token_id"])
    return neurons_at(run, rows[rows["token_id"] == token])


def neurons_at(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the neurons with an example at one of the positions in `rows`, all that there are of a token or a word;
    columns as `neurons_of` has them. rows: columns sequence, position, token_id"""
    examples = run.frame("examples", ["layer", "neuron", "kind", "value", "sequence", "position"])
    is_here = np.isin(position_keys(examples), position_keys(rows))
    examples = examples.assign(is_here=is_here)
    largest = examples[is_here].groupby(["layer", "neuron"])["value"].max()
    if largest.empty:
        raise Missing("No neuron has an example here: it fires none strongly enough, or occurs too rarely.")
    examples = examples.set_index(["layer", "neuron"])
    examples = examples[examples.index.isin(largest.index)]
    neurons = largest.to_frame("value")
    for kind in ("top", "sample"):
        by_neuron = examples[examples["kind"] == kind].groupby(level=["layer", "neuron"])["is_here"]
        counts = by_neuron.agg(["sum", "size"]).reindex(neurons.index, fill_value=0)
        neurons[[f"{kind}_here", f"{kind}_examples"]] = counts.to_numpy()
    all_neurons = analysis.by_neuron(run).set_index(["layer", "neuron"])
    neurons[["label", "density"]] = all_neurons.loc[neurons.index, ["label", "density"]]
    tokens = open_summaries(run).frame("neurons").set_index(["layer", "neuron"])[["token_min", "token_max"]]
    token = rows["token_id"].iloc[0] if rows["token_id"].nunique() == 1 else None
    neurons["one_token"] = (tokens.loc[neurons.index] == token).all(axis=1)
    neurons["share"] = neurons["top_here"] / neurons["top_examples"].clip(lower=1)
    neurons = neurons.sort_values(["share", "sample_here", "value"], ascending=False, kind="stable").reset_index()
    counts_of_examples = ["top_here", "top_examples", "sample_here", "sample_examples"]
    return neurons[["label", "layer", "neuron", *counts_of_examples, "value", "density", "one_token"]]


def neurons_html(frame: pd.DataFrame) -> str:
    """Return the first SHOWN rows of `neurons_of` as HTML, each a link to the neuron's page.

    A bar shows the share of the neuron's largest values that are at the token.
    """
    lines = ['<div class="tw-neurons"><div class="tw-neuron names"><span>neuron</span><span></span>']
    lines.append("<span>of its largest values</span><span>value here</span><span>density</span></div>")
    for row in frame.head(SHOWN).itertuples():
        width = 100 * row.top_here / max(row.top_examples, 1)
        only = ", fires on nothing else" if row.one_token else ""
        here = f"{row.top_here} of {row.top_examples} are here"
        if not row.top_here:  # of the random sample of its firings
            here = f"none; {row.sample_here} of {plural(row.sample_examples, 'sampled firing')} here"
        lines.append(
            f'<a class="tw-neuron" href="{link("neuron", neuron=row.label)}"><span class="name">{row.label}</span>'
            f'<i><b style="width:{width:.0f}%"></b></i><span>{here}{only}</span>'
            f'<span class="number">{number(float(row.value))}</span>'
            f'<span class="number">{percent(float(row.density))}</span></a>'
        )
    return "".join([*lines, "</div>"])


def neurons_caption(frame: pd.DataFrame) -> str:
    """Return how many neurons `neurons_of` has, as two sentences."""
    majority = int((frame["top_here"] * 2 > frame["top_examples"]).sum())
    limit = f" (first {SHOWN} shown)" if len(frame) > SHOWN else ""
    verb = "has" if majority == 1 else "have"
    return (
        f"{plural(len(frame), 'neuron')}{limit}; {majority or 'none'} of them {verb} "
        "more than half of their largest values here. Choose one to see all its examples, or a place in the text below "
        "for all that it fires there."
    )
