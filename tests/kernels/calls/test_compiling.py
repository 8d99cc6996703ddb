"""The backend of torch.compile: which additions the FFN's op takes over, and that results are those of the addition."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.gpu_checks import CUDA, assert_same, make, poison, run_added, skip_without, uneven
from torch import Tensor, fx, nn
from transformers import LlamaConfig, LlamaModel

from twell.kernels.backends import hopper
from twell.kernels.calls import compiling
from twell.kernels.dispatch import Kernel
from twell.kernels.modules import Probe, SparseFFN

STAND_IN = "hopper_stand_in_ffn"
REST = (  # of its schema
    "Tensor? b_gate, Tensor? b_up, Tensor? b_down, Tensor(a!) workspace, SymInt[] offsets, Tensor(b!) y, "
    "Tensor(c!) finite, Tensor(d!)? nnz_used, Tensor? added, SymInt row, SymInt rows, bool planned, int stages, "
    "Tensor(nnz!)? nnz) -> ()"
)
given: list[bool] = []  # of each call of `op`, whether it was given something to add


@pytest.fixture(scope="module", autouse=True)
def op() -> Iterator[Callable[..., None]]:
    """An op with the arguments of the hopper kernel's that matter here, on the CPU: y = relu(x), plus what is added."""
    library = torch.library.Library("twell_test", "DEF")
    library.define("ffn(Tensor x, Tensor(a!) y, Tensor? added) -> ()")

    def run(x: Tensor, y: Tensor, added: Tensor | None) -> None:
        given.append(added is not None)
        y.copy_(x.relu() if added is None else x.relu() + added)

    library.impl("ffn", run, "CPU")
    torch.library.register_fake("twell_test::ffn", lambda *_: None, lib=library)
    yield torch.ops.twell_test.ffn
    library._destroy()


def ffn(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    torch.ops.twell_test.ffn(x, y, None)
    return y


def plain(traced: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """Compile nothing after the change."""
    compiling.add_in_kernels(traced)
    return traced.forward


def twice(x: Tensor, r: Tensor) -> Tensor:
    y = ffn(x)
    return r + y + y


def later(x: Tensor, r: Tensor) -> Tensor:
    y = ffn(x)
    r.mul_(2)
    return r + y


def in_place(x: Tensor, r: Tensor) -> Tensor:
    r += ffn(x)
    return r


def of_itself(x: Tensor, _: Tensor) -> Tensor:
    y = ffn(x)
    return y + y


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a residual": lambda x, r: r + ffn(x),
    "a residual on the right": lambda x, r: ffn(x) + r,
    "torch.add": lambda x, r: torch.add(ffn(x), r),
    "of two": lambda x, r: ffn(r + ffn(x)) * 2,
    "its own input": lambda x, _: x + ffn(x),
}
LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "output read twice": twice,
    "after what it adds has changed": later,
    "in place": in_place,
    "of itself": of_itself,
    "a row for all": lambda x, r: r[0] + ffn(x),
    "a row in place of many": lambda x, r: r + ffn(x[:1]),
    "a number": lambda x, _: ffn(x) + 1,
    "scaled": lambda x, r: torch.add(r, ffn(x), alpha=2),
    "another dtype": lambda x, r: r.double() + ffn(x),
    "not contiguous": lambda x, r: r.t().contiguous().t() + ffn(x),
    "a product": lambda x, r: r * ffn(x),
}


def check(function: Callable[[Tensor, Tensor], Tensor], taken: bool, **options: Any) -> None:
    x, r = torch.randn(3, 4), torch.randn(3, 4)
    expected = function(x.clone(), r.clone())
    torch.compiler.reset()
    given.clear()
    assert_same("y", torch.compile(function, fullgraph=True, **options)(x.clone(), r.clone()), expected)
    assert given[-1] == taken if function is not TAKEN["of two"] else given == [True, False]


@pytest.mark.parametrize("name", TAKEN)
def test_an_addition_right_after_the_op_becomes_its_argument(name: str) -> None:
    check(TAKEN[name], True, backend=plain)


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name: str) -> None:
    check(LEFT[name], False, backend=plain)


def test_a_gradient_through_what_is_added_is_followed() -> None:
    x, r = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    torch.compiler.reset()
    traced: list[int] = []

    def counting(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        traced.append(compiling.add_in_kernels(graph))
        return graph.forward

    torch.compile(TAKEN["a residual"], backend=counting, fullgraph=True)(x, r).sum().backward()
    assert traced == [0] and r.grad is not None and bool((r.grad == 1).all())
    with torch.no_grad():
        torch.compile(TAKEN["a residual"], backend=counting, fullgraph=True)(x, r.detach())
    assert traced == [0, 1]


@pytest.mark.parametrize(
    "options", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"epilogue_fusion": False}}], ids=str
)
def test_the_rest_is_inductor_with_the_same_options(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    compile_graph = torch._inductor.compile

    def spy(graph: fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Any:
        seen.append(options)
        return compile_graph(graph, inputs, options)

    monkeypatch.setattr(torch._inductor, "compile", spy)
    check(TAKEN["a residual"], True, backend=compiling.twell, **options)
    assert seen == [torch._TorchCompileInductorWrapper(options.get("mode"), options.get("options"), None).config]


@pytest.mark.parametrize("dynamic", [True, False])
def test_every_layer_of_a_model_of_transformers(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As their decoder layers add the residual, with an op in the place of the hopper kernel's."""
    library = torch.library.Library("twell", "FRAGMENT")
    library.define(f"{STAND_IN}(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, {REST}")

    def run(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *others: Any) -> None:
        y, added = others[5], others[8]
        given.append(added is not None)
        y.copy_(((x @ w_gate.t()).relu() * (x @ w_up.t())) @ w_down.t())
        if added is not None:
            y.add_(added)

    library.impl(STAND_IN, run, "CPU")
    torch.library.register_fake(f"twell::{STAND_IN}", lambda *_: None, lib=library)
    kernels = {"hopper": Kernel(hopper.run, lambda *_: None, "a test", down_by_neuron=True)}
    monkeypatch.setattr(hopper, "loaded_op", lambda *_: STAND_IN)
    monkeypatch.setattr("twell.kernels.dispatch.KERNELS", kernels)
    monkeypatch.setattr("twell.kernels.modules.KERNELS", kernels)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = LlamaModel(LlamaConfig(vocab_size=50, hidden_act="relu", **sizes)).bfloat16()
    for layer in model.layers:
        mlp: Any = layer.mlp
        layer.mlp = SparseFFN.gated(mlp.gate_proj, mlp.up_proj, mlp.down_proj, kernel="hopper")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=plain)
    with torch.inference_mode():
        for length in (5, 7):
            ids = torch.arange(2 * length).view(2, length)
            expected = model(ids).last_hidden_state
            given.clear()
            assert_same("hidden", compiled(ids).last_hidden_state, expected)
            assert given == [True] * 3
    library._destroy()


def test_it_is_known_by_name_where_the_package_is_installed() -> None:
    names = "import importlib.metadata as m; print([e.value for e in m.entry_points(group='torch_dynamo_backends')])"
    said = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True).stdout
    if said.strip() == "[]":
        pytest.skip("twell is not installed here, but imported from its folder")
    assert "twell.kernels.calls.compiling:twell" in said


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_add_to_what_they_have_rounded(dtype: torch.dtype) -> None:
    """On each path, in rows that are not finite too, and from an address that they cannot read."""
    skip_without(hopper)
    counts: dict[str, Any] = {"probes": "counts", "layout": None, "want_packed": False}
    shapes = (
        (make, True, 2048, 5632, 90, "relu"),
        (uneven, True, 192, 5632, 12, "relu"),
        (make, False, 1000, 392, -40, "relu"),
        (uneven, False, 264, 8192, 8, "relu2"),  # from 2 048 rows on, CTAs that stay
    )
    for kind, gated, d_model, d_ff, quiet, activation in shapes:
        for n in (1, 8, 9, 16, 17, 33, 64, 65, 300, 1000, 2048, 2500, 9000):
            params = kind(n, d_model, d_ff, quiet, gated=gated, activation=activation, bias=True, dtype=dtype, **counts)
            params.x[n // 2, 3] = float("nan")
            more = torch.randn(n * d_model + 1, device=CUDA, dtype=torch.float32).mul_(100).to(dtype)
            poison()
            alone = run_added(params, None)[0]
            for begin in (0, 1):
                added = more[begin : n * d_model + begin].view(n, d_model)
                poison()
                assert_same(
                    f"y {gated, activation, d_model, d_ff, n, begin}", run_added(params, added)[0], alone + added
                )


class Residual(nn.Module):
    """What a decoder layer does with its FFN; the launch before writes the residual."""

    def __init__(self, ffn: SparseFFN) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        r = r + x
        return r + self.ffn(r * 2)


@pytest.mark.gpu
def test_a_compiled_module_gives_the_bits_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(hopper)
    weights = (torch.randn(3, 1000, 192, device=CUDA) / 10).bfloat16()
    block = Residual(SparseFFN(weights[0], weights[1], weights[2].t(), kernel="hopper", probe=Probe(probes="counts")))
    moved: list[int] = []
    add = compiling.add_in_kernels
    monkeypatch.setattr(compiling, "add_in_kernels", lambda traced: moved.append(add(traced)))
    torch.compiler.reset()
    compiled = torch.compile(block, dynamic=False, fullgraph=True, backend=compiling.twell)
    with torch.inference_mode():
        for n in (1, 16, 40, 500):
            x, r = torch.randn(2, n, 192, device=CUDA, dtype=torch.bfloat16)
            assert_same(f"y of {n}", compiled(x, r), block(x, r))
    assert moved == [1] * 4
