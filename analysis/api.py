"""Gather every question about a run, and check what each is asked with: the names of `twell.analysis`."""

from twell.analysis import questions
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
from twell.analysis.compare import compare_layers, compare_positions, compare_runs, compare_tokens
from twell.analysis.exports.command import export
from twell.analysis.exports.notebook import shaded_text
from twell.analysis.neurons.at_token import neurons_at
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.coactivation import fired_csr, together
from twell.analysis.neurons.concentration import concentration, dead_curve, dead_mask, dead_neurons, lorenz
from twell.analysis.neurons.effects import neuron_effects
from twell.analysis.neurons.examples import examples
from twell.analysis.neurons.firing_clusters import firing_clusters
from twell.analysis.neurons.reuse import reuse, reuse_cache
from twell.analysis.neurons.value_histogram import neuron_histogram
from twell.analysis.overview import overview
from twell.analysis.shipped import studies, study_runs
from twell.analysis.speed.compression import tile_settings
from twell.analysis.speed.contribution import gain_correlations, layer_gains, model_time
from twell.analysis.speed.ffn_speedup import ffn_speedup
from twell.analysis.speed.potential import layer_potential
from twell.analysis.speed.speedup import model_speedup, speedup, speedup_correlation, timings_by_batch
from twell.analysis.speed.tile_overflow import peer_audit, tile_audit
from twell.analysis.speed.unions import union_sizes
from twell.analysis.speed.whole_model import whole_model
from twell.analysis.summaries.refresh import ensure, summarize
from twell.analysis.tokens.by_token import by_token, token_profile
from twell.analysis.tokens.classes import token_classes
from twell.analysis.tokens.contexts import contexts, loudest, passages
from twell.analysis.tokens.identity import token_covariates, token_identity
from twell.analysis.tokens.words import by_word
from twell.analysis.training import compare_trainings, sparse_since, training_layers, training_results, training_steps

__all__ = [
    "across_layers",
    "allocation",
    "by_layer",
    "by_neuron",
    "by_phase",
    "by_position",
    "by_source",
    "by_token",
    "by_word",
    "compare_layers",
    "compare_positions",
    "compare_runs",
    "compare_tokens",
    "compare_trainings",
    "concentration",
    "contexts",
    "dead_curve",
    "dead_mask",
    "dead_neurons",
    "effects",
    "ensure",
    "entropy_correlation",
    "examples",
    "export",
    "ffn_speedup",
    "findings",
    "firing_clusters",
    "first_positions",
    "fired_csr",
    "gain_correlations",
    "layer_gains",
    "layer_histogram",
    "layer_potential",
    "lorenz",
    "loudest",
    "model_speedup",
    "model_time",
    "neurons_at",
    "neuron_effects",
    "neuron_histogram",
    "overview",
    "passages",
    "peer_audit",
    "position_blocks",
    "position_fit",
    "reuse",
    "reuse_cache",
    "sparse_since",
    "shaded_text",
    "speedup",
    "speedup_correlation",
    "studies",
    "study_runs",
    "summarize",
    "surprisal",
    "surprisal_classes",
    "surprisal_correlation",
    "surprisal_own",
    "surprisal_within",
    "tile_audit",
    "tile_settings",
    "timings_by_batch",
    "together",
    "token_classes",
    "token_covariates",
    "token_identity",
    "token_profile",
    "training_layers",
    "training_results",
    "training_steps",
    "union_sizes",
    "whole_model",
]

globals().update({name: questions.asked(globals()[name]) for name in __all__})
