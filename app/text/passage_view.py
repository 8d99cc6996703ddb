"""The passage as HTML: every token a link to its page, shaded; under the pointer, or with the keyboard on it, what is
known of it, always at the same place beside the text. No script: the tokens carry their lines, and CSS shows them.
"""

from __future__ import annotations

import html
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pandas as pd

from twell.analysis.passage import Scale
from twell.app.ui.formatting import SPACE, number, running, visible, whole
from twell.workbench.run.schema import DECODE, FLAG_FIRST, FLAG_NOT_FINITE, FLAG_SPECIAL, nnz_columns

FAINT, STRONG = 0.02, 0.72  # opacity of the ends of the scale
LINE = 16  # strokes in the longest bar
BARS = ["━" * (halves // 2) + "╸" * (halves % 2) for halves in range(2 * LINE + 1)]


def opacity(share: float) -> float:
    """Of a share of the scale."""
    return FAINT + (STRONG - FAINT) * share


def legend(scale: Scale) -> str:
    """The scale, its range printed."""
    unit = f"{SPACE}{scale.unit}" if scale.unit not in ("", "neurons") else ""
    low, high = ((whole if scale.unit == "neurons" else number)(end) + unit for end in (scale.low, scale.high))
    low = low if scale.low == 0 else f"≤{SPACE}{low}"
    return (
        f'<div class="tw-scale"><span>{html.escape(scale.name)}</span><span>{html.escape(low)}</span>'
        f"<i></i><span>≥{SPACE}{html.escape(high)}</span>"
        f'<span class="tw-quiet">{html.escape(scale.range_note)}</span></div>'
    )


def bar(share: float) -> str:
    """A bar of strokes, to half of one."""
    return BARS[round(max(0.0, min(share, 1.0)) * LINE * 2)]


def lines(row: dict[str, Any], text: str, value: str, percentile: float, tops: dict[str, float]) -> str:
    """What is known of a token, in lines of text; `value` is a line about what shades it, where that is a neuron."""
    flags = int(row["flags"])
    marks = {FLAG_SPECIAL: "special token", FLAG_FIRST: "first of its sequence", FLAG_NOT_FINITE: "not finite"}
    said = [mark for bit, mark in marks.items() if flags & bit]
    out = [
        f"{visible(text)}   id {row['token_id']}",
        f"position {row['position']}" + (", generated" if row["phase"] == DECODE else ""),
        f"nnz {whole(row['nnz'])}, percentile {percentile:.0f}",
        f"surprisal {number(row['surprisal'])}, loss {number(row['loss'])} nats",
    ]
    out += [value] if value else []
    out += [f"{', '.join(said)}: in no statistic"] if said else []
    out.append("")
    for layer, (name, top) in enumerate(tops.items()):
        out.append(f"L{layer:<3}{row[name]:>5} {bar(row[name] / max(top, 1))}")
    return "\n".join(out)


def passage_html(
    rows: pd.DataFrame,
    texts: list[str],
    names: list[str],
    shares: np.ndarray,
    ranks: np.ndarray,
    tops: dict[str, float],
    values: list[str],
    run: str,
    at: int | None,
) -> str:
    """The passage and the pane beside it.

    `texts` is what each token adds, `names` the tokens by themselves, `shares` their place on the scale, `ranks` their
    percentiles, `tops` the greatest common nnz of each layer, `values` a line a token about a neuron, or nothing; `at`
    is the position that is marked.
    """
    spans, resting = [], ""
    loudest = int(np.nanargmax(shares)) if np.isfinite(shares).any() else 0
    for place, row in enumerate(rows.to_dict("records")):
        share = float(shares[place])
        said = lines(row, names[place], values[place], float(ranks[place]), tops)
        here = at is not None and row["position"] == at
        if here or (at is None and place == loudest) or not resting:
            resting = said
        spans.append(_token(row, texts[place], said, share, here, run))
    height = 1.2 * (len(tops) + 6 + any(values))  # of the pane, in rem, so that nothing moves when it fills
    return (
        f'<div class="tw-text" style="--pane: {height:.1f}rem">'
        f'<div class="tw-passage" tabindex="0">{"".join(spans)}</div>'
        f'<pre class="tw-pane">{html.escape(resting)}</pre></div>'
    )


def _token(row: dict[str, Any], text: str, said: str, share: float, here: bool, run: str) -> str:
    """One token of the passage; line ends in it break the line."""
    kind = "t" + (" here" if here else "") + (" out" if row["flags"] else "") + (" bare" if not text else "")
    kind += " made" if row["phase"] == DECODE else ""
    shade = "" if np.isnan(share) else f' style="background:rgba(47,126,216,{opacity(share):.3f})"'
    address = html.escape("token?" + urlencode({"run": run, "token": row["token_id"]}), quote=True)
    label = html.escape(f"{said}\n", quote=True)
    return f'<a class="{kind}"{shade} href="{address}" data-said="{label}">{_broken(text)}</a>'


def _broken(text: str) -> str:
    """Text with its line ends shown and kept; nothing in it is left to interpret."""
    parts = text.replace("\r\n", "\n").split("\n")
    return '<i class="end">⏎</i>\n'.join(html.escape(running(part)) for part in parts)


def jumps(frame: pd.DataFrame, run: str, more: dict[str, str], scale: Scale) -> str:
    """The loudest places, each a link to its place in the text; `more` is what else of the address stays."""
    names = ("where", "sequence:position"), ("before", ""), ("token", ""), ("after", ""), ("number", scale.short)
    cells = "".join(f'<span class="{kind}">{html.escape(name)}</span>' for kind, name in names)
    out = [f'<div class="tw-jump names">{cells}</div>']
    for row in frame.itertuples():
        query = {"run": run, "sequence": row.sequence, "position": row.position, **more}
        address = html.escape("text?" + urlencode(query), quote=True)
        tint = opacity(float(scale.share(np.array([row.value]))[0]))
        out.append(
            f'<a class="tw-jump" href="{address}"><span class="where">{row.sequence}:{row.position}</span>'
            f'<span class="before"><span>{html.escape(running(row.before[-60:]))}</span></span>'
            f'<span class="token" style="background:rgba(47,126,216,{tint:.2f})">'
            f"{html.escape(visible(row.token))}</span>"
            f'<span class="after">{html.escape(running(row.after[:60]))}</span>'
            f'<span class="number">{html.escape(number(row.value))}</span></a>'
        )
    return f'<div class="tw-places">{"".join(out)}</div>'


def layer_tops(counts: pd.DataFrame, layers: int) -> dict[str, float]:
    """The 99th percentile of each layer's nnz: the length of a full bar (by_layer)."""
    tops = counts.set_index("layer")["p99"]
    return {name: float(tops.get(layer, 1)) for layer, name in enumerate(nnz_columns(layers))}
