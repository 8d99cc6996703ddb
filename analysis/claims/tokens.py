"""Claims about which tokens fire many neurons, and about what the model expects. `findings` runs every check of CLAIMS.

To add a claim, write its check here (`claim` says what it returns) and list it in CLAIMS at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from twell.analysis.activity.surprisal import surprisal_correlation, surprisal_within
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, Answer, Claim, between
from twell.analysis.comparisons import widened
from twell.analysis.statistics import t_half
from twell.analysis.tokens.by_token import tokens_spelt
from twell.analysis.tokens.classes import token_classes
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

LEAST_SEQUENCES = 10  # in which a named token occurs: its interval is worth little with fewer


def named_tokens(words: Sequence[str], sign: int) -> Callable[[Run], Answer]:
    """Return a check that every token spelt as one of `words` has z of this sign with 95 % confidence.

    words: spellings, without white space. sign: +1 for z above 0, -1 for z below.
    """
    side, other = ("above", "below") if sign > 0 else ("below", "above")

    def check(run: Run) -> Answer:
        rows = tokens_spelt(run, words, 1).dropna(subset=["z_se"])
        rows = rows[rows["sequences"] >= LEAST_SEQUENCES]
        half = t_half(rows["degrees"].to_numpy()) * rows["z_se"]
        rows = rows.assign(low=rows["z"] - half, high=rows["z"] + half).dropna(subset=["low"])
        if rows.empty:
            raise Missing(
                f"None of {', '.join(words)} is a single token that occurs in {LEAST_SEQUENCES} sequences of "
                f"{run.name}: "
                "another vocabulary cuts them up, or the text lacks them."
            )
        so, not_so = (rows["low"] > 0, rows["high"] < 0) if sign > 0 else (rows["high"] < 0, rows["low"] > 0)
        some_so, some_not = (
            bool((way * rows["z"] > half * widened(rows["degrees"], len(rows))).any()) for way in (sign, -sign)
        )
        named = [f"{row.text} {row.z:+.2f} (n = {row.count})" for row in rows.itertuples()]
        mixed = IN_PART if some_so else FAILS if some_not else UNTOLD
        absent = [word for word in words if word not in set(rows["text"])]
        return Answer(
            "z of "
            + ", ".join(named)
            + (f"; not there as one token often enough: {', '.join(absent)}" if absent else ""),
            f"{int(so.sum())} of {len(rows)} {side} the layers' means with 95 % confidence, {int(not_so.sum())} "
            f"{other}",
            HOLDS if so.all() else REVERSED if not_so.all() else mixed,
            f"each that occurs in {LEAST_SEQUENCES} sequences lies {side} 0 with 95 % confidence; some: in part; each "
            f"{other}: reversed; some {other} and none {side}: does not hold; some: by intervals that hold together",
            ", ".join(f"{row.text} {between(row.low, row.high, form='+.2f')}" for row in rows.itertuples()),
        )

    return check


def quiet_class(kind: str) -> Callable[[Run], Answer]:
    """Return a check that a class of tokens has a lower mean z than all others, with 95 % confidence."""

    def check(run: Run) -> Answer:
        table = token_classes(run)
        rows = table.set_index("class")
        if kind not in rows.index or np.isnan(rows.loc[kind, "difference_high"]):
            raise Missing(f"The text holds too few occurrences of {kind}s, in too few documents, for an interval.")
        row = rows.loc[kind]
        low, high = row["difference_low"], row["difference_high"]
        loss = f"; the loss of what follows them is {row['loss_mean']:.2f} nats" if pd.notna(row["loss_mean"]) else ""
        return Answer(
            f"{kind}s: z {row['z']:+.2f}, against {row['others']:+.2f} of all other tokens{loss}",
            f"n = {int(row['count']):,} of {int(row['tokens'])} tokens of the vocabulary, by {row['clusters']}",
            HOLDS if high < 0 else REVERSED if low > 0 else UNTOLD,
            "the interval of the difference lies below 0; above 0: reversed; across 0: cannot be told",
            f"difference {between(low, high, form='+.2f')}",
        )

    return check


def follows_surprisal(run: Run) -> Answer:
    """Check that nnz rises with the next token's loss within tokens, with 95 % confidence, in most layers."""
    pooled = surprisal_correlation(run).dropna(subset="spearman")
    if pooled.empty:
        raise Missing("No layer's counts vary, so there is nothing to correlate with the loss.")
    if pooled["low"].isna().all():
        raise Missing(
            f"Too few documents for an interval; pooled over tokens, nnz and the next token's loss go together at "
            f"Spearman {pooled['spearman'].min():+.2f} to {pooled['spearman'].max():+.2f} by layer."
        )
    above, below = int((pooled["low"] > 0).sum()), int((pooled["high"] < 0).sum())
    mixed = (
        f"pooled over tokens, nnz rises with the next token's loss in {above} of {len(pooled)} layers, falls in {below}"
    )
    try:
        rows = surprisal_within(run).dropna()
    except Missing:
        raise Missing(
            f"Its summaries are of before revision 5, without sums within tokens; {mixed}, which mixes tokens with "
            "what "
            "follows them."
        ) from None
    if rows.empty:
        raise Missing(f"Too few documents for an interval; {mixed}.")
    rising, falling = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
    middle = rows.loc[(rows["pearson"] - rows["pearson"].median()).abs().idxmin()]
    return Answer(
        f"of one token in different contexts, nnz rises with the next token's loss in {rising} of {len(rows)} layers, "
        "falls "
        f"in {falling}; {mixed}",
        f"Pearson within tokens {rows['pearson'].min():+.2f} to {rows['pearson'].max():+.2f} by layer, "
        f"{int(rows['n'].iloc[0]):,} counted tokens with a loss",
        _verdict_within(rows),
        "within tokens the correlation is above 0 with 95 % confidence in most layers; in some, by intervals of all "
        "layers that hold together: in part; below 0 in most: reversed",
        f"Pearson of layer {middle['layer']:.0f}, in the middle: {middle['pearson']:+.3f} "
        f"({between(middle['low'], middle['high'], form='+.3f')})",
    )


def _verdict_within(rows: pd.DataFrame) -> str:
    """Return the verdict on rows of `surprisal_within` that have intervals.

    In most layers chance alone hardly ever puts them on one side; in some of 28 it does in up to half of all runs.
    """
    rising, falling = (rows["low"] > 0).sum(), (rows["high"] < 0).sum()
    if max(rising, falling) > len(rows) / 2:
        return HOLDS if rising > falling else REVERSED
    middle, low = np.arctanh(rows["pearson"].to_numpy()), np.arctanh(rows["low"].to_numpy())
    if (middle > (middle - low) * widened(rows.attrs["degrees"], len(rows))).any():
        return IN_PART
    return FAILS if falling == len(rows) / 2 else UNTOLD


CLAIMS = (
    Claim(
        "tokens",
        "Pieces whose sequel is obvious are quiet: doesn, couldn, doi, gov.",
        named_tokens(("doesn", "couldn", "doi", "gov"), -1),
    ),
    Claim(
        "tokens",
        "Rare words of much meaning are loud: Vermont, Greeks, formaldehyde.",
        named_tokens(("Vermont", "Greeks", "formaldehyde"), +1),
    ),
    Claim("tokens", "Function words fire little.", quiet_class("function word")),
    Claim("tokens", "Parts of URLs fire little.", quiet_class("URL part")),
    Claim("surprisal", "Tokens fire little where the model knows what comes next.", follows_surprisal),
)
