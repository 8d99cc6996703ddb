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
from pandas.api.extensions import ExtensionArray

from twell.analysis.activity.layers import layer_moments
from twell.analysis.memo import memoized
from twell.analysis.statistics import centred_error, drawn_variance, effective, guarded_error, ratio_error, shrink
from twell.analysis.summaries.read import EARLIER, Summaries, open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.columns import LOSS_UNITS_PER_NAT
from twell.workbench.run.store import Run
from twell.workbench.run.uncounted import no_counted_token

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


def by_token(run: Run, min_count: int = 20, flagged: bool = False, rank: Rank = "shrunk") -> pd.DataFrame:
    """Return the tokens that occur at least `min_count` times, loudest first: by shrunk, or with rank="z" or
    "z_position" by that. Columns:

    token_id; text; count; sequences, documents (it occurs in); effective (Kish's effective number of the documents, by
    occurrences: the degrees of freedom of an interval are one less); z, z_se (in sd); z_position, z_position_se (the
    same with means and sds of the layer at the token's band of positions: each below 8, then floor(√(8·position));
    empty in copies of an earlier revision); mean, mean_se (nnz a layer, mean over layers); loss_mean (nats, of the
    predictions made at the token); surprisal_mean (nats, of the token itself, as predicted one position earlier);
    shrunk, shrunk_se (z by empirical Bayes: `statistics.shrink` over every token that occurs, with variances drawn
    towards the common one as if by ten more documents). Standard errors: `statistics.ratio_error`, clusters are
    documents (`summaries.documents`); empty for one document. Those of z count that the layers' means come from the
    same documents (`statistics.centred_error`; not in copies of an earlier revision), take their sds as known, and are
    not less than a variance drawn towards that of all tokens, as if by ten more documents, would give
    (`statistics.guarded_error`): that of few documents is often too small.
    Missing where no token occurs that often.
    """
    rows = token_totals(open_summaries(run, scored=True), flagged)
    if not len(rows["tokens"]):
        raise no_counted_token(run)
    frequent = rows["tokens"] >= min_count
    if not frequent.any():
        highest = int(rows["tokens"].max(initial=0))
        raise Missing(
            f"No token of {run.name} occurs {min_count} times, the most frequent one {highest} times: ask for a lower "
            "minimum count."
        )
    rows["shrunk"], rows["shrunk_se"] = _shrunk(rows)
    score = rows["shrunk"] if rank == "shrunk" else rows[f"{rank}_sum"] / rows["tokens"]
    if rank == "shrunk" and np.isnan(score).all():  # no token tells how much z varies
        score = rows["z_sum"] / rows["tokens"]
    if np.isnan(score).all():
        raise Missing(f"{run.name} holds no {rank}: {EARLIER}.")
    order = np.flatnonzero(frequent)
    order = order[np.lexsort((rows["token_id"][order], -score[order]))]
    selected = {name: values[order] for name, values in rows.items()}
    n, n2 = selected["tokens"], selected["tokens_square"]
    columns: dict[str, Any] = {"token_id": selected["token_id"], "text": token_text(run, selected["token_id"])}
    columns |= {"count": n, "sequences": selected["sequences"], "documents": selected["clusters"]}
    columns["effective"] = effective(n, n2)
    for name in SCORES:
        columns |= {name: selected[f"{name}_sum"] / n, f"{name}_se": z_error(rows, name)[order]}
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


def z_error(rows: Mapping[str, NDArray], name: str = "z") -> NDArray:
    """Return the standard error of each token's mean z, guarded against a variance that is too small by chance.

    rows: columns of `token_totals`, of all tokens; name: z or z_position
    """
    return guarded_error(_own_error(rows, name), *_sizes(rows), PRIOR_DOCUMENTS)


def _sizes(rows: Mapping[str, NDArray]) -> tuple[NDArray, NDArray]:
    """Return occurrences and effective documents of each token."""
    return rows["tokens"], effective(rows["tokens"], rows["tokens_square"])


def _own_error(rows: Mapping[str, NDArray], name: str = "z") -> NDArray:
    """Return the standard error of each token's mean z, from its own documents alone."""
    sums = [rows["tokens"], rows["tokens_square"], *(rows[f"{name}_{kind}"] for kind in PARTS)]
    beside, n_beside = (rows[f"{name}_{kind}"] for kind in BESIDE)
    if np.isnan(beside).any():  # a copy of before revision 6
        return ratio_error(*sums)
    return centred_error(sums, beside, n_beside, rows[f"{name}_{ALL_SQUARE}"], rows[ALL_TOKENS])


def _shrunk(rows: Mapping[str, NDArray]) -> tuple[NDArray, NDArray]:
    """Return z of every token by empirical Bayes, and its posterior sd; NaN where `z_variances` has none."""
    variance = z_variances(rows)
    if np.isnan(variance).any():
        return variance, variance
    return shrink(rows["z_sum"] / rows["tokens"], np.sqrt(variance))


def z_variances(rows: Mapping[str, NDArray]) -> NDArray:
    """Return the variance of each token's mean z: its clustered estimate, drawn towards the common variance as if by
    ten more documents. NaN where fewer than two tokens occur in two or more documents."""
    return drawn_variance(_own_error(rows) ** 2, *_sizes(rows), PRIOR_DOCUMENTS)


def token_profile(run: Run, token_id: int, flagged: bool = False) -> pd.DataFrame:
    """Return nnz and z of one token in each layer. Columns: layer; count; mean (nnz); z; z_se (within the layer, by
    `statistics.ratio_error` alone)."""
    summaries = open_summaries(run)
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
    frame = pd.DataFrame({"layer": sums["layer"], "count": n, "mean": sums["nnz_sum"] / n})
    frame["z"] = (frame["mean"] - centre) / spread
    frame["z_se"] = ratio_error(n, n2, sums["nnz_sum"], sums["nnz_square"], sums["nnz_cross"]) / spread
    frame.attrs = {"definition": DEFINITION, "token_id": token_id, "sequences": sequences}
    return frame


def tokens_spelt(run: Run, words: Sequence[str], min_count: int) -> pd.DataFrame:
    """Return the unflagged tokens that are one of these words, apart from white space around it, and occur at least
    `min_count` times, loudest first. Columns: text, count, sequences, documents, effective, z, z_se, as in by_token."""
    rows = token_totals(open_summaries(run, scored=True), False)
    selected = np.isin(rows["token_id"], _spelt(run, words)) & (rows["tokens"] >= min_count)
    error = z_error(rows)[selected]
    rows = {name: values[selected] for name, values in rows.items()}
    n, n2 = rows["tokens"], rows["tokens_square"]
    text = [piece.strip() for piece in token_text(run, rows["token_id"])]
    about = {"sequences": rows["sequences"], "documents": rows["clusters"], "effective": effective(n, n2)}
    frame = pd.DataFrame({"text": text, "count": n, **about, "z": rows["z_sum"] / n, "z_se": error})
    return frame.sort_values(["z", "text"], ascending=[False, True], ignore_index=True)


def _spelt(run: Run, words: Sequence[str]) -> NDArray:
    """Return the ids of the tokens that are one of these words, apart from white space around it."""
    vocab = _vocabulary(run)
    matches = pc.is_in(pc.utf8_trim_whitespace(vocab["text"]), pa.array(words))
    return vocab["token_id"][matches.to_numpy(zero_copy_only=False)]


def token_text(run: Run, token_ids: NDArray) -> ExtensionArray:
    """Return the text of each token as the vocabulary displays it; <id> for an id that the vocabulary lacks."""
    vocab, token_ids = _vocabulary(run), np.asarray(token_ids)
    vocab_ids = vocab["token_id"]
    row = np.full(1 + max(vocab_ids.max(initial=0), token_ids.max(initial=0)), -1)
    row[vocab_ids] = np.arange(len(vocab_ids))
    row = row[token_ids]
    text = vocab["text"].take(pa.array(row, mask=row < 0))
    if text.null_count:
        names = [f"<{token}>" for token in token_ids]
        text = pc.coalesce(text, pa.array(names, pa.string()))
    return text.to_pandas().array


@memoized
def _vocabulary(run: Run) -> dict[str, Any]:
    """Return the columns token_id and text of the vocabulary; both empty if the run has no vocabulary."""
    if not run.has("vocab"):
        return {"token_id": np.zeros(0, np.int32), "text": pa.array([], pa.string())}
    vocab = run.arrow("vocab", ["token_id", "text"])
    return {"token_id": vocab["token_id"].to_numpy(), "text": vocab["text"].combine_chunks()}
