"""Say in words what a run lacks that has no rows of a table, and how to record them: messages name no tables."""

from __future__ import annotations

ABSENT: dict[str, tuple[str, str]] = {  # by table: what is not there, and what to do; "" where nothing helps
    # an option stands with its argument of `capture` in Python: either may be at hand where the sentence is read
    "activity": ("rows of single tokens", ""),
    "neurons": ("sums by neuron", "capture with --probes neurons (in Python probes='neurons')"),
    "sequences": ("list of sequences", ""),
    "timings": ("timings", "capture with --timings above 0 (in Python timings=)"),
    "vocab": ("vocabulary", ""),
    "tiles": ("counts by tile", ""),
    "unions": ("counts of the different neurons that blocks of tokens fire", ""),
    "value_bins": ("counts of values by neuron", "capture with --probes neurons (in Python probes='neurons')"),
    "examples": ("examples of where neurons fire", "capture with --examples 8 (in Python examples=8)"),
    "fired": ("sample of firings", "capture with --fired LAYERS (in Python fired=[LAYERS])"),
    "bench": ("benchmark", "measure one with `twell bench MODEL --out RUN`"),
    "training": ("training", "`twell train` records one"),
    "effects": ("ablations", "measure some with `twell ablate RUN`"),
    "neuron_effects": ("effects of single neurons", "estimate them with `twell ablate RUN --neurons 64`"),
}
UNTIMED = "it counts what is above a threshold, and the model runs densely, so that there is nothing to compare"
