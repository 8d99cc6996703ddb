"""Refuse a summary with keys that no row of the run can have, before arrays of that size are allocated.

Questions use keys (layer, position, neuron, …) as indices. Cost: the footer of the file, 0.3 ms.
"""

from __future__ import annotations

from pathlib import Path

from twell.workbench.errors import UserError, first_line
from twell.workbench.run.part_files import open_part
from twell.workbench.run.schema import SUMMARIES

MOST_TOKENS, MOST_POSITIONS, MOST_GROUPS, MOST_CLASSES = 2**24, 2**26, 20, 2**16  # far above what any run has


def check_keys(path: Path, name: str, layers: int, d_ff: int) -> None:
    """Raise UserError for a key out of range in a summary's file, and for a file that cannot be read.

    name: of the summary; layers, d_ff: of the run's model
    """
    ranges = {
        "layer": (-1, layers - 1),
        "neuron": (0, d_ff - 1),
        "neurons": (0, d_ff),
        "occupancy": (0, d_ff),
        "tile": (1, MOST_CLASSES),
        "block": (1, MOST_CLASSES),
        "nnz": (0, layers * d_ff),
        "position": (0, MOST_POSITIONS),
        "token_id": (0, MOST_TOKENS),
        "replicate": (0, MOST_GROUPS - 1),
        **dict.fromkeys(("band", "loss_bin", "loss_class", "nnz_class"), (0, MOST_CLASSES)),
    }
    for column in SUMMARIES.tables[name].keys:
        if column in ranges:
            smallest, greatest = ranges[column]
            for value in _extremes(path, column):
                if not smallest <= value <= greatest:
                    raise UserError(
                        f"Expected {column} from {smallest} to {greatest} in {path}, got {value}: remove its folder to "
                        "have it made anew, or copy a run without rows again."
                    )


def _extremes(path: Path, column: str) -> list[int]:
    """Return the least and the greatest value of a column in each row group; a group without statistics is read."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        with open_part(path) as file:
            metadata = file.metadata
            if column not in metadata.schema.names:
                return []
            index, extremes = metadata.schema.names.index(column), list[int]()
            for group in range(metadata.num_row_groups):
                statistics = metadata.row_group(group).column(index).statistics
                if statistics is None or not statistics.has_min_max:
                    values = pc.min_max(file.read_row_group(group, [column])[column]).as_py()
                    extremes += [value for value in values.values() if value is not None]
                else:
                    extremes += [statistics.min, statistics.max]
            return extremes
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"Expected a readable summary at {path}, got {first_line(error)}: remove its folder to have it made anew, "
            "or copy a run without rows again."
        ) from None
