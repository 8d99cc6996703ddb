"""Read from a call of a model which of its rows are tokens, what they are, and where sequences begin.

The idea: a row of the FFN's input is a token unless a mask says that it is padding. A mask of two dimensions says so by
column. One of four, as a static cache makes, says so on its diagonal: a token attends to itself, and padding does not.
Position ids that do not rise begin a new sequence in the same row of the batch, as packed text has them.

Nothing here waits for the device but `packed_numbers`, which is asked where position ids are given and rows are kept.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from twell.workbench.errors import UserError

MASKED = -1e4  # an additive mask that is lower than this hides a position
NO_IDS = ("attention_mask", "position_ids", "cache_position", "token_type_ids", "labels")  # whole numbers, but no ids
CACHES = ("past_key_values", "past_key_value", "cache_params", "past")  # arguments and outputs that hold a cache


@dataclass
class CallInputs:
    """The arguments of a model's call that tell of tokens.

    ids: [sequences, columns], None where vectors are given; shape: sequences and columns, None where nothing tells
    mask, position_ids: as they were given; cache: the object that holds keys and values, or None; past: columns that it
    holds before the call
    """

    ids: Tensor | None
    shape: tuple[int, int] | None
    mask: Any
    position_ids: Tensor | None
    cache: Any
    past: int = 0

    @classmethod
    def of(
        cls, module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any], names: Mapping[str, str]
    ) -> CallInputs:
        """Read the arguments of a call of `module.forward`.

        names: those of `ids` and `mask`, where they are not input_ids, or the first tensor of whole numbers, and
        attention_mask. Raises UserError for a name that is none of an argument.
        """
        if args and isinstance(args[0], Mapping):  # a batch
            args, keywords = args[1:], {**args[0], **keywords}
        given = {**_named(module, args), **{name: value for name, value in keywords.items() if value is not None}}
        for name in names.values():
            if name not in given and name not in inspect.signature(module.forward).parameters:
                raise UserError(
                    f"Expected an argument {name} in a call of {type(module).__name__}, as inputs= says, got "
                    f"{', '.join(given) or 'none'}."
                )
        ids = _ids(given, names)
        shape = None if ids is None else (int(ids.shape[0]), int(ids.shape[1]))
        vectors = [given.get("inputs_embeds"), *args[:1], *keywords.values()]
        if shape is None:  # vectors instead of ids: [sequences, columns, size], or of a module of any kind [rows, size]
            first = next((one for one in vectors if isinstance(one, Tensor) and one.dim() > 1), None)
            shape = None if first is None else shape_of(first.shape[:-1])
        positions = given.get("position_ids")
        positions = positions if isinstance(positions, Tensor) and positions.dim() == 2 else None
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        mask = given.get(names.get("mask", "attention_mask"))
        return cls(ids, shape, mask, positions, cache, 0 if cache is None else cached_columns(cache))

    def fitted(self, leading: torch.Size) -> CallInputs:
        """Return these, or, where the FFNs see other rows than they tell of, what is known then: rows without ids.

        leading: dimensions of an FFN's rows
        """
        if self.shape is not None and math.prod(self.shape) == math.prod(leading):
            return self
        return CallInputs(None, shape_of(leading), None, None, self.cache, self.past)

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


def refuse_names(inputs: Any, beside_ffns: bool) -> None:
    """Raise UserError unless inputs= names arguments of a module whose FFNs are named too."""
    if inputs is not None and not (beside_ffns and isinstance(inputs, Mapping) and set(inputs) <= {"ids", "mask"}):
        raise UserError(f'Expected inputs= as in {{"ids": "tokens", "mask": "padding"}}, beside ffns=, got {inputs!r}.')


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


def _ids(given: Mapping[str, Any], names: Mapping[str, str]) -> Tensor | None:
    """Return the ids among a call's arguments, [sequences, columns], or None."""
    named: list[Any] = [given.get(names.get("ids", "input_ids"))]
    if "ids" not in names and given.get("inputs_embeds") is None:
        others = [one for name, one in given.items() if name not in {*NO_IDS, *names.values()}]
        named += sorted((one for one in others if isinstance(one, Tensor)), key=Tensor.dim, reverse=True)
    for one in named:
        if isinstance(one, Tensor) and one.dim() in (1, 2) and _is_whole(one):
            return one[None] if one.dim() == 1 else one
    return None


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def shape_of(leading: torch.Size) -> tuple[int, int]:
    """Return how many sequences and columns rows of these leading dimensions are."""
    rows = (1, *leading) if len(leading) < 2 else leading
    return int(rows[0]), math.prod(rows[1:])


def cached_columns(cache: Any) -> int:
    """Return how many columns a cache holds."""
    length = getattr(cache, "get_seq_length", None)
    return int(length()) if length is not None else 0


def _named(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments by the names that the module's forward gives them; others by their numbers."""
    if not args:
        return {}
    named = [
        name for name, one in inspect.signature(module.forward).parameters.items() if one.kind is not one.VAR_POSITIONAL
    ]
    return dict(zip([*named[: len(args)], *map(str, range(len(named), len(args)))], args, strict=True))
