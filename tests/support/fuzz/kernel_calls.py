"""Random calls of the FFN op, valid and spoiled, by the kernels that run on a processor, compared with float64.

A valid call goes through `reference`, and through `cpu` at a random vector level where that takes it; both must give
what `float64_ffn` computes, within rounding, and exactly that where all sums are whole numbers. A spoiled call has one
argument wrong, and must be refused by that argument's name before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.fuzz import FAILED, REFUSED, SAME, Outcome, generator
from support.fuzz.float64_checks import difference
from support.fuzz.float64_ffn import expect

from twell.kernels.backends import cpu, reference
from twell.kernels.layout import COMPRESSIONS, TILES, Layout
from twell.kernels.ops import gated_ffn, plain_ffn
from twell.kernels.params import FFNParams, not_sparse

Rng = np.random.Generator
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WEIGHTS = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
PLAIN_NAMES = {"w_gate": "w_in", "w_down": "w_out", "b_gate": "b_in", "b_down": "b_out"}
ROWS = (0, 1, 2, 3, 5, 8, 17, 63, 64, 65, 95, 96, 97, 130, 260)
LEVELS = {"AVX2": 2, "AVX512": 3}.get(torch.backends.cpu.get_cpu_capability(), 1)
SPOILED = 0.15  # share of calls with one wrong argument


@dataclass
class Call:
    """A call's arguments by gated_ffn's names. exact: whether all its sums are exact in float32."""

    tensors: dict[str, Any]  # x and the weights, None where left out
    info: dict[str, Any]  # rows, tokens, sequences
    options: dict[str, Any]
    exact: bool
    shape: tuple[int, ...] = field(default=())  # of x as it is handed over

    @property
    def words(self) -> str:
        """The call in words, for a failure."""
        x, options = self.tensors["x"], {name: value for name, value in self.options.items() if value}
        present = [name for name in WEIGHTS if self.tensors[name] is not None]
        d_ff = len(self.tensors["w_gate"]) if isinstance(self.tensors["w_gate"], torch.Tensor) else "?"
        rows = self.info["rows"] is not None
        about = f"rows {rows}, exact {self.exact}, {options}"
        return f"x {list(self.shape)} {x.dtype}, d_ff {d_ff}, {', '.join(present)}, {about}"


def cases(folder: Path, seed: int) -> Callable[[int], list[Outcome]]:
    """Return the function from a case's number to its outcomes; nothing is written to the folder."""
    if (reason := cpu.refuses(torch.device("cpu"), torch.float32, 64, 64, 1)) is not None:  # compiles it
        raise RuntimeError(reason)
    return lambda number: _case(generator(seed, number))


def _case(rng: Rng) -> list[Outcome]:
    """Return the outcomes of one random call: by each kernel that takes it, or of the refusal of a spoiled one."""
    call = draw(rng)
    if rng.random() < SPOILED:
        names = spoil(call, rng)
        return [_refusal(call, names)]
    before = {name: tensor.clone() for name, tensor in call.tensors.items() if tensor is not None}
    expected = expect(call.tensors, call.options, call.exact)
    info = {name: None if tensor is None else tensor.numpy() for name, tensor in call.info.items()}
    params = FFNParams(**{**call.tensors, "x": call.tensors["x"].view(call.shape)}, **call.info, **call.options)
    results = {"reference": _op(call, kernel="reference") if rng.random() < 0.5 else reference.run(params.checked())}
    if params.x.dtype in cpu.DTYPES and not_sparse(params) is None:
        results["cpu"] = cpu.run(params, int(rng.integers(-1, LEVELS)))
    outcomes = []
    for kernel, (y, stats) in results.items():
        wrong = difference(y, stats, expected, info, call.options)
        if tuple(y.shape) != call.shape or y.dtype != params.x.dtype:
            wrong = f"y: {y.dtype} {list(y.shape)}"
        for name, tensor in before.items():
            if not torch.equal(tensor.nan_to_num(3.0), call.tensors[name].nan_to_num(3.0)):
                wrong = f"{name}: was changed by a call"
        outcomes.append(Outcome(FAILED if wrong else SAME, f"{kernel}: {call.words}" if wrong else kernel, wrong))
    return outcomes


def _op(call: Call, **more: Any) -> Any:
    """Call the op by its public name."""
    x = call.tensors["x"]
    given = {**call.tensors, "x": x.view(call.shape) if call.shape else x, **call.info, **call.options, **more}
    if given["w_up"] is not None:
        return gated_ffn(**given)
    del given["w_up"], given["b_up"], given["up_relu"]
    return plain_ffn(**{PLAIN_NAMES.get(name, name): value for name, value in given.items()})


def pick(rng: Rng, choices: Any) -> Any:
    """Return one of the choices."""
    return choices[int(rng.integers(len(choices)))]


# ---- valid calls


def draw(rng: Rng) -> Call:
    """Return a valid call."""
    n, d_model = pick(rng, ROWS), 8 * int(rng.integers(1, 18))
    d_ff = 8 * int(rng.integers(1, 10 if rng.random() < 0.5 else 140))
    dtype, gated = pick(rng, DTYPES[:2] if rng.random() < 0.8 else DTYPES), rng.random() < 0.6
    kind = pick(rng, ("whole", "whole", "real", "real", "wild"))
    options = _options(rng, gated)
    exact = kind == "whole" and "relu" in options["activation"] and dtype != torch.float16
    shapes = {"x": (n, d_model), "w_gate": (d_ff, d_model), "w_up": (d_ff, d_model), "w_down": (d_model, d_ff)}
    shapes |= {"b_gate": (d_ff,), "b_up": (d_ff,), "b_down": (d_model,)}
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        left_out = name.startswith("b_") and rng.random() < 0.5
        if left_out or (name in ("w_up", "b_up") and not gated):
            tensors[name] = None
            continue
        tensors[name] = torch.from_numpy(_values(rng, kind, shape, name)).to(dtype)
    if rng.random() < 0.5:
        tensors["w_down"] = tensors["w_down"].t().contiguous().t()
    info: dict[str, Any] = dict.fromkeys(("rows", "tokens", "sequences"))
    if rng.random() < 0.6:
        info["rows"] = torch.from_numpy(
            (rng.random(n) < pick(rng, (0.0, 0.3, 0.9))).astype(np.uint8) * pick(rng, (1, 7, 255))
        )
    if options["probes"] == "neurons":
        low, high = pick(rng, ((0, 50), (0, 2**31 - 1), (2**31 - 9, 2**31 - 1), (7, 8)))
        info["tokens"] = torch.from_numpy(rng.integers(low, high, n, dtype=np.int32))
        info["sequences"] = torch.from_numpy(np.sort(rng.integers(0, pick(rng, (1, 5, 2**31 - 1)), n, dtype=np.int32)))
    factors = [factor for factor in (2, 3, 5) if n and n % factor == 0]
    shape = (n, d_model) if not factors or rng.random() < 0.6 else (factors[0], n // factors[0], d_model)
    return Call(tensors, info, options, exact, (d_model,) if n == 1 and rng.random() < 0.5 else shape)


def _options(rng: Rng, gated: bool) -> dict[str, Any]:
    """Return options that go together."""
    threshold = pick(rng, (0.0, 0.1, 3.0)) if rng.random() < 0.15 else None
    names = ("relu", "relu2") if threshold is None else ("relu", "relu2", "silu", "gelu", "gelu_tanh")
    return {
        "activation": pick(rng, names),
        "up_relu": bool(gated and rng.random() < 0.3),
        "threshold": threshold,
        "probes": pick(rng, ("none", "counts", "neurons", "neurons")),
        "layout": Layout(pick(rng, TILES), pick(rng, COMPRESSIONS)) if rng.random() < 0.6 else None,
        "want_packed": bool(rng.random() < 0.4),
    }


def _values(rng: Rng, kind: str, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return float64 values: whole numbers from -1 to 1; normal ones; or those with a few of any size, inf and NaN."""
    if kind == "whole":
        shift = int(rng.integers(-6, 7)) if name == "b_gate" else 0
        return rng.integers(-1, 2, shape).astype(np.float64) + shift
    values = rng.standard_normal(shape) * (1 if name in ("x", "b_gate") else 1 / np.sqrt(shape[-1]))
    if name == "b_gate":
        values += rng.normal() * 2
    if kind == "wild" and values.size and rng.random() < 0.4:
        flat = values.reshape(-1)
        for place in rng.integers(values.size, size=int(rng.integers(1, 4))):
            size = 10.0 ** int(rng.integers(-46, 39)) * pick(rng, (1, -1))
            odd = (
                size
                if name.startswith(("w_down", "b_down"))
                else pick(rng, (size, size, np.inf, -np.inf, np.nan, -0.0))
            )
            flat[place] = odd
    return values


# ---- calls with one argument wrong


def spoil(call: Call, rng: Rng) -> tuple[str, ...]:
    """Put something wrong in one argument; return the names by which it may be refused."""
    gated = call.tensors["w_up"] is not None
    if rng.random() < 0.3:
        name, values = pick(rng, list(ODD_OPTIONS.items()))
        if name == "up_relu" and not gated:
            name, values = "layout", ODD_OPTIONS["layout"]
        call.options[name] = pick(rng, values)
        if name == "threshold" and call.options[name] is None:
            call.options["activation"] = "silu"
        return (name,)
    holders = [(call.tensors, name) for name, tensor in call.tensors.items() if tensor is not None]
    holders += [(call.info, name) for name, tensor in call.info.items() if tensor is not None]
    holder, name = pick(rng, holders)
    tensor = holder[name]
    ways = [way for way in ODD_TENSORS if way is not needs_gradient or tensor.dtype.is_floating_point]
    odd = pick(rng, ways)(tensor)
    if isinstance(odd, torch.Tensor) and odd.layout is torch.strided and not odd.is_nested and odd.is_contiguous():
        odd = "a string" if odd.dtype == tensor.dtype and odd.shape == tensor.shape and not odd.requires_grad else odd
    if name == "x":
        call.shape = ()
    holder[name] = odd
    axes = ("d_model", "d_ff") if odd is not None and name in ("x", "w_gate") else ()
    others = ("w_gate",) if name == "x" else ("w_up", "w_down") if name == "w_gate" else ()
    own = {} if gated else PLAIN_NAMES
    return tuple(own.get(each, each) for each in (name, *axes, *others))


def needs_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that a gradient is asked of."""
    return tensor.clone().requires_grad_()


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another length, or of nine columns."""
    return tensor.new_zeros(len(tensor) + 1) if tensor.dim() == 1 else tensor.new_zeros(*tensor.shape[:-1], 9)


ODD_TENSORS: tuple[Callable[[torch.Tensor], Any], ...] = (
    needs_gradient,
    _longer,
    lambda tensor: tensor.tolist(),
    lambda tensor: "tensor",
    lambda tensor: tensor.float().numpy(),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.to(torch.int16),
    lambda tensor: tensor.to(torch.complex64),
    lambda tensor: tensor.to(torch.bool),
    lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    lambda tensor: tensor[None, ..., None].repeat(1, *[1] * tensor.dim(), 3)[..., 0].to(torch.float8_e4m3fn),
    lambda tensor: torch.empty_strided(tensor.shape, [0] * tensor.dim(), dtype=tensor.dtype),
    lambda tensor: tensor.to_sparse(),
    lambda tensor: (tensor if tensor.dim() == 2 else tensor[None]).to_sparse_csr(),
    lambda tensor: tensor.float().to_mkldnn(),
    lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    lambda tensor: torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged),
)
ODD_OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation": ("tanh", None, 3, ["relu"], torch.ones(2), "ReLU"),
    "probes": ("all", None, True, ["counts"], torch.ones(2)),
    "threshold": (-0.1, float("nan"), float("inf"), "0.1", [0.1], 1j, torch.ones(2), None),
    "layout": (256, "256", (256, 8), Layout),
    "up_relu": ("yes", 1, None, torch.ones(2)),
    "want_packed": ("no", 0, None, torch.ones(2)),
    "kernel": ("fast", "", None, 5, ["cpu"], torch.ones(2)),
}


def _refusal(call: Call, names: tuple[str, ...]) -> Outcome:
    """Make a spoiled call, and judge its refusal."""
    words = (
        f"spoiled {names[0]}: {call.tensors.get(names[0], call.info.get(names[0], call.options.get(names[0])))!r:.80}"
    )
    try:
        _op(call)
    except (TypeError, ValueError) as error:
        text = str(error)
        named = any(text.startswith(f"{name}: expected ") for name in names) and ", got " in text and "\n" not in text
        return Outcome(REFUSED if named else FAILED, words, f"{type(error).__name__}: {text}")
    except Exception as error:
        return Outcome(FAILED, words, f"{type(error).__name__}: {error}")
    return Outcome(FAILED, words, "it ran")
