"""Words: which fire many neurons, joined from the pieces that the tokenizer cut them into.

    by_word(run)   a row a word, loudest first

`summaries.z_scores` says what a word is, and adds words up part by part when a run is summarised. Cost: 30 ms, from the
summary `words`.
"""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from twell.analysis.statistics import centred_error, effective
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.by_token import token_totals
from twell.workbench.errors import Missing
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run


def by_word(run: Run, min_count: int = 20) -> pd.DataFrame:
    """Return the words that occur at least `min_count` times, loudest (greatest z) first. Columns:

    word; count; sequences, documents (it occurs in); effective (documents, see by_token: the degrees of freedom of an
    interval are one less); pieces (tokens a word, mean); z, z_se (mean over its pieces of the token's z, see by_token;
    clustered by document, empty for one); mean (nnz a piece and layer). Missing where no word
    occurs that often, and where a run has so many words that its summary keeps none that occurs so seldom.
    """
    summaries = open_summaries(run, scored=True)
    rows = summaries.arrow("words", [column.name for column in SUMMARIES.tables["words"].columns])
    frequent = rows["occurrences"].to_numpy() >= min_count
    rows = rows.filter(pa.array(frequent))
    total, fewest = summaries.words_kept()
    if min_count < fewest:
        raise Missing(
            f"{run.name} has {total:,} words, of which its summary keeps those that occur {fewest} times or more, got "
            f"a minimum count of {min_count}: ask for {fewest}."
        )
    if not len(rows):
        highest = summaries.columns("words", "occurrences")["occurrences"].max() if total else 0
        raise Missing(
            f"No word of {run.name} occurs {min_count} times, the most frequent one {highest} times: ask for a lower "
            "minimum count."
        )
    sums = {name: rows[name].to_numpy() for name in rows.schema.names if name != "word"}
    n = sums["occurrences"]
    tokens = token_totals(summaries, False)
    all_square, all_tokens = (tokens[name][:1].sum() for name in ("z_all_square", "all_tokens"))
    squares = [n, *(sums[name] for name in ("occurrences_square", "z_sum", "z_square", "z_cross"))]
    beside = sums["z_beside"], sums["z_tokens_beside"]
    frame = pd.DataFrame(
        {
            "word": [word.decode("utf-8", errors="replace") for word in rows["word"].to_pylist()],
            "count": n,
            "sequences": sums["sequences"],
            "documents": sums["clusters"],
            "effective": effective(n, sums["occurrences_square"]),
            "pieces": sums["pieces"] / n,
            "z": sums["z_sum"] / n,
            "z_se": centred_error(squares, *beside, all_square, all_tokens),
            "mean": sums["nnz_sum"] / n / run.layers,
        }
    )
    frame = frame.sort_values(["z", "word"], ascending=[False, True], ignore_index=True)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": f"left out: {total - len(frame):,} of {total:,} words, which occur under {min_count} times",
    }
    return frame
