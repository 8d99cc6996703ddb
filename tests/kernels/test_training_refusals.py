"""The op with gradients refuses bad input in one sentence before anything runs; the backend chosen has a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training_calls import random_ffn, train_ffn

from twell.kernels import training
from twell.kernels.training import capacity_for, choose


def test_double_backward_is_refused() -> None:
    tensors = random_ffn(4, 8, 16)
    out = train_ffn(tensors)
    with pytest.raises(ValueError, match="expected one backward pass, got create_graph=True"):
        torch.autograd.grad(out.y.sum(), tensors["x"], create_graph=True)


def test_a_gradient_that_is_not_contiguous_is_copied() -> None:
    tensors = random_ffn(4, 8, 16)
    gradient = torch.randn(8, 4, dtype=torch.float64).t()
    (got,) = torch.autograd.grad(train_ffn(tensors).y, tensors["x"], gradient)
    (want,) = torch.autograd.grad(train_ffn(tensors).y, tensors["x"], gradient.contiguous())
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 12)}, "d_model: expected a positive multiple of 8, got 12"),
        ({"x": torch.zeros(4, 8).half()}, r"w_gate: expected torch.float16 or torch.float32, got torch.float64"),
        ({"w_up": torch.zeros(16, 8, dtype=torch.float64, device="meta")}, "w_up: expected device cpu, that of x"),
        ({"w_up": torch.zeros(8, 8, dtype=torch.float64)}, r"w_up: expected shape \[16, 8\], got \[8, 8\]"),
        ({"w_gate": torch.zeros(8, 16, dtype=torch.float64).t()}, "w_gate: expected a contiguous tensor, got strides"),
        ({"b_up": [0.0]}, "b_up: expected a tensor, got list"),
        ({"rows": torch.ones(3, dtype=torch.uint8)}, r"rows: expected shape \[4\], got \[3\]"),
        ({"rows": torch.ones(4)}, "rows: expected torch.uint8, got torch.float32"),
        ({"activation": "silu"}, "activation: expected one of relu, relu2, got 'silu'"),
        ({"capacity": 0}, "capacity: expected at least 1 neuron a row, or None, got 0"),
        ({"capacity": 2.5}, "capacity: expected at least 1 neuron a row, or None, got 2.5"),
        ({"kernel": "fastest"}, "kernel: expected one of .*, got 'fastest'"),
    ],
)
def test_bad_input_is_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as error:
        train_ffn({**random_ffn(4, 8, 16), **change})
    assert "\n" not in str(error.value)


def test_a_capacity_has_room_for_half_as_many_again() -> None:
    whole = 3755  # six bytes each are as many as four of all 5632
    expected = {0: 44, 29: 44, 30: 176, 117: 176, 118: 704, 469: 704, 470: 1408, 704: 1408, 705: whole, 5632: whole}
    assert {mean: capacity_for(mean, 5632) for mean in expected} == expected
    assert capacity_for(0.5, 8) == 8 and capacity_for(0.5, 1024) == 16, "not what says that nothing is to be kept"


def test_the_choice_has_a_reason() -> None:
    choice = choose("cpu", torch.float32, 8, 16, 4)
    assert choice.kernel == "reference" and choice.reason
    assert choose("cpu", torch.float32, 8, 16, 4, "reference").reason == "asked for by name"


def test_sparse_passes_pay_where_little_fires() -> None:
    assert training.sparse_pays(330.0, 5632) and not training.sparse_pays(2816.0, 5632)
