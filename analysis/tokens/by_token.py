"""Tokens: which fire many neurons and which few.

    by_token(run)                 a row a token of the vocabulary, loudest first
    token_profile(run, token_id)  one token, layer by layer

Tokens are ranked by z, which is nnz standardised within each layer, so that a busy layer does not outvote the others.
Beside it are the raw mean, and z shrunk towards the mean of all tokens, which orders rare tokens more fairly. Cost:
20 ms for a vocabulary of 50 000, from the summaries `tokens`, `token_scores`, `token_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from twell.analysis.activity.layers import counted_tokens, layer_moments, mean_errors
from twell.analysis.memo import memoized
from twell.analysis.statistics import centred_error, effective, pooled_variance, ratio_error, shrink
from twell.analysis.summaries.read import EARLIER, Summaries, open_summaries
from twell.analysis.tokens.token_text import token_text, vocabulary
from twell.workbench.errors import Missing
from twell.workbench.run.checks.uncounted import no_counted_token
from twell.workbench.run.columns import LOSS_UNITS_PER_NAT
from twell.workbench.run.store import Run

PRIOR_DOCUMENTS = 10  # the common variance of z weighs as much as this many documents of the token's own
Rank = Literal["shrunk", "z", "z_position"]
KEY = ("token_id", "flagged")
COUNTS = ("tokens", "sequences", "clusters", "tokens_square")
LOSSES = ("loss_sum", "loss_tokens", "surprisal_sum", "surprisal_tokens")
SCORES, PARTS = ("z", "z_position"), ("sum", "square", "cross")
BESIDE = ("beside", "tokens_beside")  # which copies of before revision 6 lack
ALL_SQUARE, ALL_TOKENS = "all_square", "all_tokens"
DEFINITION = (
    "z: (nnz - layer mean) / layer sd, mean over layers, layer means and sds being those of unflagged tokens; "
    "standard errors are clustered by document"
)


def by_token(
    run: Run, min_count: int = 20, flagged: bool = False, rank: Rank = "shrunk", spelled: bool = False
) -> pd.DataFrame:
    """Return the tokens that occur at least `min_count` times, loudest first: by shrunk, or with rank="z" or
    "z_position" by that. spelled: bytes of no whole character are written out, \\xe2\\x80 for �. Columns:

    token_id; text; count; sequences, documents (it occurs in); effective (Kish's effective number of the documents, by
    occurrences); degrees (of freedom of an interval of z; of one of mean, effective - 1); z, z_se (in sd); z_position,
    z_position_se (the same with means and sds of the layer at the token's band of positions: each below 8, then
    floor(√(8·position)); empty in copies of an earlier revision); mean, mean_se (nnz a layer, mean over layers);
    loss_mean (nats, of the predictions made at the token); surprisal_mean (nats, of the token itself, as predicted one
    position earlier); shrunk, shrunk_se (z by empirical Bayes: `statistics.shrink` over every token that occurs).
    Standard errors: `statistics.ratio_error`, clusters are documents (`summaries.documents`); empty for one document.
    Those of z count that the layers' means come from the same documents (`statistics.centred_error`; not in copies of
    an earlier revision), take their sds as known, and are drawn towards those of tokens like it, as if by ten more
    documents (`statistics.pooled_variance`): what few documents tell of a variance is often too small.
    Missing where no token occurs that often.
    """
    rows = token_totals(open_summaries(run, scored=True), flagged)
    if not len(rows["tokens"]):
        raise no_counted_token(run)
    frequent = rows["tokens"] >= min_count
    if not frequent.any():
        highest = int(rows["tokens"].max(initial=0))
        raise Missing(
            f"No token of {run.name} occurs {min_count} times, the most frequent one {highest} "
            f"time{'' if highest == 1 else 's'}: ask for a lower minimum count."
        )
    pooled = {name: _pooled(rows, name) for name in SCORES}
    rows["shrunk"], rows["shrunk_se"] = _shrunk(rows, pooled["z"][0])
    score = rows["shrunk"] if rank == "shrunk" else rows[f"{rank}_sum"] / rows["tokens"]
    if rank == "shrunk" and np.isnan(score).all():  # no token tells how much z varies
        score = rows["z_sum"] / rows["tokens"]
    if np.isnan(score).all():
        raise Missing(f"{run.name} holds no {rank}: {EARLIER}.")
    order = np.flatnonzero(frequent)
    order = order[np.lexsort((rows["token_id"][order], -score[order]))]
    selected = {name: values[order] for name, values in rows.items()}
    n, n2 = selected["tokens"], selected["tokens_square"]
    columns: dict[str, Any] = {"token_id": selected["token_id"]}
    columns |= {
        "text": token_text(run, columns["token_id"], spelled),
        "count": n,
        "sequences": selected["sequences"],
        "documents": selected["clusters"],
    }
    columns["effective"] = effective(n, n2)
    errors = {name: _error(rows, *each) for name, each in pooled.items()}
    columns["degrees"] = errors["z"][1][order]
    for name, (error, _) in errors.items():
        columns |= {name: selected[f"{name}_sum"] / n, f"{name}_se": error[order]}
    y, y2, ny = (selected[f"nnz_{kind}"] for kind in PARTS)
    columns |= {"mean": y / n / run.layers, "mean_se": ratio_error(n, n2, y, y2, ny) / run.layers}
    with np.errstate(invalid="ignore"):
        columns["loss_mean"] = selected["loss_sum"] / LOSS_UNITS_PER_NAT / selected["loss_tokens"]
        columns["surprisal_mean"] = selected["surprisal_sum"] / LOSS_UNITS_PER_NAT / selected["surprisal_tokens"]
    frame = pd.DataFrame(columns | {"shrunk": selected["shrunk"], "shrunk_se": selected["shrunk_se"]})
    frame.attrs = {
        "definition": DEFINITION,
        "tokens": int(n.sum()),
        "note": f"left out: {(~frequent).sum():,} of {len(frequent):,} tokens, which occur under {min_count} times",
    }
    return frame


@memoized
def token_totals(summaries: Summaries, flagged: bool) -> dict[str, NDArray]:
    """Return the columns of the summaries `tokens` and `token_scores` by name, one row for each token that occurs.

    flagged: whether the sums of flagged tokens are added to those of the others. In every row, `all_tokens` is how many
    unflagged tokens the run has, and `z_all_square` the sum over documents of their z there, squared.
    """
    scored = summaries.columns(
        "token_scores", *KEY, *(f"{name}_{kind}" for name in SCORES for kind in (*PARTS, *BESIDE))
    )
    rows = summaries.columns("tokens", *KEY, *COUNTS, *LOSSES, *(f"nnz_{kind}" for kind in PARTS))
    if not all(np.array_equal(rows[name], scored[name]) for name in KEY):  # the run has grown between the two reads
        keys, scored_keys = (2 * each["token_id"].astype(np.int64) + each["flagged"] for each in (rows, scored))
        _, keys, scored_keys = np.intersect1d(keys, scored_keys, assume_unique=True, return_indices=True)
        rows, scored = ({n: v[at] for n, v in each.items()} for each, at in ((rows, keys), (scored, scored_keys)))
    rows |= scored
    if np.isnan(rows["clusters"]).any():  # a copy of an earlier revision, whose sums are over sequences
        rows["clusters"] = rows["sequences"]
    flags = rows.pop("flagged")
    whole = {f"{name}_{ALL_SQUARE}": rows[f"{name}_beside"][~flags].sum() for name in SCORES}
    whole[ALL_TOKENS] = rows["tokens"][~flags].sum()
    if not flagged:
        rows = {name: values[~flags] for name, values in rows.items()}
        return rows | {name: np.full(len(rows["tokens"]), value) for name, value in whole.items()}
    starts = np.flatnonzero(np.diff(rows["token_id"], prepend=-1))
    token_id = rows.pop("token_id")[starts]
    rows = {"token_id": token_id} | {name: np.add.reduceat(values, starts) for name, values in rows.items()}
    return rows | {name: np.full(len(token_id), value) for name, value in whole.items()}


def z_error(rows: Mapping[str, NDArray]) -> tuple[NDArray, NDArray]:
    """Return the standard error of each token's mean z and its degrees of freedom, NaN for tokens of one document.

    rows: columns of `token_totals`, of all tokens
    """
    return _error(rows, *_pooled(rows))


def _error(rows: Mapping[str, NDArray], variance: NDArray, degrees: NDArray) -> tuple[NDArray, NDArray]:
    """Return standard errors and degrees of freedom of the variances of `_pooled`, NaN for tokens of one document."""
    told = effective(rows["tokens"], rows["tokens_square"]) > 1
    return np.where(told, np.sqrt(variance), np.nan), np.where(told, degrees, np.nan)


def _pooled(rows: Mapping[str, NDArray], name: str = "z") -> tuple[NDArray, NDArray]:
    """Return the variance of every token's mean z and its degrees of freedom: `statistics.pooled_variance`."""
    n, clusters = rows["tokens"], effective(rows["tokens"], rows["tokens_square"])
    return pooled_variance(_own_error(rows, name) ** 2, n, clusters, rows[f"{name}_sum"] / n, PRIOR_DOCUMENTS)


def _own_error(rows: Mapping[str, NDArray], name: str = "z") -> NDArray:
    """Return the standard error of each token's mean z, from its own documents alone."""
    sums = [rows["tokens"], rows["tokens_square"], *(rows[f"{name}_{kind}"] for kind in PARTS)]
    beside, n_beside = (rows[f"{name}_{kind}"] for kind in BESIDE)
    if np.isnan(beside).any():  # a copy of before revision 6
        return ratio_error(*sums)
    return centred_error(sums, beside, n_beside, rows[f"{name}_{ALL_SQUARE}"], rows[ALL_TOKENS])


def _shrunk(rows: Mapping[str, NDArray], variance: NDArray) -> tuple[NDArray, NDArray]:
    """Return z of every token by empirical Bayes, and its posterior sd; NaN where there is no variance of its mean."""
    if np.isnan(variance).any():
        return variance, variance
    return shrink(rows["z_sum"] / rows["tokens"], np.sqrt(variance))


def _together(rows: Mapping[str, NDArray], token_id: int) -> float:
    """Return the correlation over documents of a token's mean z and that of all tokens; NaN where it is not known.

    rows: columns of `token_totals`
    """
    n, n2, y, y2, ny, beside, n_beside, all_square = (
        float(rows[name][rows["token_id"] == token_id][0])
        for name in ("tokens", "tokens_square", *(f"z_{kind}" for kind in (*PARTS, *BESIDE, ALL_SQUARE)))
    )
    mean = y / n
    square = (y2 - 2 * mean * ny + mean**2 * n2) * all_square
    return (beside - mean * n_beside) / np.sqrt(square) if square > 0 else np.nan


def z_variances(rows: Mapping[str, NDArray]) -> NDArray:
    """Return the variance of every token's mean z, of tokens of one document too; NaN throughout where fewer than two
    tokens occur in two or more documents."""
    return _pooled(rows)[0]


def token_profile(run: Run, token_id: int, flagged: bool = False) -> pd.DataFrame:
    """Return nnz and z of one token in each layer. Columns: layer; count; effective (documents, see by_token: an
    interval has one degree of freedom less); mean (nnz); z; z_se (of the token's mean and of the layer's, which are
    taken to go together over documents as they do in z over all layers).

    flagged: whether special, first and non-finite tokens count. Missing where the token does not occur.
    """
    summaries = open_summaries(run, scored=True)
    counts = summaries.frame("tokens", token_id=token_id)
    counts = counts if flagged else counts[~counts["flagged"]]
    if counts["tokens"].sum() == 0:
        raise Missing(f"Token {token_id} does not occur in {run.name}{'' if flagged else ' unflagged'}.")
    n, n2, sequences = (int(counts[name].sum()) for name in ("tokens", "tokens_square", "sequences"))
    rows = summaries.frame("token_layers", token_id=token_id)
    rows = rows if flagged else rows[~rows["flagged"]]
    sums = rows.groupby("layer", as_index=False)[["nnz_sum", "nnz_square", "nnz_cross"]].sum()
    layer_mean, layer_sd = layer_moments(summaries)
    centre, spread = layer_mean[sums["layer"].to_numpy()], pd.Series(layer_sd[sums["layer"].to_numpy()])
    spread = spread.where(spread > 0)
    about = {"layer": sums["layer"], "count": n, "effective": float(effective(n, n2))}
    frame = pd.DataFrame({**about, "mean": sums["nnz_sum"] / n})
    frame["z"] = (frame["mean"] - centre) / spread
    own = ratio_error(n, n2, sums["nnz_sum"], sums["nnz_square"], sums["nnz_cross"]) / spread
    of_layer = mean_errors(summaries)[0][1 + sums["layer"].to_numpy()] / spread
    together = _together(token_totals(summaries, flagged), token_id)
    centred = np.sqrt(np.maximum(own**2 - 2 * together * own * of_layer + of_layer**2, 0))
    frame["z_se"] = centred.fillna(own)  # copies of before revision 6 do not tell how they go together
    note = counted_tokens(run, flagged)
    frame.attrs = {"definition": DEFINITION, "note": note, "token_id": token_id, "sequences": sequences}
    return frame


def tokens_spelt(run: Run, words: Sequence[str], min_count: int) -> pd.DataFrame:
    """Return the unflagged tokens that are one of these words, apart from white space around it, and occur at least
    `min_count` times, loudest first. Columns: text, count, sequences, documents, degrees, z, z_se, as in by_token."""
    rows = token_totals(open_summaries(run, scored=True), False)
    selected = np.isin(rows["token_id"], _spelt(run, words)) & (rows["tokens"] >= min_count)
    error, degrees = (each[selected] for each in z_error(rows))
    rows = {name: values[selected] for name, values in rows.items()}
    n = rows["tokens"]
    text = [piece.strip() for piece in token_text(run, rows["token_id"])]
    about = {"sequences": rows["sequences"], "documents": rows["clusters"], "degrees": degrees}
    frame = pd.DataFrame({"text": text, "count": n, **about, "z": rows["z_sum"] / n, "z_se": error})
    return frame.sort_values(["z", "text"], ascending=[False, True], ignore_index=True)


def _spelt(run: Run, words: Sequence[str]) -> NDArray:
    """Return the ids of the tokens that are one of these words, apart from white space around it."""
    vocab = vocabulary(run)
    matches = pc.is_in(pc.utf8_trim_whitespace(vocab["text"]), pa.array(words))
    return vocab["token_id"][matches.to_numpy(zero_copy_only=False)]
