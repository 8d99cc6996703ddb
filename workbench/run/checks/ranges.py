"""The values that columns can have in a run of a model of some size; questions use many of them as indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twell.workbench.run.columns import VALUE_BINS
from twell.workbench.run.schema import FLAG_FIRST, FLAG_NOT_FINITE, FLAG_SPECIAL

if TYPE_CHECKING:
    from twell.workbench.run.manifest import Manifest

MOST_TOKENS, MOST_POSITIONS, MOST_GROUPS, MOST_CLASSES = 2**24, 2**26, 20, 2**16  # far above what any run has
SPARE = 1000  # sequences
MOST_INT32, MOST = 2**31 - 1, 2**62


@dataclass(frozen=True)
class Sizes:
    """The sizes that ranges depend on. tokens: of the vocabulary; sequences: a bound of their numbers; 0 if not known.
    used: whether used_LL were recorded."""

    layers: int
    d_ff: int
    tokens: int = 0
    used: bool = False
    sequences: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Sizes:
        """Return the sizes of a run's model."""
        known = [manifest.model.get("vocab_size"), manifest.tokenizer.get("vocab_size")]
        tokens = max([size for size in known if isinstance(size, int)], default=0)
        ended = manifest.status == "complete" and not manifest.ranks and manifest.sequences
        numbered = manifest.sequences + sum(entry["sequences"] for entry in manifest.left_out)
        sequences = 2 * numbered + SPARE if ended else 0  # as others number them there may be gaps
        return cls(manifest.layers, manifest.d_ff, tokens, manifest.counts_used, sequences)


def value_range(table: str, column: str, sizes: Sizes) -> tuple[float, float] | None:
    """Return the least and the greatest value that a column can have, None where it can have any.

    table: of the run, or the name of a summary; column: as it stands on disk, or the column of a list's entries
    """
    if table == "bench":  # of any model, or of none
        return (-1, MOST_CLASSES) if column == "layer" else None
    name = column.rpartition("_")[0] if column.startswith(("nnz_", "used_")) and column[-1].isdigit() else column
    return _ranges(table, sizes).get(name)


def _ranges(table: str, sizes: Sizes) -> dict[str, tuple[float, float]]:
    single_layers = table in ("neurons", "tiles", "unions", "examples", "fired", "value_bins")  # elsewhere -1: all
    counts = ("tokens", "rows", "pairs", "blocks", "fires", "sequences", "loss_tokens", "surprisal_tokens", "n")
    return {
        **dict.fromkeys(counts, (0, MOST)),
        "layer": (0 if single_layers else -1, sizes.layers - 1),
        "neuron": (0, sizes.d_ff - 1),
        "neurons": (0, sizes.d_ff),
        "occupancy": (0, sizes.d_ff),
        "bin": (0, VALUE_BINS - 1),
        "nnz": (0, sizes.layers * sizes.d_ff if table in ("layers", "highest") else sizes.d_ff),
        "used": (0, sizes.d_ff),
        "tile": (1, MOST_CLASSES),
        "block": (1, MOST_CLASSES),
        "sequence": (0, (sizes.sequences or MOST_INT32) - 1),
        "document": (0, MOST_INT32),
        "start": (0, MOST),
        "position": (0, MOST_POSITIONS),
        "token_id": (0, sizes.tokens or MOST_TOKENS),  # one past the vocabulary: a vector without an id
        "token_min": (0, MOST_INT32),
        "token_max": (-1, MOST_INT32),
        "first_sequence": (-1, MOST_INT32),
        "phase": (0, 1),
        "flags": (0, FLAG_SPECIAL | FLAG_FIRST | FLAG_NOT_FINITE),
        "loss": (-1, float("inf")),
        "entropy": (0, float("inf")),
        "batch": (0, MOST_INT32),
        "microseconds": (0, float("inf")),
        "nnz_mean": (0, sizes.d_ff),
        "replicate": (0, MOST_GROUPS - 1),
        **dict.fromkeys(
            ("band", "loss_bin", "loss_class", "entropy_class", "nnz_class", "rank_class"), (0, MOST_CLASSES)
        ),
    }
