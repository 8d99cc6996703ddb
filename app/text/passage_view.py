"""The passage as HTML: each token is shaded, is a link to its page, and has a tooltip beside the text.

The tooltip of the token under the pointer, or with the keyboard focus, always appears at the same place. It needs no
script: each token carries its tooltip as an attribute, and CSS shows it.
"""

from __future__ import annotations

import html
import math
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pandas as pd

from twell.analysis.passage import Scale
from twell.app.ui.formatting import SPACE, number, running, visible, whole
from twell.workbench.run.schema import DECODE, FLAG_FIRST, FLAG_NOT_FINITE, FLAG_SPECIAL, nnz_columns

MIN_OPACITY, MAX_OPACITY = 0.02, 0.72  # of the ends of the scale
BAR_LENGTH = 16  # strokes in a full bar
BARS = ["━" * (halves // 2) + "╸" * (halves % 2) for halves in range(2 * BAR_LENGTH + 1)]
UNMARKED = "Choose a token for {}.\n"
FULLEST = "The one that fires most here:\n\n"
REASONS = {FLAG_SPECIAL: "special", FLAG_FIRST: "first in sequence", FLAG_NOT_FINITE: "not finite"}  # by flag


def opacity(share: float) -> float:
    """Return the opacity of the shade for a share (0 to 1) of the scale."""
    return MIN_OPACITY + (MAX_OPACITY - MIN_OPACITY) * share


def in_unit(value: float, scale: Scale) -> str:
    """Return a value of a scale without its unit; neurons are whole."""
    return (whole if scale.unit == "neurons" else number)(value)


def legend(scale: Scale) -> str:
    """Return the legend of the shades as HTML: what they show, the ends of the scale, and where these come from."""
    unit = f"{SPACE}{scale.unit}" if scale.unit not in ("", "neurons") else ""
    low, high = (in_unit(end, scale) + unit for end in (scale.low, scale.high))
    low = low if scale.low == 0 else f"≤{SPACE}{low}"
    return (
        f'<div class="tw-scale"><span>{html.escape(scale.name)}</span><span>{html.escape(low)}</span>'
        f"<i></i><span>≥{SPACE}{html.escape(high)}</span>"
        f'<span class="tw-quiet">{html.escape(scale.range_note)}</span></div>'
    )


def bar(share: float) -> str:
    """Return a bar of strokes for a share (0 to 1), to half a stroke."""
    return BARS[round(max(0.0, min(share, 1.0)) * BAR_LENGTH * 2)]


def percentile_in_words(percentile: float) -> str:
    """Return a percentile; 100 only where no token has more."""
    return f"{percentile:.0f}" if percentile <= 99 or percentile >= 100 else f"{math.floor(10 * percentile) / 10:.1f}"


def tooltip(row: dict[str, Any], name: str, neuron_line: str, percentile: float, full_bars: dict[str, float]) -> str:
    """Return the tooltip of a token: lines of text with its numbers, and its nnz in each layer as a bar.

    Args:
        row: the token's row of `passage`.
        name: the token by itself.
        neuron_line: a line about the neuron that shades the passage; empty if none does.
        percentile: of the token's nnz among all tokens of the run.
        full_bars: the nnz of a full bar, by the name of the layer's column.
    """
    flags = int(row["flags"])
    reasons = [reason for bit, reason in REASONS.items() if flags & bit]
    lines = [
        f"{visible(name)}   id {row['token_id']}",
        f"position {row['position']}" + (", generated" if row["phase"] == DECODE else ""),
        f"{whole(row['nnz'])} neurons over all layers",
        f"percentile {percentile_in_words(percentile)} of the run's tokens",
        f"surprisal {number(row['surprisal'])} nats; the next {number(row['loss'])}",
    ]
    lines += [neuron_line] if neuron_line else []
    lines += [f"not counted: {', '.join(reasons)}"] if reasons else []
    lines += ["", "nnz by layer; full: 99th percentile"]
    for layer, (column, full) in enumerate(full_bars.items()):
        lines.append(f"L{layer:<3}{row[column]:>5} {bar(row[column] / max(full, 1))}")
    return "\n".join(lines)


def passage_html(
    rows: pd.DataFrame,
    texts: list[str],
    names: list[str],
    shares: np.ndarray,
    percentiles: np.ndarray,
    full_bars: dict[str, float],
    neuron_lines: list[str],
    run: str,
    marked: range,
    parameters: dict[str, Any] | None = None,
) -> str:
    """Return the passage as HTML, with a pane beside it for the tooltips.

    While no token is pointed at, the pane shows the marked token, or else the one that fires most, if any fires.

    Args:
        rows: the rows of `passage` that are drawn, n tokens.
        texts: the text that each token adds, n.
        names: each token by itself, n.
        shares: each token's place on the scale, 0 to 1; NaN for no shade. Shape [n].
        percentiles: of each token's nnz among all tokens of the run. Shape [n].
        full_bars: the nnz of a full bar, by the name of the layer's column.
        neuron_lines: a line about the neuron that shades the passage, or nothing, n.
        run: the run's name.
        marked: the positions of tokens to mark; the first is the one that the pane shows.
        parameters: query parameters with which each token links to itself in the passage; None: it links to its page.
    """
    shown = next((index for index, position in enumerate(rows["position"]) if position in marked), None)
    said = "" if shown is not None else UNMARKED.format("its page" if parameters is None else "its neurons")
    in_pane = fullest(rows) if shown is None and rows["nnz"].any() else shown
    spans, pane = [], html.escape(said)
    for index, row in enumerate(rows.to_dict("records")):
        text = tooltip(row, names[index], neuron_lines[index], float(percentiles[index]), full_bars)
        if index == in_pane:
            pane += html.escape(text) if not said else f"<span>{FULLEST}{html.escape(text)}</span>"
        spans.append(_token(row, texts[index], text, float(shares[index]), row["position"] in marked, run, parameters))
    lines = len(full_bars) + 8 + any(neuron_lines) + 3 * bool(said)
    height = 1.2 * lines  # of the pane, in rem; fixed, so that nothing moves
    return (
        f'<div class="tw-text" style="--pane: {height:.1f}rem">'
        f'<div class="tw-passage" tabindex="0">{"".join(spans)}</div>'
        f'<pre class="tw-pane">{pane}</pre></div>'
    )


def fullest(rows: pd.DataFrame) -> int:
    """Return the index of the row of `passage` with the greatest nnz, of the counted tokens if there are any."""
    nnz = rows["nnz"].to_numpy(float)
    return int(np.where((rows["flags"] == 0).to_numpy() | (rows["flags"] > 0).all(), nnz, -1).argmax())


def _token(
    row: dict[str, Any],
    text: str,
    tooltip_text: str,
    share: float,
    is_marked: bool,
    run: str,
    parameters: dict[str, Any] | None,
) -> str:
    """Return one token of the passage as an HTML link; its line ends break the line."""
    classes = "t" + (" here" if is_marked else "") + (" out" if row["flags"] else "") + (" bare" if not text else "")
    classes += " made" if row["phase"] == DECODE else ""
    shade = "" if np.isnan(share) else f' style="background:rgba(47,126,216,{opacity(share):.3f})"'
    if parameters is None:
        target = "token?" + urlencode({"run": run, "token": row["token_id"]})
    else:
        target = "text?" + urlencode({"run": run, **parameters, "position": row["position"]})
    address = html.escape(target, quote=True)
    label = html.escape(f"{tooltip_text}\n", quote=True)
    name = "" if text else f' aria-label="{html.escape(tooltip_text.partition(chr(10))[0].strip(), quote=True)}"'
    return f'<a class="{classes}"{shade} href="{address}"{name} data-tooltip="{label}">{_with_line_ends(text)}</a>'


def _with_line_ends(text: str) -> str:
    """Return text as HTML, escaped, with its line ends both visible and kept."""
    lines = text.replace("\r\n", "\n").split("\n")
    return '<i class="end">⏎</i>\n'.join(html.escape(running(line)) for line in lines)


def highest_html(frame: pd.DataFrame, run: str, parameters: dict[str, str], scale: Scale) -> str:
    """Return the tokens with the highest values as HTML, each a link to its position in the text.

    Args:
        frame: the rows of `analysis.passage.loudest`.
        run: the run's name.
        parameters: further query parameters of the links.
        scale: the scale that shades the tokens.
    """
    titles = ("where", "sequence:position"), ("before", ""), ("token", ""), ("after", ""), ("number", scale.short)
    cells = "".join(f'<span class="{kind}">{html.escape(title)}</span>' for kind, title in titles)
    lines = [f'<div class="tw-jump names">{cells}</div>']
    for row in frame.itertuples():
        query = {"run": run, "sequence": row.sequence, "position": row.position, **parameters}
        address = html.escape("text?" + urlencode(query), quote=True)
        shade = opacity(float(scale.share(np.array([row.value]))[0]))
        lines.append(
            f'<a class="tw-jump" href="{address}"><span class="where">{row.sequence}:{row.position}</span>'
            f'<span class="before"><span>{html.escape(running(row.before[-60:]))}</span></span>'
            f'<span class="token" style="background:rgba(47,126,216,{shade:.2f})">'
            f"{html.escape(visible(row.token))}</span>"
            f'<span class="after">{html.escape(running(row.after[:60]))}</span>'
            f'<span class="number">{html.escape(in_unit(row.value, scale))}</span></a>'
        )
    return f'<div class="tw-places">{"".join(lines)}</div>'


def full_bar_counts(by_layer: pd.DataFrame, layers: int) -> dict[str, float]:
    """Return the nnz of a full bar by the name of the layer's column: the layer's 99th percentile.

    Args:
        by_layer: the rows of `analysis.by_layer`.
        layers: how many layers the model has.
    """
    p99 = by_layer.set_index("layer")["p99"]
    return {column: float(p99.get(layer, 1)) for layer, column in enumerate(nnz_columns(layers))}
