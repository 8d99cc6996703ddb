"""Adapters in a model, laid out as PEFT lays them out, and modules of one's own around a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from twell.workbench import ablate, capture, study, threshold, use_sparse_ffns, watch
from twell.workbench.errors import UserError

IDS = torch.arange(1, 9)[None]


class LoRA(nn.Module):
    """A linear map and what an adapter of rank 2 adds."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # as PEFT has it: without what is added

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Task(nn.Module):
    """A module of one's own that holds a model, as a training framework's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.net(*given, **named)


def adapted(model: Any, name: str) -> Any:
    """Give each layer's map of this name an adapter."""
    for layer in model.model.layers:
        setattr(layer.mlp, name, LoRA(getattr(layer.mlp, name)))
    return model


def counted(model: Any, limit: float) -> Tensor:
    """Return how many hidden values each token has above a limit, by plain hooks, int32 [tokens, layers]."""
    counts: list[Tensor] = []
    hooks = []
    for layer in model.model.layers:
        down = layer.mlp.down_proj
        first = down.base_layer if isinstance(down, LoRA) else down
        hooks.append(first.register_forward_pre_hook(lambda _m, x: counts.append((x[0].abs() > limit).sum(-1)[0])))
    model(IDS)
    for hook in hooks:
        hook.remove()
    return torch.stack(counts, 1).int()


def silu() -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, **heads)
    ).eval()


@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("limit", [0.0, 2e-4])
def test_counts_above_a_threshold(small: Any, name: str, limit: float) -> None:
    """While the adapter is trained: what goes into the map back is counted, whichever map has one."""
    for model in (adapted(small, name), adapted(silu(), name)):
        expected = counted(model, limit)
        with watch(model, threshold=limit) as w:
            model(IDS, labels=IDS).loss.backward()
        assert torch.equal(torch.from_numpy(w.nnz), expected)
        assert 0 < w.nnz.mean() <= 32


def test_the_way_that_counts_is_named(small: Any) -> None:
    """A watch names the threshold, which is no way for what changes the model."""
    model = adapted(small, "down_proj")
    merge = r"merge adapters first, as PEFT's merge_and_unload\(\) does"
    way = f"{merge}, or count what is above a threshold=0, which is all that fires;"
    with pytest.raises(UserError, match=f"got a LoRA as down_proj: {way}"):
        watch(model).__enter__()
    for change in (lambda: ablate(model, {0: [1]}).__enter__(), lambda: use_sparse_ffns(model)):
        with pytest.raises(UserError, match=f"{merge}; experts"):
            change()


@pytest.mark.parametrize("make", [lambda small: small, lambda _: silu()], ids=["relu", "silu"])
def test_a_study_needs_all_of_the_map_back(
    small: Any, tokenizer: PreTrainedTokenizerFast, make: Callable[[Any], Any]
) -> None:
    """Its conditions compute the map back from its weight, which lacks what the adapter adds."""
    model = adapted(make(small), "down_proj")
    model.resize_token_embeddings(len(tokenizer))
    with pytest.raises(UserError, match=r"Expected FFNs without adapters in .*, got one in layer 0: merge"):
        study(model, ["the cat sat on the mat"] * 3, ["ffn@1"], tokenizer=tokenizer, threshold=0.0)


def test_what_holds_a_model(small: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Its refusal says where the model is, and calls of what holds it are counted then."""
    task = Task(small)
    tries: list[Callable[[], Any]] = [
        lambda: watch(task).__enter__(),
        lambda: ablate(task, {0: [1]}).__enter__(),
        lambda: threshold(task, 0.1).__enter__(),
        lambda: use_sparse_ffns(task),
        lambda: capture(task, ["the cat"], tokenizer=tokenizer),
        lambda: study(task, ["the cat"], tokenizer=tokenizer),
    ]
    for use in tries:
        with pytest.raises(UserError, match=r"got a Task.*: give what it holds as \.net"):
            use()
    with torch.no_grad(), watch(task.net) as w:
        task(IDS)
    assert len(w.nnz) == IDS.numel()


@pytest.mark.parametrize("read", [capture, study])
def test_texts_for_a_module_of_ones_own(read: Callable[..., Any], tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="which takes texts, got a Linear: count it with `watch`, ffns= and calls"):
        read(nn.Linear(8, 8), ["the cat"], tokenizer=tokenizer)


@pytest.mark.parametrize("read", [capture, study])
def test_a_tokenizer_of_another_model(small: Any, tokenizer: PreTrainedTokenizerFast, read: Callable[..., Any]) -> None:
    """It is refused before the model runs: on a GPU an id past the embedding ends all use of the device."""
    with pytest.raises(UserError, match=r"Expected token ids below 50 from the tokenizer of LlamaForCausalLM.*got 319"):
        read(small, ["the cat"], tokenizer=tokenizer)


def test_a_token_for_padding_that_was_added(small: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The embedding need not have it: no text holds it, and texts of several lengths are captured."""
    small.resize_token_embeddings(len(tokenizer))
    padded = deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert padded.pad_token_id == len(tokenizer)
    texts = ["the cat sat on the mat", "a dog"]
    run = capture(small, texts, tokenizer=padded, generate=2)
    for saved in (small, padded):
        saved.save_pretrained(tmp_path / "padded")
    again = capture(tmp_path / "padded", texts, generate=2, device="cpu")
    assert len(again.activity()) == len(run.activity()) > 0
