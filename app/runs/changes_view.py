"""What changed between two runs: a sentence, and their numbers side by side with difference and ratio."""

from __future__ import annotations

import html
from contextlib import suppress

import numpy as np
import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.changes import headline_changes
from twell.analysis.comparisons import FALSE_DISCOVERIES
from twell.analysis.figures.compare import layer_labels
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, layer_width, number, percent, plural, signed, times, typeset, whole
from twell.app.ui.query import query_with_others
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

NAMES = {
    "nnz_mean": "nnz per token and layer",
    "firing_share": "Share of a layer that fires",
    "dead_share": "Dead neurons",
    "loss": "Next-token loss, nats",
    "ffn_speedup": "FFN speedup",
    "pass_speedup": "Speedup of a whole pass",
}
LEAST = 0.01  # change of the whole, so that the longest bar of two runs that are nearly alike is short
SHARES, SPEEDS = {"firing_share", "dead_share"}, {"ffn_speedup", "pass_speedup"}


def draw_changes(runs: tuple[Run, Run]) -> None:
    """Draw what changed most between the runs, first in a sentence, then number by number."""
    result = query_with_others(runs[0], [runs[1]], headline_changes)
    frame = result.frame
    if frame.empty:
        raise Missing("These runs have no number in common.")
    first, other = (run.name for run in runs)
    with widgets.show_errors():
        st.html(f'<p class="tw-lead">{html.escape(typeset(lead(runs, frame)))}</p>')
    widgets.heading(
        "What changed most",
        f"First what is clear, by how much of the whole it changes (the bar: of all neurons, of the dense time, of the "
        f"loss), then what has no interval (grey) and what may be chance (hollow). Difference: {first} minus {other}; "
        f"ratio: {first} / {other}, with 95{SPACE}% intervals where the runs tell one.",
        result,
        key="changes",
    )
    st.html(changes_html(frame, (first, other)))


def lead(runs: tuple[Run, Run], frame: pd.DataFrame) -> str:
    """Return in two sentences or three how the first run differs from the second. frame: `headline_changes`"""
    sentences, by_name = [], frame.set_index("number")
    if "nnz_mean" in by_name.index:
        row = by_name.loc["nnz_mean"]
        span = f" ({times(row['ratio_low'])} to {times(row['ratio_high'])})" if pd.notna(row["ratio_low"]) else ""
        sentence = (
            f"{runs[0].name} fires {times(row['ratio'])} as many neurons a token and layer as {runs[1].name}{span}: "
            f"{number(row['value'])} against {number(row['first'])}"
        )
        if runs[0].manifest.widths != runs[1].manifest.widths:
            share = by_name.loc["firing_share"]
            sentence += (
                f". Of a layer's neurons, {layer_width(runs[0])} and {layer_width(runs[1])}, that is "
                f"{times(share['ratio'])} the share: {percent(share['value'])} against {percent(share['first'])}"
            )
        sentences.append(f"{sentence}.")
    with suppress(Missing):
        sentences.append(most_changed_layer(query_with_others(runs[0], [runs[1]], analysis.compare_layers).frame))
    chance = [NAMES[number] for number in frame.loc[frame["evidence"] == "chance", "number"]]
    if chance:
        sentences.append(f"May be chance: {', '.join(chance)}.")
    return " ".join(sentences)


def most_changed_layer(frame: pd.DataFrame) -> str:
    """Return in a sentence which layer's mean nnz changed most, in neurons a token, and which least.

    Where some layers differ for all that chance may do among so many (by q), and others do not, it is of the first
    alone, and says how many the others are: a change that may be none has no place in an order of sizes. frame: rows of
    `compare_layers`
    """
    clear = frame["q"] <= FALSE_DISCOVERIES
    if frame["low"].notna().any() and not clear.any():
        return "No layer's nnz changed by more than chance may."
    named = frame.assign(label=layer_labels(frame))
    among = named[clear] if clear.any() else named.dropna(subset="difference")
    size = among["difference"].abs()
    if len(named) < 2 or among.empty:
        return ""

    def told(row: pd.Series) -> str:
        ratio = f" ({times(row['ratio'])})" if np.isfinite(row["ratio"]) else ""
        return f"by {signed(row['difference'])} neurons a token{ratio}"

    most, least = among.loc[size.idxmax()], among.loc[size.idxmin()]
    if clear.any() and not clear.all():
        which = f"the {len(among)} layers whose" if len(among) > 1 else "all layers, the only one whose"
        rest = len(named) - len(among)
        return (
            f"{most['label']} changed most of {which} change can be told from none, {told(most)}; in the other "
            f"{plural(rest, 'layer')} it may be chance."
        )
    return f"Of the layers {most['label']} changed most, {told(most)}, and {least['label']} least, {told(least)}."


def beyond_chance(clear: pd.Series) -> str:
    """Return, after a space, how many tokens differ by more than chance may among so many. clear: whether each does"""
    among = f"more than chance may among so many (at most {100 * FALSE_DISCOVERIES:g}{SPACE}% of false discoveries)"
    count = int(clear.sum())
    if not count:
        return f" None differs by {among}: of {whole(len(clear))} intervals, some leave 0 out where nothing differs."
    return f" {plural(count, 'token')} differ{'s' * (count == 1)} by {among}."


def changes_html(frame: pd.DataFrame, names: tuple[str, str]) -> str:
    """Return rows of `headline_changes` as HTML; a bar is the change of the whole, to the right where it is above 0."""
    size = frame["of_whole"].to_numpy(float)
    most = max(float(np.abs(size[np.isfinite(size)]).max(initial=0.0)), LEAST)
    head = "".join(f"<span>{html.escape(name)}</span>" for name in ("", *names, "difference", "ratio"))
    lines = [f'<div class="tw-changes"><div class="names">{head}<span></span></div>']
    for row, change in zip(frame.itertuples(), size, strict=True):
        form = percent if row.number in SHARES else times if row.number in SPEEDS else number
        cells = (NAMES[row.number], form(row.value), form(row.first), _difference(row), _ratio(row))
        width = 0.0 if np.isnan(change) else 50 * min(abs(change) / most, 1.0)
        side = "left" if change > 0 else "right"
        bar = f'<i><b class="{row.evidence}" style="{side}:50%;width:{width:.0f}%"></b></i>'
        lines.append(f"<div>{''.join(f'<span>{html.escape(cell)}</span>' for cell in cells)}{bar}</div>")
    return "".join([*lines, "</div>"])


def _difference(row: object) -> str:
    """Return the difference of a row with its interval; of shares in percentage points."""
    name, difference, low, high = (getattr(row, key) for key in ("number", "difference", "low", "high"))
    if pd.isna(difference):
        return "another text" if name == "loss" else "other amounts of text"
    scale = 100 if name in SHARES else 1
    unit = " points" if name in SHARES else ""
    span = f" ({signed(scale * low)} to {signed(scale * high)})" if pd.notna(low) else ""
    return f"{signed(scale * difference)}{unit}{span}"


def _ratio(row: object) -> str:
    """Return the ratio of a row with its interval."""
    ratio, low, high = (getattr(row, key) for key in ("ratio", "ratio_low", "ratio_high"))
    chance = ", may be chance" if getattr(row, "evidence") == "chance" else ""  # noqa: B009
    return times(ratio) + (f" ({number(low)} to {number(high)}){chance}" if pd.notna(low) else "")
