"""Tokens: which fire many neurons and which few.

    by_token(run)                 a row a token of the vocabulary, loudest first
    token_profile(run, token_id)  one token, layer by layer

Ranked by z, nnz standardised within each layer, so that a busy layer does not outvote the others; the raw mean stands
beside it, and so does z shrunk towards the mean of all tokens, which is the fairer order among rare ones. Cost: 20 ms
for a vocabulary of 50 000, from the summaries `tokens`, `token_scores`, `token_layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis import summary
from twell.analysis.layers import moments
from twell.analysis.shared import shared
from twell.analysis.statistics import ratio_error, shrink
from twell.workbench.errors import Missing
from twell.workbench.store import Run

PRIOR_SEQUENCES = 10  # what the common variance of z counts for, beside a token's own
Rank = Literal["z", "z_position"]
LOSS_UNIT = 2.0**24  # sums of losses are kept in units of 2^-24 nats
DEFINITION = (
    "z: (nnz - layer mean) / layer sd, mean over layers, layer means and sds being those of unflagged tokens; "
    "standard errors are clustered by sequence"
)


def by_token(run: Run, min_count: int = 20, flagged: bool = False, rank: Rank = "z") -> pd.DataFrame:
    """Tokens that occur at least `min_count` times, loudest first: by z, or with rank="z_position" by that. Columns:

    token_id; text; count; sequences (it occurs in); z, z_se (in sd); z_position, z_position_se (the same with means and
    sds of the layer at the token's band of positions: each below 8, then floor(√(8·position)); empty in copies of an
    earlier revision); mean, mean_se (nnz a layer, mean over layers); loss_mean (nats, of the predictions made at the
    token); surprisal_mean (nats, of the token itself, as predicted one position earlier); shrunk, shrunk_se (z by
    empirical Bayes: `statistics.shrink` over every token that occurs, with variances drawn towards the common one as if
    by ten more sequences). Standard errors: `statistics.ratio_error`, clusters are sequences; empty for one sequence.
    They take the layers' means and sds as known. Missing where no token occurs that often.
    """
    rows = sums(run, flagged)
    rows["shrunk"], rows["shrunk_se"] = _shrunk(rows)
    kept = rows[rows["tokens"] >= min_count].reset_index(drop=True)
    if kept.empty:
        most = int(rows["tokens"].max()) if len(rows) else 0
        raise Missing(
            f"No token of {run.name} occurs {min_count} times, the most frequent one {most} times: ask for a lower "
            "minimum count."
        )
    n, n2, g = kept["tokens"], kept["tokens_square"], kept["sequences"]
    frame = pd.DataFrame({"token_id": kept["token_id"], "text": token_text(run, kept["token_id"])})
    frame["count"], frame["sequences"] = n, g
    frame["z"] = kept["z_sum"] / n
    frame["z_se"] = ratio_error(n, n2, kept["z_sum"], kept["z_square"], kept["z_cross"], g)
    y, y2, ny = (kept[f"z_position_{part}"] for part in ("sum", "square", "cross"))
    frame["z_position"], frame["z_position_se"] = y / n, ratio_error(n, n2, y, y2, ny, g)
    frame["mean"] = kept["nnz_sum"] / n / run.layers
    frame["mean_se"] = ratio_error(n, n2, kept["nnz_sum"], kept["nnz_square"], kept["nnz_cross"], g) / run.layers
    frame["loss_mean"] = kept["loss_sum"] / LOSS_UNIT / kept["loss_tokens"].where(kept["loss_tokens"] > 0)
    own = kept["surprisal_tokens"].where(kept["surprisal_tokens"] > 0)
    frame["surprisal_mean"] = kept["surprisal_sum"] / LOSS_UNIT / own
    frame["shrunk"], frame["shrunk_se"] = kept["shrunk"], kept["shrunk_se"]
    if frame[rank].isna().all():
        raise Missing(f"{run.name} holds no {rank}: {summary.EARLIER}.")
    frame = frame.sort_values([rank, "token_id"], ascending=[False, True], ignore_index=True)
    frame.attrs = {
        "definition": DEFINITION,
        "tokens": int(n.sum()),
        "note": f"left out: {len(rows) - len(kept):,} of {len(rows):,} tokens, which occur under {min_count} times",
    }
    return frame


@shared
def sums(run: Run, flagged: bool) -> pd.DataFrame:
    """A row a token that occurs: the columns of the summaries `tokens` and `token_scores`, added up."""
    rows, scored = summary.read(run, "tokens"), summary.read(run, "token_scores")
    keys = ["token_id", "flagged"]
    if rows[keys].equals(scored[keys]):  # as they are, but for a run that has grown in between
        rows = pd.concat([rows, scored.drop(columns=[*keys, "class"])], axis=1)
    else:
        rows = rows.merge(scored.drop(columns="class"), on=keys)
    if not flagged:
        return rows[~rows["flagged"]].drop(columns="flagged").reset_index(drop=True)
    return rows.drop(columns="flagged").groupby("token_id", as_index=False).sum(min_count=1)


def _shrunk(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """z of every token by empirical Bayes, and its posterior sd; empty where no token tells how much z varies."""
    variance = z_variances(rows)
    if np.isnan(variance).any():
        return pd.Series(np.nan, rows.index), pd.Series(np.nan, rows.index)
    means, errors = shrink(rows["z_sum"].to_numpy() / rows["tokens"].to_numpy(float), np.sqrt(variance))
    return pd.Series(means, rows.index), pd.Series(errors, rows.index)


def z_variances(rows: pd.DataFrame) -> NDArray:
    """The variance of each token's mean z, its clustered estimate drawn towards the common one as if by ten more
    sequences; NaN where under two tokens stand in two sequences."""
    n, g = rows["tokens"].to_numpy(float), rows["sequences"].to_numpy(float)
    alone = n * ratio_error(n, rows["tokens_square"], rows["z_sum"], rows["z_square"], rows["z_cross"], g) ** 2
    told = g > 1
    if told.sum() < 2:
        return np.full(len(rows), np.nan)
    common = float((alone[told] * (g[told] - 1)).sum() / (g[told] - 1).sum())
    mixed = (np.where(told, alone, 0.0) * (g - 1) + common * PRIOR_SEQUENCES) / (g - 1 + PRIOR_SEQUENCES)
    return mixed / n


def token_profile(run: Run, token_id: int, flagged: bool = False) -> pd.DataFrame:
    """One token in each layer. Columns: layer; count; mean (nnz); z; z_se (as in by_token, within the layer)."""
    counts = summary.read(run, "tokens", token_id=token_id)
    counts = counts if flagged else counts[~counts["flagged"]]
    if counts["tokens"].sum() == 0:
        raise Missing(f"Token {token_id} does not occur in {run.name}{'' if flagged else ' unflagged'}.")
    n, n2, g = (int(counts[name].sum()) for name in ("tokens", "tokens_square", "sequences"))
    rows = summary.read(run, "token_layers", token_id=token_id)
    rows = rows if flagged else rows[~rows["flagged"]]
    sums = rows.groupby("layer", as_index=False)[["nnz_sum", "nnz_square", "nnz_cross"]].sum()
    layer_mean, layer_sd = moments(summary.read(run, "layers"), run.layers)
    centre, spread = layer_mean[sums["layer"].to_numpy()], pd.Series(layer_sd[sums["layer"].to_numpy()])
    spread = spread.where(spread > 0)
    frame = pd.DataFrame({"layer": sums["layer"], "count": n, "mean": sums["nnz_sum"] / n})
    frame["z"] = (frame["mean"] - centre) / spread
    frame["z_se"] = ratio_error(n, n2, sums["nnz_sum"], sums["nnz_square"], sums["nnz_cross"], g) / spread
    frame.attrs = {"definition": DEFINITION, "token_id": token_id, "sequences": g}
    return frame


def tokens_spelt(run: Run, words: Sequence[str], min_count: int) -> pd.DataFrame:
    """Unflagged tokens that are one of these words, white space around it aside, and occur at least `min_count` times,
    loudest first. Columns: text, count, sequences, z, z_se, as in by_token."""
    text = run.vocab["text"].str.strip() if run.has("vocab") else pd.Series(dtype=str)
    text = text[text.isin(words)]
    rows = sums(run, False)
    rows = rows[rows["token_id"].isin(text.index) & (rows["tokens"] >= min_count)]
    n, g = rows["tokens"], rows["sequences"]
    error = ratio_error(n, rows["tokens_square"], rows["z_sum"], rows["z_square"], rows["z_cross"], g)
    columns = {"count": n, "sequences": g, "z": rows["z_sum"] / n, "z_se": error}
    frame = pd.DataFrame({"text": text.loc[rows["token_id"]].to_numpy(object), **columns})
    return frame.sort_values(["z", "text"], ascending=[False, True], ignore_index=True)


def token_text(run: Run, token_ids: pd.Series) -> list[str]:
    """The tokens as the vocabulary displays them; an id that it lacks as <id>."""
    text = run.vocab["text"] if run.has("vocab") else pd.Series(dtype=str)
    shown = text.reindex(token_ids.to_numpy()).to_numpy(object)
    return [piece if isinstance(piece, str) else f"<{i}>" for piece, i in zip(shown, token_ids, strict=True)]
