"""Training calls on a Hopper GPU: random ones, their gradients by our kernels, and the errors of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from twell.kernels.backends import hopper_backward, reference_backward
from twell.kernels.backends.reference_backward import Weights
from twell.kernels.training import Trained, train_gated_ffn, train_plain_ffn


def _is_hopper() -> bool:
    """Return whether the first GPU is a Hopper one, by the driver: CUDA may not run before a fork."""
    if not torch.cuda.is_available():
        return False
    import pynvml

    pynvml.nvmlInit()
    return tuple(pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))) == (9, 0)


ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not _is_hopper(), reason="no Hopper GPU here")]
SHAPES = [(1, 256, 512), (131, 136, 1032), (300, 264, 520), (1025, 512, 1024), (2049, 512, 2048), (4097, 1024, 2816)]
NAMES = ("x", "w_gate", "w_up", "w_down")
COEFFICIENT = 0.7
FITS = 12  # where `fits` is among the offsets of a compact pass


def made(n: int, d_model: int, d_ff: int, shift: float = -1.5, seed: int = 0) -> list[Tensor]:
    """Random x and weights that need gradients, in bfloat16; `shift` moves all gates: their column 0 meets ones."""
    source = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=source, device="cuda") * scale

    x, gate = normal(n, d_model), normal(d_ff, d_model, scale=d_model**-0.5)
    x[:, 0], gate[:, 0] = 1, shift
    tensors = [x, gate, normal(d_ff, d_model, scale=d_model**-0.5), normal(d_model, d_ff, scale=d_ff**-0.5)]
    return [tensor.bfloat16().requires_grad_() for tensor in tensors]


def firing(many: Tensor, d_model: int, d_ff: int) -> list[Tensor]:
    """Make a call whose i-th row fires many[i] neurons: the first ones of one order, in which all rows fire them."""
    n = len(many)
    x, gate, up, down = (tensor.detach() for tensor in made(n, d_model, d_ff, 0.0))
    rank = torch.randperm(d_ff, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    one, many = torch.ones(n, device="cuda"), many.cuda()
    x *= 2**-11  # a firing depends on the first five columns alone, whose sum is (many - rank - 1 / 2) / 64, exactly
    x[:, :5] = torch.stack([many // 32, many % 32, one, one, one], 1) / 8
    digits = torch.stack([rank // 32 * -32, -(rank % 32)], 1)
    gate[:, :5] = torch.cat([torch.tensor([[32, 1]] * d_ff, device="cuda"), digits, -0.5 + 0 * digits[:, :1]], 1) / 8
    return [tensor.requires_grad_() for tensor in (x, gate, up, down)]


def direction(n: int, d_model: int) -> Tensor:
    return torch.randn(n, d_model, generator=torch.Generator("cuda").manual_seed(5), device="cuda").bfloat16()


def gradients(y: Tensor, l1: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients of y along `direction`, and of COEFFICIENT times l1."""
    along = direction(*tensors[0].shape).to(y.dtype)
    return list(torch.autograd.grad((y, l1), tensors, (along, torch.full_like(l1, COEFFICIENT))))


def ours(tensors: list[Tensor], **options: Any) -> tuple[Trained, list[Tensor]]:
    """Return the results of a call by `hopper` and its gradients; of a plain FFN if there are three tensors."""
    train = train_plain_ffn if len(tensors) == 3 else train_gated_ffn
    out = train(*tensors, kernel="hopper", **options)  # type: ignore[arg-type]
    return out, gradients(out.y, out.l1, tensors)


def dense(tensors: list[Tensor]) -> list[Tensor]:
    """Return y and the gradients of the dense formula in bfloat16; biases of gate, up and down may follow."""
    x, gate, up, down, *biases = tensors
    of_gate, of_up, of_down = biases or (None, None, None)
    hidden = linear(x, gate, of_gate).relu() * linear(x, up, of_up)
    y, l1 = linear(hidden, down, of_down), hidden.abs().sum(dtype=torch.float32) / len(x)
    return [y, *gradients(y, l1, tensors)]


def exact(tensors: list[Tensor], rows: Tensor | None = None, activation: str = "relu") -> list[Tensor]:
    """Return y and the gradients in float64; without up weights, of a plain FFN."""
    x, gate, *up, down = (tensor.detach().double() for tensor in tensors)
    packed = Weights(gate, up[0] if up else None, down, None, None, None)
    out = reference_backward.forward(x, packed, rows, activation)
    coefficient = torch.tensor(COEFFICIENT, device="cuda", dtype=torch.float64)
    along = direction(*x.shape).double()
    grads = reference_backward.backward(x, packed, out.saved, activation, along, coefficient, torch.float64)
    return [out.y, *(grad for grad in (grads.x, grads.gate, grads.up, grads.down) if grad is not None)]


@contextmanager
def what_fits() -> Iterator[list[int]]:
    """Yield a list that gets, of each compact backward pass by the traced ops, whether what it keeps has fit.

    1: it has; 0: it was computed densely, in passes; -1: densely, at once
    """
    found: list[int] = []
    op = hopper_backward.op

    def watched(name: str, activation: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            results = op(name, activation)(*arguments)
            if name == "backward":
                memory, offsets = arguments[11:13]
                found.append(int(memory[offsets[FITS] :][:4].view(torch.int32)))
            return results

        return run

    hopper_backward.op = watched
    try:
        yield found
    finally:
        hopper_backward.op = op


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Return the mean and the largest row's error, relative to the mean size of a row."""
    got, want = got.detach().double(), want.detach().double()
    off = (got - want).norm(dim=1) / want.norm(dim=1).mean().clamp(min=1e-30)
    return float(off.mean()), float(off.max())


def assert_errors_are_denses(tensors: list[Tensor], **options: Any) -> Trained:
    """Expect no larger errors against float64 than 1.25 times those of the dense formula; return the call's results."""
    out, grads = ours(tensors, **options)
    for name, got, loose, want in zip(("y", *NAMES), [out.y, *grads], dense(tensors), exact(tensors), strict=True):
        assert got.isfinite().all(), name
        (mean, most), (denses_mean, denses_most) = errors(got, want), errors(loose, want)
        assert mean <= 1.25 * denses_mean + 1e-6, (name, mean, denses_mean)
        assert most <= 2 * denses_most + 1e-6, (name, most, denses_most)  # of few rows, one rounding may be the largest
    return out


def assert_l1_of_rows_that_count(**options: Any) -> None:
    """Expect the reference's gradients of l1 alone, which are too small to be seen beside those of y.

    Rows are so unlike that blocks take them by nnz, and one in three does not count.
    """
    tensors = made(700, 256, 512)
    rows = (torch.arange(700, device="cuda") % 3 != 0).to(torch.uint8)
    with torch.no_grad():
        tensors[0][:, 0] = torch.linspace(0, 2, 700, device="cuda")[torch.arange(700, device="cuda") * 37 % 700]
    l1 = [
        train_gated_ffn(*tensors, rows=rows, kernel="hopper", **options).l1,  # type: ignore[arg-type]
        train_gated_ffn(*tensors, rows=rows, kernel="reference").l1,  # type: ignore[arg-type]
    ]
    torch.testing.assert_close(*l1, rtol=1e-3, atol=0)
    grads = [torch.autograd.grad(each, tensors[:3]) for each in l1]
    assert all(errors(got, want)[0] <= 0.02 for got, want in zip(*grads, strict=True))


def assert_masters_get_their_dtype(**options: Any) -> None:
    """Expect gradients in float32 where weights are, and in bfloat16 those of bfloat16 weights, rounded."""
    tensors = made(1025, 512, 1024)
    masters = [tensors[0], *(tensor.detach().float().requires_grad_() for tensor in tensors[1:])]
    _, grads = ours(masters, **options)
    _, narrow = ours(tensors, **options)
    assert torch.equal(grads[0], narrow[0])
    for wide, rounded in zip(grads[1:], narrow[1:], strict=True):
        assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), rounded)


def assert_one_graph(**options: Any) -> None:
    """Compile a call whole, and expect the gradients that it has uncompiled."""
    tensors = made(1025, 512, 1024)

    def loss(*values: Tensor) -> Tensor:
        out = train_gated_ffn(*values, **options)  # type: ignore[arg-type]
        return out.y.float().square().sum() + out.l1

    torch.compiler.reset()
    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def assert_two_streams_agree(**options: Any) -> None:
    """Run calls in two streams at once, and expect the gradients that each has alone."""
    many = [made(1025, 512, 1024, seed=seed) for seed in range(2)]
    want = [ours(tensors, **options)[1] for tensors in many]
    streams = [torch.cuda.Stream() for _ in many]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, tensors in zip(streams, many, strict=True):
            with torch.cuda.stream(stream):
                got.append(ours(tensors, **options)[1])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))
