"""Choose the device that a command runs on, by its name."""

from __future__ import annotations

import torch

from twell.workbench.errors import UserError


def pick_device(device: str) -> torch.device:
    """Return the device of a name; auto is the GPU where there is one. Raises UserError for a GPU that is missing."""
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise UserError(
            "Expected a CUDA device for --device cuda, PyTorch sees none: use --device cpu, or `twell doctor`."
        )
    return torch.device("cuda", torch.cuda.current_device()) if present and device != "cpu" else torch.device("cpu")
