"""Words: which fire many neurons, joined from the pieces that the tokenizer cut them into.

    by_word(run)   a row a word, loudest first

`summaries.z_scores` says what a word is, and adds words up part by part when a run is summarised. Cost: 30 ms, from the
summary `words`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.statistics import centred_error, effective, pooled_variance
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.by_token import PRIOR_DOCUMENTS, token_totals
from twell.workbench.errors import Missing
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run


def by_word(run: Run, min_count: int = 20) -> pd.DataFrame:
    """Return the words that occur at least `min_count` times, loudest (greatest z) first. Columns:

    word; count; sequences, documents (it occurs in); effective (documents, see by_token); degrees (of freedom of an
    interval); pieces (tokens a word, mean); z, z_se (mean over its pieces of the token's z, see by_token; clustered by
    document, drawn towards those of words like it as tokens are, empty for one document); mean (nnz a piece and layer).
    Missing where no word occurs that often, and where a run has so many words that its summary keeps none that occurs
    so seldom.
    """
    summaries = open_summaries(run, scored=True)
    rows = summaries.arrow("words", [column.name for column in SUMMARIES.tables["words"].columns])
    error, degrees = _errors(rows, token_totals(summaries, False))
    frequent = rows["occurrences"].to_numpy() >= min_count
    rows, error, degrees = rows.filter(pa.array(frequent)), error[frequent], degrees[frequent]
    total, fewest = summaries.words_kept()
    if min_count < fewest:
        raise Missing(
            f"{run.name} has {total:,} words, of which its summary keeps those that occur {fewest} times or more, got "
            f"a minimum count of {min_count}: ask for {fewest}."
        )
    if not len(rows):
        highest = summaries.columns("words", "occurrences")["occurrences"].max() if total else 0
        raise Missing(
            f"No word of {run.name} occurs {min_count} times, the most frequent one {highest} "
            f"time{'' if highest == 1 else 's'}: ask for a lower minimum count."
        )
    sums = {name: rows[name].to_numpy() for name in rows.schema.names if name != "word"}
    n = sums["occurrences"]
    frame = pd.DataFrame(
        {
            "word": [word.decode("utf-8", errors="replace") for word in rows["word"].to_pylist()],
            "count": n,
            "sequences": sums["sequences"],
            "documents": sums["clusters"],
            "effective": effective(n, sums["occurrences_square"]),
            "degrees": degrees,
            "pieces": sums["pieces"] / n,
            "z": sums["z_sum"] / n,
            "z_se": error,
            "mean": sums["nnz_sum"] / n / run.layers,
        }
    )
    frame = frame.sort_values(["z", "word"], ascending=[False, True], ignore_index=True)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": f"left out: {total - len(frame):,} of {total:,} words, which occur under {min_count} times",
    }
    return frame


def _errors(rows: pa.Table, tokens: Mapping[str, NDArray]) -> tuple[NDArray, NDArray]:
    """Return the standard error of each word's z and its degrees of freedom, NaN for words of one document.

    rows: of the summary `words`; tokens: columns of `token_totals`
    """
    names = ("occurrences", "occurrences_square", "z_sum", "z_square", "z_cross", "z_beside", "z_tokens_beside")
    n, n2, z, z2, nz, beside, n_beside = (rows[name].to_numpy().astype(float) for name in names)
    all_square, all_tokens = (tokens[name][:1].sum() for name in ("z_all_square", "all_tokens"))
    own, clusters = centred_error([n, n2, z, z2, nz], beside, n_beside, all_square, all_tokens), effective(n, n2)
    variance, degrees = pooled_variance(own**2, n, clusters, z / n, PRIOR_DOCUMENTS)
    return np.where(clusters > 1, np.sqrt(variance), np.nan), np.where(clusters > 1, degrees, np.nan)
