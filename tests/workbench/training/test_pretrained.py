"""`twell train --from`: a SiLU model goes on as a ReLU one; models that cannot are refused. Cost: 3 s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import END, TEXT, save_model
from torch.nn.functional import cross_entropy, softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from twell.analysis.figures.plots import training_loss
from twell.analysis.training import reached, training_steps
from twell.workbench.errors import UserError
from twell.workbench.models.pretrained import read_teacher
from twell.workbench.options import TrainOptions
from twell.workbench.run.store import open_run
from twell.workbench.training.command import train
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.sparse_llama import Objective, continued


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
    printed = capsys.readouterr().out
    assert f"silu: {record['origin_loss']:.4f} nats on held-out text with silu, the line to reach." in printed
    assert f", the original {record['origin_loss']:.4f}), nnz" in printed
    assert record["origin_loss"] == pytest.approx(_heldout_loss(tmp_path / "ids", before), rel=1e-4)
    steps = training_steps(open_run(out))
    assert steps.attrs["origin_loss"] == record["origin_loss"]
    line = training_loss(open_run(out)).data[2]
    assert set(line.y) == {record["origin_loss"]} and "silu" in line.hovertemplate
    steps.attrs["origin_loss"] = float(steps["heldout_loss"].max())
    assert reached(steps) == steps.dropna(subset="heldout_loss")["step"].iloc[0]
    steps.attrs["origin_loss"] = 0.0
    assert reached(steps) is None
    assert "goes on from `silu`" in (out / "README.md").read_text()


def test_the_line_to_reach_is_there_while_it_trains(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silu = save_model(tmp_path / "silu", hidden_act="silu")
    step = TrainingLoop.one_step

    def one_step(training: TrainingLoop) -> None:
        if training.state.step == 6:
            raise KeyboardInterrupt
        step(training)

    monkeypatch.setattr(TrainingLoop, "one_step", one_step)
    with pytest.raises(KeyboardInterrupt):
        train(TrainOptions(out=tmp_path / "relu", from_=str(silu), **given))
    run = open_run(tmp_path / "relu")
    assert run.manifest.status == "interrupted"
    loss = training_steps(run).attrs["origin_loss"]
    assert f"silu: {loss:.4f} nats on held-out text" in capsys.readouterr().out


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


def test_a_teacher_moves_the_gradient_and_not_the_loss(given: dict[str, Any], tmp_path: Path) -> None:
    """Half of the gradient of the logits is the difference from the teacher's distribution, by plain autograd."""
    folder = save_model(tmp_path / "silu", hidden_act="silu")
    student: Any = AutoModelForCausalLM.from_pretrained(folder)
    student.model.embed_tokens.weight.data.mul_(1.5)  # so that it is not its teacher
    tokenizer = AutoTokenizer.from_pretrained(folder)
    teacher = read_teacher(str(folder), tokenizer.backend_tokenizer, 320, 32)
    rows = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(1))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    plain.load_state_dict(student.state_dict())
    logits = plain(input_ids=rows[:, :-1]).logits.flatten(0, 1)
    goal = softmax(teacher.logits(rows[:, :-1]).flatten(0, 1), -1)
    text = torch.nn.functional.one_hot(rows[:, 1:].flatten(), 320)
    loss = -((0.5 * text + 0.5 * goal) * logits.log_softmax(-1)).sum(-1).mean()  # but for the teacher's own entropy
    loss.backward()
    model = continued(student, "silu", torch.device("cpu"))
    objective = Objective(model, teach=teacher.logits)
    taught = objective(rows)[0]
    taught.backward()
    with torch.no_grad():
        assert taught.item() == pytest.approx(objective(rows)[0].item(), rel=1e-6)  # as without gradients: the text's
    assert taught.item() == pytest.approx(cross_entropy(logits, rows[:, 1:].flatten()).item(), rel=1e-5)
    ours = model.model.layers[1].mlp.down_proj.weight.grad
    torch.testing.assert_close(ours, plain.model.layers[1].mlp.down_proj.weight.grad, rtol=1e-3, atol=1e-6)
    assert not [name for name, _ in objective.named_parameters() if "teach" in name]


def test_a_training_has_a_teacher(given: dict[str, Any], tmp_path: Path) -> None:
    silu = save_model(tmp_path / "silu", hidden_act="silu")
    losses = []
    for name, teacher in (("alone", None), ("taught", str(silu))):
        out = train(TrainOptions(out=tmp_path / name, from_=str(silu), teacher=teacher, **given))
        losses.append(open_run(out).frame("training")["loss"].tolist())
        record = json.loads((out / "training.json").read_text())
        assert ("teacher" in record) == (teacher is not None)
    assert losses[0] != losses[1]
    assert record["teacher"] == {"name": "silu", "weights": record["origin"]["weights"], "share": 0.5}
    assert "--teacher silu" in record["command"]
    with pytest.raises(UserError, match=r"Expected --teacher silu, with which .*/taught began, got no --teacher: give"):
        train(TrainOptions(out=tmp_path / "taught", from_=str(silu), **given))
    with pytest.raises(UserError, match=r"Expected no --teacher, with which .*/alone began, got --teacher silu: give"):
        train(TrainOptions(out=tmp_path / "alone", from_=str(silu), teacher=str(silu), **given))
    with pytest.raises(UserError, match=r"Expected --from silu, with which .*/alone began, got no --from: give"):
        train(TrainOptions(out=tmp_path / "alone", **given))


def test_a_teacher_of_another_vocabulary_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    silu, other = (save_model(tmp_path / name, hidden_act="silu") for name in ("silu", "other"))
    AutoTokenizer.from_pretrained(other).train_new_from_iterator(TEXT[:1], 300).save_pretrained(other)
    with pytest.raises(UserError, match="a teacher of the model's own vocabulary, 320 tokens, got another one of 320"):
        train(TrainOptions(out=tmp_path / "out", from_=str(silu), teacher=str(other), **given))
    with pytest.raises(UserError, match="Expected --from beside --teacher"):
        train(TrainOptions(out=tmp_path / "out", teacher=str(silu), **given))
    short = save_model(tmp_path / "short", max_position_embeddings=16)
    with pytest.raises(UserError, match="a context of at least 32 tokens"):
        train(TrainOptions(out=tmp_path / "out", from_=str(silu), teacher=str(short), **given))
    assert not (tmp_path / "out").exists()
