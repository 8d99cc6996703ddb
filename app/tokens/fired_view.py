"""The neurons that a word or a token fires: drawn on its page, from the run, or read now by its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from twell.analysis.neurons.at_token import first_of_layers
from twell.analysis.passage import sequences
from twell.app.jobs.asking import model_request, passages_anew, prepare
from twell.app.tokens.fired_data import ORDERS, firing_order
from twell.app.ui import widgets
from twell.app.ui.formatting import number, percent, plural, whole
from twell.app.ui.query import Query, QueryResult, fetch, query, query_with_others
from twell.app.ui.url_state import link
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SHOWN = 20  # neurons
PASSAGES, TOKENS = 3, 2048  # that the model reads at most, the first passage in any case


def draw_fired(
    run: Run, noun: str, find: Callable[..., pd.DataFrame], places: Callable[..., pd.DataFrame], **of: Any
) -> None:
    """Draw the neurons that a word or a token fires, first those that it fires more often than other text does.

    Raises Missing where none can be told.

    Args:
        run: the run.
        noun: what fires them: word, token.
        find: `fired_by_word` or `fired_by_token`.
        places: finds its places, for the passages that the model reads.
        of: the argument of both, by name.
    """
    result, read = query(run, find, **of), "the first whose firings the run keeps"
    is_kept = _keeps(run, result)
    if not can_tell(run, find, **of):
        raise _not_kept(run)
    area = st.container()
    order = widgets.url_choice("Order", ORDERS, "fired", "excess", label_visibility="collapsed")
    if not is_kept:
        result, read = _read_now(run, Query(find, of), fetch(run, places, **of))
    result = result.then(firing_order, run, order)
    frame = result.frame
    always = int((frame["fired"] == frame["places"]).sum())
    shown = first_of_layers(frame, max(1, SHOWN // run.layers)) if order == "layer" else frame.head(SHOWN)
    limit = f" ({len(shown)} shown)" if len(frame) > len(shown) else ""
    with area:
        widgets.heading(
            f"Neurons that this {noun} fires",
            f"{plural(len(frame), 'neuron')}{limit} at {plural(int(frame['places'].max()), 'place')}, {read}; "
            f"{whole(always) if always else 'none'} at each of them. Bar: the share of the places that fire it. Value: "
            "the mean over them, 0 where it is silent. Density: the share of the whole run's tokens that fire it.",
            result,
            key="fired-here",
        )
    with st.container(key="fired-neurons"):
        st.html(fired_html(shown))


def can_tell(run: Run, find: Callable[..., pd.DataFrame], **of: Any) -> bool:
    """Return whether a word's or a token's neurons can be told: the run keeps them, or its model reads. For the
    arguments see `draw_fired`."""
    return _keeps(run, query(run, find, **of)) or bool(run.has("activity") and model_request(run))


def _keeps(run: Run, result: QueryResult) -> bool:
    return run.has("fired") and result.known


def _not_kept(run: Run) -> Missing:
    """Return why a run cannot tell what fires: it keeps none of it, and its model is not here."""
    return Missing(
        f"{run.name} keeps no firings of these tokens, and its model is not at hand to read them: capture with --fired "
        "all to see them."
    )


def _read_now(run: Run, find: Query, tokens: pd.DataFrame) -> tuple[QueryResult, str]:
    """Return the table of neurons from the first passages with these tokens, read now by the model, and what was read,
    as a clause."""
    prepare()
    lengths = fetch(run, sequences).set_index("sequence")["tokens"]
    first = lengths.loc[tokens["sequence"].drop_duplicates().head(PASSAGES)]
    chosen = first.index[: max(1, int((first.cumsum() <= TOKENS).sum()))].tolist()
    *others, last = passages_anew(run, chosen)
    read = f"those in the first {plural(len(chosen), 'passage')} with it, computed now on {last.manifest.device}"
    return query_with_others(last, others, find), read


def fired_html(frame: pd.DataFrame) -> str:
    """Return rows of `firing_order` as HTML, each a link to the neuron's page."""
    lines = ['<div class="tw-neurons"><div class="tw-neuron names"><span>neuron</span><span></span>']
    lines.append("<span>fires at</span><span>value</span><span>density</span></div>")
    for row in frame.itertuples():
        density = "–" if pd.isna(row.density) else percent(float(row.density))
        lines.append(
            f'<a class="tw-neuron" href="{link("neuron", neuron=row.label)}"><span class="name">{row.label}</span>'
            f'<i><b style="width:{100 * row.fired / row.places:.0f}%"></b></i>'
            f"<span>{row.fired} of {plural(int(row.places), 'place')}</span>"
            f'<span class="number">{number(float(row.value))}</span><span class="number">{density}</span></a>'
        )
    return "".join([*lines, "</div>"])
