"""What a neuron's page shows as HTML: its examples, token by token, and the tokens that it writes."""

from __future__ import annotations

import html
from urllib.parse import urlencode

import numpy as np
import pandas as pd

from twell.analysis.neurons.values import SIDE
from twell.app.text.passage_view import opacity
from twell.app.ui.formatting import aligned, number, running, token_html


def examples_html(frame: pd.DataFrame, high: float, name: str, label: str) -> str:
    """Return a line an example: where it is, its text with the values as shades, the value, and its quantile if it was
    drawn at random. frame: rows of example_pieces; high: value of the strongest shade; name: the run's; label: the
    neuron's."""
    quantiles = "percentile" if frame["quantile"].notna().any() else ""
    names = ("where", "sequence:position"), ("words", ""), ("number", quantiles), ("number", "value")
    cells = "".join(f'<span class="{kind}">{name}</span>' for kind, name in names)
    out = [f'<div class="tw-places"><div class="tw-example-names">{cells}</div>']
    for row in frame.itertuples():
        window = dict(zip(range(row.position - SIDE, row.position + SIDE + 1), row.window, strict=False))
        spans = []
        for position, text in enumerate(row.pieces, row.start):
            value = window.get(position, 0.0)
            share = 0.0 if not value > 0 else min(value / max(high, 1e-9), 1.0)
            shade = f' style="background:rgba(47,126,216,{opacity(share):.3f})"' if share else ""
            mark = ' class="here"' if position == row.position else ""
            tip = f' title="{number(float(value))}"' if share else ""
            spans.append(f"<span{mark}{shade}{tip}>{html.escape(running(text))}</span>")
        query = {"run": name, "sequence": row.sequence, "position": row.position, "neuron": label}
        address = html.escape("text?" + urlencode(query), quote=True)
        drawn = "" if np.isnan(row.quantile) else f"{100 * row.quantile:.0f}"
        out.append(
            f'<div class="tw-example"><a class="where" href="{address}">{row.sequence}:{row.position}</a>'
            f'<span class="words">{"".join(spans)}</span><span class="number">{drawn}</span>'
            f'<span class="number">{number(float(row.value))}</span></div>'
        )
    return "".join([*out, "</div>"])


def written_html(frame: pd.DataFrame, run: str) -> str:
    """Two columns of tokens with their logits as bars, each token a link to its page."""
    most = max(float(frame["logit"].abs().max()), 1e-9)
    columns = []
    for kind, title in (("raised", "Raised most"), ("lowered", "Lowered most")):
        lines, part = [], frame[frame["kind"] == kind]
        for row, logit in zip(part.itertuples(), aligned(part["logit"]), strict=True):
            address = html.escape("token?" + urlencode({"run": run, "token": row.token_id}), quote=True)
            width = 100 * abs(row.logit) / most
            lines.append(
                f'<a class="tw-logit {kind}" href="{address}"><span>{token_html(row.text)}</span>'
                f'<i><b style="width:{width:.1f}%"></b></i><span class="number">{logit}</span></a>'
            )
        columns.append(f'<div><h4 class="tw-part">{title}</h4>{"".join(lines)}</div>')
    return f'<div class="tw-logits">{"".join(columns)}</div>'
