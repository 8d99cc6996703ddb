"""Decay: does nnz fall off exponentially along a sequence, and over how many tokens?

    position_fit(run)   a row a layer, and one for their sum: a + b·exp(-p/λ), a + b·p^(-k), and two exponentials

First: does nnz fall at all? Positions 1 to 7, as far as they lie before it, are compared with the later half, with an
interval. Then each curve is fitted to the means of bands of positions, without position 0, by least squares; the weight
of a band is its number of tokens over their variance. Given λ (or k) the fit is linear in a and b, so only λ (or k) is
searched for (variable projection: Golub and Pereyra, 1973). Intervals, those of differences in AICc (Hurvich and Tsai,
1989) too, leave out one twentieth of the documents at a time, and each refit is one Gauss-Newton step: neither the
tokens of a document nor the means at two positions are independent, so a difference in AICc of 2 decides nothing by
itself. Cost: 0.1 s for 28 layers.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import band_sums
from twell.analysis.activity.position_curves import (
    Bands,
    curve_design,
    double_exponential,
    exponential,
    power,
    refits,
    search,
)
from twell.analysis.activity.positions import CLUSTER_SUMS, SUMS
from twell.analysis.statistics import band, distinct, effective, jackknife_error, t_half
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

LEAST_BANDS = 8
DECISIVE = 2.0  # a smaller difference in AICc decides nothing (Burnham and Anderson, 2002, section 2.6)
EARLY = 8  # positions before this one are early, unless they are late: past the middle
LITTLE = 0.1  # of mean nnz past the middle: a drop that "no decay" rules out
PARAMETERS = {"exponential": 4, "power law": 4, "two exponentials": 6}  # a variance included


def position_fit(run: Run) -> pd.DataFrame:
    """Fit an exponential and a power law to mean nnz by position; a row a layer, then layer -1, the sum over layers.
    Columns:

    layer; tokens; bands (of positions, from 1 on); drop, drop_low, drop_high (mean nnz at positions 1 to 7 up to the
    middle, less that past it, 95 %); a, b (neurons a token: the level far on, and what comes on top at position 0);
    decay, decay_low, decay_high (λ in tokens, 95 %); r2 (of the bands' means, weighted); power (k of the power law),
    power_r2; aicc, aicc_low, aicc_high (exponential less power law, 95 %: negative speaks for the exponential);
    first_ratio (mean of position 0 over a); verdict: rises or no decay (by drop: its interval holds 0, and no 10 % of
    mean nnz past the middle), else the best form: exponential, power law, two exponentials, either (none is better than
    the others for certain), or cannot be told (λ or k is at the end of the searched range: λ half a token to four times
    the longest sequence, k 0.02 to 8, and its interval then 0 to infinity; or b is not above 0 for certain; or the
    interval of the drop holds both 0 and 10 %; or one document alone, or hardly more, reaches the later half, so that
    it has none).
    """
    summaries = open_summaries(run)
    rows = band_sums(summaries)
    positions = summaries.columns("positions", "layer", "flagged", "position", *SUMS, *CLUSTER_SUMS)
    layer, later = positions["layer"], ~positions["flagged"] & (positions["position"] > 0)
    first = ~positions["flagged"] & (positions["position"] == 0) & (positions["tokens"] > 0)
    start = np.full(run.layers + 1, np.nan)
    start[layer[first]] = positions["nnz_sum"][first] / positions["tokens"][first]  # layer -1 is the last
    tokens = int(positions["tokens"][later & (layer == -1)].sum())
    fits = _fits(_bands(run, rows, {name: values[later] for name, values in positions.items()}), start)
    frame = pd.DataFrame({"layer": np.append(np.arange(run.layers), -1), "tokens": tokens, **fits})
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "a + b·exp(-p/λ) over unflagged tokens from position 1 on; intervals from groups of documents, each "
        "left out once; curves are told apart by the difference in AICc with its interval",
        "sequences": run.manifest.sequences,
    }
    return frame


def _bands(run: Run, rows: dict[str, NDArray], positions: dict[str, NDArray]) -> Bands:
    """Return the means by band of each layer and, last, of their sum.

    rows: as `band_sums` returns them; positions: columns of the summary `positions`. Raises Missing where there are too
    few bands to fit three parameters and judge the fit.
    """
    numbers, band_index = distinct(rows["band"])
    if len(numbers) < LEAST_BANDS:
        raise Missing(
            f"{run.name} has unflagged tokens in {len(numbers)} band{'s' * (len(numbers) != 1)} of positions: a fit "
            f"needs at least {LEAST_BANDS}, so sequences of 9 tokens or more."
        )
    replicates, replicate = distinct(rows["replicate"])
    n, y = np.zeros((2, run.layers + 1, len(replicates), len(numbers)))
    cell = (rows["layer"], replicate, band_index)
    n[cell], y[cell] = rows["tokens"], rows["nnz_sum"]
    bands = band(positions["position"])
    index = positions["layer"] % (run.layers + 1) * len(numbers) + np.searchsorted(numbers, bands)
    tokens, position, square = (
        np.bincount(index, weights, minlength=n[:, 0].size)[: n[:, 0].size].reshape(n[:, 0].shape)
        for weights in (positions["tokens"], positions["tokens"] * positions["position"], positions["nnz_square"])
    )
    if not (np.isin(bands, numbers).all() and (tokens > 0).all()):
        raise UserError(
            f"Expected tokens in each layer and band of positions in the summaries of {run.path}, got a band without "
            "any: remove their folder to have them made anew, or copy a run without rows again."
        )
    mean = y.sum(axis=1) / tokens
    variance = np.maximum(square / tokens - mean**2, 0)
    variance = np.maximum(variance, variance.mean(axis=1, keepdims=True) * 1e-3 + 1e-12)  # where all counts agree
    remaining = n.sum(axis=1, keepdims=True) - n
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.where(remaining > 0, (y.sum(axis=1, keepdims=True) - y) / remaining, 0.0)
    place = (position / tokens)[-1]  # every layer has the same tokens, and so the same mean positions
    late = place > place[-1] / 2
    early = (numbers < EARLY) & ~late
    drop, drop_error, level = _contrast(n, y, early, late)
    half, *halves = (
        float(t_half(effective(size.sum(), (size**2).sum()) - 1))
        for size in (n[-1][:, chosen].sum(axis=1) for chosen in (slice(None), early, late))
    )
    drop_half = max(halves) if np.isfinite(halves).all() else float("nan")
    weight, rest = tokens / variance, remaining / variance[:, None]
    return Bands(place, mean, weight, without, rest, drop, drop_error, level, half, drop_half)


def _contrast(n: NDArray, y: NDArray, early: NDArray, late: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return mean nnz in early bands less that in late ones, its jackknife standard error, and the latter, each
    [layer].

    n, y [layer, replicate, band]: tokens and nnz; early, late [band]: masks.
    """

    def means(tokens: NDArray, nnz: NDArray) -> list[NDArray]:
        return [nnz[..., chosen].sum(axis=-1) / tokens[..., chosen].sum(axis=-1) for chosen in (early, late)]

    with np.errstate(divide="ignore", invalid="ignore"):
        first, last = means(n.sum(axis=1), y.sum(axis=1))
        without = np.subtract(*means(n.sum(axis=1, keepdims=True) - n, y.sum(axis=1, keepdims=True) - y))
    return first - last, jackknife_error(first - last, np.moveaxis(without, 1, 0)), last


def _fits(bands: Bands, starts: NDArray) -> dict[str, NDArray]:
    """Return the columns of position_fit from "bands" to "verdict". starts [layer]: mean nnz at position 0."""
    falling, scaling = search(bands, exponential, 0.5, 4 * bands.position[-1]), search(bands, power, 0.02, 8.0)
    number, half = len(bands.position), bands.half
    singles = {"exponential": (falling, exponential), "power law": (scaling, power)}
    steps = {name: refits(bands, *curve_design(bands, *each)) for name, each in singles.items()}
    errors = {name: _jackknifed(each[0]) for name, each in steps.items()}
    reach = np.where(falling.at_end, np.inf, half * errors["exponential"][:, 2])
    level = (bands.weight * bands.mean).sum(axis=1) / bands.weight.sum(axis=1)
    total = (bands.weight * (bands.mean - level[:, None]) ** 2).sum(axis=1)
    double, double_residual = double_exponential(bands)
    residuals = {
        "exponential": (falling.residual, steps["exponential"][1]),
        "power law": (scaling.residual, steps["power law"][1]),
        "two exponentials": (double_residual, refits(bands, *double)[1]),
    }
    scores = {
        name: [_aicc(number, PARAMETERS[name], residual) for residual in both] for name, both in residuals.items()
    }
    certain = {
        name: each[0].b > half * _jackknifed(refits(bands, *curve_design(bands, *each, fit_rate=False))[0])[:, 1]
        for name, each in singles.items()
    }
    aicc, aicc_error = _apart(scores, "exponential", "power law")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {
            "bands": np.full(len(starts), number),
            "drop": bands.drop,
            "drop_low": bands.drop - bands.drop_half * bands.drop_error,
            "drop_high": bands.drop + bands.drop_half * bands.drop_error,
            "a": falling.a,
            "b": falling.b,
            "decay": np.exp(falling.rate),
            "decay_low": np.exp(falling.rate - reach),
            "decay_high": np.where(reach < 100, np.exp(falling.rate + reach), np.inf),
            "r2": np.where(total > 0, 1 - falling.residual / total, np.nan),
            "power": np.exp(scaling.rate),
            "power_r2": np.where(total > 0, 1 - scaling.residual / total, np.nan),
            "aicc": aicc,
            "aicc_low": aicc - half * aicc_error,
            "aicc_high": aicc + half * aicc_error,
            "first_ratio": np.where(falling.a > 0, starts / falling.a, np.nan),
            "verdict": _verdicts(bands, scores, (falling.at_end, scaling.at_end), certain),
        }


def _jackknifed(steps: NDArray) -> NDArray:
    """Return jackknife standard errors [layer, parameter] from the steps of refits [layer, replicate, parameter]."""
    return jackknife_error(np.zeros((len(steps), steps.shape[-1])), np.moveaxis(steps, 1, 0))


Scores = dict[str, list[NDArray]]  # AICc of each form: [layer], and [layer, replicate] without each replicate


def _aicc(number: int, parameters: int, residual: NDArray) -> NDArray:
    """Return AICc of fits to so many bands, with so many parameters; infinite where there are too few bands."""
    spare = number - parameters - 1
    penalty = 2 * parameters * (1 + (parameters + 1) / spare) if spare > 0 else np.inf
    return number * np.log(np.maximum(residual, 1e-300)) + penalty


def _apart(scores: Scores, one: str, other: str) -> tuple[NDArray, NDArray]:
    """Return AICc of one form less that of another, and its jackknife standard error, each [layer]."""
    with np.errstate(invalid="ignore"):
        whole, without = (a - b for a, b in zip(scores[one], scores[other], strict=True))
    return whole, jackknife_error(whole, without.T)


def _verdicts(bands: Bands, scores: Scores, at_end: tuple[NDArray, NDArray], certain: dict[str, NDArray]) -> NDArray:
    """Return the verdict on each layer.

    at_end: whether the rate of the exponential, and of the power law, lies at an end of the searched range; certain:
    whether the b of each is above 0 with 95 % confidence.
    """
    apart, error = _apart(scores, "exponential", "power law")
    exponential_better = apart < 0
    single = np.where(exponential_better, "exponential", "power law")
    verdicts = single.astype(object)
    verdicts[~(np.abs(apart) > np.maximum(DECISIVE, bands.half * error))] = "either"
    double = [_apart(scores, "two exponentials", name) for name in ("exponential", "power law")]
    beaten = np.where(exponential_better, double[0][0], double[1][0]) < -DECISIVE
    verdicts[beaten] = "either"
    clearly = [each < -np.maximum(DECISIVE, bands.half * spread) for each, spread in double]
    verdicts[clearly[0] & clearly[1]] = "two exponentials"
    ends = np.where(exponential_better, *at_end) & (verdicts != "two exponentials")
    verdicts[ends | ~np.where(exponential_better, *certain.values())] = "cannot be told"
    reach = bands.drop_half * bands.drop_error
    level = bands.drop <= reach
    verdicts[level] = "cannot be told"
    verdicts[level & (bands.drop + reach <= LITTLE * bands.late)] = "no decay"
    verdicts[bands.drop < -reach] = "rises"
    verdicts[np.isnan(reach)] = "cannot be told"
    return verdicts
