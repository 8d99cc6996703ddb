"""The HTML on a neuron's page: its examples, token by token, and the tokens whose logits it changes most."""

from __future__ import annotations

import html
from urllib.parse import urlencode

import numpy as np
import pandas as pd

from twell.analysis.neurons.values import SIDE
from twell.app.text.passage_view import opacity
from twell.app.ui.formatting import aligned, number, running, token_html


def examples_html(frame: pd.DataFrame, high: float, name: str, label: str) -> str:
    """Return a line an example: its position, its text with values as shades, its percentile (if sampled), its value.

    Args:
        frame: the rows of `example_pieces`.
        high: the value of the strongest shade.
        name: the run's name.
        label: the neuron's name.
    """
    percentile_title = "percentile" if frame["quantile"].notna().any() else ""
    titles = ("where", "sequence:position"), ("words", ""), ("number", percentile_title), ("number", "value")
    cells = "".join(f'<span class="{kind}">{title}</span>' for kind, title in titles)
    lines = [f'<div class="tw-places"><div class="tw-example-names">{cells}</div>']
    for row in frame.itertuples():
        window = dict(zip(range(row.position - SIDE, row.position + SIDE + 1), row.window, strict=False))
        spans = []
        for position, text in enumerate(row.pieces, row.start):
            value = window.get(position, 0.0)
            share = 0.0 if not value > 0 else min(value / max(high, 1e-9), 1.0)
            shade = f' style="background:rgba(47,126,216,{opacity(share):.3f})"' if share else ""
            marker = ' class="here"' if position == row.position else ""
            tooltip = f' title="{number(float(value))}"' if share else ""
            spans.append(f"<span{marker}{shade}{tooltip}>{html.escape(running(text))}</span>")
        query = {"run": name, "sequence": row.sequence, "position": row.position, "neuron": label}
        address = html.escape("text?" + urlencode(query), quote=True)
        percentile = "" if np.isnan(row.quantile) else f"{100 * row.quantile:.0f}"
        lines.append(
            f'<div class="tw-example"><a class="where" href="{address}">{row.sequence}:{row.position}</a>'
            f'<span class="words">{"".join(spans)}{_again(row.again)}</span><span class="number">{percentile}</span>'
            f'<span class="number">{number(float(row.value))}</span></div>'
        )
    return "".join([*lines, "</div>"])


def _again(times: float) -> str:
    """Return how often an example's context comes again in the run, as HTML; nothing where it does not."""
    if not times > 0:
        return ""
    title = "the same eight tokens up to the marked one stand so many times more in the run; the first is shown"
    return f' <span class="tw-again" title="{title}">+{times:.0f} alike</span>'


def neighbours_html(frame: pd.DataFrame, run: str) -> str:
    """Return the neurons of `fires_with` as links, each with how many tokens it shares. run: the run's name."""
    links = []
    for row in frame.itertuples():
        address = html.escape("neuron?" + urlencode({"run": run, "neuron": row.label}), quote=True)
        phi = "" if np.isnan(row.phi) else f", φ {row.phi:.2f}"
        links.append(f'<a class="tw-chip" href="{address}">{row.label} <span>{row.shared} of {row.of}{phi}</span></a>')
    return f'<div class="tw-chips">{"".join(links)}</div>'


def written_html(frame: pd.DataFrame, run: str, titles: tuple[str, str] = ("Raised most", "Lowered most")) -> str:
    """Return two columns of tokens with their logits as bars, each token a link to its page.

    Args:
        frame: the rows of `written`, or of `answers_to`.
        run: the run's name.
        titles: of the two columns.
    """
    largest = max(float(frame["logit"].abs().max()), 1e-9)
    columns = []
    for kind, title in zip(("raised", "lowered"), titles, strict=True):
        lines, rows = [], frame[frame["kind"] == kind]
        if rows.empty:  # nothing at this end stands out
            continue
        for row, logit in zip(rows.itertuples(), aligned(rows["logit"]), strict=True):
            address = html.escape("token?" + urlencode({"run": run, "token": row.token_id}), quote=True)
            width = 100 * abs(row.logit) / largest
            lines.append(
                f'<a class="tw-logit {kind}" href="{address}"><span>{token_html(row.text)}</span>'
                f'<i><b style="width:{width:.1f}%"></b></i><span class="number">{logit}</span></a>'
            )
        columns.append(f'<div><h3 class="tw-part">{title}</h3>{"".join(lines)}</div>')
    return f'<div class="tw-logits">{"".join(columns)}</div>'
