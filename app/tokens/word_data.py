"""A word's tokens in the text: what each of its places fires, by layer, and the neurons with examples there.

Cost: one pass over the run's text until MOST places are found, then over the sequences that they are in.
"""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.analysis.memo import memoized
from twell.analysis.neurons.values import missing
from twell.analysis.tokens.text_search import starts_of
from twell.app.tokens.token_neurons import neurons_at
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

MOST = 300  # places of a word that are read
PIECES = 24  # tokens that a word is cut into, at most


@memoized
def word_tokens(run: Run, word: str) -> pd.DataFrame:
    """Return the tokens that a word is cut into at its first places, MOST of them, in the order of the text.

    Columns: place (the index of its place, as `places_of` orders them); sequence; position; token_id; flags; nnz of
    every layer. Missing where the run has no rows of single tokens.
    """
    places = starts_of(run, word, MOST, whole=True)
    names = ["sequence", "position", "token_id", "flags", *nnz_columns(run.layers)]
    chosen = sorted(set(places["sequence"].tolist()))
    rows = (
        run.rows("activity", [("sequence", "in", chosen)], names).to_pandas() if chosen else pd.DataFrame([], [], names)
    )
    rows = rows.sort_values(["sequence", "position"], ignore_index=True)
    spelled = run.vocab["bytes"].reindex(rows["token_id"]).tolist()
    begins = pd.MultiIndex.from_frame(rows[["sequence", "position"]]).get_indexer(
        pd.MultiIndex.from_frame(places[["sequence", "position"]])
    )
    found: list[tuple[int, int]] = []  # (place, row)
    for place, begin in enumerate(begins):
        text = b""
        for row in range(begin, min(begin + PIECES, len(rows))):
            found.append((place, row))
            text += spelled[row] if isinstance(spelled[row], bytes) else b""
            if word.encode() in text:
                break
    frame = rows.iloc[[row for _, row in found]].reset_index(drop=True)
    frame.insert(0, "place", [place for place, _ in found])
    return frame


def word_neurons(run: Run, word: str) -> pd.DataFrame:
    """Return the neurons with an example at a word's tokens, those first that have most of their largest values there;
    columns as `neurons_of` has them."""
    if not run.has("examples"):
        raise missing(run)
    return neurons_at(run, word_tokens(run, word))


def word_layers(run: Run, word: str) -> pd.DataFrame:
    """Return the mean nnz of a word's counted tokens in each layer, beside that of all tokens.

    Columns: layer; nnz (of the word, neurons a token); run_nnz (of the run); tokens (of the word). Missing where no
    token of the word is counted.
    """
    rows = word_tokens(run, word)
    rows = rows[rows["flags"] == 0]
    if rows.empty:
        raise Missing("No token of this word is counted.")
    layers = analysis.by_layer(run)
    own = rows[nnz_columns(run.layers)].mean().to_numpy()
    frame = pd.DataFrame({"layer": layers["layer"], "nnz": own, "run_nnz": layers["mean"], "tokens": len(rows)})
    return frame.astype({"nnz": float, "run_nnz": float})


def with_nnz(places: pd.DataFrame, run: Run, word: str) -> pd.DataFrame:
    """Return the first places of a word with one column more: nnz, neurons a layer, the mean of its tokens there."""
    rows = word_tokens(run, word)
    means = rows[nnz_columns(run.layers)].mean(axis=1).groupby(rows["place"]).mean()
    return places.assign(nnz=means.reindex(range(len(places))).to_numpy())
