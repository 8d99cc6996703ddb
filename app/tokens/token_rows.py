"""Rows of tokens or words: how many neurons each fires, with an interval, and one place where it stands in the text.

Every row is a link to the page of the token or the word, and, where they can be told, one to the neurons that it fires
at that place.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.statistics import t_half
from twell.analysis.tokens.contexts import one_place_each
from twell.analysis.tokens.word_places import first_places
from twell.app.jobs.asking import names_neurons
from twell.app.tokens.token_neurons import neurons_caption, neurons_html
from twell.app.ui import widgets
from twell.app.ui.formatting import fixed, number, percent, running, token_html, typeset, visible, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import link
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SHOWN = 30  # rows
MOST = 0.5  # of a token's firings: the share from which one layer makes most of them


def titled_row(frame: pd.DataFrame, column: str, value: int | str | None, label: str) -> pd.Series | None:
    """Return the row of a token or word under its title; None, with a note on the page, where the run counts no such.

    Args:
        frame: the rows of all tokens or all words.
        column: where `value` stands, `token_id` or `word`.
        value: the token's id, or the word.
        label: what stands after its text, such as "token 40" or "word".
    """
    noun, rows = label.split()[0], frame[frame[column] == value]
    if rows.empty:
        widgets.title(f"No such {noun}")
        st.info(f"This run counts no such {noun}. Choose one from the list of all {noun}s.")
        return None
    row = rows.iloc[0]
    text = row["word" if "word" in frame else "text"]
    st.html(f'<h1 class="tw-title">{token_html(text)} <span class="tw-note">{label}</span></h1>')
    return row


def snippets(run: Run, frame: pd.DataFrame) -> dict[Any, pd.Series]:
    """Return one place of each row's token or word, by it: sequence, position, and the text before, at and after it;
    empty without a text."""
    try:
        if "word" in frame:
            places = fetch(run, first_places, words=tuple(frame["word"]))
            keys = places["word"] if len(places) else []
        else:
            places = fetch(run, one_place_each, token_ids=tuple(int(token) for token in frame["token_id"]))
            keys = places["token_id"]
    except Missing:
        return {}
    return dict(zip(keys, (place for _, place in places.iterrows()), strict=True))


def rows_html(run: Run, frame: pd.DataFrame, rank: str, filters: dict[str, str]) -> str:
    """Return the rows as HTML.

    Args:
        run: the run.
        frame: rows of `analysis.by_token` or `analysis.by_word`, at most SHOWN of which are drawn.
        rank: the column that orders them.
        filters: query parameters that the links keep.
    """
    frame = frame.head(SHOWN)
    is_word, texts = "word" in frame, snippets(run, frame)
    score = "z" if rank == "mean" else rank
    frame = frame if "mean_se" in frame else frame.assign(mean_se=float("nan"))
    frame = frame.assign(half=t_half(frame["effective"].to_numpy() - 1) * frame["mean_se"])
    low, high = dot_axis(frame["mean"], frame["half"])
    axis = f'<span class="ends"><span>{number(low)}</span><span>{number(high)}</span></span>'
    unit = "neurons a layer" + (" ± 95 %" if frame["half"].notna().any() else "")
    titles = ["word" if is_word else "token", axis, unit, "z", "times", *(["for example"] if texts else [])]
    names = "".join(title if title == axis else f"<span>{typeset(title)}</span>" for title in titles)
    tells = bool(texts) and names_neurons(run)
    lines = [_with_neurons(f'<div class="tw-fired names">{names}</div>', "" if tells else None)]
    for row in frame.to_dict("records"):
        key = row["word"] if is_word else row["token_id"]
        address = link("token", **({"word": key} if is_word else {"token": key}), **filters)
        name = token_html(row["word"] if is_word else row["text"])
        half = row["half"]
        mean = number(row["mean"]) + ("" if pd.isna(half) else f" ± {number(half, 2)}")
        numbers = f"<span>{mean}</span><span>{fixed(row[score])}</span><span>{whole(row['count'])}</span>"
        place = texts.get(key)
        cells = (
            f'<a class="tw-fired" href="{address}"><span>{name}</span>{_dot(row["mean"], half, low, high)}{numbers}'
            f"{_snippet(place) if texts else ''}</a>"
        )
        there = "" if place is None else link("text", sequence=place["sequence"], position=place["position"])
        lines.append(_with_neurons(cells, there if tells else None))
    return f'<div class="tw-fired-rows{"" if texts else " bare"}">{"".join(lines)}</div>'


def _with_neurons(cells: str, address: str | None) -> str:
    """Return a row with a link to the neurons of its place, by address; empty: room for it alone, None: neither."""
    if address is None:
        return cells
    there = f'<a class="tw-its" href="{address}">its neurons →</a>' if address else '<span class="tw-its"></span>'
    return f'<div class="tw-row">{cells}{there}</div>'


def _dot(mean: float, half: float, low: float, high: float) -> str:
    """Return a dot at the mean on an axis from `low` to `high`, with its 95 % interval, `half` to each side."""
    share = 100 / max(high - low, 1e-9)
    at, whisker = (mean - low) * share, ""
    if not pd.isna(half):
        left, right = max(0.0, at - half * share), min(100.0, at + half * share)
        whisker = f'<u style="left:{left:.1f}%;width:{right - left:.1f}%"></u>'
    return f'<i>{whisker}<b style="left:{at:.1f}%"></b></i>'


def dot_axis(means: pd.Series, halves: pd.Series) -> tuple[float, float]:
    """Return the ends of the axis of the dots: from near the least to near the greatest interval, at least 1 apart."""
    halves = halves.fillna(0)
    low, high = float((means - halves).min()), float((means + halves).max())
    margin = max(0.04 * (high - low), 0.5)
    return max(0.0, low - margin), high + margin


def _snippet(place: pd.Series | None) -> str:
    """Return the text around a token, the token marked; an empty cell if there is none."""
    if place is None:
        return "<span></span>"
    before, token, after = place["before"], place["token"], place["after"]
    return (
        f'<span class="around"><span class="before"><bdi>{html.escape(running(before[-40:]))}</bdi></span>'
        f"<mark>{html.escape(visible(token))}</mark>"
        f'<span class="after">{html.escape(running(after[:60]))}</span></span>'
    )


def say_mostly_layer(run: Run, noun: str, nnz: pd.Series) -> None:
    """Draw which layer makes most of the firings of a token or a word; nothing where none makes half of them.

    noun: which of them; nnz: its mean nnz in each layer, by the layer
    """
    share = nnz / nnz.sum()
    if len(nnz) > 1 and share.max() > MOST:
        layer = share.idxmax()
        every = fetch(run, analysis.by_layer).set_index("layer")["share"]
        st.html(
            f'<p class="tw-said">Mostly layer {layer}: it makes {percent(share[layer])} of what this {noun} fires, '
            f"and {percent(every[layer])} of all firings of the run.</p>"
        )


def draw_neurons(run: Run, noun: str, find: Callable[..., pd.DataFrame], **of: Any) -> None:
    """Draw the neurons with examples at a token or a word. noun: which of them; find: finds them; of: its arguments"""
    result = query(run, find, **of)
    frame = result.frame  # before the heading, which is left out with it
    widgets.heading(f"Neurons with an example at this {noun}", neurons_caption(frame), result)
    with st.container(key="example-neurons"):
        st.html(neurons_html(frame))


def draw_its_neurons(run: Run, places: pd.DataFrame, names: list[str]) -> None:
    """Draw a link to the neurons that each token of one place fires; nothing where they cannot be told.

    Args:
        run: the run.
        places: a row a token, with its sequence and position.
        names: each token by itself.
    """
    if not len(places) or not names_neurons(run):
        return
    links = [
        f'<a class="plain tw-chip" href="{link("text", sequence=row.sequence, position=row.position)}">'
        f"{row.sequence}:{row.position} {token_html(name)} →</a>"
        for row, name in zip(places.itertuples(), names, strict=True)
    ]
    st.html(f'<p class="tw-said">What it fires at one place: {" ".join(links)}</p>')
