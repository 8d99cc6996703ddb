"""Refuse a configuration whose sizes the weights beside it do not have, before memory is taken for them.

The idea: transformers makes a network as large as config.json says, and only then misses its weights. So the network is
made once on torch's meta device, which holds shapes alone, and its parameters are compared with the elements that the
headers of the safetensors files name. Layers are compared first, as each of them takes time even there.

Cost: the headers, and a few milliseconds a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from twell.workbench.errors import UserError, first_line

MOST_LAYERS = 10_000
TIED = 2  # times as many parameters as a file that stores one of two tied matrices
SLACK = 2**22  # parameters, of masks and positions that a file need not store


def refuse_too_many_layers(fields: dict[str, Any], name: str) -> None:
    """Raise UserError for a configuration with more layers than any model has: some classes list them all.

    fields: config.json; name: the model's
    """
    for field, value in _numbers(fields):
        if "layer" in field and value > MOST_LAYERS:
            raise UserError(
                f"Expected at most {MOST_LAYERS:,} layers in {name}, got {field}: {value:.6g} in its config.json: "
                "correct it."
            )


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a configuration and of those nested in it, with their fields' names."""
    pending = [fields]
    while pending:
        for field, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield field, value


def refuse_other_sizes(folder: Path, name: str, config: Any, make: Callable[[], torch.nn.Module]) -> None:
    """Raise UserError for a configuration that asks for many more parameters than its weights have.

    make: makes the network, on the device that is the default
    """
    tensors, elements = _stored(folder)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not tensors:
        return  # files that cannot be read are refused where the weights are read
    if isinstance(layers, int) and layers > tensors:
        raise UserError(
            f"Expected in {name} the weights that its config.json asks for, got {tensors:,} tensors for "
            f"num_hidden_layers: {layers:,}: copy the checkpoint again, or correct its config.json."
        )
    try:
        with torch.device("meta"):
            wanted = sum(parameter.numel() for parameter in make().parameters())
    except Exception as error:  # each class checks itself in its own ways
        raise UserError(
            f"Expected a config.json in {name} of which transformers can make a network, got an error "
            f"({first_line(error)}): correct it."
        ) from None
    if wanted > TIED * elements + SLACK:
        raise UserError(
            f"Expected in {name} the weights that its config.json asks for, {wanted:,} parameters, got {elements:,}: "
            "copy the checkpoint again, or correct the sizes in its config.json."
        )


def _stored(folder: Path) -> tuple[int, int]:
    """Return how many tensors and elements the safetensors files of a folder hold; 0, 0 if one is unreadable."""
    tensors = elements = 0
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # it is no mapping
                    tensors += 1
                    size = 1
                    for side in file.get_slice(key).get_shape():
                        size *= side
                    elements += size
    except (SafetensorError, OSError):
        return 0, 0
    return tensors, elements
