"""Every bad input is refused before anything runs, by name, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twell.kernels.dispatch import KERNELS, Choice, Kernel, choose
from twell.kernels.layout import Layout
from twell.kernels.ops import gated_ffn, plain_ffn
from twell.kernels.params import Requirements

N, D_MODEL, D_FF = 6, 16, 24


def good(gated: bool = True) -> dict[str, Any]:
    down = torch.zeros(D_MODEL, D_FF)
    weights = {"w_gate": torch.zeros(D_FF, D_MODEL), "w_up": torch.zeros(D_FF, D_MODEL), "w_down": down}
    biases = {"b_gate": torch.zeros(D_FF), "b_up": torch.zeros(D_FF), "b_down": torch.zeros(D_MODEL)}
    if not gated:
        weights = {"w_in": weights["w_gate"], "w_out": down}
        biases = {"b_in": biases["b_gate"], "b_out": biases["b_down"]}
    numbers = torch.zeros(N, dtype=torch.int32)
    info = {"rows": torch.ones(N, dtype=torch.uint8), "tokens": numbers, "sequences": numbers}
    return {"x": torch.zeros(N, D_MODEL), **weights, **biases, **info, "probes": "neurons"}


def refusal(arguments: dict[str, Any]) -> str:
    op = gated_ffn if "w_gate" in arguments else plain_ffn
    with pytest.raises((TypeError, ValueError)) as caught:
        op(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("gated", [True, False])
def test_every_tensor_is_checked_by_name(gated) -> None:
    arguments = good(gated)
    (gated_ffn if gated else plain_ffn)(**arguments)
    for name, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        shape = list(tensor.shape)

        def refused_with(replaced: Any, name: str = name) -> str:
            return refusal({**arguments, name: replaced})

        assert refused_with([1.0]) == f"{name}: expected a tensor, got list"
        if name != "x":
            assert refused_with(tensor.to("meta")) == f"{name}: expected device cpu, that of x, got meta"
            assert refused_with(tensor.to(torch.int8)) == f"{name}: expected {tensor.dtype}, got torch.int8"
            rank = tensor.dim()
            assert refused_with(tensor[None].clone()) == f"{name}: expected {rank} dimensions, got {rank + 1}"
            longer = torch.cat([tensor, tensor[:1]])
            grown = [shape[0] + 1, *shape[1:]]
            if name in ("w_gate", "w_in"):
                assert refused_with(longer) == f"d_ff: expected a positive multiple of 8, got {D_FF + 1}"
            else:
                assert refused_with(longer) == f"{name}: expected shape {shape}, got {grown}"
        spread = torch.stack([tensor, tensor], -1)[..., 0]
        assert refused_with(spread) == f"{name}: expected a contiguous tensor, got strides {list(spread.stride())}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(6, 16, dtype=torch.int32)}, "x: expected one of torch.bfloat16, torch.float16, "
         "torch.float32, torch.float64, got torch.int32"),
        ({"x": torch.tensor(1.0)}, "x: expected at least 1 dimension, got 0"),
        ({"x": torch.zeros(6, 12)}, "d_model: expected a positive multiple of 8, got 12"),
        ({"x": torch.zeros(6, 0)}, "d_model: expected a positive multiple of 8, got 0"),
        ({"x": torch.zeros(6, 32)}, "w_gate: expected shape [24, 32], got [24, 16]"),
        ({"w_gate": torch.zeros(32, 16)}, "w_up: expected shape [32, 16], got [24, 16]"),
        ({"w_up": None}, "w_up: expected a tensor, got NoneType"),
        ({"w_down": None}, "w_down: expected a tensor, got NoneType"),
        ({"tokens": None}, 'tokens: expected an int32 tensor with probes="neurons", got None'),
        ({"sequences": None}, 'sequences: expected an int32 tensor with probes="neurons", got None'),
        ({"activation": "tanh"}, "activation: expected one of relu, relu2, silu, gelu, gelu_tanh, got 'tanh'"),
        ({"activation": "silu"}, "threshold: expected a number, as silu has no zeros to leave uncounted, got None"),
        ({"threshold": -1.0}, "threshold: expected a finite number of at least 0, got -1.0"),
        ({"threshold": float("nan")}, "threshold: expected a finite number of at least 0, got nan"),
        ({"probes": "all"}, "probes: expected one of none, counts, neurons, got 'all'"),
        ({"layout": 256}, "layout: expected a Layout, got int"),
        ({"kernel": "fast"}, "kernel: expected one of auto, hopper, cuda, cpu, reference, got 'fast'"),
        ({"w_up": torch.zeros(24, 16, requires_grad=True)}, "w_up: expected no gradient to follow, as the op is for "
         "inference, got requires_grad=True; call it under torch.inference_mode()"),
    ],
)  # fmt: skip
def test_messages(changes, message) -> None:
    assert refusal({**good(), **changes}) == message


@pytest.mark.filterwarnings("ignore:.*(nested|Nested|Sparse).*")
@pytest.mark.parametrize("gated", [True, False])
def test_a_tensor_that_is_not_dense_is_named_with_its_layout(gated) -> None:
    arguments = good(gated)
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor):
            sparse = f"{name}: expected a dense tensor, got layout torch.sparse_coo"
            assert refusal({**arguments, name: tensor.to_sparse()}) == sparse
            if tensor.dim() == 2:
                nested = torch.nested.nested_tensor(list(tensor))
                assert refusal({**arguments, name: nested}) == f"{name}: expected a dense tensor, got a nested one"


def test_checks_come_in_one_order() -> None:
    """Wrong in everything, a tensor is told of its device; that put right, of its dtype; and so on."""
    ranks = torch.zeros(2, D_FF, dtype=torch.float64)
    wrong = [
        (ranks.to("meta"), "expected device"),
        (ranks, "expected torch.float32"),
        (ranks.float(), "expected 1 dimensions"),
        (torch.zeros(2 * D_FF + 2).float()[::2], "expected shape"),
        (torch.zeros(2 * D_FF).float()[::2], "expected a contiguous"),
    ]
    for tensor, message in wrong:
        assert refusal({**good(), "b_up": tensor}).startswith(f"b_up: {message}")


def test_gradients_may_be_off_instead_of_absent() -> None:
    arguments = good()
    arguments["w_up"].requires_grad_()
    with torch.no_grad():
        y, _ = gated_ffn(**arguments)
    assert not y.requires_grad


def test_auto_says_why() -> None:
    choice = choose("cpu", torch.float64, 16, 24, 6)
    assert choice.kernel == "reference"
    assert choice.reason.endswith("; cpu: expected float32 or bfloat16, got float64")
    assert choose("cpu", torch.float32, 16, 24, 6, "reference") == Choice("reference", "asked for by name")
    counted = choose("cpu", torch.float32, 16, 24, 6, requirements=Requirements("silu", threshold=0.1))
    assert counted.kernel == "reference"
    assert counted.reason.endswith("; cpu: expected relu or relu2 and no threshold, got silu with threshold 0.1")


def test_a_kernel_that_refuses_gives_way(monkeypatch) -> None:
    """A kernel joins by standing in KERNELS, and what it refuses goes to the next one with the reason."""

    def few_rows(device: Any, dtype: Any, d_model: int, d_ff: int, n: int, _: Any) -> str | None:
        return None if n <= 4 else f"expected at most 4 rows, got {n}"

    calls = []

    def run(params: Any) -> Any:
        calls.append(params.x.shape[0])
        return KERNELS["reference"].run(params)

    kernels = {"few": Kernel(run, few_rows, "for few rows"), "reference": KERNELS["reference"]}
    monkeypatch.setattr("twell.kernels.dispatch.KERNELS", kernels)
    assert choose("cpu", torch.float32, 16, 24, 4) == Choice("few", "for few rows")
    for name in ("auto", "few"):
        choice = choose("cpu", torch.float32, 16, 24, 5, name)
        assert choice.kernel == "reference"
        assert "few: expected at most 4 rows, got 5" in choice.reason
    x, up, down = torch.ones(4, 8), torch.ones(8, 8), torch.ones(8, 8)
    for n in (4, 5):
        gated_ffn(torch.ones(n, 8), x.new_ones(8, 8), up, down, layout=Layout())
    assert calls == [4]
