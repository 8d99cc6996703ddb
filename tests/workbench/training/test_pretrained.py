"""`twell train --from`: a SiLU model goes on as a ReLU one; models that cannot are refused. Cost: 3 s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import END, TEXT, save_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from twell.workbench.errors import UserError
from twell.workbench.options import TrainOptions
from twell.workbench.training.command import train


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("from")
    recipe = {"steps": 12, "rows": 4, "seq_len": 32, "l1": 0.05, "l1_warmup": 4, "warmup": 2, "log_every": 4}
    (folder / "tiny.json").write_text(json.dumps({**recipe, "rate": 1e-3, "evaluations": 1}))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text * 40}) + "\n" for text in TEXT))
    return {"config": str(folder / "tiny.json"), "text": (str(folder / "text.jsonl"),), "holdout": 0.2, "device": "cpu"}


def test_a_silu_model_goes_on_as_a_relu_one(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own loss is that of plain transformers on the held-out ids; what is saved is a ReLU model of its sizes."""
    silu = save_model(tmp_path / "silu", hidden_act="silu", tie_word_embeddings=False)
    out = train(TrainOptions(out=tmp_path / "relu", from_=str(silu), prepared=tmp_path / "ids", **given))
    record = json.loads((out / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.hidden_act, model.config.intermediate_size, model.config.num_hidden_layers) == ("relu", 264, 3)
    before, after = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (silu, out))
    moved = (before.model.embed_tokens.weight - after.model.embed_tokens.weight).detach().abs()
    assert 0 < float(moved.max()) < 0.1  # it went on from there
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(silu).get_vocab() and tokenizer.bos_token == END
    assert record["origin"]["name"] == "silu" and record["heldout"]["tokens"] > 100
    shown = capsys.readouterr().out
    assert f"silu: {record['origin_loss']:.4f} nats on held-out text with silu, the line to reach." in shown
    assert record["origin_loss"] == pytest.approx(_heldout_loss(tmp_path / "ids", before), rel=1e-4)


def _heldout_loss(folder: Path, model: Any) -> float:
    """Return the loss of plain transformers on the rows of the held-out ids."""
    ids = torch.from_numpy(np.load(folder / "heldout.npy").astype(np.int64))
    rows = [ids[at : at + 33] for at in range(0, len(ids) - 32, 32)]
    with torch.inference_mode():
        losses = [cross_entropy(model(input_ids=row[None, :-1]).logits[0], row[1:]).item() for row in rows]
    return float(np.mean(losses))


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        ("mistral", {}, "model_type llama or nemotron"),
        ("llama", {"hidden_act": "gelu"}, "Expected relu, relu2, silu"),
        ("llama", {"max_position_embeddings": 16}, "at most 16"),
    ],
)
def test_other_models_are_refused(
    given: dict[str, Any], tmp_path: Path, family: str, fields: dict[str, Any], sentence: str
) -> None:
    other = save_model(tmp_path / "other", family, **fields)
    with pytest.raises(UserError, match=sentence):
        train(TrainOptions(out=tmp_path / "out", from_=str(other), **given))
    assert not (tmp_path / "out").exists()
