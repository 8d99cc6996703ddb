"""Check kernels for NVIDIA GPUs: calls of integers, where all sums are exact, and results that must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from twell.kernels.backends import gpu, hopper, reference
from twell.kernels.backends.gpu import Workspace
from twell.kernels.layout import Layout, TwELL, unpack
from twell.kernels.ops import gated_ffn
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats

NEIGHBOURS = [  # rows, neurons to a tile on 132 multiprocessors where d_model is 128, d_ff
    (100, 48, 5632), (190, 96, 5632), (384, 128, 5632), (500, 176, 5632), (640, 224, 5632), (768, 256, 5632),
    (1000, 176, 5632), (20, 64, 8192), (100, 64, 8192), (640, 160, 8192), (700, 192, 8192), (5, 112, 14_336),
    (60, 112, 14_336), (200, 112, 6912), (384, 144, 6200), (400, 192, 12_288),
]  # fmt: skip
CUDA = torch.device("cuda")
LAUNCHES = 2000  # of each thread, where threads are to meet in one
Results = tuple[Tensor, Stats]
Run = Callable[[], Results]
Result = TypeVar("Result")


def skip_without(kernel: ModuleType) -> None:
    """Skip the test, with the reason, where there is no GPU that the kernel takes."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if reason := kernel.refuses(CUDA, torch.bfloat16, 64, 64, 1):
        pytest.skip(reason)


def plan_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `hopper` make a plan from 2 049 rows on, however few neurons there are: small tensors meet its edges."""
    monkeypatch.setattr(hopper, "has_plan", lambda n, d_ff: n > 2048)


def poison() -> None:
    """Fill memory with NaN and free it, so that workspaces and results are made of it next."""
    block = torch.full((2**26,), float("nan"), device=CUDA)
    small = [torch.full((2**exponent,), float("nan"), device=CUDA) for exponent in range(7, 24)]
    del block, small


def apart(workspace: Workspace, moved: Callable[[Tensor], Tensor]) -> None:
    """Give each region of a workspace memory of its own: the tensor that `moved` makes of it."""
    tensors = {name: moved(workspace.tensor(name)) for name in workspace.names}
    begin = workspace.memory.data_ptr()
    workspace.offsets = tuple(tensor.data_ptr() - begin for tensor in tensors.values())
    workspace.tensor = tensors.__getitem__  # type: ignore[assignment, method-assign]


def make(n: int, d_model: int, d_ff: int, quiet: float, *, gated: bool = True, bias: bool = False, seed: int = 0,
         dtype: torch.dtype = torch.bfloat16, **options: Any) -> FFNParams:  # fmt: skip
    """Make a checked call of -1, 0 and 1, its gate pre-activations lowered by `quiet`; options: of FFNParams."""
    generator = torch.Generator(device=CUDA).manual_seed(n * d_ff + d_model + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator, device=CUDA).to(dtype)

    x, w_gate = draw(n, d_model), draw(d_ff, d_model)
    x[:, 0], w_gate[:, 0] = 1, -quiet
    w_up, w_down = draw(d_ff, d_model) if gated else None, draw(d_ff, d_model).t()
    biases = (draw(d_ff), draw(d_ff) if gated else None, draw(d_model)) if bias else (None, None, None)
    row = torch.arange(n, dtype=torch.int32, device=CUDA)
    about: dict[str, Any] = {
        "rows": (row % 5 > 0).byte(),
        "tokens": row * 7 % 31,
        "sequences": row // 9,
        "activation": "relu",
        "up_relu": False,
        "threshold": None,
        "probes": "neurons",
        "layout": Layout(),
        "want_packed": True,
    }
    return FFNParams(x, w_gate, w_up, w_down, *biases, **(about | options)).checked()


def uneven(n: int, d_model: int, d_ff: int, quiet: float, **options: Any) -> FFNParams:
    """Make such a call with rows that fire different numbers of neurons: the kernel puts them in another order."""
    call = make(n, d_model, d_ff, quiet, **options)
    row = torch.arange(n, device=CUDA)
    call.x[:, 0] = torch.where(row % 41 == 7, -1, row * 13 % 7 % 3)  # -1: nearly every neuron, as quiet turns to loud
    return call


def assert_same(name: str, got: Any, expected: Any, spill: bool = True) -> None:
    """Compare values, NaN too; a failure names the first that differs. Without `spill`, rows past their slots may
    lie at other places of a TwELL's spill."""
    if isinstance(expected, Tensor):
        assert got.shape == expected.shape, f"{name}: expected {list(expected.shape)}, got {list(got.shape)}"
        wrong = ~torch.isclose(got.double(), expected.double(), rtol=0, atol=0, equal_nan=True)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            pytest.fail(
                f"{name}{list(at)}: expected {expected[at].item()}, got {got[at].item()}; {int(wrong.sum())} wrong"
            )
    elif isinstance(expected, TwELL) and not spill:
        assert_same(f"{name}.words", got.words, expected.words)
        assert_same(f"{name}.spill_index", got.spill_index < 0, expected.spill_index < 0)
        assert_same(f"{name} unpacked", unpack(got), unpack(expected))
    elif hasattr(expected, "__dataclass_fields__"):
        for field in fields(expected):
            assert_same(f"{name}.{field.name}", getattr(got, field.name), getattr(expected, field.name), spill)
    else:
        assert got == expected, name


def assert_same_results(got: Results, expected: Results, about: object = "", spill: bool = True) -> None:
    """Compare y and the statistics of two calls as `assert_same` does. about: the call, for a failure's message."""
    assert_same(f"y {about}", got[0], expected[0])
    assert_same(f"stats {about}", got[1], expected[1], spill)


def run_added(params: FFNParams, added: Tensor | None) -> Results:
    """Run a call of `hopper` that adds to what it has rounded. added: [n, d_model], or None"""
    y, stats = gpu.results(params, in_full=True)
    planned = hopper.plans(params, params.n)
    workspace = hopper.HopperWorkspace(params.n, len(params.w_gate), params.x.dtype, params.x.device, planned)
    hopper.launch(params, slice(0, params.n), workspace, y, stats, added=added)
    return y, stats


def assert_right(kernel: ModuleType, params: FFNParams, about: object = "", spill: bool = True) -> Stats:
    """Run a call over memory of NaN, expect the bits of the reference, and return the statistics."""
    expected = reference.run(params)
    poison()
    got = kernel.run(params)
    assert_same_results(got, expected, about, spill)
    return got[1]


def assert_probes_change_nothing_else(run: Callable[[FFNParams], Results], params: FFNParams) -> None:
    """Run a call with fewer probes: the same bits of y, and no other statistics than the call asks for."""
    y, stats = run(params)
    for probes in ("none", "counts"):
        bare = replace(params, probes=probes, layout=None, want_packed=False, tokens=None, sequences=None)
        again, less = run(bare)
        assert_same("y", again, y)
        assert_same("finite", less.finite, stats.finite)
        assert less.tiles is None and less.neurons is None and less.packed is None
        assert len(less.nnz) == (0 if probes == "none" else params.x.shape[0])
        assert (less.nnz_used is None) == (probes == "none" or not params.up_relu)


def on_two_streams(run: Callable[[], Result]) -> Iterator[Result]:
    """Yield the results of ten calls on each of two streams at once."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(10):
        others = []
        for stream in streams:
            with torch.cuda.stream(stream):
                others.append(run())
        torch.cuda.synchronize()
        yield from others


def assert_same_in_a_graph(run: Run, y: Tensor, stats: Stats) -> None:
    """Replay a captured call over a poisoned result, and expect the same bits."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, counts = run()
    graph.replay()  # from now on there is memory behind its results, whatever allocates it
    captured.fill_(float("nan")), counts.nnz.fill_(-1)
    graph.replay()
    assert_same("y", captured, y)
    assert_same("nnz", counts.nnz, stats.nnz)


def assert_same_on_streams(run: Run) -> None:
    """Expect the bits of a call from calls on two streams at once, and from a captured one."""
    alone = run()
    for other in on_two_streams(run):
        assert_same_results(other, alone)
    assert_same_in_a_graph(run, *alone)


def normal_ffn(n: int, d_model: int, d_ff: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, w_gate, w_up and w_down of normal numbers in bfloat16; a few per cent of the neurons fire."""
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    w_gate, w_up, by_neuron = (
        torch.randn(d_ff, d_model, device=CUDA, generator=generator).bfloat16() / d_model**0.5 for _ in range(3)
    )
    x = torch.randn(n, d_model, device=CUDA, generator=generator).bfloat16()
    w_gate[:, 0], x[:, 0] = -2, 1
    return x, w_gate, w_up, by_neuron.t()


def assert_as_exact_as_dense(kernel: str, n: int) -> None:
    """Compare each row's relative error to float64, mean and greatest, with that of torch's three dense products."""
    tensors = normal_ffn(n, 1024, 2816, seed=2)
    linear = torch.nn.functional.linear

    def densely(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return linear(torch.relu(linear(x, w_gate)) * linear(x, w_up), w_down)

    exact = densely(*(tensor.double() for tensor in tensors))
    y, _ = gated_ffn(*tensors, kernel=kernel)
    ours, theirs = (((t.double() - exact).norm(dim=1) / exact.norm(dim=1)) for t in (y, densely(*tensors)))
    assert ours.max() <= 1.25 * theirs.max()
    assert ours.mean() <= 1.25 * theirs.mean()


def spoilt(params: FFNParams, how: str) -> tuple[FFNParams, list[int]]:
    """Change a call so that some rows are not finite, each by one neuron's doing; return it and these rows.

    how: inf, -inf or rounds to inf, of gate values; up, of the up pre-activation; hidden, of their product
    """
    (n, _), d_ff, half = params.x.shape, params.w_gate.shape[0], params.x.dtype == torch.float16
    pairs = dict(zip((0, n // 4, n // 2, n - 1), (d_ff - 1, d_ff // 4 + 1, 3 * d_ff // 4 + 114, 0), strict=True))
    gate, up = params.w_gate, params.w_gate if params.w_up is None else params.w_up
    params.x[:, 8:16], gate[:, 8:16], up[:, 8:16] = 0, 0, 0
    big, some = (60_000.0, 2.0**4) if half else (2.0**100, 2.0**35)
    last, tie = (65_504.0, 16.0) if half else (255 * 2.0**120, 2.0**119)  # the last number; half of its last bit
    for column, (row, neuron) in enumerate(pairs.items()):
        at = 8 + 2 * column  # two that are this row's and this neuron's alone
        gate[neuron, 1:], gate[neuron, 0] = 0, 1  # fires in every row
        if params.w_up is not None:
            up[neuron] = 0  # times which inf is no number
        if how == "rounds to inf":
            params.x[row, at : at + 2] = 1
            gate[neuron, at], gate[neuron, at + 1] = last, tie
        elif how == "hidden":
            params.x[row, at], gate[neuron, at], up[neuron, at] = some, some, some
        elif how == "up":
            params.x[row, at], up[neuron, at] = big, big
        else:
            params.x[row, at], gate[neuron, at] = big, -big if how == "-inf" else big
    return params, sorted(pairs)
