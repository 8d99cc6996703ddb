"""Declare the table of what ablations do to the loss."""

from __future__ import annotations

from twell.workbench.run.columns import LAYER, NEURON, Column, Table, tokens_column

OWN_TOKENS = "the run's tokens"  # the name of a study's text, where it is that of the run
_PREDICTED = tokens_column("tokens whose next token was predicted")

EFFECTS = Table(
    "effects",
    "a document's tokens in one batch under one condition of `twell ablate`; sums of several batches add up",
    (
        Column("study", "int32", "", "number of the study; its text and options are in the manifest's `effects`"),
        Column("condition", "string", "", "what was taken away, as `--condition` spells it"),
        Column(
            "kind",
            "string",
            "",
            "ffn: a layer's FFN; dead, rarest, busiest, random: neurons by their firings in the run; weakest, "
            "scattered: firings of each token, by |hidden| or at random; smallest, below: values up to a quantile of "
            "the layer or to a number; shares: up to a quantile of each layer, of its own share; neurons: a list",
        ),
        Column("layer", "int32", "", "decoder layer, or -1 for all of them"),
        Column("share", "float64", "", "share that was taken away, of what the kind says; of below the value", True),
        Column(
            "silenced", "int64", "neurons", "how many neurons were silent throughout; null where tokens differ", True
        ),
        Column("batch", "int32", "", "number of the batch in the study, from 0"),
        Column("source", "string", "", "the text source of the document"),
        Column("document", "int32", "", "number of the document in the source, from 0"),
        Column("piece", "int32", "", "part of a long document, from 0: as many tokens as 16 sequences have"),
        _PREDICTED,
        Column("loss_sum", "float64", "nats", "sum of their losses under the condition"),
        Column("base_sum", "float64", "nats", "sum of their losses with nothing taken away, in the same batch"),
        Column(
            "firings",
            "int64",
            "",
            "firings in all layers that were left, on one of 8 tokens: hidden values past the "
            "threshold, 0 for a ReLU; with a ReLU on both branches, those with a product that is not zero",
        ),
        Column("base_firings", "int64", "", "firings on the same tokens with nothing taken away"),
    ),
)

NEURON_EFFECTS = Table(
    "neuron_effects",
    "a neuron, and what silencing it would do to the loss, to first order (`twell ablate --neurons`)",
    (
        LAYER,
        NEURON,
        Column("estimate_sum", "float64", "nats", "sum over tokens of - gradient × hidden value"),
        _PREDICTED,
    ),
    adds_up=False,
    cumulative=True,
)
