"""Declare tables: the classes of a column and a table, and the columns that several tables share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A column of a table.

    type: the name of an Arrow type; unit: "" for a plain number; per_layer: whether it is written once a layer, as
    `name_LL`; merge: how values of several parts combine into one; is_newer: whether older runs lack it, where it reads
    as null.
    """

    name: str
    type: str
    unit: str
    meaning: str
    nullable: bool = False
    per_layer: bool = False
    merge: Literal["sum", "min", "max"] = "sum"
    is_newer: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a run.

    grain: what a row is, in words; adds_up: whether rows of several parts may be summed; in_summary_only: whether a
    summary-only copy of a run keeps it; single_file: whether it is one file and has no parts; cumulative: whether each
    part holds the table of the run so far and replaces the part before it.
    """

    name: str
    grain: str
    columns: tuple[Column, ...]
    adds_up: bool = True
    in_summary_only: bool = True
    single_file: bool = False
    cumulative: bool = False

    def column(self, name: str) -> Column:
        """Return the declaration of a column, by its name or that of one layer. Raises KeyError for any other name."""
        for column in self.columns:
            if column.name == name or (column.per_layer and name.startswith(column.name + "_")):
                return column
        raise KeyError(f"table {self.name!r} has no column {name!r}")


@dataclass(frozen=True)
class SummaryTable(Table):
    """A table of summaries.

    keys: the columns that identify a row, in the order that rows are sorted by; source: the table of the run that it is
    built from; absent: why a run may lack it, as a clause, empty if every run has it; needs_means: whether it needs the
    means of the whole run, so that a new part requires reading all parts again; since: the revision that added it.
    """

    keys: tuple[str, ...] = ()
    source: str = "activity"
    absent: str = ""
    needs_means: bool = False
    since: int = 0

    def merges(self) -> dict[str, str]:
        """Return by name how each column combines over parts (sum, min or max), without keys and strings."""
        return {c.name: c.merge for c in self.columns if c.name not in self.keys and c.type != "string"}


@dataclass(frozen=True)
class SummarySchema:
    """The tables that analysis derives from a run's parts, under `summary/`, with their version and revision."""

    version: int
    revision: int
    tables: dict[str, SummaryTable]

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of the tables of a run that summaries are built from."""
        return tuple(dict.fromkeys(table.source for table in self.tables.values()))


# Sums of losses are in units of 2^-24 nats. Every float16 is a whole number of these, so the sums are exact.
LOSS_UNITS_PER_NAT = 2.0**24

SEQUENCE = Column("sequence", "int32", "", "number of the sequence in this run, from 0")
LAYER = Column("layer", "int32", "", "decoder layer, from 0")
LAYER_OR_SUM = Column("layer", "int32", "", "decoder layer, from 0; -1: the sum over all layers")
POSITION = Column("position", "int32", "tokens", "position in the sequence, from 0")
PHASE = Column("phase", "uint8", "", "0 prefill, 1 decode")
LOSSES_MADE = (
    Column("loss_sum", "int64", "2^-24 nats", "sum of the losses of the predictions made there"),
    Column("loss_tokens", "int64", "tokens", "tokens with such a loss"),
)
NEURON = Column("neuron", "int32", "", "index of the FFN neuron in its layer, from 0")
TOKEN_ID = Column("token_id", "int32", "", "the token's id in the model's vocabulary")

NEURON_SUMS = (
    LAYER,
    NEURON,
    Column("fires", "int64", "tokens", "unflagged tokens on which the neuron fired"),
    Column("value_sum", "int64", "2^-20", "sum of its values, in fixed point"),
    Column("value_max", "float32", "", "its largest value", merge="max"),
    Column("token_min", "int32", "", "least token id that fired it", merge="min"),
    Column(
        "token_max",
        "int32",
        "",
        "greatest token id that fired it; equal to token_min where one token alone fires it",
        merge="max",
    ),
    Column("first_sequence", "int32", "", "first sequence in which it fired", merge="min"),
)

VALUE_BINS = 32  # two to a doubling of values

VALUE_COUNTS = (
    LAYER,
    NEURON,
    Column(
        "bin",
        "int32",
        "",
        "bin b of the value: even ones begin at 2^(b/2 − 9), odd ones at 1.5 times where the one before begins; the "
        "first, 0, has lesser values too, the last, 31, all from 96",
    ),
    Column("fires", "int64", "tokens", "tokens on which the neuron fired with such a value"),
)

TILE_COUNTS = (
    LAYER,
    Column("tile", "int32", "neurons", "T, the neurons of a tile"),
    Column("occupancy", "int32", "neurons", "how many neurons fired in the tile"),
    Column("pairs", "int64", "token × tile", "pairs of a token and a tile with that occupancy"),
    Column("rows", "int64", "tokens", "tokens whose fullest tile has that occupancy"),
)

UNION_COUNTS = (
    LAYER,
    Column(
        "block",
        "int32",
        "tokens",
        "tokens in a block: 16, 64 or 128; the incomplete block at a sequence's end is not counted",
    ),
    Column("neurons", "int32", "neurons", "how many different neurons fired in the block"),
    Column("blocks", "int64", "", "how many blocks have that number"),
)

TIMED_OPERATIONS = (
    Column("batch", "int32", "", "number of the batch whose input was timed"),
    Column("layer", "int32", "", "decoder layer, or -1 for the whole model"),
    Column(
        "op",
        "string",
        "",
        "ffn_sparse: the layer's FFN in the capture's own pass; ffn_dense, and gate: the gate product alone, dense, on "
        "the first rows of the same input; attention: in the capture's own pass; pass: the capture's own pass, probes "
        "and loss included; model_dense and model_sparse: the whole forward pass without probes; in older runs "
        "ffn_sparse beside the pass too, without probes, and up_down: ffn_sparse less gate",
    ),
    PHASE,
    Column("tokens", "int32", "rows", "rows that it ran on, padding included; of a pass the tokens, without padding"),
    Column("nnz_mean", "float32", "neurons", "mean nnz of the rows of that call, or of the same input", True),
    Column("microseconds", "float64", "µs", "of that call; while decoding of all steps (in older runs a median)"),
    Column("kernel", "string", "", "the kernel that ran: dense, reference, cpu, cuda, hopper"),
    Column("sm_mhz", "float32", "MHz", "the GPU's clock, where it reports one", True),
    Column(
        "watts",
        "float32",
        "W",
        "the GPU's power, where it reports it; of the whole model: mean of 5 s of that operation alone",
        True,
    ),
    Column("seconds", "float64", "s", "from the capture's beginning to the end of the pass", True, is_newer=True),
    Column("load", "float32", "", "the machine's load of the last minute, per core", True, is_newer=True),
)

TRAINING_STEPS = (
    Column("step", "int64", "steps", "optimizer steps done so far"),
    Column("tokens", "int64", "tokens", "tokens trained on so far"),
    Column("seconds", "float64", "s", "time of the training loop so far, without compilation"),
    Column("tokens_per_second", "float64", "tokens/s", "training speed since the row before"),
    Column("total_steps", "int64", "steps", "planned length of the training; null if not yet known", True),
    Column("loss", "float64", "nats", "mean cross-entropy of the training tokens, without the L1 term"),
    Column(
        "heldout_loss",
        "float64",
        "nats",
        "mean cross-entropy of the first 131 072 held-out tokens, 16 384 on a CPU; of a `Trainer` its `eval_loss`",
        True,
    ),
    Column("l1", "float64", "", "L1 term before its coefficient: mean over layers and tokens of Σ|hidden|"),
    Column("l1_coefficient", "float64", "", "coefficient of the L1 term in the loss", True),
    Column("rate", "float64", "", "learning rate"),
    Column("gradient_norm", "float64", "", "mean norm of the gradient before clipping", True),
    Column("peak_bytes", "int64", "bytes", "greatest memory of the device in use since the row before", True),
    Column("sparse_layers", "int32", "layers", "layers whose FFN ran by sparse kernels at this row", True),
    Column("dense_step", "float64", "µs", "one step with every FFN dense, timed beside sparse_step", True),
    Column("sparse_step", "float64", "µs", "the same step with the sparse layers by sparse kernels", True),
    Column("nnz", "float64", "neurons", "mean number of FFN neurons that a token fires in layer LL", per_layer=True),
    Column("dead", "float64", "share", "neurons of layer LL that fired on no token of these steps", per_layer=True),
)

# Shared by summaries.
NO_LOSS = "no loss was recorded (--no-loss)"
NO_ENTROPY = (
    "its predictions' entropy was not recorded, as `twell capture MODEL --text SOURCE --out DIR` does beside each loss "
    "(not with --no-loss)"
)
# In every summary, rows with `flagged` hold what the flagged tokens add to each sum: leave them out, or sum over both.
FLAGGED = Column("flagged", "bool", "", "false: over unflagged tokens; true: what flagged tokens add to each sum")
# Up to revision 3 a sequence stood for a document, here and in sums over documents.
_BY_20 = (
    "document (of long ones in a source of under 40: and block of 16 sequences) modulo 20: what the jackknife groups"
)
REPLICATE = Column("replicate", "int32", "", _BY_20)
CLUSTERS = Column("clusters", "int64", "", "documents it occurs in, or blocks of long ones (see replicate)")


def tokens_column(meaning: str = "tokens counted") -> Column:
    return Column("tokens", "int64", "tokens", meaning)


def value_bins() -> list[float]:
    """Return the least value of each bin of `value_bins`; of the first one 0."""
    begins = [2.0 ** (index // 2 - 9) * (1.5 if index % 2 else 1.0) for index in range(VALUE_BINS)]
    return [0.0, *begins[1:]]
