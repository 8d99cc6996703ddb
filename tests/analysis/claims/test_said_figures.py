"""The figures that a finding says, in its sentence, its statistic and its interval, against the run's own rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis import by_layer, by_token, findings, surprisal_correlation, surprisal_within, token_classes
from twell.analysis.activity.layers import mean_over_layers
from twell.analysis.activity.origins import first_over_all
from twell.analysis.claims.claim import between
from twell.analysis.claims.speed import energy, faster, slow_where_dense
from twell.analysis.statistics import t_half
from twell.workbench.run.schema import FLAG_NOT_FINITE
from twell.workbench.run.store import Run

LAYERS, WIDTH = 4, 512


@pytest.fixture(scope="module")
def said(run: Run) -> pd.DataFrame:
    return findings(run).set_index("claim")


@pytest.fixture(scope="module")
def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the counts of the layers on counted tokens."""
    return rows.loc[rows["flags"] == 0, list(range(LAYERS))]


def row(said: pd.DataFrame, words: str) -> tuple[str, str, str]:
    """Return the sentence, the statistic and the interval of the one claim of these words."""
    (found,) = said.index[said.index.str.contains(words, regex=False)]
    return tuple(said.loc[found, ["this_run", "statistic", "interval"]])


def test_few_fire(said: pd.DataFrame, plain: pd.DataFrame, run: Run) -> None:
    says, statistic, interval = row(said, "half a percent")
    mean, (_, low, high) = plain.mean(), mean_over_layers(run)
    span = f"from {mean.min():.1f} to {mean.max():.1f} by layer"
    assert says == f"{plain.to_numpy().mean():.1f} of {WIDTH} neurons fire, {span}"
    share = 100 * plain.to_numpy().mean() / WIDTH
    assert statistic == f"{share:.2f} %, mean of {LAYERS} layers, {len(plain):,} counted tokens"
    assert interval == between(100 * low / WIDTH, 100 * high / WIDTH, " %")


def test_dead(said: pd.DataFrame, plain: pd.DataFrame, run: Run) -> None:
    says, statistic, interval = row(said, "More than 30 %")
    fired, total = run.frame("neurons").groupby("layer")["neuron"].nunique(), LAYERS * WIDTH
    dead = total - fired.sum()
    waking = by_layer(run)["dead_waking"].sum()
    observed, limit = 100 * dead / total, 100 * (dead - waking) / total
    of_layers = [100 * (1 - fired.max() / WIDTH), 100 * (1 - fired.min() / WIDTH)]
    span = f"from {of_layers[0]:.1f} % to {of_layers[1]:.1f} % by layer"
    assert says == f"{observed:.1f} % of all neurons never fired, {span}; with more text at most {limit:.1f} %"
    sequences = run.manifest.sequences
    assert statistic == (
        f"{dead:,} of {total:,} neurons, in {sequences:,} sequences of {len(plain):,} tokens; each fires in under "
        f"{300 / sequences:.3g} % of sequences (95 %)"
    )
    assert interval.startswith(f"{limit:.1f} to {observed:.1f} %: Chao's estimate")


def test_over_depth(said: pd.DataFrame, plain: pd.DataFrame, run: Run) -> None:
    mean, order = plain.mean(), plain.mean().sort_values().index.tolist()
    ends = by_layer(run).set_index("layer")[["low", "high"]]
    shallow = f"; seen or not in a shallow model, {LAYERS} layers against 28"
    says, statistic, interval = row(said, "first two layers")
    assert says == (
        f"the least active layers are {order[0]} and {order[1]}; layers 0 and 1 fire {mean[0]:.1f} and {mean[1]:.1f} "
        f"neurons{shallow}"
    )
    assert statistic == f"ranks {order.index(0) + 1} and {order.index(1) + 1} of {LAYERS}, quietest first"
    least = mean[2:].idxmin()
    assert interval == ", ".join(
        f"{name} {between(*ends.loc[layer])}"
        for name, layer in (("layer 0", 0), ("layer 1", 1), ("the least other", least))
    )
    says, statistic, interval = row(said, "peaks in the early")
    assert says == f"layer {order[-1]} fires most, {mean.max():.1f} neurons{shallow}"
    assert statistic == f"at {100 * order[-1] / (LAYERS - 1):.0f} % of the depth, {LAYERS} layers"
    assert interval == between(*ends.loc[order[-1]])


def test_the_fullest_token(said: pd.DataFrame, plain: pd.DataFrame) -> None:
    says, statistic, _ = row(said, "orders of magnitude")
    most, mean = plain.max(), plain.mean()
    own, ratio = most / mean, most.max() / mean.mean()
    assert says == (
        f"the fullest token fires {most.max():.0f} neurons in layer {most.idxmax()}, {ratio:.0f} times the mean of all "
        f"layers, {mean.mean():.1f}; by layer {own.min():.0f} to {own.max():.0f} times its own"
    )
    assert statistic == f"greatest of {len(plain):,} counted tokens in {LAYERS} layers"


def test_the_first_position(said: pd.DataFrame, plain: pd.DataFrame, rows: pd.DataFrame, run: Run) -> None:
    says, statistic, interval = row(said, "first token of a sequence")
    first = rows[(rows["position"] == 0) & (rows["flags"] & FLAG_NOT_FINITE == 0)][list(range(LAYERS))]
    by = first.mean() / plain.mean()
    ratio = first.sum(axis=1).mean() / plain.sum(axis=1).mean()
    assert says.partition("; by what")[0] == (
        f"position 0 fires {ratio:.2f} times the neurons of later ones, {by.min():.1f} to {by.max():.1f} times by layer"
    )
    assert statistic == f"sum over {LAYERS} layers, {len(first):,} sequences"
    assert interval == between(*first_over_all(run).loc["all", ["low", "high"]])


@pytest.mark.parametrize(
    ("word", "absent", "side", "other"),
    [("doesn", "couldn, doi, gov", "below", "above"), ("formaldehyde", "Vermont, Greeks", "above", "below")],
)
def test_named_tokens(said: pd.DataFrame, run: Run, word: str, absent: str, side: str, other: str) -> None:
    says, statistic, interval = row(said, word)
    tokens = by_token(run, min_count=1)
    token = tokens[tokens["text"].str.strip() == word].iloc[0]
    half = t_half(token["degrees"]) * token["z_se"]
    assert says == (
        f"z of {word} {token['z']:+.2f} (n = {token['count']}); not there as one token often enough: {absent}"
    )
    assert statistic == f"1 of 1 {side} the layers' means with 95 % confidence, 0 {other}"
    assert interval == f"{word} {token['z'] - half:+.2f} to {token['z'] + half:+.2f}"


def test_a_quiet_class(said: pd.DataFrame, run: Run) -> None:
    says, statistic, interval = row(said, "Function words")
    of = token_classes(run).set_index("class").loc["function word"]
    assert says == (
        f"function words: z {of['z']:+.2f}, against {of['others']:+.2f} of all other tokens; the loss of what follows "
        f"them is {of['loss_mean']:.2f} nats"
    )
    assert statistic.startswith(f"n = {of['count']:,.0f} of {of['tokens']:.0f} tokens of the vocabulary, by ")
    assert interval == f"difference {of['difference_low']:+.2f} to {of['difference_high']:+.2f}"


def test_what_follows(said: pd.DataFrame, run: Run, rows: pd.DataFrame) -> None:
    says, statistic, _ = row(said, "knows what comes next")
    pooled, within = surprisal_correlation(run), surprisal_within(run)
    inside, over = (
        f"nnz rises with the next token's loss in {(each['low'] > 0).sum()} of {LAYERS} layers, falls in "
        f"{(each['high'] < 0).sum()}"
        for each in (within, pooled)
    )
    assert says == f"of one token in different contexts, {inside}; pooled over tokens, {over}"
    known = ((rows["flags"] == 0) & np.isfinite(rows["loss"])).sum()
    span = f"{within['pearson'].min():+.2f} to {within['pearson'].max():+.2f}"
    assert statistic == f"Pearson within tokens {span} by layer, {known:,} counted tokens with a loss"


def geometric(ratios: np.ndarray) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and the ends of its 95 % interval, by Student's t of their logarithms."""
    logs = np.log(ratios)
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    return tuple(np.exp([logs.mean(), logs.mean() - half, logs.mean() + half]))


def test_the_whole_pass(made: ModuleType, tmp_path: Path) -> None:
    """Timed in three batches, which differ in time and in power."""
    dense, gains, watts = np.array([1000.0, 1100.0, 900.0]), np.array([1.2, 1.3, 1.25]), np.array([410.0, 420.0, 380.0])
    added = [
        {"layer": -1, "batch": batch, "op": op, "microseconds": time[batch], "watts": power[batch], "kernel": kernel}
        for batch in range(3)
        for op, time, power, kernel in (
            ("model_dense", dense, np.full(3, 400.0), "dense"),
            ("model_sparse", dense / gains, watts, "cuda"),
        )
    ]
    run = made.make(tmp_path / "timed", parts=1, change_timings=lambda table: made.more_timings(table, added))
    run.manifest.model["parameters"] = int(5e8)
    answer = faster(run)
    ratio, low, high = geometric(gains)
    assert answer.says.startswith(f"the whole forward pass runs {ratio:.2f} times as fast, on cpu")
    assert answer.says.endswith(f", of {100 * (1 - np.median(dense / gains) / 1000):.0f} % saved")
    assert answer.statistic.startswith("geometric mean of 3 batches; kernel cuda, 2,048 rows a batch, float32, on cpu")
    assert answer.interval == between(low, high)
    answer, joules = energy(run), np.median(watts / 400 / gains)
    assert answer.says == f"a token takes {100 * (1 - joules):.0f} % less energy"
    assert answer.statistic.startswith(
        f"power times time, sparse over dense, n = 3 batches with a reading: {joules:.2f}"
    )
    assert answer.interval == "none: 3 readings, the median"


def test_layers_that_are_not_sparse(run: Run, plain: pd.DataFrame) -> None:
    answer, times = slow_where_dense(run), run.frame("timings")
    sparsity = 1 - plain.mean() / WIDTH
    layers = [layer for layer in range(LAYERS) if sparsity[layer] < 0.95]
    said, ends, slower, faster = [], [], 0, 0
    for layer in layers:
        of = times[times["layer"] == layer].pivot(index="batch", columns="op", values="microseconds")
        ratio, low, high = geometric((of["ffn_dense"] / of["ffn_sparse"]).to_numpy())
        said.append(f"layer {layer}, {100 * sparsity[layer]:.1f} % sparse, runs {ratio:.2f} times as fast as dense")
        ends.append(f"layer {layer} {between(low, high)}")
        slower, faster = slower + (high < 1), faster + (low > 1)
    assert (answer.says, answer.interval) == (", ".join(said), ", ".join(ends))
    assert answer.statistic.startswith(
        f"{slower} of {len(layers)} layers under 95 % sparsity are slower than dense for certain, {faster} faster; "
        "kernel cpu, "
    )
