"""What code asks of a device, step by step: operations with the memory that they touch, and waits for their results.

An operation is one that reaches a backend, so that what another is made of is told too. A sum in another type than its
input's is two of them, as torch makes a copy of the input in that type first, unless the one is of 16 bits and the
other float32. A wait is a call that fetches numbers to the host, whatever device they are on: of tensors on a CPU it
costs nothing, and is told all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "equal", "masked_select", "__array__"}
WAITS |= {"__bool__", "__int__", "__float__", "__index__", "is_nonzero"}
NOTHING = {"view", "detach", "t", "transpose", "unsqueeze", "slice", "select", "expand", "alias", "_unsafe_view"}
NOTHING |= {"reshape", "empty", "empty_like", "promote_types"}  # launch nothing, in the calls that are compared
HALF = (torch.float16, torch.bfloat16)


@dataclass
class Step:
    """What one step asked for: operations that launch something, the bytes that each touches, and waits."""

    operations: list[str] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def large(self, least: int) -> list[int]:
        """Return the bytes of the operations that touch at least so many."""
        return [size for size in self.bytes if size >= least]


class _Waits(TorchFunctionMode):
    def __init__(self, calls: StepCalls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        moves = name == "to" and any(isinstance(one, str) for one in (*args[1:], *(kwargs or {}).values()))
        if name in WAITS or moves:
            self.calls.steps[-1].waits.append(name)
        return function(*args, **(kwargs or {}))


class StepCalls(TorchDispatchMode):
    """Notes what is asked inside it; `next_step` begins another step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [Step()]
        self._waits = _Waits(self)

    def next_step(self) -> None:
        self.steps.append(Step())

    def __enter__(self) -> StepCalls:
        self._waits.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._waits.__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.partition("::")[2]
        if name in NOTHING:
            return result
        before, after = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), result))
        tensors = {id(tensor): tensor for tensor in (*before, *after)}  # one that is written to stands in both
        step, size = self.steps[-1], sum(map(_bytes, tensors.values()))
        if name == "_local_scalar_dense":
            step.waits.append(name)
        if name == "sum" and before[0].dtype != after[0].dtype and before[0].dtype not in HALF:
            copy = before[0].numel() * after[0].element_size()
            step.operations.append("copy of a sum")
            step.bytes.append(_bytes(before[0]) + copy)
            size += copy - _bytes(before[0])
        step.operations.append(name)
        step.bytes.append(size)
        return result


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
