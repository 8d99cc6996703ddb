"""The op's backward pass by the reference: against finite differences, against autograd, compiled, checkpointed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twell.kernels import training
from twell.kernels.backends.reference_backward import Weights, dense_loss_reference
from twell.kernels.training import Trained, choose, train_gated_ffn, train_plain_ffn

Tensors = dict[str, Tensor]
COEFFICIENT = 0.3  # of l1 in the losses here


def made(
    n: int, d_model: int, d_ff: int, *, gated: bool = True, biased: bool = True, shift: float = 0.0, seed: int = 0,
    dtype: torch.dtype = torch.float64, masters: torch.dtype | None = None,
) -> Tensors:  # fmt: skip
    """Random arguments that need gradients; `shift` moves the gates' biases, so that more or fewer neurons fire."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, kind: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=source, dtype=torch.float64) * scale
        return drawn.to(kind or masters or dtype).requires_grad_()

    first, last = ("w_gate", "w_down") if gated else ("w_in", "w_out")
    tensors = {"x": normal(n, d_model, kind=dtype), first: normal(d_ff, d_model, scale=d_model**-0.5)}
    if gated:
        tensors["w_up"] = normal(d_ff, d_model, scale=d_model**-0.5)
    tensors[last] = normal(d_model, d_ff, scale=d_ff**-0.5)
    if biased:
        tensors["b_gate" if gated else "b_in"] = (normal(d_ff).detach() + shift).requires_grad_()
        tensors["b_down" if gated else "b_out"] = normal(d_model)
        if gated:
            tensors["b_up"] = normal(d_ff)
    return tensors


def run(tensors: Tensors, **options: Any) -> Trained:
    return (train_gated_ffn if "w_gate" in tensors else train_plain_ffn)(**tensors, **options)


def weights_of(tensors: Tensors) -> Weights:
    if "w_gate" in tensors:
        names = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
    else:
        names = ("w_in", "", "w_out", "b_in", "", "b_out")
    return Weights(*(tensors.get(name) for name in names))  # type: ignore[arg-type]


def gradients(tensors: Tensors, y: Tensor, l1: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss of y and l1, by name."""
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    loss = (y * direction).sum() + COEFFICIENT * l1
    return dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))


def expected(tensors: Tensors, activation: str = "relu") -> dict[str, Tensor]:
    """Return the gradients that autograd finds in float64 on its own."""
    doubled = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    y, l1 = dense_loss_reference(doubled["x"], weights_of(doubled), activation)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = (y * direction.to(tensors["x"].dtype).double()).sum() + COEFFICIENT * l1
    return dict(zip(doubled, torch.autograd.grad(loss, list(doubled.values())), strict=True))


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.isfinite().all(), name
        error = (tensor.double() - want[name]).norm() / want[name].norm().clamp(min=1e-30)
        assert error <= tolerance, (name, float(error))


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_gradcheck(gated: bool, biased: bool, activation: str) -> None:
    tensors = made(5, 8, 16, gated=gated, biased=biased)
    names = list(tensors)

    def both(*values: Tensor) -> tuple[Tensor, Tensor]:
        out = run(dict(zip(names, values, strict=True)), activation=activation)
        return out.y, out.l1

    assert torch.autograd.gradcheck(both, tuple(tensors.values()))


@pytest.mark.parametrize("shift", [-100.0, 0.0, 100.0], ids=["all dead", "some", "all alive"])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), [(1, 8, 8), (7, 24, 40), (131, 136, 264), (257, 40, 88)])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_autograds(gated: bool, n: int, d_model: int, d_ff: int, shift: float) -> None:
    tensors = made(n, d_model, d_ff, gated=gated, shift=shift)
    out = run(tensors)
    assert_close(gradients(tensors, out.y, out.l1), expected(tensors), 1e-12)
    assert int(out.nnz.sum()) == int(out.fires.sum())
    if shift:
        assert int(out.nnz.sum()) == (n * d_ff if shift > 0 else 0)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_many_rows_are_added_in_parts(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    monkeypatch.setattr("twell.kernels.backends.reference_backward.ROWS", 16)
    tensors = made(67, 24, 40)
    out = run(tensors, activation=activation)
    assert_close(gradients(tensors, out.y, out.l1), expected(tensors, activation), 1e-12)


@pytest.mark.parametrize("masters", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype, masters: torch.dtype | None) -> None:
    if masters is not None and dtype == torch.float32:
        pytest.skip("float32 weights are what that is")
    tensors = made(64, 64, 128, biased=False, dtype=dtype, masters=masters)
    out = run(tensors)
    got = gradients(tensors, out.y, out.l1)
    rounded = {n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items()}
    assert_close(got, expected(rounded), {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-5}[dtype])
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
    assert out.l1.dtype == torch.float32


def test_rows_that_do_not_count() -> None:
    tensors = made(10, 16, 24)
    rows = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.uint8)
    out = run(tensors, rows=rows)
    y, _ = dense_loss_reference(tensors["x"], weights_of(tensors), "relu")
    counted = {**tensors, "x": tensors["x"].detach()[rows.bool()]}
    _, l1 = dense_loss_reference(counted["x"], weights_of(tensors), "relu")
    torch.testing.assert_close(out.y, y)
    torch.testing.assert_close(out.l1, l1)
    with torch.no_grad():
        assert torch.equal(out.fires, run(counted).fires)
    (grad,) = torch.autograd.grad(out.l1, tensors["x"])
    assert (grad[rows == 0] == 0).all() and (grad[rows == 1] != 0).any()


def test_no_row_counts() -> None:
    tensors = made(3, 8, 16)
    out = run(tensors, rows=torch.zeros(3, dtype=torch.uint8))
    assert out.l1.item() == 0 and int(out.fires.sum()) == 0
    assert all(not grad.any() for grad in torch.autograd.grad(out.l1, list(tensors.values()), allow_unused=True))


def test_no_rows_at_all() -> None:
    tensors = made(0, 8, 16)
    out = run(tensors)
    (out.y.sum() + out.l1).backward()
    assert out.y.shape == (0, 8) and not tensors["w_gate"].grad.any()  # type: ignore[union-attr]


def test_a_broken_row_stays_alone() -> None:
    tensors = made(6, 8, 16)
    with torch.no_grad():
        tensors["x"][2] = torch.inf
    out = run(tensors)
    assert out.finite.tolist() == [True, True, False, True, True, True]
    got = gradients(tensors, torch.where(out.finite[:, None], out.y, 0), out.l1)
    others = {**tensors, "x": tensors["x"].detach()[out.finite].clone().requires_grad_()}
    alone = run(others)
    direction = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[out.finite]
    want = torch.autograd.grad((alone.y * direction).sum() + COEFFICIENT * alone.l1, list(others.values()))
    for (name, grad), right in zip(got.items(), want, strict=True):
        torch.testing.assert_close(grad[out.finite] if name == "x" else grad, right)
    assert got["x"][2].isnan().all()


def test_same_call_same_bits() -> None:
    tensors = made(50, 40, 88, dtype=torch.float32)
    first, second = (gradients(tensors, out.y, out.l1) for out in (run(tensors), run(tensors)))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_leading_dimensions() -> None:
    tensors = made(12, 16, 24)
    flat = run(tensors)
    out = run({**tensors, "x": tensors["x"].view(3, 4, 16)})
    assert out.y.shape == (3, 4, 16) and torch.equal(out.y.view(12, 16), flat.y) and torch.equal(out.nnz, flat.nnz)


def test_w_down_by_neuron() -> None:
    tensors = made(9, 16, 24)
    turned = {**tensors, "w_down": tensors["w_down"].detach().t().contiguous().t().requires_grad_()}
    out = run(turned)
    assert_close(gradients(turned, out.y, out.l1), expected(tensors), 1e-12)


def test_gradients_accumulate() -> None:
    tensors = made(9, 16, 24)
    for _ in range(2):
        out = run(tensors)
        (out.y.sum() + out.l1).backward()
    once = made(9, 16, 24)
    out = run(once)
    (out.y.sum() + out.l1).backward()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad, 2 * once[name].grad)  # type: ignore[operator]


@pytest.mark.parametrize("gated", [True, False])
def test_one_graph_when_compiled(gated: bool) -> None:
    tensors = made(20, 16, 24, gated=gated, dtype=torch.float32)

    def loss(values: Tensors) -> Tensor:
        out = run(values)
        return out.y.square().sum() + COEFFICIENT * out.l1

    want = torch.autograd.grad(loss(tensors), list(tensors.values()))
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(tensors), list(tensors.values()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_the_ops_follow_torchs_rules() -> None:
    tensors = made(6, 8, 16, dtype=torch.float32)
    arguments = (tensors["x"], *weights_of(tensors), None, "relu", "reference", True)
    torch.library.opcheck(torch.ops.twell.ffn_forward.default, arguments)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    tensors = made(11, 16, 24)
    names = list(tensors)

    def both(*values: Tensor) -> tuple[Tensor, Tensor]:
        out = run(dict(zip(names, values, strict=True)))
        return out.y, out.l1

    y, l1 = checkpoint(both, *tensors.values(), use_reentrant=reentrant)
    if reentrant:  # it follows no torch.autograd.grad
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ((y * direction).sum() + COEFFICIENT * l1).backward()
        got = {name: tensor.grad for name, tensor in tensors.items()}
    else:
        got = gradients(tensors, y, l1)
    assert_close(got, expected(tensors), 1e-12)  # type: ignore[arg-type]


def test_autocast_casts_x_and_keeps_masters() -> None:
    tensors = made(16, 32, 64, dtype=torch.float32, biased=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(tensors)
    assert out.y.dtype == torch.bfloat16
    got = gradients(tensors, out.y, out.l1)
    assert all(grad.dtype == torch.float32 for grad in got.values())


@pytest.mark.parametrize("way", ["no_grad", "inference_mode", "no tensor needs one"])
def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    asked: list[bool] = []
    whole = training.ffn_forward

    def watched(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        results = whole(*arguments)
        assert sum(tensor.numel() for tensor in results[5:]) == 0
        return results

    monkeypatch.setattr(training, "ffn_forward", watched)
    tensors = made(4, 8, 16)
    if way == "no tensor needs one":
        out = run({name: tensor.detach() for name, tensor in tensors.items()})
    else:
        with getattr(torch, way)():
            out = run(tensors)
    assert asked == [False] and not out.y.requires_grad


@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down", "b_up"])
def test_a_tensor_without_gradient_is_refused(name: str) -> None:
    tensors = made(4, 8, 16)
    with pytest.raises(ValueError, match=rf"^{name}: expected requires_grad=True.*got False") as error:
        run({**tensors, name: tensors[name].detach()})
    assert "\n" not in str(error.value)


def test_double_backward_is_refused() -> None:
    tensors = made(4, 8, 16)
    out = run(tensors)
    with pytest.raises(ValueError, match="expected one backward pass, got create_graph=True"):
        torch.autograd.grad(out.y.sum(), tensors["x"], create_graph=True)


def test_a_gradient_that_is_not_contiguous_is_copied() -> None:
    tensors = made(4, 8, 16)
    gradient = torch.randn(8, 4, dtype=torch.float64).t()
    (got,) = torch.autograd.grad(run(tensors).y, tensors["x"], gradient)
    (want,) = torch.autograd.grad(run(tensors).y, tensors["x"], gradient.contiguous())
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
        ({"kernel": "fastest"}, "kernel: expected one of .*, got 'fastest'"),
    ],
)
def test_bad_input_is_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as error:
        run({**made(4, 8, 16), **change})
    assert "\n" not in str(error.value)


def test_the_choice_has_a_reason() -> None:
    choice = choose("cpu", torch.float32, 8, 16, 4)
    assert choice.backend == "reference" and choice.reason
    assert choose("cpu", torch.float32, 8, 16, 4, "reference").reason == "asked for by name"


def test_sparse_passes_pay_where_little_fires() -> None:
    assert training.sparse_pays(330.0, 5632) and not training.sparse_pays(2816.0, 5632)
