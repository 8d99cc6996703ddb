"""The dashboard's own figures, each a function of a run: what a page draws when it is opened, as a plotly figure.

    from twell.analysis import plots
    plots.overview(run).show()
    plots.neuron_values(run, 7, 1234).write_image("values.png")

Each raises Missing, with the reason, where the page would say what the run lacks. The figures of the exported notebook
and HTML page, which take a table of the API (`plots.layers(by_layer(run))`), are here under their names, too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import pandas as pd
from plotly.graph_objects import Figure

from twell.analysis.activity.layers import by_layer
from twell.analysis.activity.position_decay import position_fit
from twell.analysis.activity.positions import position_blocks
from twell.analysis.activity.surprisal import surprisal_correlation
from twell.analysis.figures import layers as _layers
from twell.analysis.figures import neurons as _neurons
from twell.analysis.figures import overview as _overview
from twell.analysis.figures import positions as _positions
from twell.analysis.figures import tokens as _tokens
from twell.analysis.figures.ablation.effects import (
    ablation_budget,
    ablation_curves,
    ablation_layers,
    ablation_neurons,
)
from twell.analysis.figures.compare import compared_layers, layer_differences, loss_and_sparsity, ratio_by_position
from twell.analysis.figures.speed import bench as _bench
from twell.analysis.figures.speed import bench_rows as _rows
from twell.analysis.figures.speed import compressions as _compressions
from twell.analysis.figures.speed import kernels as _kernels
from twell.analysis.figures.speed import live as _live
from twell.analysis.figures.speed import potential as _potential
from twell.analysis.figures.speed import timings as _timings
from twell.analysis.figures.table_plots.base import dressed
from twell.analysis.figures.table_plots.by_layer import (
    depth,
    expected,
    gains,
    layers,
    origins,
    positions,
    starts,
    surprisal,
    within,
)
from twell.analysis.figures.table_plots.by_neuron import cache, clusters, dead, lags, lorenz
from twell.analysis.figures.table_plots.by_token import classes, covariates, identity, tokens
from twell.analysis.figures.training import (
    training_loss,
    training_nnz,
    training_silent,
    training_speed,
    training_went_sparse,
)
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.value_histogram import neuron_histogram
from twell.analysis.neurons.values import sampled
from twell.analysis.speed.compression import tile_settings
from twell.analysis.speed.contribution import model_time
from twell.analysis.speed.potential import layer_potential
from twell.analysis.speed.speedup import speedup
from twell.analysis.speed.tile_overflow import tile_audit
from twell.analysis.tokens.by_token import by_token, token_profile
from twell.analysis.tokens.classes import token_classes
from twell.analysis.tokens.words import by_word
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

__all__ = [
    "ablation_budget",
    "ablation_curves",
    "ablation_layers",
    "ablation_neurons",
    "bench_by_layer",
    "bench_by_nnz",
    "cache",
    "classes",
    "clusters",
    "compared_layers",
    "compression_times",
    "covariates",
    "dead",
    "decay_lengths",
    "depth",
    "dressed",
    "expected",
    "gains",
    "identity",
    "lags",
    "layer_differences",
    "layer_times",
    "layers",
    "live_calls",
    "lorenz",
    "loss_and_sparsity",
    "neuron_densities",
    "neuron_rank",
    "neuron_values",
    "nnz_by_loss",
    "nnz_by_position",
    "nnz_distributions",
    "origins",
    "overview",
    "pass_time",
    "positions",
    "ratio_by_position",
    "speedup_by_nnz",
    "speedup_potential",
    "starts",
    "surprisal",
    "tile_overflow",
    "times_over_capture",
    "token_by_layer",
    "token_class_dots",
    "tokens",
    "top_tokens",
    "top_words",
    "training_loss",
    "training_nnz",
    "training_silent",
    "training_speed",
    "training_went_sparse",
    "within",
]


def __dir__() -> list[str]:
    """Return what a notebook completes: the figures alone."""
    return __all__


def overview(run: Run) -> Figure:
    """Draw a row a layer: mean nnz by position, nnz of a token, dead neurons, FFN speedup. Page Overview."""
    blocks = position_blocks(run, blocks=_overview.BLOCKS)
    return _overview.layer_by_layer(blocks, by_layer(run), _overview.comparable_speedup(run))


def nnz_distributions(run: Run) -> Figure:
    """Draw how each layer's nnz is distributed over tokens, its share of all, its dead neurons. Page Layers."""
    return _layers.ridges(_layers.nnz_bins(run), by_layer(run))


def nnz_by_loss(run: Run, of: Literal["next", "own"] = "next") -> Figure:
    """Draw mean nnz against the loss of the next token or, of="own", of the token, a panel a layer. Page Layers."""
    return _layers.surprisal_panels(_layers.surprisal_bins(run, of), surprisal_correlation(run, of=of))


def nnz_by_position(run: Run) -> Figure:
    """Draw mean nnz along the sequence, over the layer's mean, a panel a layer. Page Positions."""
    return _positions.position_panels(_positions.position_bins(run))


def decay_lengths(run: Run) -> Figure:
    """Draw over how many tokens each layer's nnz falls off along a sequence. Page Positions."""
    return _positions.decay_lengths(position_fit(run))


def top_tokens(
    run: Run,
    min_count: int = _tokens.MIN_COUNT,
    rank: Literal["shrunk", "z", "z_position"] = "shrunk",
    rows: int = _tokens.END_ROWS,
) -> Figure:
    """Draw the tokens that fire most and least, by z with intervals. Page Tokens.

    min_count: least occurrences of a token; rank: shrunk | z | z_position; rows: tokens at each end
    """
    ends = _tokens.both_ends(by_token(run, min_count=min_count, rank=rank, spelled=True), rows)
    return _tokens.ranking(_tokens.ranked_by(ends, rank))


def top_words(run: Run, min_count: int = _tokens.MIN_COUNT, rows: int = _tokens.END_ROWS) -> Figure:
    """Draw the whole words that fire most and least, by mean z with intervals. Page Tokens. For arguments see
    `top_tokens`."""
    return _tokens.ranking(_tokens.as_ranked(_tokens.both_ends(by_word(run, min_count=min_count), rows)))


def token_class_dots(run: Run) -> Figure:
    """Draw the mean z of each class of tokens, with intervals. Page Tokens."""
    return _tokens.class_dots(token_classes(run))


def token_by_layer(run: Run, token_id: int) -> Figure:
    """Draw one token's z in each layer, with intervals. Page Token."""
    return _tokens.profile(token_profile(run, token_id=token_id))


def neuron_densities(run: Run) -> Figure:
    """Draw how many neurons of each layer fire how often. Page Neurons."""
    return _neurons.density_map(_neurons.density_bins(run))


def neuron_rank(run: Run, layer: int, neuron: int) -> Figure:
    """Draw the densities of a layer's neurons by rank, one of them marked. Page Neuron."""
    densities, row = _neurons.ranks(run, layer), by_neuron(run, layer=layer).iloc[_index(run, layer, neuron)]
    rank = int((densities["density"] > row["density"]).sum()) + 1
    return _neurons.rank_curve(densities["density"].to_numpy(), rank, float(row["density"]), str(row["label"]))


def neuron_values(run: Run, layer: int, neuron: int) -> Figure:
    """Draw how a neuron's values are distributed where it fires: all of them where the run counts values by bins, else
    those that it keeps. Page Neuron."""
    row = by_neuron(run, layer=layer).iloc[_index(run, layer, neuron)]
    mean, largest = float(row["value_mean"]), float(row["value_max"])
    if row["fires"]:
        with suppress(Missing):
            return _neurons.value_bars(neuron_histogram(run, layer, neuron), mean, largest)
    return _neurons.value_distribution(sampled(run, layer, neuron)["value"].to_numpy(), mean, largest)


def layer_times(run: Run) -> Figure:
    """Draw the dense and the sparse time of each layer's FFN. Page Kernels."""
    table = speedup(run)
    return _timings.dense_and_sparse(table, table.attrs["comparable"])


def speedup_by_nnz(run: Run) -> Figure:
    """Draw each layer's speedup against its mean nnz, with the line through their times. Page Kernels."""
    return _timings.speedup_by_nnz(speedup(run))


def speedup_potential(run: Run) -> Figure:
    """Draw what each layer could still gain and what its sparse FFN has saved, a bar a layer. Page Kernels."""
    return _potential.gains(layer_potential(run))


def live_calls(run: Run) -> Figure:
    """Draw the time of each sparse call above its nnz, as the capture ran. Page Kernels."""
    table = _live.sparse_calls(run)
    if table.empty:
        raise Missing(f"{run.name} has no sparse call that was timed by itself: it is of an older capture.")
    return _live.times_and_nnz(table)


def pass_time(run: Run) -> Figure:
    """Draw the time of a forward pass by part, dense and sparse. Page Kernels."""
    return _kernels.time_split(model_time(run))


def tile_overflow(run: Run) -> Figure:
    """Draw the share of tokens that overflow a tile, by layer and compression. Page Kernels."""
    return _kernels.audit_map(_kernels.of_tile(tile_audit(run), run.manifest.layout["tile"]))


def times_over_capture(run: Run, layer: int | None = None) -> Figure:
    """Draw dense and sparse time a token in each timed batch, of all layers or one. Page Kernels."""
    return _timings.over_batches(_timings.summed(_timings.batch_times(run), layer))


def compression_times(run: Run) -> Figure:
    """Draw the time of each layer by compression, the fastest safe one marked. Page Kernels, after `twell bench`."""
    return _compressions.time_map(_compressions.fastest_kernels(tile_settings(run)))


def bench_by_layer(run: Run) -> Figure:
    """Draw the time of every FFN operation by layer, as `twell bench` measured it first. Page Kernels."""
    return _bench.time_by_layer(_rows.layer_cases(_first_setting(run)))


def bench_by_nnz(run: Run) -> Figure:
    """Draw speedup over dense by nnz on synthetic inputs, as `twell bench` measured it first. Page Kernels."""
    rows = _first_setting(run)
    cases = _rows.synthetic_cases(rows)
    return _bench.speed_by_nnz(cases[cases["sparse"]], _bench.curve_height(_rows.layer_cases(rows)))


def _index(run: Run, layer: int, neuron: int) -> int:
    if not 0 <= neuron < run.widths[layer]:
        raise UserError(f"Expected a neuron from 0 to {run.widths[layer] - 1}, got {neuron}.")
    return neuron


def _first_setting(run: Run) -> pd.DataFrame:
    """Return the rows of `ffn_times` in the setting that the page shows first."""
    settings = _rows.by_setting(_rows.ffn_times(run))
    if not settings:
        raise Missing(f"{run.name} has no benchmark of its FFN width: measure one with `twell bench MODEL --out RUN`.")
    return next(iter(settings.values()))
