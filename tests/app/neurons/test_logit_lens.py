"""What a neuron writes, and the values that a run keeps of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from streamlit.testing.v1 import AppTest
from support.page_elements import markup
from transformers import OPTConfig, OPTForCausalLM

from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.logit_lens import answers_to, promoted, written
from twell.analysis.neurons.top_tokens import weight_norms
from twell.analysis.neurons.values import in_sequence, sampled
from twell.workbench.errors import Missing
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]
BUNDLED = Path(__file__).resolve().parents[3] / "data" / "demo-model"


@pytest.fixture(scope="module")
def tiny(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that says it is of the bundled model, with the bundled model's vocabulary size."""
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    run = made.make(folder, layers=8, d_ff=768, vocab=6144, sequences=10, fired=True)
    manifests.update(folder, model={**run.manifest.model, "name": "demo-model", "d_model": 256})
    return open_run(folder)


def expected(tensors: dict[str, torch.Tensor], layer: int, neuron: int) -> torch.Tensor:
    """The logits that a small step along the neuron's down row adds, through the norm as the model computes it."""
    scale, table = tensors["model.norm.weight"].double(), tensors["model.embed_tokens.weight"].double()
    row = tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, neuron].double()
    logits = table @ (torch.diag(scale) @ row)
    return logits - logits.mean()


def test_logits_are_those_of_the_down_row_through_norm_and_unembedding(tiny: Run) -> None:
    logits = expected(load_file(BUNDLED / "model.safetensors"), 5, 100)
    frame = written(tiny, str(BUNDLED), 5, 100)
    raised, lowered = frame[frame["kind"] == "raised"], frame[frame["kind"] == "lowered"]
    assert raised["token_id"].tolist() == logits.argsort(descending=True)[: len(raised)].tolist()
    assert lowered["token_id"].tolist() == logits.argsort()[: len(lowered)].tolist()
    np.testing.assert_allclose(frame["logit"], logits[torch.tensor(frame["token_id"].to_numpy())], rtol=1e-4)
    assert frame.attrs == {"tokens": 6144, "signed": True, "scaled": True}


def test_a_relu_on_the_up_branch_too_leaves_no_sign(tiny: Run, tmp_path: Path) -> None:
    """Half of the firings of a gated FFN have a negative product, of one with two ReLUs none has."""
    shutil.copytree(tiny.path, tmp_path / "both")
    manifests.update(tmp_path / "both", model={**tiny.manifest.model, "up_relu": True})
    assert not written(open_run(tmp_path / "both"), str(BUNDLED), 5, 100).attrs["signed"]


def test_many_neurons_at_once_are_each_alone(tiny: Run) -> None:
    table = promoted(tiny, str(BUNDLED), ((5, 100), (0, 3), (5, 99)), each=3)
    assert list(zip(table["layer"], table["neuron"], strict=True))[::3] == [(5, 100), (0, 3), (5, 99)]
    alone = written(tiny, str(BUNDLED), 0, 3).head(3)
    assert table["token_id"].iloc[3:6].tolist() == alone["token_id"].tolist()
    np.testing.assert_allclose(table["logit"].iloc[3:6], alone["logit"], rtol=1e-4)
    assert promoted(tiny, str(BUNDLED), ()).empty


def test_weights_that_are_gone_are_told_from_others(tiny: Run, tmp_path: Path) -> None:
    tensors = load_file(BUNDLED / "model.safetensors")
    for name, axis in (("gate_proj", 0), ("down_proj", 1)):
        weight = tensors[f"model.layers.2.mlp.{name}.weight"]
        tensors[f"model.layers.2.mlp.{name}.weight"] = weight.index_fill(axis, torch.tensor([7]), 0)
    save_file(tensors, tmp_path / "model.safetensors")
    frame = weight_norms(tiny, str(tmp_path), 2).set_index("neuron")
    assert frame.loc[7, "gone"]
    assert frame.loc[7, ["gate_norm", "down_norm"]].tolist() == [0, 0]
    fires = by_neuron(tiny, layer=2)["fires"].to_numpy() > 0
    lengths = tensors["model.layers.2.mlp.gate_proj.weight"].float().norm(dim=1).numpy()
    np.testing.assert_allclose(frame["gate_norm"], lengths / np.median(lengths[fires]), rtol=1e-5)


def test_a_neuron_answers_to_the_embeddings_that_its_gate_row_matches_beyond_chance(tiny: Run, tmp_path: Path) -> None:
    """One row points at a token's embedding, one away from it, one anywhere, and one has no length at all."""
    tensors = load_file(BUNDLED / "model.safetensors")
    table, name = tensors["model.embed_tokens.weight"].float(), "model.layers.2.mlp.gate_proj.weight"
    scale = tensors["model.layers.2.post_attention_layernorm.weight"].float()
    table -= table.mean(dim=0)
    gate = tensors[name].float()
    gate[40], gate[41] = table[1234] / scale, -table[1234] / scale
    gate[42], gate[43] = torch.randn(256, generator=torch.manual_seed(1)), 0.0
    save_file(tensors | {name: gate}, tmp_path / "model.safetensors")
    matches = table @ (gate * scale).T
    told = [answers_to(tiny, str(tmp_path), 2, neuron) for neuron in (40, 41, 42, 43)]
    order = matches[:, 40].argsort(descending=True)
    raised = told[0][told[0]["kind"] == "raised"]
    assert raised["token_id"].tolist() == order[: len(raised)].tolist() and raised["token_id"].iloc[0] == 1234
    np.testing.assert_allclose(raised["logit"], matches[order[: len(raised)], 40], rtol=1e-4)
    assert told[1].loc[told[1]["kind"] == "lowered", "token_id"].iloc[0] == 1234
    assert told[2].empty and told[3].empty, "nothing stands out from noise"
    shuffled = np.random.default_rng(99).permuted((gate * scale)[torch.arange(768) != 43].numpy(), axis=1)
    strongest = (table.numpy() @ (shuffled / np.linalg.norm(shuffled, axis=1, keepdims=True)).T).max(axis=0)
    least = told[0].attrs["least"] / float((gate * scale)[40].norm())
    assert np.quantile(strongest, 0.97) < least <= strongest.max(), "of the layer's rows, shuffled otherwise"
    assert (raised["logit"] > told[0].attrs["least"]).all()
    if len(raised) < 12:
        assert matches[order[len(raised)], 40] <= told[0].attrs["least"], "none that passes is left out"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_head_of_its_own_and_other_dtypes(tiny: Run, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(BUNDLED / "model.safetensors").items()}
    torch.manual_seed(0)
    save_file({"lm_head.weight": torch.randn(6144, 256).to(dtype)}, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    head = load_file(tmp_path / "a.safetensors")["lm_head.weight"]
    logits = expected(tensors | {"model.embed_tokens.weight": head}, 2, 7)
    frame = written(tiny, str(tmp_path), 2, 7)
    assert frame["token_id"].iloc[0] == int(logits.argmax())
    np.testing.assert_allclose(frame["logit"].iloc[0], float(logits.max()), rtol=1e-4)


@pytest.mark.parametrize("final", [True, False])
def test_the_norm_of_a_layer_is_not_the_final_one(tiny: Run, tmp_path: Path, final: bool) -> None:
    """An OPT's layers have a final_layer_norm each, and some OPTs none before the head."""
    draw = torch.Generator().manual_seed(0)
    down, head, norms = (torch.randn(shape, generator=draw) for shape in ((256, 768), (6144, 256), (2, 256)))
    tensors = {"model.decoder.layers.0.fc2.weight": down, "lm_head.weight": head}
    tensors["model.decoder.layers.0.final_layer_norm.weight"] = norms[0].clone()
    if final:
        tensors["model.decoder.final_layer_norm.weight"] = norms[1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    logits = head @ (down[:, 7] * (norms[1] if final else 1))
    frame = written(tiny, str(tmp_path), 0, 7)
    assert frame.attrs["scaled"] == final and frame["token_id"].iloc[0] == int(logits.argmax())


@pytest.mark.parametrize("before", [True, False])
def test_an_opt_whose_norms_come_last_is_refused(made: ModuleType, tmp_path: Path, before: bool) -> None:
    """In a layer of it final_layer_norm stands after the FFN: the gate does not read through it, and what is written
    goes through it. An OPT of the usual order is read."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2, "vocab_size": 200}
    config = OPTConfig(**sizes, num_attention_heads=2, max_position_embeddings=32, do_layer_norm_before=before)
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    run = made.make(tmp_path / "made", layers=2, d_ff=64, sequences=10)
    manifests.update(run.path, model={**run.manifest.model, "family": "opt", "d_model": 32})
    run = open_run(run.path)
    for asked in (
        partial(written, layer=1, neuron=3),
        partial(answers_to, layer=1, neuron=3),
        partial(promoted, neurons=((1, 3),)),
    ):
        if before:
            assert asked(run, str(tmp_path / "opt")) is not None
        else:
            with pytest.raises(Missing, match="norms stand after its FFNs"):
                asked(run, str(tmp_path / "opt"))


def test_weights_of_another_model_or_broken_ones_are_refused(tiny: Run, made_run: Run, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="not this run's"):
        written(made_run, str(BUNDLED), 0, 0)
    with pytest.raises(Missing, match="no safetensors"):
        written(tiny, str(tmp_path), 0, 0)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(Missing, match="cannot be read"):
        written(tiny, str(tmp_path), 0, 0)
    (tmp_path / "x.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{nope")
    with pytest.raises(Missing, match="cannot be read"):
        written(tiny, str(tmp_path), 0, 0)


def test_a_family_whose_norms_are_not_known_is_refused(made: ModuleType, tmp_path: Path) -> None:
    """A Gemma's norms scale by 1 + weight: by the weight alone other tokens would come first."""
    run = made.make(tmp_path / "made", layers=8, d_ff=768, vocab=6144, sequences=10)
    manifests.update(run.path, model={**run.manifest.model, "family": "gemma", "d_model": 256})
    for asked in (written, answers_to):
        with pytest.raises(Missing, match="norms of gemma"):
            asked(open_run(run.path), str(BUNDLED), 0, 0)
    with pytest.raises(Missing, match="norms of gemma"):
        promoted(open_run(run.path), str(BUNDLED), ((0, 0),))


def test_values_are_those_of_the_fired_rows(made_run: Run) -> None:
    rows = made_run.frame("fired")
    rows = rows[rows["layer"] == 1]
    fired = [
        (row.sequence, row.position, value)
        for row in rows.itertuples()
        for neuron, value in zip(row.neuron, row.value, strict=True)
        if neuron == 5
    ]
    values = sampled(made_run, 1, 5)
    assert values.attrs == {"source": "fired", "tokens": len(rows)}
    assert sorted(values["value"]) == sorted(float(v) for _, _, v in fired)
    sequence = fired[0][0]
    by_position = in_sequence(made_run, 1, 5, sequence)
    looked_at = rows[rows["sequence"] == sequence]["position"]
    assert set(looked_at) <= set(by_position.index)
    examples = made_run.frame("examples").query("layer == 1 and neuron == 5 and sequence == @sequence")
    if examples.empty:
        assert (by_position > 0).sum() == sum(s == sequence for s, _, _ in fired)


def test_the_page_shows_values_and_what_the_neuron_writes(show: Show, runs: Path, tiny: Run) -> None:
    test = show(tiny.path.parent, "neuron", run="tiny", neuron="L1/N3")
    assert not test.exception
    html = "\n".join(str(element.proto.body) for element in test.get("html"))
    answers = answers_to(tiny, str(BUNDLED), 1, 3)
    assert html.count('class="tw-logit raised"') == 12 + (answers["kind"] == "raised").sum()
    assert html.count("without the layers between") == 2, "beside either list of what it writes"
    assert "Where it fires and its up branch is positive, it makes these likelier, where that is negative less" in html
    assert "if it is negative, raised and lowered swap" in "\n".join(caption.value for caption in test.caption) + html
    assert ("Nothing stands out from noise: no token" in html) == answers.empty
    assert "by value; two bars to a doubling" in html
    (only,) = set(answers_to(tiny, str(BUNDLED), 0, 200)["kind"])
    html = markup(show(tiny.path.parent, "neuron", run="tiny", neuron="L0/N200"))
    assert only == "raised" and "Matched best" in html and "Matched worst" not in html, "no column without a token"
    assert "Only matches beyond what 99" in html and "stands out from noise" not in html
    away = show(runs, "neuron", run="made", neuron="L1/N3")
    assert "not on this machine" in " ".join(info.value for info in away.info).replace("\\", "")
