"""Models that cannot be captured: one sentence that names what is wrong, and nothing on disk changed. Cost: 10 s."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.captures import save_model
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from twell.kernels.modules import Probe
from twell.workbench.errors import UserError
from twell.workbench.models import threshold_ffn, weights
from twell.workbench.models.checkpoint import understood

Twell = Callable[..., str]


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    """Copy a model folder, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "copied"))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"hidden_act": "silu"}, 'hidden_act: "silu"'),
        ({"hidden_act": "gelu"}, 'hidden_act: "gelu"'),
        ({"hidden_act": None}, "hidden_act: null"),
        ({"hidden_act": "wavy"}, 'hidden_act: "wavy"'),
        ({"model_type": "llama_sparse_relu", "sparsity_top_k": 8}, "sparsity_top_k: 8"),
        ({"model_type": "gpt2"}, 'model_type: "gpt2"'),
        ({"sparsity_twell_tile": 256}, "sparsity_twell_tile: 256"),
        ({"num_local_experts": 8}, "num_local_experts: 8"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: "),
        ({"auto_map": {"AutoModel": "model.Mine"}}, "auto_map: "),
        ({"intermediate_size": 260}, "intermediate_size: 260"),
        ({"num_attention_heads": "two"}, "num_attention_heads"),
    ],
)
def test_a_model_that_is_not_understood(fields: dict[str, Any], sentence: str, copied: Path, refused: Twell) -> None:
    change_config(copied, **fields)
    message = refused(model=copied)
    assert sentence in message
    supported = "model_type llama, mistral, qwen2, qwen3, nemotron, opt, llama_sparse_relu or bamboo"
    assert supported in message


def test_a_silu_model_is_told_what_comes(copied: Path, refused: Twell) -> None:
    change_config(copied, hidden_act="silu")
    assert "; `twell capture` and `twell text` count above --threshold 0.01." in refused(model=copied)
    path = copied / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "hidden_act"}))
    assert 'hidden_act: "silu"' in refused(model=copied)  # what all three families take it to be


def test_a_config_that_is_not_one(copied: Path, refused: Twell) -> None:
    (copied / "config.json").write_text("{")
    assert "config.json" in refused(model=copied)
    (copied / "config.json").write_text("[]")
    assert "got a list" in refused(model=copied)
    (copied / "config.json").unlink()
    assert "found none" in refused(model=copied)


def test_weights(copied: Path, refused: Twell) -> None:
    path = copied / "model.safetensors"
    whole = load_file(path)
    gate = "model.layers.1.mlp.gate_proj.weight"

    def spoil(**changed: torch.Tensor) -> str:
        kept = {name: tensor for name, tensor in {**whole, **changed}.items() if len(tensor)}
        save_file(kept, path, metadata={"format": "pt"})
        return refused(model=copied)

    assert f"missing {gate}" in spoil(**{gate: torch.zeros(0)})
    assert "unexpected model.layers.0.mlp.gate_proj.bias" in spoil(
        **{"model.layers.0.mlp.gate_proj.bias": torch.ones(264)}
    )
    assert f"mismatched {gate}" in spoil(**{gate: torch.zeros(264, 16)})
    assert "w_gate: expected finite weights, got 1 inf or nan in layer 1" in spoil(
        **{gate: torch.where(whole[gate] == whole[gate][7, 7], torch.nan, whole[gate])}
    )
    path.write_bytes(path.read_bytes()[:1000])
    assert "Expected weights that load" in refused(model=copied)
    path.rename(copied / "pytorch_model.bin")
    assert "only pytorch_model.bin, a pickle" in refused(model=copied)
    (copied / "pytorch_model.bin").unlink()
    assert "Expected weights in safetensors in copied, got none" in refused(model=copied)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "weight",
    ["model.layers.1.mlp.gate_proj.weight", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"],
)
def test_weights_that_are_no_floating_point_numbers(
    dtype: torch.dtype, weight: str, copied: Path, refused: Twell, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied / "model.safetensors"
    stored = load_file(path)
    save_file(stored | {weight: stored[weight].to(dtype)}, path, metadata={"format": "pt"})
    monkeypatch.setattr(weights.AutoModelForCausalLM, "from_pretrained", None)  # refused before it is called
    for more in ((), ("--threshold", "0.1")):
        message = refused(*more, model=copied)
        assert "Expected weights in floating point of 16 bits or more in copied, got " in message
        assert f" in {weight}: " in message


def test_whole_numbers_that_are_no_weights(copied: Path) -> None:
    """A mask or the positions beside the weights, and what training counted, are not taken for weights."""
    path = copied / "model.safetensors"
    others = {
        "model.layers.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "model.position_ids": torch.arange(4),
        "model.layers.0.mlp.tracker.weight": torch.arange(4),
    }
    save_file(load_file(path) | others, path, metadata={"format": "pt"})
    weights._refuse_other_numbers(understood(copied, "copied"))


def test_tokenizer(copied: Path, refused: Twell) -> None:
    path = copied / "tokenizer.json"
    path.write_text("{}")
    assert "tokenizer.json" in refused(model=copied)
    path.unlink()
    assert "one of): save the model's tokenizer there" in refused(model=copied)  # transformers' own line ends in ": "
    (copied / "tokenizer_config.json").unlink()
    assert f"got no file of a tokenizer: tokenizer.save_pretrained('{copied}') puts it there" in refused(model=copied)


def test_a_tokenizer_of_ids_that_the_embedding_lacks(tmp_path: Path, copied: Path, refused: Twell) -> None:
    message = refused(model=save_model(tmp_path / "narrow", vocab_size=300))
    assert "token ids below 300 from the tokenizer of narrow" in message
    assert "got 319" in message
    path = copied / "tokenizer.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["model"]["vocab"]["F"] = 500  # with a gap below it: no more tokens than rows
    path.write_text(json.dumps(stored), encoding="utf-8")
    assert "got 500" in refused(model=copied)


def test_an_encoder_and_decoder(tmp_path: Path, copied: Path, refused: Twell) -> None:
    """It has nothing to correct in its config.json: it is a model of another kind."""
    model = T5ForConditionalGeneration(T5Config(vocab_size=320, d_model=16, d_ff=32, num_layers=1, num_heads=2))
    model.save_pretrained(tmp_path / "t5")
    for path in copied.glob("tokenizer*"):
        (tmp_path / "t5" / path.name).write_bytes(path.read_bytes())
    message = refused("--threshold", "0.1", model=tmp_path / "t5")
    assert "Expected a causal language model in t5, got model_type t5" in message


def test_no_such_model(tmp_path: Path, refused: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "got nothing there" in refused(model=tmp_path / "nowhere")
    assert "got a file" in refused(model=__file__)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused(model="nobody/no-such-model")
    assert "no such folder here, and the hub cannot be reached" in message
    assert "leave --revision out" in refused("--revision", "main")


def test_layers_of_different_widths_cannot_be_counted(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    layers = model.model.layers
    layers[1].mlp.down_proj = torch.nn.Linear(272, 32)
    with pytest.raises(UserError, match=r"got FFNs of 264 and 272 neurons \(model_type"):
        threshold_ffn.watch("tiny", model, list(layers), 0.1, Probe())
    with pytest.raises(UserError, match="got no such layers"):
        threshold_ffn.watch("tiny", model, [], 0.1, Probe())


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}, "got 0 maps back from one in layer 0"),
        ("mamba", {}, "got no attention in layer 0"),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 0.5}, "as by a cap or a scale: add --no-loss"),
        ("bert", {"is_decoder": False}, "got one whose tokens see later ones (model_type bert)"),
    ],
)
def test_models_that_a_threshold_cannot_count(
    family: str, fields: dict[str, Any], sentence: str, tmp_path: Path, refused: Twell
) -> None:
    folder = save_model(tmp_path / "model", family, bos_token_id=0, eos_token_id=0, **fields)
    assert sentence in refused("--threshold", "0.1", model=folder)
    message = refused(model=folder)
    assert f'model_type: "{family}"' in message and "can be counted above a --threshold" in message
