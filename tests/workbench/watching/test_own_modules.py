"""Modules of one's own under a watch: FFNs by name, of several kinds, that take more than their input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from twell.workbench import watch
from twell.workbench.errors import UserError


def test_a_module_of_ones_own() -> None:
    """FFNs by name, in a module that is no language model; its inputs are vectors."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.up(x)))

    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"a": Block(), "b": Block()})
    net.forward = lambda x: x + net["b"](net["a"](x))  # type: ignore[method-assign]
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        inner = net["a"](x)
        expected = [(net["a"].up(x) > 0).sum(-1).flatten(), (net["b"].up(inner) > 0).sum(-1).flatten()]
        with watch(net, ffns={"a": ("up", "out"), "b": ("up", "out")}) as w:
            net(x)
    np.testing.assert_array_equal(w.nnz, torch.stack(expected, 1).numpy())


def test_an_ffn_that_takes_more_than_its_input() -> None:
    """What else it is given, its own code alone knows what to do with: it runs, and is counted."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.out(torch.relu(self.up(x))) * scale

    torch.manual_seed(0)
    net, x = torch.nn.ModuleDict({"a": Scaled()}), torch.randn(2, 5, 16)
    for call in (lambda x: net["a"](x, 5.0), lambda x: net["a"](x, scale=5.0)):
        net.forward = call  # type: ignore[method-assign]
        with torch.no_grad():
            expected = net(x)
            with watch(net, ffns={"a": ("up", "out")}) as w:
                torch.testing.assert_close(net(x), expected)
            np.testing.assert_array_equal(w.nnz[:, 0], (net["a"].up(x) > 0).sum(-1).flatten().numpy())


@pytest.mark.parametrize("both", [(False, True), (True, False)], ids=["the second", "the first"])
def test_a_relu_on_both_branches_of_some_layers(both: tuple[bool, bool]) -> None:
    """In a layer without it, every neuron that fires is used."""

    class Block(torch.nn.Module):
        def __init__(self, up_relu: bool) -> None:
            super().__init__()
            self.w1, self.w3, self.w2 = (torch.nn.Linear(*sizes) for sizes in ((16, 40), (16, 40), (40, 16)))
            self.up_relu = up_relu

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.w3(x)
            return self.w2(self.w1(x).relu() * (up.relu() if self.up_relu else up))

    torch.manual_seed(0)
    blocks, x = torch.nn.Sequential(*map(Block, both)), torch.randn(2, 5, 16)
    nnz, used = [], []
    with torch.no_grad():
        at = x
        for block in blocks:
            fired, at, up = block.w1(at) > 0, block(at), block.w3(at) > 0  # type: ignore[operator]
            nnz.append(fired.sum(-1).flatten())
            used.append((fired & up).sum(-1).flatten() if block.up_relu else nnz[-1])
        with watch(blocks, ffns=["0", "1"]) as w:
            blocks(x)
    np.testing.assert_array_equal(w.nnz, torch.stack(nnz, 1).numpy())
    np.testing.assert_array_equal(w.table()[["used_00", "used_01"]], torch.stack(used, 1).numpy())
    assert f"in layer {both.index(True)} gate" in w.run.manifest.nnz_definition


def test_a_list_of_modules_and_what_is_no_list() -> None:
    """The modules themselves name FFNs as well as their paths do; what is refused, and how to name the maps."""
    net = torch.nn.Sequential(PlainFFN("up_proj", "down_proj"), PlainFFN("up_proj", "down_proj"))
    x = torch.randn(2, 5, 16)
    counts = []
    for ffns in (["0", "1"], list(net)):
        with torch.no_grad(), watch(net, ffns=ffns) as w:
            net(x)
        counts.append(w.nnz)
    np.testing.assert_array_equal(*counts)
    other = torch.nn.Sequential(PlainFFN("first", "second"))
    three = torch.nn.Sequential(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))))
    refusals: list[tuple[torch.nn.Module, Any, str]] = [
        (net, "*", r"Expected a list of FFNs in ffns=, .*, got '\*': put it in a list\.$"),
        (net, net, r"got a Sequential: put it in a list\.$"),
        (net, list(other), r"Expected modules of Sequential in ffns=, got a PlainFFN that is none of its\.$"),
        (three, ["0"], r'name them, as in ffns=\{"0": \("0", "1", "2"\)\}\.$'),
    ]
    for module, ffns, sentence in refusals:
        with pytest.raises(UserError, match=sentence), watch(module, ffns=ffns):
            pass


class PlainFFN(torch.nn.Module):
    """A plain FFN whose maps have the given names."""

    def __init__(self, first: str, last: str) -> None:
        super().__init__()
        self.names = first, last
        self.add_module(first, torch.nn.Linear(16, 40))
        self.add_module(last, torch.nn.Linear(40, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = (self.get_submodule(name) for name in self.names)
        return last(torch.relu(first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("limit", [None, 0.0], ids=["", "by a threshold"])
def test_two_linear_maps_need_no_names(limit: float | None) -> None:
    """Those of a Sequential, say, whose numbers no list of usual names has."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = (torch.nn.Linear(16, 40), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(40, 16))
            self.net = torch.nn.Sequential(*inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.net(x)

    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Block(), Block()).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = [model[0].net[0](x) > 0, model[1].net[0](model[0](x)) > 0]
        for given in (["0.net", "1.net"], [model[0].net, model[1].net]):
            with watch(model, ffns=given, threshold=limit) as w:
                model(x)
            np.testing.assert_array_equal(w.nnz, torch.stack([one.sum(-1).flatten() for one in expected], 1).numpy())
