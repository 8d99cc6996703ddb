"""A run in a notebook: a card of what it holds, and one of its sequences as a shaded passage.

run                       the card, where a notebook shows it
shaded_text(run, 0)       tokens shaded by nnz; under the pointer, the counts of each and its loudest neurons
"""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import by_layer
from twell.analysis.passage import ALL, Scale, passage, scale, values
from twell.analysis.tokens.text_around import pieces
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.manifest import spelled
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

LOUDEST = 3  # neurons that are named under the pointer, where their values are kept
STRONG = 0.72  # opacity of the strongest shade


@dataclass(frozen=True, repr=False)
class ShadedText:
    """A passage, its tokens' texts, and how strongly each is shaded; HTML in a notebook, elsewhere its text."""

    rows: pd.DataFrame
    texts: list[str]
    scale: Scale
    shares: np.ndarray
    notes: list[str]

    def __str__(self) -> str:
        return "".join(self.texts)

    __repr__ = __str__  # consoles show this one

    def _repr_html_(self) -> str:
        spans = []
        for text, share, note in zip(self.texts, self.shares, self.notes, strict=True):
            shade = "" if np.isnan(share) else f"background:rgba(47,126,216,{STRONG * share:.2f})"
            spans.append(f'<span style="{shade}" title="{html.escape(note, quote=True)}">{html.escape(text)}</span>')
        ends = f"{self.scale.name}: {self.scale.low:,.0f} to {self.scale.high:,.0f}"
        passage = "".join(spans)
        return (
            f'<div style="white-space:pre-wrap;line-height:1.7">{passage}</div>'
            f'<div style="font-size:smaller;opacity:.7">{html.escape(ends)}</div>'
        )


def shaded_text(run: Run, sequence: int = 0, layer: int | None = None) -> ShadedText:
    """Return a sequence as a passage shaded by nnz, summed over the layers or of one layer.

    Raises Missing where the run has no such sequence, or no vocabulary to read it with.
    """
    if layer is not None and not 0 <= layer < run.layers:
        raise UserError(f"Expected a layer from 0 to {run.layers - 1}, got {layer}.")
    if not run.has("vocab"):
        raise Missing(f"{run.name} holds no vocabulary, so its tokens have no text: give the watch the tokenizer.")
    shade = ALL if layer is None else f"L{layer}"
    rows, of_run = passage(run, sequence), scale(run, shade)
    texts = pieces(run.vocab["bytes"].reindex(rows["token_id"]))
    loudest = _loudest(run, sequence, layer)
    names = nnz_columns(run.layers)
    notes = []
    for row in rows.to_dict("records"):
        counts = ", ".join(f"L{number} {row[name]}" for number, name in enumerate(names))
        notes.append(f"position {row['position']}, nnz {row['nnz']}: {counts}{loudest.get(row['position'], '')}")
    return ShadedText(rows, texts, of_run, of_run.share(values(rows, run, shade)), notes)


def _loudest(run: Run, sequence: int, layer: int | None) -> dict[int, str]:
    """Return a line on each token's neurons of the largest values, by position; without any where none are kept."""
    if not run.has("fired"):
        return {}
    filters: list[tuple[str, str, object]] = [("sequence", "=", sequence)]
    rows = run.rows("fired", [*filters, *([] if layer is None else [("layer", "=", layer)])]).to_pylist()
    by_position: dict[int, list[tuple[float, str]]] = {}
    for row in rows:
        named = (f"L{row['layer']}/N{neuron}" for neuron in row["neuron"])
        by_position.setdefault(row["position"], []).extend(zip(map(float, row["value"]), named, strict=True))
    return {
        position: "\n" + ", ".join(f"{name} {value:.2f}" for value, name in sorted(fired, reverse=True)[:LOUDEST])
        for position, fired in by_position.items()
        if fired
    }


def card(run: Run) -> str:
    """Return a card of a run as HTML: model, text, sparsity and loss, and a bar a layer."""
    about = run.manifest
    rate = about.tokens / about.seconds if about.seconds and not run.left_out else 0.0
    facts = [
        f"{about.tokens:,} tokens",
        f"{run.layers} layers of {spelled(about.widths)} neurons",
        about.dtype,
        about.device,
    ]
    facts += [f"{rate:,.0f} tokens/s"] if rate else []
    made = ", generated tokens among them" if about.options.get("generate") else ""  # which are easier to predict
    facts += [] if about.loss is None else [f"loss {about.loss:.3f} nats{made}"]
    try:
        layers = by_layer(run)
        mean = float(layers["mean"].mean())
        facts.insert(0, f"sparsity {1 - mean * run.layers / run.neurons:.2%} (mean nnz {mean:,.1f})")
        most = float(layers["mean"].max()) or 1.0
        bars = "".join(_bar(row["layer"], row["mean"], row["mean"] / most) for _, row in layers.iterrows())
    except Missing as reason:
        bars = html.escape(str(reason))
    sources = ", ".join(str(source["source"]) for source in about.text)
    state = "" if about.status == "complete" else f" ({about.status})"
    head = f"{run.name}: {about.model['name']} on {sources}{state}"
    return (
        f"<div><b>{html.escape(head)}</b><br>{html.escape(' · '.join(facts))}"
        f"{run.left_out and f'<br>{html.escape(run.left_out)}'}"
        f'<div style="display:flex;align-items:flex-end;gap:2px;height:48px;margin-top:4px">{bars}</div></div>'
    )


def _bar(layer: float, mean: float, share: float) -> str:
    return (
        f'<div title="layer {layer:.0f}: mean nnz {mean:,.1f}" '
        f'style="width:10px;height:{100 * share:.0f}%;background:#2f5d8a"></div>'
    )
