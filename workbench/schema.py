"""Every table and column of a run, declared once, as data.

A run is a folder of Parquet tables and one manifest (`run.json`). What each column is called, its type, its unit
and what it means stands here and nowhere else: the writer builds its Arrow schemas from these declarations, the
readers look columns up in them, and the column dictionary in `data/README.md` is generated from them
(`python -m twell.workbench.schema` prints it). This module imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1

# Bits of activity.flags. Statistics leave every row with flags != 0 out unless they are asked for it.
FLAG_SPECIAL, FLAG_FIRST, FLAG_NOT_FINITE = 1, 2, 4

# activity.phase
PREFILL, DECODE = 0, 1

# neurons.value_sum counts in units of 2^-20: integer sums come out the same in any order.
VALUE_SCALE = 2**20

# Marks of a neuron that never fired, in the columns that would otherwise name a token or a sequence.
NEVER_SEQUENCE, NEVER_TOKEN_MIN, NEVER_TOKEN_MAX = -1, 2**31 - 1, -1


@dataclass(frozen=True)
class Column:
    """One column. `type` is an Arrow type name; `per_layer` columns are written once a layer, as `name_LL`."""

    name: str
    type: str
    unit: str
    meaning: str
    nullable: bool = False
    per_layer: bool = False


@dataclass(frozen=True)
class Table:
    """One table. `grain` says what a row is; `adds_up` whether rows of several parts may be summed."""

    name: str
    grain: str
    columns: tuple[Column, ...]
    adds_up: bool = True
    in_summary_only: bool = True
    single_file: bool = False

    def column(self, name: str) -> Column:
        """The declaration of a column; KeyError if the table has none of that name."""
        for column in self.columns:
            if column.name == name or (column.per_layer and name.startswith(column.name + "_")):
                return column
        raise KeyError(f"table {self.name!r} has no column {name!r}")


_SEQUENCE = Column("sequence", "int32", "", "number of the sequence in this run, from 0")
_LAYER = Column("layer", "int32", "", "decoder layer, from 0")
_NEURON = Column("neuron", "int32", "", "index of the FFN neuron in its layer, from 0")
_TOKEN_ID = Column("token_id", "int32", "", "the token's id in the model's vocabulary")

ACTIVITY = Table(
    "activity",
    "a token of the text, as the model read it",
    (
        _SEQUENCE,
        Column("position", "int32", "tokens", "place in the sequence, from 0"),
        _TOKEN_ID,
        Column("phase", "uint8", "", "0 prefill, 1 decode"),
        Column("flags", "uint8", "bits", "1 special token, 2 first of its sequence, 4 a pre-activation was not finite"),
        Column("loss", "float16", "nats", "of the next token as predicted here; null at a sequence's end", True),
        Column("nnz", "uint16", "neurons", "how many FFN neurons the token fires in layer LL", per_layer=True),
    ),
    adds_up=False,
    in_summary_only=False,
)

NEURONS = Table(
    "neurons",
    "a neuron that fired in the part; those that never fired in it have no row",
    (
        _LAYER,
        _NEURON,
        Column("fires", "int64", "tokens", "tokens on which the neuron fired"),
        Column("value_sum", "int64", "2^-20", "sum of its values, in fixed point"),
        Column("value_max", "float32", "", "its largest value"),
        Column("token_min", "int32", "", "least token id that fired it"),
        Column(
            "token_max", "int32", "", "greatest token id that fired it; equal to the least: it answers to one token"
        ),
        Column("first_sequence", "int32", "", "first sequence in which it fired"),
        Column("tokens", "int64", "tokens", "unflagged tokens in the part: what fires is counted out of"),
    ),
)

SEQUENCES = Table(
    "sequences",
    "a sequence: one forward context",
    (
        _SEQUENCE,
        Column("document", "int32", "", "number of its document in the source, from 0"),
        Column("start", "int64", "tokens", "place of its first token in the document"),
        Column("source", "string", "", "the text source it came from"),
        Column("tokens", "int32", "tokens", "its length"),
    ),
    adds_up=False,
    in_summary_only=False,
)

TIMINGS = Table(
    "timings",
    "one timed operation on one batch",
    (
        Column("batch", "int32", "", "number of the batch whose input was timed"),
        Column("layer", "int32", "", "decoder layer, or -1 for the whole model"),
        Column("op", "string", "", "ffn_dense, ffn_sparse, gate, up_down, attention, model_dense, model_sparse"),
        Column("phase", "uint8", "", "0 prefill, 1 decode"),
        Column("tokens", "int32", "rows", "rows in the batch, padding included"),
        Column("nnz_mean", "float32", "neurons", "mean nnz of the batch's rows in that layer", True),
        Column("microseconds", "float64", "µs", "median over repetitions on that input"),
        Column("kernel", "string", "", "the kernel that ran: dense, reference, cpu, cuda, hopper"),
        Column("sm_mhz", "float32", "MHz", "the GPU's clock, where it reports one", True),
        Column("watts", "float32", "W", "the GPU's power, where it reports it", True),
    ),
    adds_up=False,
)

VOCAB = Table(
    "vocab",
    "a token of the vocabulary",
    (
        _TOKEN_ID,
        Column("bytes", "binary", "", "exactly what the token adds to the text"),
        Column("text", "string", "", "for display: undecodable bytes shown as �, control characters escaped"),
        Column("special", "bool", "", "whether the tokenizer calls it special"),
    ),
    adds_up=False,
    single_file=True,
)

TABLES: dict[str, Table] = {t.name: t for t in (ACTIVITY, NEURONS, SEQUENCES, TIMINGS, VOCAB)}


@dataclass(frozen=True)
class Summaries:
    """The tables that analysis derives from the parts, under `summary/`, and the version that they are of."""

    version: int
    tables: dict[str, Table]


# In every summary, rows with `flagged` hold what the flagged tokens add to each sum: leave them out, or sum over both.
_FLAGGED = Column("flagged", "bool", "", "false: over unflagged tokens; true: what flagged tokens add to each sum")
_REPLICATE = Column("replicate", "int32", "", "sequence modulo 20: the groups that intervals are jackknifed over")
_NNZ_SUM = Column("nnz_sum", "int64", "neurons", "sum of nnz")
_NNZ_SQUARE = Column("nnz_square", "int64", "neurons²", "sum over sequences of the token's nnz there, squared")
_NNZ_CROSS = Column("nnz_cross", "int64", "neurons·tokens", "sum over sequences of nnz there times tokens there")


def _tokens(meaning: str = "tokens counted") -> Column:
    return Column("tokens", "int64", "tokens", meaning)


_LAYERS = Table(
    "layers",
    "a count that occurs in a layer",
    (
        Column("layer", "int32", "", "decoder layer, from 0; -1: the sum over all layers"),
        _FLAGGED,
        Column("nnz", "int32", "neurons", "the count"),
        _tokens("tokens that have it"),
    ),
)

_POSITIONS = Table(
    "positions",
    "a position and layer",
    (
        Column("position", "int32", "tokens", "place in the sequence, from 0"),
        Column("flagged", "bool", "", "as elsewhere, but position 0 counts as unflagged unless it is not finite"),
        Column("layer", "int32", "", "decoder layer, from 0; -1: the sum over all layers"),
        _tokens(),
        _NNZ_SUM,
        Column("nnz_square", "int64", "neurons²", "sum of squared nnz"),
    ),
)

_TOKENS = Table(
    "tokens",
    "a token of the vocabulary that occurs",
    (
        _TOKEN_ID,
        _FLAGGED,
        _tokens("its occurrences n"),
        Column("sequences", "int64", "", "sequences it occurs in"),
        Column("tokens_square", "int64", "tokens²", "sum over sequences of its occurrences there, squared"),
        Column("nnz_sum", "int64", "neurons", "sum of its nnz, over all layers"),
        _NNZ_SQUARE,
        _NNZ_CROSS,
        Column("loss_sum", "int64", "2^-24 nats", "sum of the losses of the predictions made at it"),
        Column("loss_tokens", "int64", "tokens", "occurrences with such a loss"),
        Column("surprisal_sum", "int64", "2^-24 nats", "sum of its own losses, as predicted one position earlier"),
        Column("surprisal_tokens", "int64", "tokens", "occurrences with such a loss"),
    ),
)

_TOKEN_LAYERS = Table(
    "token_layers",
    "a token of the vocabulary that occurs, and a layer",
    (
        _TOKEN_ID,
        _FLAGGED,
        _LAYER,
        _NNZ_SUM,
        _NNZ_SQUARE,
        _NNZ_CROSS,
    ),
)

_TOKEN_SCORES = Table(
    "token_scores",
    "a token of the vocabulary that occurs",
    (
        _TOKEN_ID,
        _FLAGGED,
        Column("z_sum", "double", "sd", "sum of z: nnz less its layer's mean over its layer's sd, mean over layers"),
        Column("z_square", "double", "sd²", "sum over sequences of its z there, squared"),
        Column("z_cross", "double", "sd·tokens", "sum over sequences of its z there times its occurrences there"),
    ),
    adds_up=False,
)

_SURPRISAL = Table(
    "surprisal",
    "a band of the next token's loss, in a layer and replicate, over unflagged tokens",
    (
        _LAYER,
        _REPLICATE,
        Column("loss_bin", "int32", "", "floor(24·√loss): from (k/24)² to ((k+1)/24)² nats"),
        _tokens(),
        _NNZ_SUM,
    ),
)

_SURPRISAL_RANKS = Table(
    "surprisal_ranks",
    "a class of loss and of nnz, in a layer and replicate, over unflagged tokens",
    (
        _LAYER,
        _REPLICATE,
        Column("loss_class", "int32", "", "loss_bin // 4"),
        Column("nnz_class", "int32", "", "nnz below 8, then floor(√(8·nnz))"),
        _tokens(),
    ),
)

_NEURON_SUMS = Table(
    "neurons",
    "a neuron that fired in the run",
    tuple(column for column in NEURONS.columns if column.name != "tokens"),
)

SUMMARIES = Summaries(
    1,
    {
        t.name: t
        for t in (
            _LAYERS,
            _POSITIONS,
            _TOKENS,
            _TOKEN_LAYERS,
            _TOKEN_SCORES,
            _SURPRISAL,
            _SURPRISAL_RANKS,
            _NEURON_SUMS,
        )
    },
)


def nnz_columns(layers: int) -> list[str]:
    """The activity columns of the layers, in order: nnz_00, nnz_01, …"""
    width = max(2, len(str(max(layers - 1, 0))))
    return [f"nnz_{layer:0{width}d}" for layer in range(layers)]


def nnz_type(d_ff: int) -> str:
    """The Arrow type that holds every count a layer of `d_ff` neurons can give."""
    return "uint16" if d_ff <= 65535 else "uint32"


def expand(table: Table, layers: int, d_ff: int) -> list[Column]:
    """The table's columns as they stand on disk for a model of this size: per-layer columns written out."""
    columns: list[Column] = []
    for column in table.columns:
        if column.per_layer:
            kind = nnz_type(d_ff) if column.name == "nnz" else column.type
            names = nnz_columns(layers) if column.name == "nnz" else []
            columns += [Column(name, kind, column.unit, column.meaning) for name in names]
        else:
            columns.append(column)
    return columns


def dictionary() -> str:
    """The column dictionary of every table, as Markdown."""
    lines: list[str] = []
    for table in (*TABLES.values(), *SUMMARIES.tables.values()):
        folder = f"summary/v{SUMMARIES.version}/" if table is SUMMARIES.tables.get(table.name) else ""
        where = f"{folder}{table.name}.parquet" if folder or table.single_file else f"{table.name}/part-NNNNN.parquet"
        lines += [f"### {folder}{table.name}", "", f"`{where}`: a row is {table.grain}.", ""]
        lines += ["| column | type | unit | meaning |", "|---|---|---|---|"]
        for column in table.columns:
            name = f"{column.name}_LL" if column.per_layer else column.name
            lines.append(f"| `{name}` | {column.type} | {column.unit} | {column.meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(dictionary())
