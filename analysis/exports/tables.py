"""The analysis tables that are exported, each declared once, in the order of an export and of the document.

To export another table, add it to EXPORTED and to the names of `twell.analysis`, and run `make docs`. Its columns are
described in its function's docstring, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from twell.analysis.ablations.allocation import allocation
from twell.analysis.ablations.by_condition import effects
from twell.analysis.activity.across_layers import across_layers
from twell.analysis.activity.entropy import entropy_correlation
from twell.analysis.activity.layers import by_layer, layer_histogram
from twell.analysis.activity.origins import by_phase, by_source, first_positions
from twell.analysis.activity.position_decay import position_fit
from twell.analysis.activity.positions import by_position, position_blocks
from twell.analysis.activity.surprisal import (
    surprisal,
    surprisal_classes,
    surprisal_correlation,
    surprisal_own,
    surprisal_within,
)
from twell.analysis.claims.findings import findings
from twell.analysis.figures.table_plots import by_layer as layer_plots
from twell.analysis.figures.table_plots import by_neuron as neuron_plots
from twell.analysis.figures.table_plots import by_token as token_plots
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.concentration import concentration, dead_curve, dead_neurons, lorenz
from twell.analysis.neurons.effects import neuron_effects
from twell.analysis.neurons.firing_clusters import firing_clusters
from twell.analysis.neurons.reuse import reuse, reuse_cache
from twell.analysis.neurons.value_histogram import neuron_histogram
from twell.analysis.speed.compression import tile_settings
from twell.analysis.speed.contribution import gain_correlations, layer_gains, model_time
from twell.analysis.speed.speedup import speedup, timings_by_batch
from twell.analysis.speed.tile_overflow import peer_audit, tile_audit
from twell.analysis.speed.unions import union_sizes
from twell.analysis.speed.whole_model import whole_model
from twell.analysis.tokens.by_token import by_token
from twell.analysis.tokens.classes import token_classes
from twell.analysis.tokens.identity import token_covariates, token_identity
from twell.analysis.tokens.words import by_word
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class ExportedTable:
    """An analysis table and its section of the notebook and of the page.

    compute: the function of `twell.analysis`, called with its defaults. title, text: heading and sentence of the
    section; a table without a title is exported, but has no section. page_figure: the function of `plots` that draws
    the dashboard's figure of it from a run, by name, as `plots` loads plotly, which a table does not need. plot: the
    function that draws the table, where no page has a figure of its own.
    """

    compute: Callable[[Run], pd.DataFrame]
    title: str = ""
    text: str = ""
    plot: Callable[[pd.DataFrame], Figure] | None = None
    page_figure: str = ""

    @property
    def name(self) -> str:
        """Return the table's name, which is that of its function in `twell.analysis`."""
        return self.compute.__name__

    @property
    def figure_code(self) -> str:
        """Return the expression that draws the section's figure, of `run` and `table`; "" where it has none."""
        if self.page_figure:
            return f"plots.{self.page_figure}(run)"
        return f"plots.dressed(plots.{self.plot.__name__}(table))" if self.plot else ""


EXPORTED = (
    ExportedTable(findings, "Findings", "What has been claimed about sparse layers, and what this run says alone."),
    ExportedTable(
        by_layer, "Activity by layer", "How many neurons a token fires in each layer.", page_figure="nnz_distributions"
    ),
    ExportedTable(layer_histogram),
    ExportedTable(by_position),
    ExportedTable(
        position_blocks,
        "Positions",
        "Mean nnz along the sequence, over the layer's own mean.",
        page_figure="nnz_by_position",
    ),
    ExportedTable(
        position_fit,
        "How fast it falls off",
        "Whether nnz falls along the sequence, and as which curve, from position 1 on.",
        page_figure="decay_lengths",
    ),
    ExportedTable(
        first_positions,
        "Position 0 against later positions",
        "Position 0 over later ones: of a document, which may carry a special token, and of a cut in one.",
        layer_plots.starts,
    ),
    ExportedTable(
        by_phase,
        "Reading against generating",
        "Prompts and generated tokens apart: tables over a whole run mix them.",
        layer_plots.origins,
    ),
    ExportedTable(
        by_source, "Activity by source of the text", "Each source of text against all others.", layer_plots.origins
    ),
    ExportedTable(
        across_layers,
        "Layers that are busy on the same tokens",
        "Whether a token that fires much in one layer does so in others: if so, a layer's load can be told ahead.",
        layer_plots.depth,
    ),
    ExportedTable(
        by_token,
        "Tokens",
        "Loudest and quietest tokens, by z shrunk the more, the rarer a token is.",
        page_figure="top_tokens",
    ),
    ExportedTable(
        token_identity,
        "How much the token itself decides",
        "How much of the variance of nnz the token itself explains: near 1, a layer's load could be looked up; near 0, "
        "the context decides.",
        token_plots.identity,
    ),
    ExportedTable(
        token_covariates,
        "What the z of a token goes with",
        "What z goes with over tokens of the vocabulary, all at once: rare tokens differ in more than frequency.",
        token_plots.covariates,
    ),
    ExportedTable(
        token_classes, "Classes of tokens", "Kinds of tokens, by their spelling.", page_figure="token_class_dots"
    ),
    ExportedTable(by_word, "Words", "Put together from their pieces.", page_figure="top_words"),
    ExportedTable(surprisal, "Activity and surprise", "nnz by the loss of the next token.", page_figure="nnz_by_loss"),
    ExportedTable(surprisal_correlation, "Rank correlation", "Spearman's, of nnz and the next token's loss."),
    ExportedTable(
        surprisal_within,
        "Activity and surprise within tokens",
        "Of one token in different contexts: nnz beside the next token's loss, without what tokens differ in.",
        layer_plots.within,
    ),
    ExportedTable(
        entropy_correlation,
        "Expected and actual surprise",
        "nnz beside what the model expects to lose on the next token and what it then loses, and each given the other.",
        layer_plots.expected,
    ),
    ExportedTable(surprisal_own),
    ExportedTable(surprisal_classes),
    ExportedTable(
        by_neuron, "Neurons", "How many neurons of each layer fire how often.", page_figure="neuron_densities"
    ),
    ExportedTable(neuron_histogram),
    ExportedTable(concentration, "Concentration", "The share of firings that the busiest neurons carry."),
    ExportedTable(lorenz, "Lorenz curve", "Firings by share of neurons.", neuron_plots.lorenz),
    ExportedTable(dead_curve, "Dead neurons", "Neurons without a firing, by sequences seen.", neuron_plots.dead),
    ExportedTable(dead_neurons),
    ExportedTable(
        reuse,
        "Firings in common with earlier tokens",
        "The share of a token's firings that an earlier one fired too; dotted: one of another sequence.",
        neuron_plots.lags,
    ),
    ExportedTable(
        reuse_cache,
        "What a cache of neurons would serve",
        "What share of firings a cache of the neurons of the last tokens would serve, and how many neurons it holds.",
        neuron_plots.cache,
    ),
    ExportedTable(
        firing_clusters,
        "Neurons that fire together",
        "Groups of neurons that fire together, which could be stored, fetched or pruned as one.",
        neuron_plots.clusters,
    ),
    ExportedTable(union_sizes, "Unions", "Different neurons in a block of consecutive tokens."),
    ExportedTable(
        tile_audit,
        "Tile audit",
        "Firings and tokens that exceed the slots of a tile, by compression.",
        page_figure="tile_overflow",
    ),
    ExportedTable(peer_audit),
    ExportedTable(tile_settings),
    ExportedTable(speedup, "Time by layer", "Dense and sparse time of each layer's FFN.", page_figure="layer_times"),
    ExportedTable(
        layer_gains,
        "Speedup and activity",
        "Dense over sparse time, by layer, and the trend.",
        page_figure="speedup_by_nnz",
    ),
    ExportedTable(gain_correlations),
    ExportedTable(model_time, "Where the time goes", "Where the time of a forward pass goes.", page_figure="pass_time"),
    ExportedTable(whole_model, "Whole model", "Tokens a second with dense FFNs and with sparse ones."),
    ExportedTable(timings_by_batch),
)
ANALYSIS = {table.name: table.compute for table in EXPORTED}
SECTIONS = tuple(table for table in EXPORTED if table.title)
# Of runs whose model was ablated. As tables go those of the run itself, of the same names.
ABLATIONS = (
    ExportedTable(
        effects,
        "What matters",
        "What the loss says when neurons, firings or layers are taken away, as twell ablate measured it.",
        page_figure="ablation_curves",
    ),
    ExportedTable(
        allocation,
        "A budget of loss over the layers",
        "The share of each layer's hidden values that is set to 0, the smallest ones.",
        page_figure="ablation_budget",
    ),
    ExportedTable(
        neuron_effects,
        "Neurons by effect",
        "What silencing a neuron does to the loss, to first order.",
        page_figure="ablation_neurons",
    ),
)


def sections(run: Run) -> list[ExportedTable]:
    """Return the sections of a run's document, in order: of ablations those that it has, and the findings last."""
    measured = []
    for section in ABLATIONS:
        with suppress(Missing):
            section.compute(run)
            measured.append(section)
    return sorted([*SECTIONS, *measured], key=lambda section: section.name == "findings")
