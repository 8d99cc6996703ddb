"""Identity: how much of nnz does the token itself explain, and what else goes with it?

    token_identity(run)     by layer: the share of the variance of nnz that lies between tokens of the vocabulary
    token_covariates(run)   what a token's z goes with: frequency, how it is spelt, how unexpected it is

Where the share is near 1, a layer's nnz could be looked up by the token and costs no prediction; where it is small, the
context decides. Covariates are there because rare tokens differ from frequent ones in more than frequency. Cost: 30 ms.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import layer_moments, unflagged_tokens
from twell.analysis.statistics import t_half
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.by_token import by_token
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

COVARIATES = ("log_count", "begins_word", "has_letter", "characters", "surprisal_mean")
LEAST = 20  # tokens beyond the number of covariates


def token_identity(run: Run) -> pd.DataFrame:
    """Return how much of the variance of nnz lies between tokens; a row a layer. Columns:

    layer; tokens (occurrences); kinds (different tokens); explained (share of the variance of nnz between tokens, what
    a table by token would explain of this run); icc (intraclass correlation, corrected for chance: what it would
    explain of more such text; Shrout and Fleiss, 1979, with unequal groups); sd, sd_within (of nnz, and of nnz less its
    token's mean).

    Missing where each token occurs once, or all are the same one.
    """
    summaries = open_summaries(run)
    counts = summaries.columns("tokens", "token_id", "flagged", "tokens")
    rows = summaries.columns("token_layers", "token_id", "flagged", "layer", "nnz_sum")
    plain = ~counts["flagged"]
    n = np.zeros(1 + int(counts["token_id"].max(initial=0)))
    n[counts["token_id"][plain]] = counts["tokens"][plain]
    total, kinds = unflagged_tokens(summaries), int((n > 0).sum())
    if kinds < 2 or total <= kinds:
        raise Missing(f"{run.name} holds {kinds} different tokens in {total}: there is nothing to tell apart.")
    mean, sd = layer_moments(summaries)
    use = ~rows["flagged"]
    token, layer, y = (rows[name][use] for name in ("token_id", "layer", "nnz_sum"))
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(n[token] > 0, y.astype(float) ** 2 / n[token], 0.0)
        between = np.bincount(layer, weights, run.layers) - total * mean**2
        everything = total * sd**2
        within = np.maximum(everything - between, 0)
        between_square, within_square = between / (kinds - 1), within / (total - kinds)
        size = (total - (n**2).sum() / total) / (kinds - 1)
        icc = (between_square - within_square) / (between_square + (size - 1) * within_square)
        explained = between / everything
    frame = pd.DataFrame(
        {
            "layer": np.arange(run.layers),
            "tokens": total,
            "kinds": kinds,
            "explained": np.where(everything > 0, explained, np.nan),
            "icc": np.where(everything > 0, icc, np.nan),
            "sd": sd,
            "sd_within": np.sqrt(within / total),
        }
    )
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": f"over {total:,} unflagged tokens"}
    return frame


def token_covariates(run: Run, min_count: int = 20) -> pd.DataFrame:
    """Return what the z of tokens goes with, all covariates together; a row a covariate. Columns:

    covariate (log_count: natural logarithm of its occurrences; begins_word: spelt with a space before it; has_letter;
    characters: of its text; surprisal_mean: of the token itself, nats); coefficient (of z, in sd, for one more of it,
    the others held fixed), low, high (95 %); standardised (for one sd more); alone (without the others); tokens (of the
    vocabulary that occur `min_count` times, each counting once).

    Least squares with the tokens of the vocabulary as units, and errors that let their variance differ (HC3: MacKinnon
    and White, 1985). Constant covariates are left out.

    Missing where too few tokens occur that often.
    """
    table = by_token(run, min_count)
    text = table["text"].astype(str)
    table = table.assign(
        log_count=np.log(table["count"]),
        begins_word=text.str.startswith(" ").astype(float),
        has_letter=text.str.contains(r"[^\W\d_]").astype(float),
        characters=text.str.len().astype(float),
    )
    names = [name for name in COVARIATES if table[name].notna().all() and np.ptp(table[name].to_numpy(float)) > 0]
    if not names or len(table) < LEAST + len(names):
        raise Missing(f"{run.name} has {len(table)} tokens that occur {min_count} times: too few for covariates.")
    y = table["z"].to_numpy(float)
    x = np.column_stack([np.ones(len(y)), *(table[name].to_numpy(float) for name in names)])
    inverse = np.linalg.pinv(x.T @ x)
    coefficient = inverse @ x.T @ y
    leverage = np.clip(np.einsum("ij,jk,ik->i", x, inverse, x), 0, 1 - 1e-9)
    residual = (y - x @ coefficient) / (1 - leverage)
    error = np.sqrt(np.diag(inverse @ (x.T * residual**2) @ x @ inverse))[1:]
    half, coefficient = float(t_half(len(y) - x.shape[1])) * error, coefficient[1:]
    alone = [np.cov(x[:, i + 1], y)[0, 1] / x[:, i + 1].var(ddof=1) for i in range(len(names))]
    frame = pd.DataFrame({"covariate": names, "coefficient": coefficient, "low": coefficient - half})
    frame["high"], frame["standardised"] = coefficient + half, coefficient * x[:, 1:].std(axis=0, ddof=1)
    frame["alone"], frame["tokens"] = alone, len(y)
    frame.attrs = {"note": f"over {len(y):,} tokens of the vocabulary that occur {min_count} times"}
    return frame
