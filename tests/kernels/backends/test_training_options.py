"""Training calls on Hopper with biases, and with given sums to which gradients of weights are added, each way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gpu_checks import poison
from support.gpu_training import COEFFICIENT, ON_HOPPER, direction, errors, made
from torch import Tensor
from torch.nn.functional import linear

from twell.kernels.backends import hopper_compact, reference_backward
from twell.kernels.backends.reference_backward import Weights
from twell.kernels.training import Trained, choose, train_gated_ffn, train_plain_ffn

pytestmark = ON_HOPPER
KINDS = [(True, "relu"), (False, "relu"), (True, "relu2"), (False, "relu2")]
SHAPES = [(1, 256, 512), (131, 136, 1032), (1025, 512, 1024), (4097, 1024, 2816), (20_000, 64, 264)]
# gated, activation, n, d_model, d_ff, shift: of gated ReLU all shapes, with none, some and all firing
CASES = [(*KINDS[0], *shape, shift) for shape in SHAPES for shift in (-60.0, -1.5, 60.0)]
CASES += [(*kind, *shape, shift) for kind in KINDS[1:] for shape in SHAPES[1:3] for shift in (-1.5, 60.0)]
GATED = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
PLAIN = {"w_gate": "w_in", "w_down": "w_out", "b_gate": "b_in", "b_down": "b_out"}
Tensors = dict[str, Tensor]
WORKSPACES = {  # and how many neurons a row have room in what is kept
    "worst case": 2**14, "repeated": 1, "compact": 2**14, "compact, dense": 1, "compact, at once": 1,
    "compact, all kept": 2**14,
}  # fmt: skip


@pytest.fixture(autouse=True, params=[*WORKSPACES])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each workspace, with room for all that is kept and for hardly any; options of the calls."""
    monkeypatch.setattr(hopper_compact, "ENABLED", request.param.startswith("compact"))
    monkeypatch.setattr(hopper_compact, "FORWARD_ROWS", 1024)
    monkeypatch.setattr(hopper_compact, "AT_ONCE", request.param in ("compact, at once", "compact, all kept"))
    monkeypatch.setattr(hopper_compact, "WHOLE_FROM", 0.0)
    if request.param in ("compact", "compact, at once"):
        monkeypatch.setattr(hopper_compact, "ROOM", 1e6)
    poison()
    return {"capacity": WORKSPACES[request.param]}


def tensors_of(
    n: int, d_model: int, d_ff: int, shift: float, *, gated: bool = True, biases: tuple[str, ...] = GATED[3:]
) -> Tensors:
    """Arguments by name; the gates' biases are `shift` in the mean."""
    x, gate, up, down = made(n, d_model, d_ff, 0.0)
    source = torch.Generator("cuda").manual_seed(9)

    def normal(size: int, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(size, generator=source, device="cuda") * 0.5 + mean
        return drawn.bfloat16().requires_grad_()

    drawn = {"b_gate": normal(d_ff, shift), "b_up": normal(d_ff), "b_down": normal(d_model)}
    tensors = {"x": x, "w_gate": gate, "w_up": up, "w_down": down} | {name: drawn[name] for name in biases}
    if gated:
        return tensors
    return {PLAIN.get(name, name): tensor for name, tensor in tensors.items() if name not in ("w_up", "b_up")}


def train(tensors: Tensors, **options: Any) -> Trained:
    return (train_gated_ffn if "w_gate" in tensors else train_plain_ffn)(**tensors, kernel="hopper", **options)


def gradients(y: Tensor, l1: Tensor, of: list[Tensor]) -> list[Tensor]:
    along = direction(*y.shape).to(y.dtype)
    return list(torch.autograd.grad((y, l1), of, (along, torch.full_like(l1, COEFFICIENT))))


def weights_of(tensors: Tensors, dtype: torch.dtype) -> Weights:
    found = [tensors.get(name, tensors.get(PLAIN.get(name, ""))) for name in GATED]
    return Weights(*(None if tensor is None else tensor.detach().to(dtype) for tensor in found))  # type: ignore[arg-type]


def dense(tensors: Tensors, activation: str) -> list[Tensor]:
    w = Weights(*(tensors.get(name, tensors.get(PLAIN.get(name, ""))) for name in GATED))  # type: ignore[arg-type]
    gate = linear(tensors["x"], w.gate, w.b_gate).relu()
    gate = gate if activation == "relu" else gate.square()
    hidden = gate if w.up is None else gate * linear(tensors["x"], w.up, w.b_up)
    y, l1 = linear(hidden, w.down, w.b_down), hidden.abs().sum(dtype=torch.float32) / len(hidden)
    return [y, *gradients(y, l1, list(tensors.values()))]


def exact(tensors: Tensors, activation: str) -> list[Tensor]:
    x, weights = tensors["x"].detach().double(), weights_of(tensors, torch.float64)
    out = reference_backward.forward(x, weights, None, activation)
    coefficient = torch.tensor(COEFFICIENT, device="cuda", dtype=torch.float64)
    grads = reference_backward.backward(
        x, weights, out.saved, activation, direction(*x.shape).double(), coefficient, torch.float64
    )
    return [out.y, *(grad for grad in grads if grad is not None)]


def as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[None]


@pytest.mark.parametrize(("gated", "activation", "n", "d_model", "d_ff", "shift"), CASES)
def test_errors_with_biases_are_denses(
    options: dict[str, Any], gated: bool, activation: str, n: int, d_model: int, d_ff: int, shift: float
) -> None:
    kind: dict[str, Any] = {"gated": gated, "activation": activation}
    assert choose("cuda", torch.bfloat16, d_model, d_ff, n, **kind).kernel == "hopper"
    tensors = tensors_of(n, d_model, d_ff, shift, gated=gated)
    out = train(tensors, activation=activation, **options)
    assert abs(shift) < 50 or int(out.nnz.sum()) == (n * d_ff if shift > 0 else 0)
    found = [out.y, *gradients(out.y, out.l1, list(tensors.values()))]
    names = ("y", *tensors)
    for name, got, loose, want in zip(
        names, found, dense(tensors, activation), exact(tensors, activation), strict=True
    ):
        assert got.isfinite().all(), name
        (mean, most), (denses_mean, denses_most) = (errors(as_rows(t), as_rows(want)) for t in (got, loose))
        if n == 1:  # both errors are single draws
            assert mean <= 0.02, (name, mean)
            continue
        single = 1.6 if got.dim() == 1 else 1
        assert mean <= 1.25 * single * denses_mean + 1e-6, (name, mean, denses_mean)
        assert most <= 2 * single * denses_most + 1e-6, (name, most, denses_most)


@pytest.mark.parametrize("biases", [("b_gate",), ("b_up",), ("b_down",), ("b_up", "b_down")])
def test_some_biases(options: dict[str, Any], biases: tuple[str, ...]) -> None:
    tensors = tensors_of(300, 264, 520, -1.0, biases=biases)
    out = train(tensors, **options)
    found = [out.y, *gradients(out.y, out.l1, list(tensors.values()))]
    for name, got, want in zip(("y", *tensors), found, exact(tensors, "relu"), strict=True):
        assert errors(as_rows(got), as_rows(want))[0] <= 0.01, name


def test_a_broken_row_stays_alone(options: dict[str, Any]) -> None:
    tensors = tensors_of(1300, 256, 512, -1.0)
    with torch.no_grad():
        tensors["x"][1207, 3] = torch.inf
    out = train(tensors, **options)
    grads = dict(zip(tensors, gradients(out.y, out.l1, list(tensors.values())), strict=True))
    assert not out.finite[1207] and grads["x"][1207].isnan().all()
    others = {**tensors, "x": tensors["x"].detach()[out.finite].requires_grad_()}
    along = direction(1300, 256)[out.finite]
    alone = train(others, **options)
    want = torch.autograd.grad(
        (alone.y, alone.l1), list(others.values()), (along, torch.full_like(alone.l1, COEFFICIENT))
    )
    for name, its in zip(others, want, strict=True):
        got = grads[name][out.finite] if name == "x" else grads[name]
        assert errors(as_rows(got), as_rows(its))[0] <= 0.01, name


@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize("masters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
def test_sums_are_those_of_torch(options: dict[str, Any], wide: bool, masters: torch.dtype, by_neuron: bool) -> None:
    """The bits of adding the gradient that the call returns without them; float32 gradients of 16-bit weights too."""
    tensors = tensors_of(1025, 512, 1024, -1.5)
    tensors |= {name: tensors[name].detach().to(masters).requires_grad_() for name in GATED}
    if by_neuron:
        tensors["w_down"] = tensors["w_down"].detach().t().contiguous().t().requires_grad_()
    matrices, others = GATED[:3], ("x", *GATED[3:])
    kind = torch.float32 if wide else masters
    begun = [torch.randn_like(tensors[name].detach(), dtype=kind) * 0.1 for name in matrices]
    sums = [total.clone(memory_format=torch.preserve_format) for total in begun]
    out = train(tensors, sums=sums, **options)
    added = gradients(out.y, out.l1, [tensors[name] for name in others])
    exactly = {**tensors} | {name: tensors[name].detach().to(kind).requires_grad_() for name in GATED}
    alone = train(exactly, **options)
    want = gradients(alone.y, alone.l1, list(exactly.values()))
    for name, one, other in zip(others, added, (want[0], *want[4:]), strict=True):
        assert torch.equal(one, other.to(one.dtype)), name
    for name, total, first, grad in zip(matrices, sums, begun, want[1:4], strict=True):
        assert total.stride() == tensors[name].stride(), name
        assert torch.equal(total, (first.float() + grad.float()).to(kind)), name


def test_sums_twice_and_in_one_graph(options: dict[str, Any]) -> None:
    if options["capacity"] == 1:
        pytest.skip("torch compiles some seconds")
    tensors = tensors_of(1025, 512, 1024, -1.5)
    matrices = [tensors[name] for name in GATED[:3]]
    names = list(tensors)

    def loss(*values: Tensor, sums: list[Tensor]) -> Tensor:
        out = train(dict(zip(names, values, strict=True)), sums=sums, **options)
        return out.y.float().square().sum() + out.l1

    found = []
    torch.compiler.reset()
    # what is compiled holds the shapes of what is kept, which hang on more than the graph in these tests
    with torch._inductor.config.patch(force_disable_caches=True):
        for run in (loss, torch.compile(loss, fullgraph=True)):
            sums = [torch.zeros_like(weight.detach(), dtype=torch.float32) for weight in matrices]
            for _ in range(2):
                run(*tensors.values(), sums=sums).backward()
            found.append(sums)
    assert all(weight.grad is None for weight in matrices)
    for one, other in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_same_call_same_bits(options: dict[str, Any]) -> None:
    tensors = tensors_of(4097, 1024, 2816, -1.5)
    first, second = (
        gradients(out.y, out.l1, list(tensors.values())) for out in (train(tensors, **options) for _ in range(2))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
