"""The summaries that take the means of the whole run, and so every part anew, declared as the others are
(`summary_schema`)."""

from __future__ import annotations

from twell.workbench.run.columns import (
    CLUSTERS,
    FLAGGED,
    LAYER,
    LOSSES_MADE,
    NO_LOSS,
    REPLICATE,
    TOKEN_ID,
    Column,
    SummaryTable,
    tokens_column,
)

TOKEN_SCORES = SummaryTable(
    "token_scores",
    "a token of the vocabulary that occurs",
    (
        TOKEN_ID,
        FLAGGED,
        Column("z_sum", "double", "sd", "sum of z: nnz less its layer's mean over its layer's sd, mean over layers"),
        Column("z_square", "double", "sd²", "sum over documents of its z there, squared"),
        Column("z_cross", "double", "sd·tokens", "sum over documents of its z there times its occurrences there"),
        Column("z_position_sum", "double", "sd", "as z_sum, by means and sds of the layer at its band of positions"),
        Column("z_position_square", "double", "sd²", "sum over documents of that z there, squared"),
        Column("z_position_cross", "double", "sd·tokens", "sum over documents of that z there times occurrences there"),
        Column("class", "string", "", "its class by spelling (see token_classes)"),
        Column(
            "z_beside", "double", "sd²", "sum over documents of its z there times that of all unflagged tokens there"
        ),
        Column("z_tokens_beside", "double", "sd·tokens", "sum over documents of its occurrences there times that z"),
        Column("z_position_beside", "double", "sd²", "as z_beside, of z by position"),
        Column("z_position_tokens_beside", "double", "sd·tokens", "as z_tokens_beside, of z by position"),
    ),
    adds_up=False,
    keys=("token_id", "flagged"),
    needs_means=True,
)

WORDS = SummaryTable(
    "words",
    "a word of the text: tokens joined where letters, digits or bytes of longer characters meet; most frequent first",
    (
        Column("word", "binary", "", "its bytes, without white space around them"),
        Column("occurrences", "int64", "", "how often it occurs, n, where none of its tokens is flagged"),
        Column("sequences", "int64", "", "sequences it occurs in"),
        Column("occurrences_square", "int64", "", "sum over documents of its occurrences there, squared"),
        Column("pieces", "int64", "tokens", "tokens that its occurrences are cut into"),
        Column("nnz_sum", "double", "neurons", "sum of its nnz, over all layers, mean over its tokens"),
        Column("z_sum", "double", "sd", "sum of z (see token_scores), mean over its tokens"),
        Column("z_square", "double", "sd²", "sum over documents of its z there, squared"),
        Column("z_cross", "double", "sd", "sum over documents of its z there times its occurrences there"),
        CLUSTERS,
        Column(
            "z_beside", "double", "sd²", "sum over documents of its z there times that of all unflagged tokens there"
        ),
        Column("z_tokens_beside", "double", "sd", "sum over documents of its occurrences there times that z"),
    ),
    adds_up=False,
    in_summary_only=False,
    keys=("word",),
    absent="it has no vocabulary, which spells the tokens",
    needs_means=True,
)

CLASS_SCORES = SummaryTable(
    "class_scores",
    "a class of tokens, in a replicate, over unflagged tokens",
    (
        Column("class", "string", "", "by spelling; a part of a URL beside one of . / : alone (see token_classes)"),
        REPLICATE,
        tokens_column(),
        Column("z_sum", "double", "sd", "sum of z (see token_scores)"),
        Column("nnz_sum", "double", "neurons", "sum of nnz, over all layers"),
        *LOSSES_MADE,
    ),
    adds_up=False,
    keys=("class", "replicate"),
    needs_means=True,
    since=5,
)

SURPRISAL_WITHIN = SummaryTable(
    "surprisal_within",
    "a layer and replicate, over unflagged tokens that have a loss, each number less the mean of its token",
    (
        LAYER,
        REPLICATE,
        tokens_column(),
        Column("product", "double", "neurons·nats", "sum of nnz times the next token's loss"),
        Column("nnz_square", "double", "neurons²", "sum of squared nnz"),
        Column("loss_square", "double", "nats²", "sum of squared losses"),
    ),
    adds_up=False,
    keys=("layer", "replicate"),
    absent=NO_LOSS,
    needs_means=True,
    since=5,
)
