"""FFNs that someone changes during a watch: their own code runs, and what comes out of it is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twell.kernels.modules import SparseFFN
from twell.workbench import threshold, watch

IDS = torch.arange(3, 15).view(3, 4)
Change = Callable[[Any], Any]


def _louder(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return output + 1.0


@contextmanager
def _other(holder: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    own = getattr(holder, name)
    setattr(holder, name, module)
    try:
        yield
    finally:
        setattr(holder, name, own)


@contextmanager
def _wrapped(module: nn.Module) -> Iterator[None]:
    """Wrap what a module runs, as other libraries do."""
    beneath, had = module.forward, "forward" in vars(module)
    module.forward = lambda x: beneath(x) * 2 - 0.05  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had:
            module.forward = beneath  # type: ignore[method-assign]
        else:
            del module.forward


class Adapter(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) - 0.02


CHANGES: dict[str, Change] = {
    "steered": lambda ffn: ffn.gate_proj.register_forward_hook(_louder),
    "another gate": lambda ffn: ffn.gate_proj.register_forward_pre_hook(lambda _m, given: (given[0] * -1,)),
    "another up": lambda ffn: ffn.up_proj.register_forward_hook(lambda _m, _x, output: output.clamp(min=0)),
    "patched": lambda ffn: ffn.down_proj.register_forward_pre_hook(lambda _m, given: (given[0].roll(1, -1) * 2,)),
    "another activation": lambda ffn: _other(ffn, "act_fn", nn.ReLU6()),
    "without zeros": lambda ffn: _other(ffn, "act_fn", nn.SiLU()),
    "an adapter": lambda ffn: _other(ffn, "gate_proj", Adapter(ffn.gate_proj)),
    "wrapped": lambda ffn: _wrapped(ffn.act_fn),
}


def outputs(model: Any, change: Change) -> tuple[Tensor, np.ndarray]:
    """Return the logits of a model whose second FFN is changed, and how many hidden values of it are not 0."""
    ffn, hidden = model.model.layers[1].mlp, []
    keep = ffn.down_proj.register_forward_hook(lambda _m, given, _y: hidden.append(given[0]))
    with torch.no_grad(), change(ffn):
        logits = model(IDS).logits
    keep.remove()
    return logits, (hidden[0] != 0).sum(-1).flatten().numpy()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"dense": True}, {"rows": False, "dense": True}], ids=["", "dense", "sums"])
def test_a_change_counts(small: Any, change: str, options: dict[str, Any]) -> None:
    """As long as it lasts, and the sparse kernels run again afterwards."""
    expected, nnz = outputs(small, CHANGES[change])
    plain, plain_nnz = outputs(small, lambda ffn: _other(ffn, "act_fn", ffn.act_fn))
    with torch.no_grad(), watch(small, **options) as w:
        before = small(IDS).logits
        with CHANGES[change](small.model.layers[1].mlp):
            got = small(IDS).logits
        after = small(IDS).logits
        metrics = w.metrics()
    torch.testing.assert_close(got, expected)
    assert torch.equal(before, after)
    torch.testing.assert_close(before, plain)
    assert not np.array_equal(nnz, plain_nnz) or change in ("another up", "another activation", "patched")
    counted = np.tile(np.arange(IDS.numel()) % IDS.shape[1] != 0, 3)
    every = np.concatenate([plain_nnz, nnz, plain_nnz])
    assert metrics["nnz/layer_01"] == pytest.approx(every[counted].mean())
    if not options.get("rows", True):
        return
    np.testing.assert_array_equal(w.nnz[:, 1], every)


def test_the_sparse_kernels_run_but_for_a_change(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on the FFN as a whole, or elsewhere, are none."""
    ran, own = [], SparseFFN.forward

    def forward(self: SparseFFN, x: Tensor) -> Tensor:
        ran.append(self.layer)
        return own(self, x)

    monkeypatch.setattr(SparseFFN, "forward", forward)
    ffn = small.model.layers[1].mlp
    with (
        torch.no_grad(),
        watch(small),
        ffn.register_forward_hook(_louder),
        small.lm_head.register_forward_hook(_louder),
    ):
        ran.clear()  # what each was compared by
        small(IDS)
        assert ran == [0, 1]
        with ffn.up_proj.register_forward_hook(_louder):
            small(IDS)
        assert ran == [0, 1, 0]


def test_a_hook_from_before_is_heard(small: Any) -> None:
    heard = []
    small.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: heard.append(1))
    with torch.no_grad(), watch(small):
        heard.clear()  # of the comparison
        small(IDS)
    assert heard == [1]


def test_a_threshold_within_a_watch(small: Any) -> None:
    """Whichever begins first, and counted by a threshold or not."""
    with torch.no_grad():
        with threshold(small, 0.02):
            expected = small(IDS).logits
            with watch(small, threshold=0) as first:
                small(IDS)
            with watch(small) as within:
                torch.testing.assert_close(small(IDS).logits, expected)
        with watch(small) as second, threshold(small, 0.02):
            torch.testing.assert_close(small(IDS).logits, expected)
        with watch(small) as plain:
            small(IDS)
    np.testing.assert_array_equal(first.nnz, second.nnz)
    np.testing.assert_array_equal(within.nnz, second.nnz)
    assert first.nnz.sum() < plain.nnz.sum()
