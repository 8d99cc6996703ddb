"""Choose the device that a command runs on, by its name, and say what to do where it has too little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from twell.workbench.errors import UserError
from twell.workbench.options import NO_GPU


def pick_device(device: str) -> torch.device:
    """Return the device of a name; auto is the GPU where there is one. Raises UserError for a GPU that is missing."""
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise UserError(NO_GPU)
    return torch.device("cuda", torch.cuda.current_device()) if present and device != "cpu" else torch.device("cpu")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has too little memory."""
    # a CPU's lack is told in the words of a RuntimeError alone
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Raise UserError, with what to do, if there is too little memory for something that is done meanwhile."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            raise UserError(f"Expected memory for {what}, got too little: {advice}.") from None
        raise
