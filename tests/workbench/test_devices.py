"""Too little memory is told with what to do, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch

from twell.workbench.devices import memory_for
from twell.workbench.errors import UserError


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_one_sentence(error: BaseException) -> None:
    with (
        pytest.raises(UserError, match=r"^Expected memory for 8 rows, got too little: lower --rows\.$"),
        memory_for("8 rows", "lower --rows"),
    ):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no memory"), UserError("Expected")])
def test_another_error_stays_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, memory_for("8 rows", "lower --rows"):
        raise error
    assert raised.value is error
