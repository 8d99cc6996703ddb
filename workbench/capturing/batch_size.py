"""Choose the size of batches: on a CPU one, on a GPU what its memory holds, and less once it was too much.

The idea: what a row takes is estimated from the model's sizes, on the side of too much; batches are the greatest power
of two of rows for which a share of the free memory is enough, up to MOST, past which passes get hardly faster. A short
text is still cut into BATCHES, so that there are times of several, and pages have something to show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from twell.workbench.capturing.forward import LOGITS
from twell.workbench.devices import lacks_memory
from twell.workbench.errors import UserError
from twell.workbench.models.load import LoadedModel
from twell.workbench.options import CPU_BATCH, CaptureOptions
from twell.workbench.text.batches import Batch

MOST, LEAST = 2**17, 2**10  # rows
SHARE = 0.8  # of the memory that is free
TOKEN_BYTES = 4  # of text, in the mean
Ran = TypeVar("Ran")
BATCHES = 8  # that a text has at least, as long as they have the size of those on a CPU


def batch_rows(loaded: LoadedModel, options: CaptureOptions, sizes: list[int | None], world: int = 1) -> int:
    """Return the rows of a batch: as given, or chosen for the device.

    sizes: of the text's sources in bytes, None where it is not known; world: how many devices share the text
    """
    if options.batch_tokens is not None or loaded.device.type != "cuda":
        return options.rows_of_batch
    free, _ = torch.cuda.mem_get_info(loaded.device)
    unused = torch.cuda.memory_reserved(loaded.device) - torch.cuda.memory_allocated(loaded.device)
    return fitting_rows(loaded, options, free + unused, about_tokens(options, sizes, world))


def about_tokens(options: CaptureOptions, sizes: list[int | None], world: int) -> int | None:
    """Return about how many tokens of the text each device gets, without tokenising any; None if it is not known."""
    known = [size for size in sizes if size is not None]
    tokens = sum(known) // TOKEN_BYTES if len(known) == len(sizes) else None
    limits = [each for each in (tokens, options.tokens) if each is not None]
    return min(limits) // world if limits else None


def fitting_rows(loaded: LoadedModel, options: CaptureOptions, free: int, tokens: int | None = None) -> int:
    """Return the greatest power of two of rows, from LEAST to MOST, that needs no more than SHARE of `free` bytes."""
    room = SHARE * free - fixed_bytes(loaded, options)
    rows = MOST
    while tokens is not None and rows > CPU_BATCH and rows * BATCHES > tokens:
        rows //= 2
    while rows > LEAST and rows * row_bytes(loaded, options) > room:
        rows //= 2
    return rows


def row_bytes(loaded: LoadedModel, options: CaptureOptions) -> int:
    """Return about what a row of a batch takes: some 16 states of the width of the model and two of them in float32
    (attention, norms), the kernel's workspace, and the three states of a dense FFN that is timed beside it; where
    tokens are generated, keys, values and TwELL of every layer too."""
    wide = loaded.model.dtype.itemsize
    kept = 2 * wide * loaded.d_model + loaded.d_ff if options.generate else 16
    return loaded.d_model * (16 * wide + 8) + loaded.d_ff * (6 + 6 * wide) + kept * loaded.layers


def fixed_bytes(loaded: LoadedModel, options: CaptureOptions) -> int:
    """Return about what a capture takes whatever its batches: logits, sums of neurons, examples of three batches."""
    wide, neurons = loaded.model.dtype.itemsize, loaded.layers * loaded.d_ff
    logits = LOGITS["cuda"] * (wide + 8) if options.loss else 0
    return (
        logits + 200 * neurons + (3 * 2 * options.examples * (33 * wide + 24) + 600) * neurons * (options.examples > 0)
    )


def about_batches(rows: int, options: CaptureOptions) -> str:
    """Return what a capture's first lines say of batches of this size; nothing of those given, or of the usual ones."""
    chosen = options.batch_tokens is None and rows != CPU_BATCH
    return f", batches of {rows:,} tokens by the GPU's memory" if chosen else ""


def if_it_fits(run: Callable[[Batch], Ran], batch: Batch) -> Ran | None:
    """Return what run() returns of a batch; None where the device's memory does not hold it."""
    try:
        return run(batch)
    except (RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            return None
        raise


def smaller_batches(batch: Batch, tell: Callable[[str], None]) -> int:
    """Return how many rows batches have from now on, after one that the device's memory did not hold, and say so.

    Raises UserError for a batch that cannot be smaller.
    """
    torch.cuda.empty_cache()  # of what was given back, in pieces too small for the next attempt
    if len(batch.sequences) == 1:
        raise UserError(
            f"Expected memory for one sequence of {batch.longest:,} tokens, got too little on the device: lower "
            "--seq-len, or free some of its memory."
        )
    rows = batch.padded // 2
    tell(f"The device's memory does not hold a batch of {batch.padded:,} rows: from here on they have up to {rows:,}.")
    return rows
