"""Declare every table and column of a run, once and as data.

A run is a folder of Parquet tables and one manifest (`run.json`). The name, type, unit and meaning of each column are
declared here and nowhere else; Arrow schemas and the column dictionary (`data/README.md`) follow from it. `columns.py`
has the classes of tables and columns, `summary_schema.py` the tables of `summary/`. They import nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from twell.workbench.run.columns import (
    LAYER,
    NEURON,
    NEURON_SUMS,
    PHASE,
    POSITION,
    SEQUENCE,
    TILE_COUNTS,
    TIMED_OPERATIONS,
    TOKEN_ID,
    TRAINING_STEPS,
    UNION_COUNTS,
    VALUE_COUNTS,
    Column,
    Table,
)
from twell.workbench.run.summary_schema import SUMMARIES
from twell.workbench.run.tables.bench import BENCH
from twell.workbench.run.tables.effects import EFFECTS, NEURON_EFFECTS

__all__ = [
    "SUMMARIES",
    "TABLES",
    "Column",
    "Table",
    "dictionary",
    "expand",
    "nnz_columns",
    "nnz_type",
]

SCHEMA_VERSION = 1

# Bits of activity.flags. Statistics leave out every row with flags != 0 unless called with flagged=True.
FLAG_SPECIAL, FLAG_FIRST, FLAG_NOT_FINITE = 1, 2, 4

# activity.phase
PREFILL, DECODE = 0, 1

# timings.op of the whole forward pass without probes: dense, and with the sparse kernel.
WHOLE_MODEL = ("model_dense", "model_sparse")

# examples: of firings whose last so many tokens are the same, the first in the text counts.
SAME_CONTEXT = 8

# neurons.value_sum is in units of 2^-20: integer sums are the same in any order.
VALUE_SCALE = 2**20

# Values for a neuron that never fired, in columns that otherwise hold a token id or a sequence.
NEVER_SEQUENCE, NEVER_TOKEN_MIN, NEVER_TOKEN_MAX = -1, 2**31 - 1, -1


ACTIVITY = Table(
    "activity",
    "a token of the text, as the model read it",
    (
        SEQUENCE,
        POSITION,
        TOKEN_ID,
        PHASE,
        Column(
            "flags",
            "uint8",
            "bits",
            '1 special token, 2 first of its sequence, 4 a pre-activation was not finite; in pandas `df["flags"]`',
        ),
        Column(
            "loss",
            "float16",
            "nats",
            "loss of the next token, predicted here; null at a sequence's end, where not finite, and with --no-loss",
            True,
        ),
        Column(
            "entropy",
            "float32",
            "nats",
            "entropy of that prediction: the loss that it expects; null where the loss is, and in older runs",
            True,
            is_newer=True,
        ),
        Column("nnz", "uint16", "neurons", "how many FFN neurons the token fires in layer LL", per_layer=True),
        Column(
            "used",
            "uint16",
            "neurons",
            "how many of these have a product that is not zero; only for models with a ReLU on the up branch too",
            per_layer=True,
        ),
    ),
    adds_up=False,
    in_summary_only=False,
)

NEURONS = Table(
    "neurons",
    "a neuron that fired in the part; those that never fired in it have no row",
    NEURON_SUMS,
    in_summary_only=False,
)

SEQUENCES = Table(
    "sequences",
    "a sequence: one forward context",
    (
        SEQUENCE,
        Column("document", "int32", "", "number of its document in the source, from 0"),
        Column("start", "int64", "tokens", "position of its first token in the document"),
        Column("source", "string", "", "the text source of the document"),
        Column("tokens", "int32", "tokens", "how many tokens it has"),
    ),
    adds_up=False,
    in_summary_only=False,
)

TIMINGS = Table("timings", "one timed operation on one batch", TIMED_OPERATIONS, adds_up=False)

VOCAB = Table(
    "vocab",
    "a token of the vocabulary",
    (
        TOKEN_ID,
        Column("bytes", "binary", "", "exactly what the token adds to the text"),
        Column("text", "string", "", "for display: undecodable bytes shown as �, control characters escaped"),
        Column("special", "bool", "", "whether the tokenizer calls it special"),
    ),
    adds_up=False,
    single_file=True,
)

TILES = Table(
    "tiles",
    "a number of neurons fired in one tile, in a layer, for one tile size; over unflagged tokens",
    TILE_COUNTS,
    in_summary_only=False,
)

UNIONS = Table(
    "unions",
    "a number of different neurons fired in a block of consecutive unflagged tokens of one sequence, in a layer",
    UNION_COUNTS,
    in_summary_only=False,
)

VALUE_BINS = Table(
    "value_bins",
    "a neuron and a bin of its values; bins without a firing have no row; over unflagged tokens (--examples)",
    VALUE_COUNTS,
    in_summary_only=False,
)

EXAMPLES = Table(
    "examples",
    "a token that fired a neuron, recorded as an example of what the neuron responds to (--examples); where the same "
    "eight tokens up to it come again, only the first in the text",
    (
        LAYER,
        NEURON,
        Column(
            "kind",
            "string",
            "",
            "top: among its largest values; sample: drawn at random, evenly from every doubling of its values; in "
            "older runs from all its firings",
        ),
        Column("value", "float32", "", "the neuron's value there"),
        SEQUENCE,
        POSITION,
        Column(
            "draw",
            "float64",
            "",
            "random key of a sample; a merge keeps those with the least of each doubling of values; 0 for top",
        ),
        Column("window", "list<float32>", "", "its values from 16 tokens before to 16 after; NaN outside the sequence"),
    ),
    adds_up=False,
    in_summary_only=False,
    cumulative=True,
)

FIRED = Table(
    "fired",
    "a token of the sample that --fired states, and a layer, with the token's sparse activations there",
    (
        SEQUENCE,
        POSITION,
        LAYER,
        Column("neuron", "list<uint16>", "", "the neurons that fired, ascending"),
        Column("value", "list<float16>", "", "their values, clipped to 65504, the greatest float16"),
    ),
    adds_up=False,
    in_summary_only=False,
)

TRAINING = Table(
    "training",
    "some optimizer steps of a training; means are over the steps since the row before",
    TRAINING_STEPS,
    adds_up=False,
    cumulative=True,
)

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        ACTIVITY,
        NEURONS,
        SEQUENCES,
        TIMINGS,
        VOCAB,
        TILES,
        UNIONS,
        EXAMPLES,
        FIRED,
        BENCH,
        TRAINING,
        VALUE_BINS,
        EFFECTS,
        NEURON_EFFECTS,
    )
}


def nnz_columns(layers: int, name: str = "nnz") -> list[str]:
    """Return the names of a quantity's columns in order of the layers: nnz_00, nnz_01, …; name: the quantity."""
    width = max(2, len(str(max(layers - 1, 0))))
    return [f"{name}_{layer:0{width}d}" for layer in range(layers)]


def nnz_type(d_ff: int) -> str:
    """Return the name of the Arrow type that holds every count and every index in a layer of `d_ff` neurons."""
    return "uint16" if d_ff <= 65535 else "uint32"


def expand(table: Table, layers: int, d_ff: int, used: bool = False) -> list[Column]:
    """Return the table's columns on disk for a model of this size.

    Columns per layer are written out, and uint16 becomes uint32 where d_ff needs it. used: whether to include the
    columns `used`, for a model with a ReLU on the up branch too.
    """
    columns: list[Column] = []
    for column in table.columns:
        if column.per_layer:
            names = nnz_columns(layers, column.name) if used or column.name != "used" else []
            kind = nnz_type(d_ff) if column.type == "uint16" else column.type
            columns += [replace(column, name=name, type=kind, per_layer=False) for name in names]
        elif column.type == "list<uint16>":
            columns.append(replace(column, type=f"list<{nnz_type(d_ff)}>"))
        else:
            columns.append(column)
    return columns


def dictionary() -> str:
    """Return the column dictionary of every table, as Markdown."""
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
