"""Copies of a watched model: they are what the model would be without the watch, and none is pickled."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from twell.workbench import watch
from twell.workbench.errors import UserError

IDS = torch.arange(3, 15).view(3, 4)


def assert_plain(model: nn.Module) -> None:
    """Expect a model without hooks, or attributes of its instances that its class has."""
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks, module
        assert not {"forward", "generate", "__deepcopy__", "__reduce_ex__"} & set(vars(module)), module


def assert_runs_its_own_weights(copied: Any) -> None:
    """Expect the outputs of a model that was made of the copy's weights, whatever becomes of these."""
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
        fresh = type(copied)(copied.config).eval()
        fresh.load_state_dict(copied.state_dict())
        assert torch.equal(copied(IDS).logits, fresh(IDS).logits)
        assert torch.equal(*(one.generate(IDS, max_new_tokens=3, do_sample=False) for one in (copied, fresh)))


@pytest.mark.parametrize(
    "options", [{}, {"rows": False}, {"dense": True}, {"threshold": 0}, {"loss": True}], ids=lambda one: "-".join(one)
)
@pytest.mark.parametrize("make", [deepcopy, AveragedModel], ids=["deepcopy", "average"])
def test_a_copy_is_not_watched(small: Any, options: dict[str, Any], make: Any) -> None:
    """Neither in the watch nor after it, whichever part is copied; the model is watched as before."""
    with torch.no_grad(), watch(small, **options) as w:
        small(IDS)
        copied = make(small)
        copied = copied if make is deepcopy else copied.module
        body = deepcopy(small.model)
        for one in (copied, body):
            one(IDS)
            assert_plain(one)
        assert all(weight.is_contiguous() for weight in copied.parameters())
        small(IDS)
        assert w.metrics()["tokens"] == 2 * (IDS.numel() - len(IDS))
    assert_runs_its_own_weights(copied)
    assert_plain(small)


def test_hooks_of_others_are_copied(small: Any) -> None:
    seen = []
    small.model.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), watch(small):
        deepcopy(small)(IDS)
        assert len(seen) == 1
        small(IDS)
    assert len(seen) == 2


def test_a_module_that_has_a_way_of_its_own_to_be_copied() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out, self.copies = nn.Linear(16, 40), nn.Linear(40, 16), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.up(x).relu())

        def __deepcopy__(self, memo: Any) -> Net:
            copied = Net()
            copied.copies = self.copies + 1
            return copied

    net = nn.Sequential(Net())
    with torch.no_grad(), watch(net, ffns={"0": ("up", "out")}):
        copied: Any = deepcopy(net)
    assert copied[0].copies == 1
    assert_plain(copied)


@pytest.mark.parametrize("save", [pickle.dumps, copy, lambda model: torch.save(model, BytesIO())])
def test_pickles_are_refused(small: Any, save: Any) -> None:
    with watch(small), pytest.raises(UserError, match=r"that is not watched to pickle.*leave the watch first"):
        save(small)
    save(small)
