"""The summary of highest places, declared as the others are (`summary_schema`)."""

from __future__ import annotations

from dataclasses import replace

from twell.workbench.run.columns import LAYER_OR_SUM, POSITION, SEQUENCE, TOKEN_ID, Column, SummaryTable

HIGHEST_TOKENS = 12  # of a layer and phase

# Its rows add up: those of parts are joined, and cut to the highest of all.
HIGHEST = SummaryTable(
    "highest",
    f"one of the {HIGHEST_TOKENS} tokens of the vocabulary that fire most neurons, in a layer and phase, at its first "
    "place of greatest nnz; of places alike, the first in the text; over unflagged tokens",
    (
        LAYER_OR_SUM,
        Column("phase", "int32", "", "0 prefill, 1 decode"),
        SEQUENCE,
        POSITION,
        replace(TOKEN_ID, merge="max"),
        Column("nnz", "int64", "neurons", "how many it fires there", merge="max"),
    ),
    in_summary_only=False,
    keys=("layer", "phase", "sequence", "position"),
    since=9,
)
