"""The CPU kernel against the reference, at every vector level: counts bit for bit, outputs against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.nn import functional

from twell.kernels.backends import cpu, reference
from twell.kernels.dispatch import choose
from twell.kernels.layout import Layout, unpack
from twell.kernels.ops import gated_ffn
from twell.kernels.params import FFNParams
from twell.kernels.stats import NeuronSums, Stats

LEVELS = ["portable", "avx2", "avx512"]
DTYPES = [torch.float32, torch.bfloat16]
CAPABILITY = {"AVX2": 2, "AVX512": 3}.get(torch.backends.cpu.get_cpu_capability(), 1 if not cpu.X86 else 3)

REFUSAL = cpu.refuses(torch.device("cpu"), torch.float32, 64, 64, 1) or ""
pytestmark = pytest.mark.skipif(bool(REFUSAL) and "do not compile" not in REFUSAL, reason=REFUSAL)  # else let it fail


@pytest.fixture(params=range(3), ids=LEVELS)
def level(request: pytest.FixtureRequest) -> int:
    if request.param >= CAPABILITY:
        pytest.skip(f"no {LEVELS[request.param]} on this processor")
    return request.param


def make_params(tensors: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> FFNParams:
    """A checked call on tensors named as in `gated_ffn` or `plain_ffn`, in neither of w_down's orders twice."""
    t = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    n = t["x"].shape[0]
    about = {
        "rows": (torch.arange(n) % 5 > 0).byte(),
        "tokens": torch.arange(n, dtype=torch.int32) * 7 % 31,
        "sequences": torch.arange(n, dtype=torch.int32) // 9,
        "activation": "relu",
        "up_relu": False,
        "threshold": None,
        "probes": "neurons",
        "layout": Layout(64, 8),
        "want_packed": False,
    }
    down = t.get("w_down", t.get("w_out"))
    down = down.t().contiguous().t() if n % 2 else down
    weights = (t.get("w_gate", t.get("w_in")), t.get("w_up"), down)
    biases = (t.get("b_gate", t.get("b_in")), t.get("b_up"), t.get("b_down", t.get("b_out")))
    return FFNParams(t["x"], *weights, *biases, **(about | options)).checked()


def assert_same_stats(stats: Stats, expected: Stats) -> None:
    """Every count equal, and the first that is not by name."""
    for name in ("nnz", "finite", "nnz_used"):
        ours, theirs = getattr(stats, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), name
    assert (stats.tiles is None) == (expected.tiles is None)
    if expected.tiles is not None:
        assert torch.equal(stats.tiles.pairs, expected.tiles.pairs)
        assert torch.equal(stats.tiles.rows, expected.tiles.rows)
    assert (stats.neurons is None) == (expected.neurons is None)
    if expected.neurons is not None:
        for field in fields(NeuronSums):
            assert torch.equal(getattr(stats.neurons, field.name), getattr(expected.neurons, field.name)), field.name
    assert (stats.packed is None) == (expected.packed is None)
    if expected.packed is not None:
        for name in ("words", "values", "spill_index", "spill"):
            ours, theirs = getattr(stats.packed, name), getattr(expected.packed, name)
            assert (ours is None) == (theirs is None), name
            if theirs is not None:
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs), name
        assert torch.equal(unpack(stats.packed), unpack(expected.packed))


SHAPES = [
    (0, 64, 64), (1, 64, 72), (2, 72, 520), (7, 104, 1032), (63, 328, 64), (64, 64, 136), (127, 72, 1544),
    (128, 136, 520), (129, 264, 200), (1000, 88, 552), (1700, 64, 1096),
]  # fmt: skip


@pytest.mark.parametrize("bias", [None, -14, 0, 14])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_the_references(make_ffn, oracle, dtype, gated, bias) -> None:
    """On integer values, from hardly any neuron to nearly all, at rows around every block and tile."""
    for seed, (n, d_model, d_ff) in enumerate(SHAPES):
        tensors = make_ffn(n, d_model, d_ff, gated=gated, bias=bias, seed=seed)
        params = make_params(tensors, dtype, want_packed=seed % 2 == 0)
        counted, expected = reference.run(params)[1], oracle(tensors)
        for level in range(CAPABILITY):
            y, stats = cpu.run(params, level)
            assert_same_stats(stats, counted)
            error = (y.double().numpy() - expected.y) / expected.scale
            worst = abs(error).max(initial=0)
            assert worst < (2**-22 if dtype is torch.float32 else 2**-7), (LEVELS[level], n, d_model, d_ff)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{"activation": "relu2"}, {"up_relu": True}, {"activation": "relu2", "up_relu": True}]
)
def test_other_activations(make_ffn, level, dtype, options) -> None:
    for bias in (-10, 0, 20):
        for n in (5, 200):
            params = make_params(make_ffn(n, 72, 648, bias=bias), dtype, want_packed=True, layout=Layout(), **options)
            y, stats = cpu.run(params, level)
            expected, counted = reference.run(params)
            assert_same_stats(stats, counted)
            torch.testing.assert_close(y, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)


def dense(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return functional.linear(functional.linear(x, gate, bias).relu() * functional.linear(x, up), down)


def rounding(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """[rows]: the root mean square, to first order, of an output row's distance from the truth if every product of its
    sums, and nothing else, were off by an independent share of float32's unit, 2^-24; of float64 operands."""
    z, u = functional.linear(x, gate, bias), functional.linear(x, up)
    of_z = functional.linear(x**2, gate**2, bias**2) * (z > 0)
    of_h = of_z * u**2 + z.relu() ** 2 * functional.linear(x**2, up**2) + (z.relu() * u) ** 2
    return 2**-24 * functional.linear(of_h, down**2).sum(dim=1).sqrt()


@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 300])
def test_errors_are_those_of_roundings(level, dtype, bias, rows) -> None:
    """On random values, in calls of so many rows, the distance of a row from float64. In float32 it is at most 3.5
    times that of independent roundings of every product on the mean (2.2 times where the portable kernel sums in
    shorter parts), and 12 times in any row; torch's own, which sums in other orders on other processors and numbers of
    threads, is no measure. In bf16, which rounds what passes between the products too, at most 1.25 times that of
    torch's dense FFN."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, gate, up, down = draw(300, 256), draw(776, 256) / 16, draw(776, 256) / 16, draw(256, 776) / 28
    tensors = {"x": x, "w_gate": gate, "w_up": up, "w_down": down, "b_gate": draw(776) + bias}
    params = make_params(tensors, dtype)
    weights = (params.w_gate, params.w_up, params.w_down, params.b_gate)
    exact = (params.x.double(), *(weight.double() for weight in weights))
    truth = dense(*exact)
    ours = torch.cat([cpu.run(make_params({**tensors, "x": piece}, dtype), level)[0] for piece in x.split(rows)])
    far = (ours.double() - truth).norm(dim=1)
    if dtype is torch.float32:
        far /= rounding(*exact)
        assert far.mean() <= (3.5 if level else 2.2) and far.max() <= 12
    else:
        dense_far = (dense(params.x, *weights).double() - truth).norm(dim=1)
        assert far.mean() <= 1.25 * dense_far.mean() and far.max() <= 1.25 * dense_far.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 333])
def test_rows_that_are_not_finite(make_ffn, level, dtype, n) -> None:
    """A row with inf or nan in its gate or hidden values comes out NaN, counts nowhere and touches no other."""
    tensors = make_ffn(n, 64, 648, bias=-4)
    clean, _ = cpu.run(make_params(tensors, dtype), level)
    tensors["x"][1, 3], tensors["x"][4, 0] = torch.inf, torch.nan
    tensors["x"][2] = 2.0**66 * tensors["x"][2]  # its hidden values are past the largest float
    for probes in ("none", "counts", "neurons"):
        params = make_params(tensors, dtype, probes=probes, want_packed=True, layout=Layout(256, 16))
        y, stats = cpu.run(params, level)
        expected, counted = reference.run(params)
        assert_same_stats(stats, counted)
        assert (~stats.finite).nonzero().flatten().tolist() == [1, 2, 4]
        assert y[~stats.finite].isnan().all()
        others = [row for row in range(n) if row not in (1, 2, 4)]
        assert torch.equal(y[others], clean[others])
        torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 40, 400, 1600])
def test_threads_change_no_bit(dtype, n) -> None:
    """Nor do other rows' counts, nor the run; on values whose sums depend on their order."""
    generator = torch.Generator().manual_seed(n)
    shapes = {"x": (n, 264), "w_gate": (1096, 264), "w_up": (1096, 264), "w_down": (264, 1096), "b_gate": (1096,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    params = make_params(tensors, dtype, want_packed=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        y, stats = cpu.run(params)
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            again, counted = cpu.run(params)
            assert torch.equal(again.view(torch.uint8), y.view(torch.uint8))
            assert_same_stats(counted, stats)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("probes", ["none", "counts", "neurons"])
def test_compiles_in_one_graph(make_ffn, probes) -> None:
    tensors = {name: tensor.float() for name, tensor in make_ffn(70, 64, 136).items()}
    about = {name: torch.arange(70, dtype=torch.int32) for name in ("tokens", "sequences")}

    def ffn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {**tensors, "x": x * 1.0}
        y, stats = gated_ffn(**given, **about, probes=probes, layout=Layout(64, 8), kernel="cpu")
        tiles = stats.tiles.pairs if stats.tiles is not None else stats.nnz
        return y + 1, stats.nnz, stats.finite, tiles, stats.neurons.fires if stats.neurons is not None else stats.nnz

    traced = torch.compile(ffn, fullgraph=True, backend="aot_eager")
    for got, want in zip(traced(tensors["x"]), ffn(tensors["x"]), strict=True):
        assert torch.equal(got, want)


def test_the_fake_tells_the_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    params = make_params({"x": torch.zeros(5, 64), "w_in": torch.zeros(72, 64), "w_out": torch.zeros(64, 72)})
    arguments = (params.x, params.w_gate, None, params.down_by_neuron, *[None] * 3)
    for tail in (
        (False, False, False, False, 0, 0),
        (True, True, True, False, 64, 0),
        (False, True, True, True, 32, 0),
    ):
        about = (None, params.tokens, params.sequences) if tail[3] else (None,) * 3
        real = torch.ops.twell.cpu_ffn(*arguments, *about, *tail, -1)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = torch.ops.twell.cpu_ffn(*arguments, *about, *tail, -1)
        shapes = [(fake.shape, fake.dtype) for fake in fakes]
        assert shapes == [(tensor.shape, tensor.dtype) for tensor in real]


def test_it_takes_what_it_can() -> None:
    assert choose("cpu", torch.float32, 64, 64, 5).kernel == "cpu"
    assert "only where neurons fire" in choose("cpu", torch.bfloat16, 64, 64, 5).reason
    assert "cpu: expected float32 or bfloat16, got float16" in choose("cpu", torch.float16, 64, 64, 5).reason
    assert "cpu: expected device cpu, got cuda" in choose("cuda", torch.float32, 64, 64, 5).reason


def test_without_a_compiler_the_reference_runs_and_says_so(tmp_path) -> None:
    program = (
        "import torch\nfrom twell.kernels.dispatch import choose\n"
        "from twell.kernels.ops import gated_ffn\n"
        "choice = choose('cpu', torch.float32, 64, 64, 5)\nprint(choice.kernel, '|', choice.reason)\n"
        "w = torch.ones(64, 64)\nprint(gated_ffn(torch.ones(5, 64), w, w, w)[1].nnz.tolist())"
    )
    environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    choice, counts = done.stdout.splitlines()
    assert choice.startswith("reference | ")
    assert "cpu: expected a C++ compiler (c++, g++, clang++) on PATH, found none; install one or set CXX" in choice
    assert counts == "[64, 64, 64, 64, 64]"
    assert done.stderr == ""


def test_importing_builds_nothing_is_quick_and_takes_torch_alone(tmp_path) -> None:
    program = (
        "import time, torch\nbegin = time.process_time()\nimport twell.kernels.modules, sys\n"
        "print(time.process_time() - begin)\n"
        "print({'torch._dynamo', 'transformers', 'pandas', 'pyarrow'} & {*sys.modules})\n"
        "import twell.workbench.bench.command\nprint({'transformers', 'pandas'} & {*sys.modules})"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    seconds, heavy, of_bench = done.stdout.splitlines()
    assert not list(tmp_path.iterdir())
    assert heavy == of_bench == "set()", "a bench of no model needs none"
    assert float(seconds) < 0.5  # 0.02 s on an idle machine
