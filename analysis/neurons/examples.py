"""Examples: the text on which a neuron fires, at the top and across its range.

    examples(run, layer, neuron)         its largest values, and a random sample of its firings by value
    example_pieces(run, layer, neuron)   the same, with the text of every token of the window

Recorded with `twell capture --examples K`; the text around comes from the rows of single tokens, which are read once.
Cost: 0.1 s a million tokens.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.neurons.by_neuron import last_neuron
from twell.analysis.neurons.value_histogram import neuron_histogram, quantile
from twell.analysis.summaries.built import with_damage_note
from twell.analysis.tokens.same_context import times_again
from twell.analysis.tokens.text_around import LONGEST_CHARACTER, TokenWindow, pieces, split_text, token_windows
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.schema import SAME_CONTEXT
from twell.workbench.run.store import Run

COLUMNS = ["kind", "value", "quantile", "sequence", "position", "before", "token", "after", "window", "again"]


def examples(run: Run, layer: int, neuron: int, width: int = 16) -> pd.DataFrame:
    """Return a neuron's top values, then its sample, both by falling value. Columns:

    kind (top, sample); value; quantile (of the neuron's firings, those not above it, where the run counts values by
    bins, else of the sample; empty for top); sequence; position; before, token, after (text, `width` tokens either
    side); window (its values from 16 tokens before to 16 after); again (how often the same eight tokens up to it come
    elsewhere in the run, empty in a long one).

    UserError for a neuron that the model lacks; Missing where the run keeps no examples, or none of this one.
    """
    return example_pieces(run, layer, neuron, width)[COLUMNS]


def example_pieces(run: Run, layer: int, neuron: int, width: int = 16) -> pd.DataFrame:
    """Return `examples` with two columns more: start (position of the first token shown); pieces (the text that each
    token from there on adds, up to `width` after the example)."""
    if not 0 <= layer < run.layers or not 0 <= neuron < run.widths[layer]:
        raise UserError(f"Expected a neuron from L0/N0 to {last_neuron(run)}, got L{layer}/N{neuron}.")
    rows = run.rows("examples", [("layer", "=", layer), ("neuron", "=", neuron)]).to_pandas()
    if rows.empty:
        raise Missing(f"{run.name} holds no example of L{layer}/N{neuron}: it never fired, or none was kept.")
    frame = rows.sort_values(["kind", "value"], ascending=[False, False], ignore_index=True)
    frame["quantile"] = _quantiles(run, layer, neuron, frame)
    frame.loc[frame["kind"] == "top", "quantile"] = np.nan
    # Read a few tokens more: a character that the window's first token ends may have begun before it.
    wide = token_windows(run, frame, max(width + LONGEST_CHARACTER, SAME_CONTEXT) - 1)
    windows = [_narrowed(window, width) for window in wide]
    again = times_again(run, wide)
    frame["again"] = np.nan if again is None else again
    texts = [split_text(run, window) for window in windows]
    for index, name in enumerate(("before", "token", "after")):
        frame[name] = [text[index] for text in texts]
    frame["start"] = [window.start for window in windows]
    frame["pieces"] = [_texts(run, *pair) for pair in zip(wide, windows, strict=True)]
    frame = frame[[*COLUMNS, "start", "pieces"]]
    note = "the largest values, and as many drawn at random, over unflagged tokens"
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": note, "layer": layer, "neuron": neuron}
    return with_damage_note(frame, run, "value_bins") if run.has("value_bins") else frame


def _quantiles(run: Run, layer: int, neuron: int, frame: pd.DataFrame) -> NDArray[np.float64]:
    """Return of each example's value the share of the neuron's firings, or of its sample, that are not above it; NaN
    where the counts of its values are damaged."""
    try:
        return quantile(neuron_histogram(run, layer, neuron), frame["value"])
    except Missing:
        if run.has("value_bins"):
            return np.full(len(frame), np.nan)
        # The sample of such a run is drawn from all firings alike.
        sample = np.sort(frame.loc[frame["kind"] == "sample", "value"].to_numpy())
        return np.searchsorted(sample, frame["value"], side="right") / max(len(sample), 1)


def _narrowed(window: TokenWindow, width: int) -> TokenWindow:
    """Return the window cut to `width` tokens on each side."""
    first = max(0, window.center - width)
    return TokenWindow(window.start + first, window.ids[first : window.center + width + 1], window.center - first)


def _texts(run: Run, wide: TokenWindow, window: TokenWindow) -> list[str]:
    """Return the text that each token of `window` adds, decoded from the start of the wider window around it."""
    skipped = window.start - wide.start
    return pieces(run.vocab["bytes"].reindex(wide.ids))[skipped : skipped + len(window.ids)]
