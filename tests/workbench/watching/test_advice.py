"""What a refused model is told to do instead, and that this works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from twell.workbench import threshold, use_sparse_ffns, watch
from twell.workbench.errors import UserError

IDS = torch.arange(3, 15).view(3, 4)


def test_gpt2_with_a_relu() -> None:
    """Its maps are transposed, so no kernel runs them: every way that is tried names the one that counts."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, activation_function="relu")
    ).eval()
    ffns = {f"transformer.h.{layer}.mlp": ("c_fc", "c_proj") for layer in range(2)}
    exactly = "count what is above a threshold=0, which is all that fires"
    with pytest.raises(UserError, match=rf"got gpt2 in GPT2LMHeadModel: {exactly}\.$"):
        watch(model).__enter__()
    for make in (lambda: watch(model, ffns=ffns).__enter__(), lambda: use_sparse_ffns(model, ffns=ffns)):
        with pytest.raises(UserError, match=f"got a Conv1D as c_fc: {exactly}"):
            make()
    counts: list[torch.Tensor] = []
    hooks = [
        block.mlp.c_proj.register_forward_pre_hook(lambda _m, given: counts.append((given[0] > 0).sum(-1).flatten()))
        for block in model.transformer.h
    ]
    with torch.no_grad():
        model(IDS)
        for hook in hooks:
            hook.remove()
        with watch(model, threshold=0) as w:
            model(IDS)
    np.testing.assert_array_equal(w.nnz, torch.stack(counts, 1).numpy())


def test_an_activation_with_zeros_that_the_kernels_do_not_compute(small: Any) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**small.config.to_dict(), "hidden_act": "relu6"})).eval()
    with pytest.raises(
        UserError, match=r"'relu6', which the kernels do not compute: count what is above a threshold=0"
    ):
        watch(model).__enter__()
    with torch.no_grad(), watch(model, threshold=0) as w:
        model(IDS)
    assert 0 < w.nnz.mean() < 32


def test_names_that_are_not_there(small: Any) -> None:
    for names in (("gate_proj", "upp_proj", "down_proj"), (None, "gate_proj", "down_proj")):
        with pytest.raises(UserError, match=r"among its modules \(gate_proj, up_proj, down_proj, act_fn\): check"):
            watch(small, ffns={"model.layers.0.mlp": names}).__enter__()  # type: ignore[dict-item]


def test_a_model_without_a_head() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    model = BertModel(BertConfig(**sizes, num_attention_heads=2, hidden_act="relu")).eval()
    ffns = {f"encoder.layer.{layer}.output": ("dense",) for layer in range(2)}
    with torch.no_grad(), watch(model, threshold=0, ffns=ffns) as w:
        model(IDS)
    assert w.nnz.shape == (12, 2)


def test_a_threshold_in_a_module_of_ones_own() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 16))
    x = torch.randn(5, 16)
    with pytest.raises(UserError, match=r"^Expected ffns= for Sequential"), threshold(net, 0.1):
        pass
    with torch.no_grad():
        hidden = net[:2](x)
        with threshold(net, 0.1, ffns={"": ("2",)}):
            torch.testing.assert_close(net(x), net[2](torch.where(hidden.abs() > 0.1, hidden, 0.0)))
