"""Metrics of a watch without rows that runs densely: those of one that keeps rows, whatever a call is. Cost: 4 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from twell.workbench import watch
from twell.workbench.watching.call_counts import rounded_down

BLOCKS = {f"blocks.{layer}": ("gate", "up", "down") for layer in range(3)}
SIDES = ({"rows": True, "dense": True}, {"rows": False}, {"rows": False, "dense": True})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 96, bias=False), nn.Linear(32, 96, bias=False)
        self.down = nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(100, 32), nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return x


def overflowing(last: bool) -> Network:
    """Return a network in which the product of token 50 overflows, in the first layer or in the last alone."""
    torch.manual_seed(0)
    network = Network().half().requires_grad_(False)
    network.embed.weight[50] *= 1000
    for block in network.blocks[:2] if last else ():
        block.down.weight.zero_()
        block.gate.weight.mul_(1e-4)
    return network


def assert_equal(metrics: list[dict[str, float]]) -> None:
    for other in metrics[1:]:
        assert other == pytest.approx({name: metrics[0][name] for name in other}, rel=1e-6)
        assert {name.partition("/")[0] for name in other} == {name.partition("/")[0] for name in metrics[0]}


@pytest.mark.parametrize("last", [False, True], ids=["first layer", "last layer"])
def test_tokens_that_overflow_are_none(last: bool) -> None:
    """In no layer, before it overflows either."""
    network, ids = overflowing(last), torch.randint(51, 100, (2, 10), generator=torch.Generator().manual_seed(1))
    ids[0, 4] = ids[1, 5] = ids[1, 8] = 50
    metrics = []
    for side in SIDES[::2]:  # a sparse product of 16 bits is rounded otherwise
        with watch(network, ffns=BLOCKS, **side) as watched:
            network(ids)
            metrics.append({k: v for k, v in watched.metrics().items() if "dead" not in k})
            if side["rows"]:
                assert watched.run.manifest.kernel["name"] == "torch", "no sparse kernel ran"
    assert metrics[0]["tokens"] == 15
    assert_equal(metrics)


def test_a_token_that_is_never_said() -> None:
    """Its logit is -inf at every token, all of which are finite."""

    class Silent(Network):
        def forward(self, input_ids: torch.Tensor) -> Any:
            logits = super().forward(input_ids)
            return {"logits": torch.cat([torch.full_like(logits[..., :1], -torch.inf), logits[..., 1:]], -1)}

    torch.manual_seed(0)
    network = Silent().requires_grad_(False)
    with watch(network, ffns=BLOCKS, rows=False, dense=True) as watched:
        network(torch.arange(20).view(2, 10))
        assert watched.metrics()["tokens"] == 18


def test_generated_sequences_are_followed(tiny: Path, load_object: Callable[..., Any]) -> None:
    """Tokens after a sequence's end are none, and losses are taken where one call predicts what the next one reads."""
    model = load_object(tiny, torch.float32).requires_grad_(False)
    ids = torch.randint(60, 319, (3, 9), generator=torch.Generator().manual_seed(4))
    longest = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 77}
    end = int(model.generate(**longest, eos_token_id=None)[0, 10])
    metrics = []
    for side in SIDES:
        with watch(model, loss=True, **side) as watched:
            model.generate(**longest, eos_token_id=end)
            metrics.append(watched.metrics())
    assert "loss" in metrics[0]
    assert_equal(metrics)


def test_calls_leave_nothing_behind(tiny: Path, load_object: Callable[..., Any]) -> None:
    model = load_object(tiny, torch.float32)
    with torch.inference_mode(), watch(model, rows=False, dense=True) as watched:
        for _ in range(20):
            model(input_ids=torch.arange(60, 70)[None])
        assert len(watched.tracker._open) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("threshold", [0.3, 0.1, 1e-7, 0.0, 70_000.0])
def test_what_is_above_a_threshold(dtype: torch.dtype, threshold: float) -> None:
    """By exact numbers: values of 16 bits are above the rounded threshold just where they are above it."""
    values = (
        torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16 if dtype != torch.float16 else dtype)
    )
    values = values[values.isfinite()].to(dtype)
    assert torch.equal(values > rounded_down(threshold, dtype), values.double() > threshold)


def test_padding_beside_a_cache(tiny: Path, load_object: Callable[..., Any]) -> None:
    """A mask of the cache's columns too: the call's own are the last."""
    model = load_object(tiny, torch.float32)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.arange(60, 65)[None], past_key_values=cache)
        with watch(model, rows=False, dense=True) as watched:
            watched.tracker.adds_tokens = True
            mask = torch.tensor([[1] * 5 + [1] * 8 + [0] * 4])
            model(input_ids=torch.arange(60, 72)[None], attention_mask=mask, past_key_values=cache)
            assert int(watched.tracker.tokens) == 8
