"""What orders the rows of page Tokens, in words, and which layer decides it."""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.app.ui.formatting import percent, plural
from twell.app.ui.query import fetch
from twell.app.ui.url_state import link
from twell.workbench.run.store import Run

ASKED = "neurons fired a layer, the mean over layers and over all places of a {}"  # what the title asks for
ORDERS = {  # what each other order is, in words
    "shrunk": "z, in which every layer counts alike, drawn towards the mean of all tokens",
    "z": "z, in which every layer counts alike",
    "z_position": "z, in which every layer counts alike, against similar positions",
}
MOST = 0.5  # share of the model's nnz from which one layer makes most of it
DOMINANT = 0.3  # share of the model's nnz from which one layer decides an order by neurons fired


def which_order(noun: str, rank: str, min_count: int, with_text: bool) -> str:
    """Return as HTML which rows answer the page's question, and which questions the other orders answer.

    The question means whole words by mean neurons fired, or single tokens where a run keeps no text.

    Args:
        noun: what a row is: token, word.
        rank: the column that orders them.
        min_count: how often a row has to occur.
        with_text: whether the run keeps its text, and so has whole words and single places.
    """
    seen = f"of {noun}s seen at least {plural(min_count, 'time')}"
    asked = "word" if with_text else "token"
    others = {
        "z": "z, which stand out with every layer counting alike",
        "token": "single tokens, which pieces of words fire most",
        "place": "single places, on page Text, where in the text most fire at once",
    }
    if not with_text:
        others = {"z": others["z"]}
    if (noun, rank) == (asked, "mean"):
        listed = "; ".join(others.values())
        return (
            f"These rows answer the question: {'whole words' if noun == 'word' else 'tokens'} by "
            f"{ASKED.format(noun)}, {seen}. The other orders answer others: {listed}."
        )
    here = f"{ASKED.format(noun)}, {seen}" if rank == "mean" else f"{ORDERS[rank]}, {seen}"
    why = "which pieces of words fire most" if rank == "mean" else "which stand out with every layer counting alike"
    kinds = "whole words" if with_text else "tokens"
    address = link("tokens", view=f"{asked}s")
    return (
        f"Ordered by {here}: these rows answer another question, {why}. For which fire most neurons, see "
        f'<a class="plain" href="{address}">{kinds} by neurons fired</a>.'
    )


def decisive_layer(run: Run, rank: str) -> pd.Series | None:
    """Return the row of `by_layer` of the layer that decides an order by neurons fired; None where no layer is far
    above the others, or the rows are ordered by z.

    rank: the column that orders the rows
    """
    layers = fetch(run, analysis.by_layer)
    if layers["share"].isna().all():  # nothing fires
        return None
    top = layers.loc[layers["share"].idxmax()]
    return None if rank != "mean" or len(layers) < 3 or top["share"] < DOMINANT else top


def mostly_one_layer(run: Run, rank: str, noun: str) -> str:
    """Return in a sentence, with a space after it, which layer decides the order; empty where none does.

    noun: what a row is: token, word
    """
    top = decisive_layer(run, rank)
    if top is None:
        return ""
    layer, share = f"ayer {top['layer']:.0f}", percent(top["share"])
    if top["share"] > MOST:
        return (
            f"Mostly l{layer}: it makes {share} of all firings of this run, and so decides which {noun} comes first. "
        )
    return f"L{layer} makes {share} of all firings of this run, more than any other, and weighs as much in this order. "


def who_decides(run: Run, rank: str) -> str:
    """Return in a sentence, with a space after it, why an order by z is another one; empty where no layer decides."""
    top = decisive_layer(run, rank)
    if top is None:
        return ""
    return (
        f"Another order than above: there layer {top['layer']:.0f} decides, which has {percent(top['share'])} of all "
        "firings; here every layer has the same weight. "
    )
