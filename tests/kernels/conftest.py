"""FFNs with integer-valued tensors, whose sums every dtype accumulates exactly, and an oracle in numpy float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from twell.kernels import dispatch

Arrays = dict[str, Any]
ROOT_2 = math.sqrt(2)
erf = np.vectorize(math.erf)


def integer_ffn(
    n: int, d_model: int, d_ff: int, *, gated: bool = True, bias: int | None = None, seed: int = 0
) -> Arrays:
    """Return the op's tensors as float64 values of -1, 0 and 1. bias: add biases, the gate's shifted by as much."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-1, 2, shape).astype(np.float64))

    first, last = ("w_gate", "w_down") if gated else ("w_in", "w_out")
    tensors = {"x": draw(n, d_model), first: draw(d_ff, d_model), last: draw(d_model, d_ff)}
    if gated:
        tensors["w_up"] = draw(d_ff, d_model)
    if bias is not None:
        tensors[first.replace("w", "b", 1)] = draw(d_ff) + bias
        tensors[last.replace("w", "b", 1)] = draw(d_model)
        if gated:
            tensors["b_up"] = draw(d_ff)
    return tensors


def activate(name: str, z: np.ndarray) -> np.ndarray:
    """Return an activation function of z by its definition."""
    if name == "relu":
        return np.where(z > 0, z, 0)
    if name == "relu2":
        return np.where(z > 0, z * z, 0)
    if name == "silu":
        return z / (1 + np.exp(-z))
    if name == "gelu":
        return z * 0.5 * (1 + erf(z / ROOT_2))
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def dense_oracle(
    tensors: Arrays, activation: str = "relu", up_relu: bool = False, threshold: float | None = None
) -> SimpleNamespace:
    """Return the op's expected results, computed densely in numpy float64 for finite inputs."""
    a = {name: tensor.double().cpu().numpy() for name, tensor in tensors.items()}
    gated = "w_up" in a
    gate = a["x"] @ a["w_gate" if gated else "w_in"].T + a.get("b_gate" if gated else "b_in", 0)
    up = a["x"] @ a["w_up"].T + a.get("b_up", 0) if gated else np.ones_like(gate)
    up = np.where(up > 0, up, 0) if up_relu else up
    act = activate(activation, gate)
    hidden = act * up
    fired = gate > 0 if threshold is None else np.abs(hidden) > threshold
    down = a["w_down" if gated else "w_out"]
    return SimpleNamespace(
        y=hidden @ down.T + a.get("b_down" if gated else "b_out", 0),
        scale=np.abs(hidden) @ np.abs(down).T + 1,
        hidden=hidden,
        fired=fired,
        value=act if threshold is None else np.abs(hidden),
        nnz=fired.sum(1),
        used=(fired & (up > 0)).sum(1),
    )


@pytest.fixture
def make_ffn() -> Callable[..., Arrays]:
    return integer_ffn


@pytest.fixture
def oracle() -> Callable[..., SimpleNamespace]:
    return dense_oracle


@pytest.fixture(params=["reference", "cpu"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make `auto` prefer a kernel in this test; the reference runs calls that it refuses."""
    names = [request.param, "reference"]
    monkeypatch.setattr(dispatch, "KERNELS", {name: dispatch.KERNELS[name] for name in names})
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    return request.param
