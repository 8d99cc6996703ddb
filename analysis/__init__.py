"""One question a module, over a run's tables; each answer a DataFrame (or a dict) with documented columns.

    from twell.workbench import open_run
    from twell.analysis import by_layer
    by_layer(open_run("runs/demo"))

Each leaves flagged tokens out unless told `flagged=True`, says in `attrs` what it counted and what it left out, and
raises `Missing` with one sentence where the run lacks what it needs. Summaries are built by the first question asked of
a run; a query engine is loaded only then.
"""

from twell.analysis.classes import token_classes
from twell.analysis.compare import compare_layers, compare_positions, compare_runs, compare_tokens
from twell.analysis.concentration import concentration, dead_curve, dead_mask, dead_neurons, lorenz
from twell.analysis.contexts import contexts, loudest, passages
from twell.analysis.decay import position_fit
from twell.analysis.examples import examples
from twell.analysis.export import export
from twell.analysis.findings import findings
from twell.analysis.gains import gain_correlations, layer_gains, model_time
from twell.analysis.layers import by_layer, layer_histogram
from twell.analysis.neurons import by_neuron
from twell.analysis.overview import overview
from twell.analysis.positions import by_position, position_blocks
from twell.analysis.refresh import ensure, summarize
from twell.analysis.settings import tile_settings
from twell.analysis.speedup import model_speedup, speedup, speedup_correlation, timings_by_batch
from twell.analysis.surprisal import surprisal, surprisal_classes, surprisal_correlation, surprisal_own
from twell.analysis.tiles import peer_audit, tile_audit
from twell.analysis.together import fired_csr, together
from twell.analysis.tokens import by_token, token_profile
from twell.analysis.unions import union_sizes
from twell.analysis.words import by_word

__all__ = [
    "by_layer",
    "by_neuron",
    "by_position",
    "by_token",
    "by_word",
    "compare_layers",
    "compare_positions",
    "compare_runs",
    "compare_tokens",
    "concentration",
    "contexts",
    "dead_curve",
    "dead_mask",
    "dead_neurons",
    "ensure",
    "examples",
    "export",
    "findings",
    "fired_csr",
    "gain_correlations",
    "layer_gains",
    "layer_histogram",
    "lorenz",
    "loudest",
    "model_speedup",
    "model_time",
    "overview",
    "passages",
    "peer_audit",
    "position_blocks",
    "position_fit",
    "speedup",
    "speedup_correlation",
    "summarize",
    "surprisal",
    "surprisal_classes",
    "surprisal_correlation",
    "surprisal_own",
    "tile_audit",
    "tile_settings",
    "timings_by_batch",
    "together",
    "token_classes",
    "token_profile",
    "union_sizes",
]
