"""The tables that analysis derives from a run's parts, declared as the run's own are (`schema.py`).

A table's declaration holds every fact about it: its keys, how its columns combine (`Column.merge`), the table of the
run that it comes from, and why a run may lack it. Most hold integer sums that add up across parts, ranks and runs.
Those of `tables.scores` take the means of the whole run, and `surprisal_correlations` come from other summaries.

Tables and columns are added at the end, and counted by `revision`: a run whose summaries are of an earlier one gets
them built anew; a summary-only copy of an earlier one opens, and lacks what came later.
"""

from __future__ import annotations

from twell.workbench.run.columns import (
    CLUSTERS,
    FLAGGED,
    LAYER,
    LAYER_OR_SUM,
    LOSSES_MADE,
    NEURON_SUMS,
    NO_ENTROPY,
    NO_LOSS,
    REPLICATE,
    TILE_COUNTS,
    TOKEN_ID,
    UNION_COUNTS,
    VALUE_COUNTS,
    Column,
    SummarySchema,
    SummaryTable,
    tokens_column,
)
from twell.workbench.run.tables.highest import HIGHEST
from twell.workbench.run.tables.scores import CLASS_SCORES, SURPRISAL_WITHIN, TOKEN_SCORES, WORDS

_NNZ_SUM = Column("nnz_sum", "int64", "neurons", "sum of nnz")
_NNZ_SQUARE = Column("nnz_square", "int64", "neurons²", "sum over documents of the token's nnz there, squared")
_NNZ_CROSS = Column("nnz_cross", "int64", "neurons·tokens", "sum over documents of nnz there times tokens there")

_LAYERS = SummaryTable(
    "layers",
    "a count that occurs in a layer",
    (
        LAYER_OR_SUM,
        FLAGGED,
        Column("nnz", "int32", "neurons", "the count"),
        tokens_column("tokens that have it"),
    ),
    keys=("layer", "flagged", "nnz"),
)

_POSITIONS = SummaryTable(
    "positions",
    "a position and layer",
    (
        Column("position", "int32", "tokens", "place in the sequence, from 0"),
        Column("flagged", "bool", "", "as elsewhere, but position 0 counts as unflagged unless it is not finite"),
        LAYER_OR_SUM,
        tokens_column(),
        _NNZ_SUM,
        Column("nnz_square", "int64", "neurons²", "sum of squared nnz"),
        Column("clusters", "int64", "", "documents, or blocks of long ones, with a token there; 0 where flagged"),
        Column("clusters_tokens_square", "int64", "tokens²", "sum over these of their tokens there, squared"),
        Column("clusters_nnz_square", "int64", "neurons²", "sum over these of their nnz there, squared"),
        Column("clusters_cross", "int64", "neurons·tokens", "sum over these of their nnz there times tokens there"),
    ),
    keys=("layer", "flagged", "position"),
)

_POSITION_BANDS = SummaryTable(
    "position_bands",
    "a band of positions, in a layer and replicate, over unflagged tokens from position 1 on",
    (
        LAYER_OR_SUM,
        REPLICATE,
        Column("band", "int32", "", "the position below 8, then floor(√(8·position))"),
        tokens_column(),
        _NNZ_SUM,
    ),
    keys=("layer", "replicate", "band"),
)

_TOKENS = SummaryTable(
    "tokens",
    "a token of the vocabulary that occurs",
    (
        TOKEN_ID,
        FLAGGED,
        tokens_column("its occurrences n"),
        Column("sequences", "int64", "", "sequences it occurs in"),
        Column("tokens_square", "int64", "tokens²", "sum over documents of its occurrences there, squared"),
        Column("nnz_sum", "int64", "neurons", "sum of its nnz, over all layers"),
        _NNZ_SQUARE,
        _NNZ_CROSS,
        Column("loss_sum", "int64", "2^-24 nats", "sum of the losses of the predictions made at it"),
        Column("loss_tokens", "int64", "tokens", "occurrences with such a loss"),
        Column("surprisal_sum", "int64", "2^-24 nats", "sum of its own losses, as predicted one position earlier"),
        Column("surprisal_tokens", "int64", "tokens", "occurrences with such a loss"),
        CLUSTERS,
    ),
    keys=("token_id", "flagged"),
)

_TOKEN_LAYERS = SummaryTable(
    "token_layers",
    "a token of the vocabulary that occurs, and a layer",
    (
        TOKEN_ID,
        FLAGGED,
        LAYER,
        _NNZ_SUM,
        _NNZ_SQUARE,
        _NNZ_CROSS,
    ),
    keys=("layer", "flagged", "token_id"),
)

_SURPRISAL = SummaryTable(
    "surprisal",
    "a band of the next token's loss, in a layer and replicate, over unflagged tokens",
    (
        LAYER,
        REPLICATE,
        Column("loss_bin", "int32", "", "floor(24·√loss): from (k/24)² to ((k+1)/24)² nats"),
        tokens_column(),
        _NNZ_SUM,
    ),
    keys=("layer", "replicate", "loss_bin"),
    absent=NO_LOSS,
)

_SURPRISAL_RANKS = SummaryTable(
    "surprisal_ranks",
    "a class of loss and of nnz, in a layer and replicate, over unflagged tokens; of long runs as `surprisal_classes`",
    (
        LAYER,
        REPLICATE,
        Column("loss_class", "int32", "", "loss_bin // 4"),
        Column("nnz_class", "int32", "", "nnz below 8, then floor(√(8·nnz))"),
        tokens_column(),
    ),
    keys=("layer", "nnz_class", "loss_class", "replicate"),
    absent=NO_LOSS,
)

_NEURON_SUMS = SummaryTable(
    "neurons",
    "a neuron that fired in the run",
    NEURON_SUMS,
    keys=("layer", "neuron"),
    source="neurons",
    absent="it was captured with --probes counts (in Python probes='counts'), which keeps counts per token alone",
)

_TILE_COUNTS = SummaryTable(
    "tiles",
    "a number of neurons fired in one tile that occurs in a layer, for one tile size; over unflagged tokens",
    TILE_COUNTS,
    keys=("layer", "tile", "occupancy"),
    source="tiles",
    absent="it was captured without tile counts",
)

_UNION_COUNTS = SummaryTable(
    "unions",
    "a number of different neurons fired in a block of consecutive tokens that occurs in a layer",
    UNION_COUNTS,
    keys=("layer", "block", "neurons"),
    source="unions",
    absent="it was captured without the different neurons of blocks of tokens",
)

# No run of an earlier revision has the table that it sums up, so it does not count as one.
_VALUE_COUNTS = SummaryTable(
    "value_bins",
    "a neuron and a bin of its values in the run; bins without a firing have no row",
    VALUE_COUNTS,
    keys=("layer", "neuron", "bin"),
    source="value_bins",
    absent="it was captured without --examples (in Python examples=8), which count each neuron's values too",
)

_SURPRISAL_CLASSES = SummaryTable(
    "surprisal_classes",
    "a class of token, of loss and of nnz, in a layer and replicate, over unflagged tokens; of long runs, of 20 "
    "documents in every 40, 80, …, so that half a million to a million tokens are counted",
    (
        LAYER,
        Column("own", "bool", "", "false: by the loss of the next token; true: by that of the token itself"),
        Column("class", "string", "", "class of the token by its spelling (see token_classes)"),
        Column("replicate", "int32", "", "document modulo 10: the groups that intervals are jackknifed over"),
        Column("loss_class", "int32", "", "floor(3·√loss)"),
        Column("nnz_class", "int32", "", "floor(8·⁴√nnz)"),
        tokens_column(),
        _NNZ_SUM,
    ),
    keys=("layer", "own", "class", "nnz_class", "loss_class", "replicate"),
    absent=NO_LOSS,
    since=1,
)

_USED = SummaryTable(
    "used",
    "a layer of a model with a ReLU on the up branch too",
    (
        LAYER,
        FLAGGED,
        tokens_column(),
        Column("used_sum", "int64", "neurons", "sum of how many fired neurons have a product that is not zero"),
    ),
    keys=("layer", "flagged"),
    absent="its model has no ReLU on the up branch, so every neuron that fires is used",
    since=1,
)

_SURPRISAL_CORRELATIONS = SummaryTable(
    "surprisal_correlations",
    "a layer, with one of two losses, of one class of tokens or all; over unflagged tokens",
    (
        Column("own", "bool", "", "false: with the loss of the next token; true: with that of the token itself"),
        Column("class", "string", "", "class of the tokens by their spelling (see token_classes); empty: all of them"),
        LAYER,
        Column("spearman", "double", "", "rank correlation of nnz and the loss"),
        Column("low", "double", "", "lower end of its 95 % interval"),
        Column("high", "double", "", "upper end"),
        tokens_column(),
        Column("groups", "int32", "", "groups of documents, each left out once for the interval; of all classes"),
        Column("kept", "double", "", "share of it that classes of nnz and loss keep, by which it is divided"),
    ),
    adds_up=False,
    keys=("own", "class", "layer"),
    absent=NO_LOSS,
)

# No run of an earlier revision has the column that it comes from, so it does not count as one.
_ENTROPY_RANKS = SummaryTable(
    "entropy_ranks",
    "a class of entropy and of nnz or loss, in a layer and replicate, over the tokens of `surprisal_ranks`",
    (
        Column("layer", "int32", "", "decoder layer, from 0; -1: classes of the next token's loss in place of nnz"),
        REPLICATE,
        Column("entropy_class", "int32", "", "floor(6·√entropy) of the next token's prediction"),
        Column("rank_class", "int32", "", "nnz_class or loss_class, as in `surprisal_ranks`"),
        tokens_column(),
    ),
    keys=("layer", "rank_class", "entropy_class", "replicate"),
    absent=NO_ENTROPY,
)

_ORIGINS = SummaryTable(
    "origins",
    "a source, phase and place in the sequence, in a layer and replicate; flags as in `positions`",
    (
        LAYER_OR_SUM,
        Column("source", "string", "", "the text source; empty where the run does not tell it"),
        Column("phase", "int32", "", "0 prefill, 1 decode"),
        Column(
            "place",
            "int32",
            "",
            "0: past position 0; 1: a document's first token; 2: its next sequence's; 3: of either",
        ),
        REPLICATE,
        tokens_column(),
        _NNZ_SUM,
        *LOSSES_MADE,
    ),
    keys=("layer", "source", "phase", "place", "replicate"),
    since=4,
)

_CLASS_LAYERS = SummaryTable(
    "class_layers",
    "a class of tokens, in a layer and replicate, over unflagged tokens; classes as in `class_scores`",
    (
        LAYER,
        Column("class", "string", "", "class of the tokens, in context"),
        REPLICATE,
        tokens_column(),
        _NNZ_SUM,
        Column("nnz_square", "int64", "neurons²", "sum of squared nnz"),
    ),
    keys=("layer", "class", "replicate"),
    since=7,
)

_TABLES = (
    *(_LAYERS, _POSITIONS, _POSITION_BANDS, _TOKENS, _TOKEN_LAYERS, TOKEN_SCORES, _SURPRISAL, _SURPRISAL_RANKS),
    *(_NEURON_SUMS, _TILE_COUNTS, _UNION_COUNTS, _SURPRISAL_CLASSES, _USED, WORDS, _SURPRISAL_CORRELATIONS, _ORIGINS),
    *(CLASS_SCORES, SURPRISAL_WITHIN, _VALUE_COUNTS, _CLASS_LAYERS, _ENTROPY_RANKS, HIGHEST),
)

SUMMARIES = SummarySchema(2, 9, {table.name: table for table in _TABLES})
