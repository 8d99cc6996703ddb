"""A module's second call of one shape runs without checks, and only where nothing but x has changed."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from twell.kernels.backends import reference
from twell.kernels.dispatch import KERNELS
from twell.kernels.layout import Layout
from twell.kernels.modules import PREPARED, Probe, SparseFFN
from twell.kernels.params import FFNParams
from twell.kernels.stats import RunAgain, Stats

Prepare = Callable[[FFNParams], Any]


class Counted:
    """A kernel that runs the reference, and counts how it was called."""

    def __init__(self) -> None:
        self.full = self.again = 0

    def run(self, params: FFNParams) -> tuple[Tensor, Stats]:
        self.full += 1
        return reference.run(params)

    def prepare(self, params: FFNParams) -> RunAgain:
        def run_again(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.again += 1
            y, stats = reference.run(replace(params, x=x))
            return y, stats.nnz, stats.finite

        return run_again

    def calls(self, module: SparseFFN, x: Tensor) -> tuple[int, int]:
        """Return how many full and how many prepared calls a call of the module makes."""
        before = self.full, self.again
        with torch.inference_mode():
            y = module(x)
        torch.testing.assert_close(y, module.dense(x))
        return self.full - before[0], self.again - before[1]


FULL, AGAIN = (1, 0), (0, 1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setitem(KERNELS, "reference", replace(KERNELS["reference"], run=counted.run, prepare=counted.prepare))
    return counted


@pytest.fixture
def module() -> SparseFFN:
    source = torch.Generator().manual_seed(0)
    weights = [torch.randn(*shape, generator=source) for shape in ((64, 16), (64, 16), (16, 64))]
    return SparseFFN(*weights, kernel="reference", probe=Probe(probes="counts"))


def test_a_second_call_of_each_of_the_last_shapes_is_prepared(counted: Counted, module: SparseFFN) -> None:
    heard: list[Stats] = []
    module.probe.on_stats = lambda _layer, _x, stats: heard.append(stats)
    for n, expected in ((3, FULL), (3, AGAIN), (3, AGAIN), (5, FULL), (5, AGAIN), (3, AGAIN)):
        x = torch.randn(n, 16)
        assert counted.calls(module, x) == expected
        assert heard[-1].nnz.tolist() == (x @ module.w_gate.T > 0).sum(1).tolist()
    for n in range(6, 6 + PREPARED):
        assert counted.calls(module, torch.randn(n, 16)) == FULL
    assert [counted.calls(module, torch.randn(n, 16)) for n in (6, 3)] == [AGAIN, FULL]


def test_weights_that_were_replaced_are_let_go(counted: Counted, module: SparseFFN) -> None:
    for n in (3, 4):
        counted.calls(module, torch.randn(n, 16))
    before = weakref.ref(module.w_up)
    module.w_up = torch.nn.Parameter(module.w_up.detach() * 2, requires_grad=False)  # type: ignore[union-attr]
    assert counted.calls(module, torch.randn(4, 16)) == FULL
    assert before() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "w_up", torch.nn.Parameter(module.w_up * 2, requires_grad=False)),
        lambda module: setattr(module.w_down, "data", module.w_down.data.clone() * 3),
        lambda module: module.double(),
        lambda module: setattr(module.probe, "layout", Layout()),
        lambda module: setattr(module.probe, "probes", "none"),
        lambda module: setattr(module, "probe", Probe(want_packed=True)),
        lambda module: setattr(module, "up_relu", True),
    ],
    ids=["another weight", "other values", "another dtype", "tiles", "no counts", "TwELL", "another activation"],
)
def test_whatever_else_changes_is_checked_anew(
    counted: Counted, module: SparseFFN, change: Callable[[SparseFFN], Any]
) -> None:
    x = torch.randn(3, 16)
    assert [counted.calls(module, x) for _ in range(2)] == [FULL, AGAIN]
    change(module)
    assert counted.calls(module, x.to(module.w_gate.dtype)) == FULL


def test_what_a_gradient_is_asked_of_is_refused_in_every_call(counted: Counted, module: SparseFFN) -> None:
    x = torch.randn(3, 16)
    assert [counted.calls(module, x) for _ in range(2)] == [FULL, AGAIN]
    with pytest.raises(ValueError, match="x: expected no gradient"):
        module(torch.randn(3, 16, requires_grad=True))
    module.w_up.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="w_up: expected no gradient"):
        module(x)


def test_what_follows_no_gradient_is_prepared_whatever_asks_for_one(counted: Counted, module: SparseFFN) -> None:
    x = torch.randn(3, 16)
    assert [counted.calls(module, x) for _ in range(2)] == [FULL, AGAIN]
    module.w_up.requires_grad_(True)  # type: ignore[union-attr]
    assert counted.calls(module, x) == AGAIN  # it runs without gradients


def test_a_tensor_of_another_kind_is_checked(counted: Counted, module: SparseFFN) -> None:
    x = torch.randn(3, 16)
    assert [counted.calls(module, x) for _ in range(2)] == [FULL, AGAIN]
    assert counted.calls(module, torch.nn.Parameter(x, requires_grad=False)) == FULL


@pytest.mark.parametrize(("how", "refused"), [({"dtype": torch.float64}, "float64"), ({"device": "meta"}, "meta")])
def test_another_dtype_and_device_are_checked(
    counted: Counted, module: SparseFFN, how: dict[str, Any], refused: str
) -> None:
    x = torch.randn(3, 16)
    assert [counted.calls(module, x) for _ in range(2)] == [FULL, AGAIN]
    with pytest.raises((TypeError, ValueError), match=refused):
        module(x.to(**how))


def test_copies_prepare_their_own(counted: Counted, module: SparseFFN) -> None:
    x = torch.randn(3, 16)
    counted.calls(module, x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            other.w_down.mul_(2)
        assert [counted.calls(other, x) for _ in range(2)] == [FULL, AGAIN]
