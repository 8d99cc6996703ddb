"""A word's tokens in the text: what each of its places fires, by layer, and the neurons with examples there.

Cost: one pass over the run's text until MOST places are found, then over the sequences that they are in.
"""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.analysis.memo import memoized
from twell.analysis.neurons.values import missing
from twell.analysis.tokens.word_places import starts_of_word
from twell.app.tokens.token_neurons import neurons_at
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

MOST = 300  # places of a word that are read


@memoized
def word_tokens(run: Run, word: str) -> pd.DataFrame:
    """Return the tokens that a word is cut into at its first places, MOST of them, in the order of the text.

    Columns: place (the index of its place, as `places_of_word` orders them); sequence; position; token_id; flags; nnz
    of every layer. Missing where the run has no rows of single tokens.
    """
    places = starts_of_word(run, word, MOST)
    names = ["sequence", "position", "token_id", "flags", *nnz_columns(run.layers)]
    chosen = sorted(set(places["sequence"].tolist()))
    rows = (
        run.rows("activity", [("sequence", "in", chosen)], names).to_pandas() if chosen else pd.DataFrame([], [], names)
    )
    rows = rows.sort_values(["sequence", "position"], ignore_index=True)
    begins = pd.MultiIndex.from_frame(rows[["sequence", "position"]]).get_indexer(
        pd.MultiIndex.from_frame(places[["sequence", "position"]])
    )
    lengths = (places["last"] - places["position"] + 1).tolist()
    index = [row for begin, length in zip(begins, lengths, strict=True) for row in range(begin, begin + length)]
    frame = rows.iloc[index].reset_index(drop=True)
    frame.insert(0, "place", [place for place, length in enumerate(lengths) for _ in range(length)])
    return frame


def word_neurons(run: Run, word: str) -> pd.DataFrame:
    """Return the neurons with an example at a word's tokens, those first that have most of their largest values there;
    columns as `neurons_of` has them."""
    if not run.has("examples"):
        raise missing(run)
    return neurons_at(run, word_tokens(run, word))


def word_layers(run: Run, word: str) -> pd.DataFrame:
    """Return the mean nnz of a word's counted tokens in each layer, beside that of all tokens.

    Columns: layer; nnz (of the word, neurons a token); run_nnz (of the run); tokens, places (of the word). Missing
    where no token of the word is counted.
    """
    rows = word_tokens(run, word)
    rows = rows[_counted(rows)]
    if rows.empty:
        raise Missing("No token of this word is counted.")
    layers = analysis.by_layer(run)
    own = rows[nnz_columns(run.layers)].mean().to_numpy()
    frame = pd.DataFrame({"layer": layers["layer"], "nnz": own, "run_nnz": layers["mean"], "tokens": len(rows)}).assign(
        places=rows["place"].nunique()
    )
    return frame.astype({"nnz": float, "run_nnz": float})


def with_nnz(places: pd.DataFrame, run: Run, word: str) -> pd.DataFrame:
    """Return the first places of a word with two columns more: nnz, neurons a layer, the mean of its tokens there;
    counted (whether statistics count the place, as they do where none of its tokens is flagged)."""
    rows = word_tokens(run, word)
    means, counted = rows[nnz_columns(run.layers)].mean(axis=1).groupby(rows["place"]).mean(), _counted(rows)
    index = range(len(places))
    return places.assign(
        nnz=means.reindex(index).to_numpy(), counted=counted.groupby(rows["place"]).first().reindex(index).to_numpy()
    )


def _counted(rows: pd.DataFrame) -> pd.Series:
    """Return whether statistics count the place of each row of `word_tokens`."""
    return rows["flags"].groupby(rows["place"]).transform("max") == 0
