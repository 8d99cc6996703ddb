"""A plugin of pytest for compute-sanitizer: run the GPU tests' calls alone, and watch some of them.

python -O -m pytest --assert=plain -p support.sanitized_tests -m gpu FILE
    its tests, but for what they compare: the plain run holds them to that, and here it would take most of the time

WATCH: seconds a call in the environment, for a tool that watches some of them alone. As `sanitized.py`, it wants
PYTORCH_ALLOC_CONF=backend:cudaMallocAsync.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch._dynamo.config
from support import gpu_checks
from support.sanitized import captured, patch_workspaces
from torch import Tensor

from twell.kernels import dispatch
from twell.kernels.backends import cuda, gpu, hopper, reference
from twell.kernels.benchmark import runner
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats

Run = Callable[[FFNParams], tuple[Tensor, Stats]]


def once(run: Run) -> Run:
    """Return a kernel that runs a repeated call (same options, tensors not written to since) once a stream, as a tool
    finds nothing more in repetitions. It waits for each call, so that a tool tracks one at a time."""
    last: dict[tuple[int, int], tuple[list[Any], list[Tensor], tuple[Tensor, Stats]]] = {}

    def runs(params: FFNParams) -> tuple[Tensor, Stats]:
        if torch.compiler.is_compiling():
            return run(params)
        if torch.cuda.is_current_stream_capturing():
            captured.append(run(params))
            return captured[-1]
        stream, values = torch.cuda.current_stream(), [getattr(params, field.name) for field in fields(params)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # which do not say when they were written to
            return run(params)
        about = [gpu.MAX_WORKSPACE, *(value for value in values if not isinstance(value, Tensor))]
        about += [(t.data_ptr(), t._version, t.shape, t.stride(), t.dtype) for t in tensors]
        here = threading.get_ident(), stream.cuda_stream
        if here not in last or last[here][0] != about:
            last[here] = about, tensors, run(params)  # the tensors, so that their memory is not another's meanwhile
            if stream == torch.cuda.default_stream():
                stream.synchronize()
        return last[here][2]

    return runs


class Watch:
    """Put NVTX ranges around some calls of each test, for a tool that watches these alone: racecheck takes seconds a
    call, and a day for all. Each test's first call is watched, and others at random, so that the mean cost of a call
    is `seconds`, estimated from earlier calls."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rate, self.range = seconds, 4e-7, 0
        self.calls = self.watched = 0
        self.turn = threading.Lock()

    def begin(self, test: str) -> None:
        """Begin a test, by its name; compiled launches before its first draw are watched."""
        self.draw, self.first = random.Random(test + os.environ.get("SEED", "")), True
        self.set(bool(self.seconds))

    def set(self, on: bool) -> None:
        """Watch the launches from now on, or stop watching; launches of graphs too."""
        if on and not self.range:
            self.range = torch.cuda.nvtx.range_start("watched")
        elif not on and self.range:
            self.range = torch.cuda.nvtx.range_end(self.range) or 0

    def over(self, launch: Callable[..., None], slow: float) -> Callable[..., None]:
        """Return a kernel's `launch` that draws whether it is watched; slow: its cost relative to `hopper`'s."""

        def launches(params: FFNParams, rows: slice, *rest: Any) -> None:
            if torch.compiler.is_compiling():
                return launch(params, rows, *rest)
            d_ff, d_model = params.w_gate.shape
            size = slow * ((rows.stop - rows.start) * d_ff * (1 + d_model / 500) + 1e6)
            with self.turn:
                on = self.draw.random() * self.rate * size < self.seconds or self.first
                self.calls, self.watched, self.first = self.calls + 1, self.watched + on, False
                self.set(on)
                if not on or torch.cuda.is_current_stream_capturing():
                    return launch(params, rows, *rest)
                torch.cuda.synchronize()
                began = time.perf_counter()
                launch(params, rows, *rest)
                torch.cuda.synchronize()
                self.rate += 0.3 * ((time.perf_counter() - began) / size - self.rate)

        return launches


WATCH = Watch(float(os.environ.get("WATCH", "0")))


def nothing(params: FFNParams) -> tuple[Tensor, Stats]:
    """Return zeros in place of the reference's result, which no test compares here."""
    nnz = torch.zeros(len(params.x), dtype=torch.int32, device=params.x.device)
    return torch.zeros_like(params.x), Stats(nnz, nnz == 0)


def pytest_configure() -> None:
    """Keep only the tests' calls: compare nothing, repeat no call, and let a benchmark take one turn."""
    patch_workspaces()
    gpu_checks.assert_same = gpu_checks.poison = lambda *_, **__: None
    gpu_checks.LAUNCHES = 20
    if WATCH.seconds:
        hopper.launch, cuda.launch = WATCH.over(hopper.launch, 1), WATCH.over(cuda.launch, 2)
    for name, module in (("hopper", hopper), ("cuda", cuda)):
        module.run = once(module.run)  # type: ignore[attr-defined]
        dispatch.KERNELS[name] = replace(dispatch.KERNELS[name], run=module.run)  # type: ignore[attr-defined]
    reference.run = nothing
    torch._dynamo.config.rewrite_assert_with_torch_assert = False  # it looks for what python -O leaves out
    runner.MIN_TURNS = runner.MAX_TURNS = runner.CALLS = runner.MAX_SETS = 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count launches of a test's fixtures as its own; its first own launch is watched too."""
    WATCH.begin(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test, and wait for its kernels."""
    WATCH.begin(item.nodeid)
    outcome = yield
    torch.cuda.synchronize()
    captured.clear()
    return outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WATCH.seconds:
        terminalreporter.write_line(f"watched {WATCH.watched} of {WATCH.calls} calls")
