"""Random calls of the FFN op against float64, valid and spoiled; and calls in a forked child. Cost: 3 s.

A failure is one case again by its number: python -m support.fuzz kernel_calls --only NUMBER, with PYTHONPATH=tests
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fuzz import FAILED, REFUSED, SAME, kernel_calls
from support.fuzz.float64_checks import difference
from support.fuzz.float64_ffn import expect

from twell.kernels.backends import cpu, reference
from twell.kernels.ops import gated_ffn
from twell.kernels.params import FFNParams

pytestmark = [
    pytest.mark.skipif(
        cpu.refuses(torch.device("cpu"), torch.float32, 64, 64, 1) is not None,
        reason="the CPU kernel does not build here",
    ),
    pytest.mark.filterwarnings(
        "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested", "ignore:Sparse CSR"
    ),
]


def test_random_calls_are_those_of_float64_or_are_refused_by_name(tmp_path: Path) -> None:
    case = kernel_calls.cases(tmp_path, seed=0)
    outcomes = [(number, outcome) for number in range(250) for outcome in case(number)]
    failed = [(number, outcome.where, outcome.details) for number, outcome in outcomes if outcome.kind == FAILED]
    assert not failed
    kinds = [outcome.kind for _, outcome in outcomes]
    assert kinds.count(SAME) > 250 and kinds.count(REFUSED) > 20


def test_the_comparison_sees_each_number() -> None:
    """One result changed by as little as it can be is a difference, whichever it is."""
    rng = np.random.default_rng(4)
    call = kernel_calls.draw(rng)
    while (
        not (call.exact and call.options["probes"] == "neurons" and call.options["up_relu"])
        or len(call.tensors["x"]) < 9
    ):
        call = kernel_calls.draw(rng)
    call.options |= {"layout": kernel_calls.Layout(32, 8), "want_packed": True, "threshold": None}
    n = len(call.tensors["x"])
    call.info = {"rows": None} | {name: torch.arange(1, n + 1, dtype=torch.int32) for name in ("tokens", "sequences")}
    expected = expect(call.tensors, call.options, call.exact)
    info = {name: None if tensor is None else tensor.numpy() for name, tensor in call.info.items()}

    def compared(name: str, spoil: bool) -> str:
        y, stats = reference.run(FFNParams(**call.tensors, **call.info, **call.options).checked())
        places = {"y": y, **vars(stats), **vars(stats.neurons), **vars(stats.tiles), **vars(stats.packed)}
        if spoil:
            tensor = places[name].view(-1)
            row = int((tensor != 0).nonzero()[-1])  # the last number that is not zero
            by = -1 if name == "words" else 64  # of words, the column of a slot
            tensor[row] = tensor[row] + by if tensor.dtype != torch.bool else ~tensor[row]
        return difference(y, stats, expected, info, call.options)

    assert compared("y", False) == ""
    names = (
        "y",
        "nnz",
        "nnz_used",
        "finite",
        "fires",
        "value_sum",
        "value_max",
        "token_min",
        "token_max",
        "first_sequence",
    )
    for name in (*names, "pairs", "rows", "words"):
        assert compared(name, True), name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(("kernel", "compiled"), [("cpu", False), ("reference", False), ("cpu", True)])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_runs_on_one_thread(kernel: str, compiled: bool) -> None:
    """Its parent's threads are not there: without care, OpenMP waits for them for ever."""
    run = torch.compile(gated_ffn, fullgraph=True, backend="eager") if compiled else gated_ffn
    torch.manual_seed(0)
    x, gate, up, down = torch.randn(600, 64), torch.randn(512, 64), torch.randn(512, 64), torch.randn(64, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        y, _ = gated_ffn(x, gate, up, down, kernel=kernel)
        child = os.fork()
        if not child:
            signal.alarm(60 if compiled else 20)
            try:
                again, _ = run(x, gate, up, down, kernel=kernel)
                os._exit(0 if torch.allclose(again, y, atol=1e-3) and torch.get_num_threads() == 1 else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
