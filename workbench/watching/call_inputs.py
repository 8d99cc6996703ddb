"""Read from a call of a model which of its rows are tokens, what they are, and where sequences begin.

The idea: a row of the FFN's input is a token unless a mask says that it is padding. A mask of two dimensions says so by
column. One of four, as a static cache makes, says so on its diagonal: a token attends to itself, and padding does not.
Position ids that do not rise begin a new sequence in the same row of the batch, as packed text has them.

Nothing here waits for the device but `packed_numbers`, which is asked where position ids are given and rows are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MASKED = -1e4  # an additive mask that is lower than this hides a position
CACHES = ("past_key_values", "past_key_value", "cache_params", "past")  # arguments and outputs that hold a cache


@dataclass
class CallInputs:
    """The arguments of a model's call that tell of tokens.

    ids: [sequences, columns], None where vectors are given; shape: sequences and columns, None where nothing tells
    mask, position_ids: as they were given; cache: the object that holds keys and values, or None
    """

    ids: Tensor | None
    shape: tuple[int, int] | None
    mask: Any
    position_ids: Tensor | None
    cache: Any

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> CallInputs:
        """Read the arguments of a call of `module.forward`."""
        given = {**_named(module, args), **{name: value for name, value in keywords.items() if value is not None}}
        ids = given.get("input_ids")
        if ids is None and args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            ids = args[0]
        ids = ids if isinstance(ids, Tensor) and ids.dim() in (1, 2) else None
        ids = ids[None] if ids is not None and ids.dim() == 1 else ids
        shape = None if ids is None else (int(ids.shape[0]), int(ids.shape[1]))
        vectors = [given.get("inputs_embeds"), *args[:1], *keywords.values()]
        if shape is None:  # vectors instead of ids: [sequences, columns, size], or of a module of any kind [rows, size]
            first = next((one for one in vectors if isinstance(one, Tensor) and one.dim() > 1), None)
            size = None if first is None else first.shape if first.dim() > 2 else (1, *first.shape)
            shape = None if size is None else (int(size[0]), int(np.prod(size[1:-1])))
        positions = given.get("position_ids")
        positions = positions if isinstance(positions, Tensor) and positions.dim() == 2 else None
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        return cls(ids, shape, given.get("attention_mask"), positions, cache)

    def real(self, past: int) -> Tensor | None:
        """Return which rows are tokens, bool [sequences, columns]; None: all. past: columns that the cache holds."""
        mask = self.mask
        if isinstance(mask, Mapping):
            mask = next((one for one in mask.values() if isinstance(one, Tensor)), None)
        if not isinstance(mask, Tensor) or self.shape is None:
            return None
        sequences, columns = self.shape
        if mask.dim() == 2 and mask.shape[0] == sequences and mask.shape[1] >= columns:
            first = past if mask.shape[1] >= past + columns else mask.shape[1] - columns
            return mask[:, first : first + columns] != 0
        if mask.dim() == 4 and mask.shape[2] == columns and mask.shape[3] >= columns:
            first = past if mask.shape[3] >= past + columns else mask.shape[3] - columns
            seen = mask[:, 0, :, first : first + columns].diagonal(dim1=1, dim2=2)
            return (seen if mask.dtype is torch.bool else seen > MASKED).expand(sequences, columns)
        return None

    def begins(self, real: Tensor | None) -> Tensor | None:
        """Return where position ids begin a sequence behind another in its row, bool [sequences, columns], or None.

        real: as `real` returns it
        """
        if self.position_ids is None or self.shape is None or self.shape[1] < 2:
            return None
        positions = self.position_ids.expand(self.shape)
        begins = torch.zeros(self.shape, dtype=torch.bool, device=positions.device)
        if real is None:
            begins[:, 1:] = positions.diff(dim=1) <= 0
            return begins
        real = real.to(positions.device)  # padding repeats the position before it
        last = torch.where(real, torch.arange(self.shape[1], device=real.device), 0).cummax(1).values
        begins[:, 1:] = (positions.gather(1, last).diff(dim=1) <= 0) & real[:, 1:] & (real.cumsum(1)[:, :-1] > 0)
        return begins

    def countable(self, real: Tensor | None, is_first: bool, begins: Tensor | None, special: Tensor) -> Tensor:
        """Return which rows are tokens that are neither special nor the first of their sequence, bool [sequences,
        columns].

        real, begins: as the methods return them; is_first: whether sequences begin in this call; special: ids, int64
        """
        assert self.shape is not None
        rows = torch.ones(self.shape, dtype=torch.bool, device=special.device)
        if real is not None:
            rows &= real.to(special.device)
        if is_first:
            rows &= rows.cumsum(1) > 1
        if begins is not None:
            rows &= ~begins.to(special.device)
        if self.ids is not None and len(special):
            rows &= ~torch.isin(self.ids.to(special.device), special)
        return rows


def packed_numbers(begins: Tensor) -> np.ndarray | None:
    """Return the sequence within the batch of each row, int64 [sequences, columns], if a row holds several.

    begins: as `CallInputs.begins` returns it. Waits for the device.
    """
    host = begins.cpu().numpy()
    if not host.any():
        return None
    host[:, 0] = True
    return host.cumsum().reshape(host.shape) - 1


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output, or None."""
    for name in CACHES:
        held = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if held is not None:
            return held
    return None


def logits_of(output: Any) -> Tensor | None:
    """Return the logits in a model's output, without their gradient, or None."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits.detach() if isinstance(logits, Tensor) else None


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of numbers in a model's output that have a row a token, [sequences, columns, size] or [rows,
    size], such as logits."""
    given = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    yield from (one for one in given if isinstance(one, Tensor) and one.dim() in (2, 3) and one.is_floating_point())


def cached_columns(cache: Any) -> int:
    """Return how many columns a cache holds."""
    length = getattr(cache, "get_seq_length", None)
    return int(length()) if length is not None else 0


def _named(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments by the names that the module's forward gives them."""
    if not args:
        return {}
    return {name: value for name, value in zip(inspect.signature(module.forward).parameters, args, strict=False)}
