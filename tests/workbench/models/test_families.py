"""Families with code of their own, and any FFN by a threshold: counts equal to the plain model's, of text that is read
and of text that the model writes. Cost: 20 s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.captures import run_capture, save_model, save_tokenizer, sequences_of
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from twell.analysis import by_layer, by_token, summarize
from twell.analysis.claims.activity import ffn_parameters
from twell.workbench.ablations.options import PruneOptions
from twell.workbench.ablations.prune import command as prune_command
from twell.workbench.errors import UserError
from twell.workbench.models.load import load
from twell.workbench.options import SummarizeOptions, VerifyOptions
from twell.workbench.run.schema import DECODE, nnz_columns
from twell.workbench.run.store import Run, open_run
from twell.workbench.verify import Counts, verify

SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 264,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
# How the names of an FFN's weights end, and whether they lie transposed: gate, up, down; or up, down.
LAYOUTS = {
    "linear": {"gate_proj.weight": False, "up_proj.weight": False, "down_proj.weight": False},
    "hybrid": {"gate_proj.weight": False, "up_proj.weight": False, "down_proj.weight": True},
    "weights": {"gate_weight": True, "up_weight": False, "down_weight": True},
    "plain weights": {"up_weight": True, "down_weight": True},
    "plain linear": {"up_proj.weight": False, "down_proj.weight": False},
    "capitals": {"GATE": False, "UP": False, "DOWN": True},
}


class Plain(nn.Module):
    """An FFN of two maps, for a model that has three."""

    def __init__(self, width: int, d_ff: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, d_ff, bias=False), nn.Linear(d_ff, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).clamp(min=0))


def published(folder: Path, layout: str, **fields: Any) -> LlamaForCausalLM:
    """Save a random checkpoint in the published form; return it as a plain model in float64."""
    size = {**SIZE, **fields}
    torch.manual_seed(3)
    config = LlamaConfig(**{**size, "hidden_act": "relu", "rope_theta": 100_000.0, "tie_word_embeddings": True})
    model = LlamaForCausalLM(config)
    if layout.startswith("plain"):
        for layer in model.model.layers:
            layer.mlp = Plain(size["hidden_size"], size["intermediate_size"])
            nn.init.normal_(layer.mlp.up_proj.weight, std=0.2)
    stored = {}
    for name, tensor in model.state_dict().items():
        begin, _, end = name.partition(".mlp.")
        if end:
            last, transposed = next(
                (last, turned) for last, turned in LAYOUTS[layout].items() if last.lower()[:2] == end[:2]
            )
            name, tensor = f"{begin}.mlp.{last}", tensor.t() if transposed else tensor
        if name != "lm_head.weight":
            stored[name] = tensor.contiguous()
    stored["tracker.last_activated"] = torch.zeros(3)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    sparsity = {
        "sparsity_gated_mlp": not layout.startswith("plain"),
        "sparsity_new_intermediate_size": size["intermediate_size"],
        "sparsity_use_hybrid_kernel": layout == "hybrid",
        "sparsity_l1_coeff": 3e-4,
        "sparsity_mlp_execution_logic": "training",
    }
    own = {"model_type": "llama_sparse_relu", "hidden_act": "silu", "auto_map": {"AutoConfig": "sparse_models.Config"}}
    left_over = {"intermediate_size": 999, "rope_theta": 100_000, "rope_scaling": None, "tie_word_embeddings": True}
    written = {**size, **left_over, **own, **sparsity, "torch_dtype": "bfloat16", "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(written))
    save_tokenizer(folder)
    return model.double().eval()


def heard(
    model: Any, maps: Callable[[Any], nn.Module], sequences: list[np.ndarray], inputs: bool = False
) -> np.ndarray:
    """Return the outputs (or `inputs`) of each layer's map, [tokens, layers, d_ff], run one sequence after another."""
    steps: list[list[torch.Tensor]] = []

    def hear(_module: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows = given[0] if inputs else output
        steps[-1].append(rows.reshape(-1, rows.shape[-1]))

    layers = next(one for one in model.get_decoder().children() if isinstance(one, nn.ModuleList))
    for layer in layers:
        maps(layer).register_forward_hook(hear)
    with torch.inference_mode():
        for ids in sequences:
            steps.append([])
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
    return np.concatenate([torch.stack(one, 1).numpy() for one in steps])


def columns(run: Run, name: str = "nnz") -> np.ndarray:
    return run.activity()[nnz_columns(run.layers, name)].to_numpy().astype(np.int64)


GENERATED = 4


@pytest.fixture
def generated(tmp_path: Path, texts: tuple[str, ...]) -> Callable[..., Run]:
    """Return a function that captures the model while it continues the texts."""

    def run(folder: Path, **given: Any) -> Run:
        recorded = run_capture(folder, tmp_path / "generated", texts, torch.float64, generate=GENERATED, **given)
        rows = recorded.activity()
        assert (rows["phase"] == DECODE).sum() > GENERATED * 10
        return recorded

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_published_checkpoints(
    layout: str, tmp_path: Path, texts: tuple[str, ...], generated: Callable[..., Run]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = published(folder, layout)
    run = run_capture(folder, tmp_path / "run", texts, torch.float64)
    first = "up_proj" if layout.startswith("plain") else "gate_proj"
    gates = heard(model, lambda layer: getattr(layer.mlp, first), sequences_of(run))
    np.testing.assert_array_equal(columns(run), (gates > 0).sum(-1))
    assert (run.manifest.model["family"], run.d_ff) == ("llama_sparse_relu", 264)
    assert ("plain FFN" in run.manifest.nnz_definition) == layout.startswith("plain")
    assert run.manifest.loss is not None
    made = generated(folder)
    gates = heard(model, lambda layer: getattr(layer.mlp, first), sequences_of(made))
    np.testing.assert_array_equal(columns(made), (gates > 0).sum(-1))


@pytest.mark.parametrize("layout", ["weights", "plain weights", "hybrid"])
def test_a_square_ffn_is_read_by_its_names(layout: str, tmp_path: Path) -> None:
    model = published(tmp_path, layout, hidden_size=64, intermediate_size=64)
    ids = torch.arange(1, 31).view(2, 15)
    with torch.inference_mode():
        ours = load(str(tmp_path), device="cpu", dtype=torch.float64).model(input_ids=ids).logits
        theirs = model(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_weights_that_are_missing_or_left_over(tmp_path: Path) -> None:
    published(tmp_path, "weights")
    whole = load_file(tmp_path / "model.safetensors")

    def refused_as(**changed: torch.Tensor | None) -> str:
        kept = {name: tensor for name, tensor in {**whole, **changed}.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError) as refused:
            load(str(tmp_path), device="cpu")
        return str(refused.value)

    layer = "model.layers.1.mlp"
    assert f"missing {layer}.gate_proj.weight" in refused_as(**{f"{layer}.gate_weight": None})
    assert f"unexpected {layer}.router.weight" in refused_as(**{f"{layer}.router.weight": torch.ones(2)})
    assert f"unexpected {layer}.up_weight" in refused_as(
        **{f"{layer}.up_proj.weight": whole[f"{layer}.up_weight"].clone()}
    )
    assert f"mismatched {layer}.down_proj.weight" in refused_as(**{f"{layer}.down_weight": torch.ones(32, 16)})


def test_a_relu_on_both_branches(
    tmp_path: Path, texts: tuple[str, ...], generated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bamboo: a Mistral, with predictors in its checkpoint that are not used."""
    folder, size = tmp_path / "model", {**SIZE, "num_key_value_heads": 1, "sliding_window": 12}
    torch.manual_seed(5)
    model = MistralForCausalLM(MistralConfig(**size, hidden_act="relu"))
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored |= {f"model.layers.{n}.mlp.predictor.fc1.weight": torch.ones(8, 32) for n in range(3)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"model_type": "bamboo", "hidden_act": "relu", "auto_map": {"AutoConfig": "configuration.BambooConfig"}}
    (folder / "config.json").write_text(json.dumps({**size, **own, "architectures": ["BambooForCausalLM"]}))
    save_tokenizer(folder)
    run = run_capture(folder, tmp_path / "run", texts, torch.float64)
    with pytest.raises(UserError, match=r"Expected FFNs of transformers to prune, .* got a ReLUFFN"):
        prune_command(PruneOptions(model=str(folder), run=run.path, out=tmp_path / "small", device="cpu"))

    model = model.double().eval()
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda _module, _inputs, output: output.clamp(min=0))
    for one in (run, generated(folder)):
        gates, ups = (
            heard(model, lambda layer, name=name: getattr(layer.mlp, name), sequences_of(one))
            for name in ("gate_proj", "up_proj")
        )
        np.testing.assert_array_equal(columns(one), (gates > 0).sum(-1))
        np.testing.assert_array_equal(columns(one, "used"), ((gates > 0) & (ups > 0)).sum(-1))
    assert 0 < columns(run, "used").sum() < columns(run).sum()
    assert "used_LL" in run.manifest.nnz_definition
    tidy = run.activity(tidy=True, layers=[2])
    np.testing.assert_array_equal(tidy["used"], columns(run, "used")[:, 2])
    single = run_capture(folder, tmp_path / "single", texts)  # another kernel has it too, where there is one
    assert (columns(single, "used") != columns(run, "used")).mean() < 1e-3
    summarize(SummarizeOptions(runs=(run.path,)))
    plain = (run.activity()["flags"] == 0).to_numpy()
    np.testing.assert_allclose(by_layer(run)["mean"], columns(run)[plain].mean(0))
    assert len(by_token(run, min_count=1))
    verify(VerifyOptions(run=single.path, tokens=100, model=str(folder), device="cpu"))
    parity = open_run(single.path).manifest.parity
    assert parity is not None and parity["logit_error"] < 1e-5 and parity["beyond_rounding"] == 0
    assert parity["counts"] == 2 * 3 * parity["tokens"]  # of what fires in each layer, and of what is used
    forward, compared = Counts.on_layer, []

    def twice(self: Counts, row_of: torch.Tensor, layer: int, x: torch.Tensor, stats: Any) -> None:
        stats.nnz_used *= 2
        forward(self, row_of, layer, x, stats)
        compared.append(self)

    monkeypatch.setattr(Counts, "on_layer", twice)
    with pytest.raises(UserError, match="by no more than rounding"):
        verify(VerifyOptions(run=single.path, tokens=100, model=str(folder), device="cpu"))
    assert compared[-1].beyond == compared[-1].compared // 2


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # the map back from the hidden values, and the configuration
    "gemma": ("mlp.down_proj", {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}),
    "phi": ("mlp.fc2", {}),
    "phi3": ("mlp.down_proj", {"pad_token_id": 0}),
    "gpt_neox": ("mlp.dense_4h_to_h", {"use_parallel_residual": True}),
    "gpt2": ("mlp.c_proj", {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 128}),
    "falcon": ("mlp.dense_4h_to_h", {"ffn_hidden_size": 264, "alibi": True}),
    "bloom": ("mlp.dense_4h_to_h", {"n_layer": 3, "n_head": 2}),
    "starcoder2": ("mlp.c_proj", {"num_key_value_heads": 1}),
    "qwen3": ("mlp.down_proj", {"hidden_act": "silu", "head_dim": 32}),  # attention leads back from another width too
    "llama": ("mlp.down_proj", {"hidden_act": "relu"}),
    "opt": ("fc2", {"activation_function": "gelu"}),
}


@pytest.mark.parametrize("family", OTHERS)
def test_any_ffn_by_a_threshold(
    family: str, tmp_path: Path, texts: tuple[str, ...], generated: Callable[..., Run]
) -> None:
    place, fields = OTHERS[family]
    folder = save_model(tmp_path / "model", family, bos_token_id=0, eos_token_id=0, **fields)
    run = run_capture(folder, tmp_path / "run", texts, torch.float64, threshold=0.05, examples=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    hidden = heard(model, lambda layer: layer.get_submodule(place), sequences_of(run), inputs=True)
    np.testing.assert_array_equal(columns(run), (np.abs(hidden) > 0.05).sum(-1))
    assert 0.02 < columns(run).mean() / run.d_ff < 0.98
    assert "|hidden| > 0.05" in run.manifest.nnz_definition and "densely" in run.manifest.nnz_definition
    assert run.manifest.model["family"] == family
    layers = next(one for one in model.get_decoder().children() if isinstance(one, nn.ModuleList))
    matrices = [one for one in layers.parameters() if one.dim() == 2 and {run.d_ff, 2 * run.d_ff} & {*one.shape}]
    assert ffn_parameters(run) == sum(one.numel() for one in matrices)  # Phi-3 has gate and up in one
    plain = (run.activity()["flags"] == 0).to_numpy()
    fires = run.frame("neurons").groupby(["layer", "neuron"])["fires"].sum()
    assert fires.sum() == (np.abs(hidden[plain]) > 0.05).sum()
    assert run.frame("neurons")["value_max"].max() == pytest.approx(np.abs(hidden[plain]).max(), rel=1e-6)
    # In float64 alone, BLOOM's own attention makes NaN of rows that see nothing, and spoils what is padded with them.
    made = generated(folder, threshold=0.05, batch_tokens=1 if family == "bloom" else 64)
    hidden = heard(model, lambda layer: layer.get_submodule(place), sequences_of(made), inputs=True)
    np.testing.assert_array_equal(columns(made), (np.abs(hidden) > 0.05).sum(-1))
