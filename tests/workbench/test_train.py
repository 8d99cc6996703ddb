"""Training: the loss against hooks on a plain Llama, a killed run, what a run leaves behind, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from twell.workbench.corpus import Rows, in_order, prepare, unigram_loss
from twell.workbench.errors import UserError
from twell.workbench.options import TrainOptions
from twell.workbench.recipes import RECIPES, Recipe, from_dict, load_recipe
from twell.workbench.sparse_llama import build, forward
from twell.workbench.train import rate_factor, train
from twell.workbench.training_folder import log_schema

CPU = torch.device("cpu")
TINY = Recipe(
    name="tiny",
    layers=2,
    d_model=32,
    d_ff=96,
    head_size=16,
    kv_heads=1,
    vocab=400,
    seq_len=32,
    steps=60,
    rows=8,
    warmup=5,
    l1=0.03,
    l1_warmup=10,
    log_every=10,
    evaluations=3,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of 400 KB, the tiny recipe, and room for the runs."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "topics.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    (folder / "tiny.json").write_text(json.dumps(TINY.as_dict()))
    return folder


def options(home: Path, out: str, **changes: object) -> TrainOptions:
    given = TrainOptions(
        config=str(home / "tiny.json"),
        text=(str(home / "topics.txt"),),
        out=home / out,
        licences="Python Software Foundation License",
        device="cpu",
        prepared=home / "prepared",
    )
    return dataclasses.replace(given, **changes)


@pytest.fixture(scope="module")
def sparse(home: Path) -> Path:
    return train(options(home, "sparse", valid=("builtin:passages",)))


def log(folder: Path) -> list[dict[str, float]]:
    return pq.read_table(folder / "train-log.parquet").to_pylist()


# ---- the loss


def test_loss_l1_and_counts_equal_those_of_a_plain_llama_with_hooks() -> None:
    ours = build(TINY, 0, CPU).double()
    plain = LlamaForCausalLM(ours.config).double()
    plain.load_state_dict(ours.state_dict())  # strict: the parameters keep their plain names
    seen: dict[tuple[int, str], torch.Tensor] = {}
    for index, layer in enumerate(plain.model.layers):
        for name in ("gate_proj", "up_proj"):
            keep = lambda _m, _x, y, key=(index, name): seen.__setitem__(key, y.detach())  # noqa: E731
            getattr(layer.mlp, name).register_forward_hook(keep)
    rows = torch.randint(0, TINY.vocab, (3, TINY.seq_len + 1), generator=torch.Generator().manual_seed(1))

    loss, l1, fires = forward(ours, rows)
    logits = plain(rows[:, :-1]).logits
    expected = -logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).mean()
    hidden = [seen[i, "gate_proj"].clamp(min=0) * seen[i, "up_proj"] for i in range(TINY.layers)]
    terms = [h.abs().sum(-1).mean().item() for h in hidden]

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert l1.item() == pytest.approx(sum(terms) / len(terms), rel=1e-6)
    counts = torch.stack([(seen[i, "gate_proj"] > 0).sum((0, 1)) for i in range(TINY.layers)])
    assert torch.equal(fires, counts)


def test_the_step_compiles_to_one_graph_once() -> None:
    torch._dynamo.reset()
    model = build(TINY, 0, CPU)
    rows = torch.randint(0, TINY.vocab, (2, TINY.seq_len + 1))
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            loss, l1, _ = compiled(model, rows)
            (loss + l1).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_rates_rise_stay_and_fall() -> None:
    recipe = dataclasses.replace(TINY, warmup=10, decay=0.4)
    rates = [rate_factor(recipe, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert set(rates[10:61]) == {1.0}
    assert rates[60:] == pytest.approx([1 - i / 40 for i in range(40)])
    cosine = dataclasses.replace(recipe, schedule="cosine")
    assert rate_factor(cosine, 50, 100) == pytest.approx(0.5)
    assert rate_factor(recipe, 70, None) == 1.0  # the total not yet known


# ---- the text


def test_the_last_share_is_left_out_of_ids_and_tokenizer(tmp_path: Path) -> None:
    body = "".join(f"Line {i} of an ordinary text about rivers, boats and the weather.\n" for i in range(3000))
    tail = "zyxwvut zyxwvut zyxwvut\n" * (len(body) // 45 // 24)
    source = tmp_path / "text.txt"
    source.write_text(body + tail)
    corpus = prepare((str(source),), tmp_path / "ids", vocab=300, holdout=0.02, bpe_megabytes=1.0)
    cut = corpus.record["sources"][0]["heldout_from"]
    raw = source.read_bytes()
    assert 0.98 * len(raw) <= cut < 0.98 * len(raw) + 100
    decode = corpus.tokenizer.decode
    assert corpus.train[0] == corpus.mark
    assert decode(corpus.train[1:].tolist()).encode() == raw[:cut]
    assert decode(corpus.heldout.tolist()).encode() == raw[cut:]
    assert raw[cut:].startswith(b"zyxwvut")
    assert not any("zyx" in token for token in corpus.tokenizer.get_vocab())
    with pytest.raises(UserError, match=r"holds a corpus with holdout 0\.02, not 0\.1"):
        prepare((str(source),), tmp_path / "ids", vocab=300, holdout=0.1, bpe_megabytes=1.0)


def test_an_epoch_reads_every_window_once_and_follows_from_seed_and_step() -> None:
    ids = np.arange(10_000, dtype=np.uint16)
    rows = Rows(ids, seq_len=10, rows=4, seed=3, mark=65_000)
    batches = [rows.batch(step) for step in range(rows.steps)]
    firsts = torch.cat(batches)[:, 1] - 1
    assert len(set(firsts.tolist())) == 4 * rows.steps >= rows.windows - 3
    assert len({first % 10 for first in firsts.tolist()}) == 1
    assert all((batch[::2, 0] == 65_000).all() and (batch[1::2, 0] < 10_000).all() for batch in batches)
    again = Rows(ids, seq_len=10, rows=4, seed=3, mark=65_000)
    late = 2 * rows.steps + 5
    assert torch.equal(again.batch(late), rows.batch(late))
    assert not torch.equal(again.batch(0), again.batch(rows.steps))


def test_unigram_loss_by_hand() -> None:
    train_ids, heldout = np.array([0, 0, 1], np.uint16), np.array([2, 0, 2], np.uint16)
    expected = -(math.log(3 / 6) + math.log(1 / 6)) / 2  # counts 2, 1, 0, each and one; the first has no prediction
    assert unigram_loss(train_ids, heldout, 3) == pytest.approx(expected)


# ---- a run


def test_loss_falls_and_l1_makes_it_sparse(home: Path, sparse: Path) -> None:
    dense = train(options(home, "dense", l1=0.0))
    first, last = log(sparse)[0], log(sparse)[-1]
    assert last["loss"] < first["loss"] - 0.3
    nnz = {out: sum(log(out)[-1][f"nnz_{i:02}"] for i in range(TINY.layers)) for out in (sparse, dense)}
    assert nnz[sparse] < 0.7 * nnz[dense]
    assert log(sparse)[-1]["l1"] < log(dense)[-1]["l1"]


def test_plain_transformers_loads_it_and_agrees_with_the_record(home: Path, sparse: Path) -> None:
    record = json.loads((sparse / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    assert record["status"] == "complete"
    assert AutoModelForCausalLM.from_pretrained(sparse).dtype == torch.bfloat16
    assert [path.name for path in sparse.glob("*.safetensors")] == ["model.safetensors"]
    assert not (sparse / "work").exists()

    tail = (home / "topics.txt").read_bytes()[record["corpus"]["sources"][0]["heldout_from"] :].decode()
    ids = tokenizer(tail)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    fired = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _m, _x, y: fired.append((y > 0).sum().item()))
    losses = []
    with torch.no_grad():
        for rows in in_order(np.array(ids[1:]), TINY.seq_len, 1):
            losses.append(F.cross_entropy(model(rows[:, :-1]).logits[0], rows[0, 1:]).item())
    assert record["heldout"]["tokens"] == len(losses) * TINY.seq_len
    assert record["heldout"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert sum(fired) == pytest.approx(sum(record["heldout"]["nnz"]) * record["heldout"]["tokens"], rel=1e-4)


def test_log_and_card_say_what_was_done(sparse: Path) -> None:
    table = pq.read_table(sparse / "train-log.parquet")
    assert table.schema.equals(log_schema(TINY.layers), check_metadata=True)
    assert {"nnz_00", "nnz_01", "dead_00", "dead_01"} < set(table.column_names)
    assert all(table.schema.field(name).metadata[b"meaning"] for name in table.column_names)
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == list(range(10, 61, 10))
    assert [row["tokens"] for row in rows] == [step * 8 * 32 for step in range(10, 61, 10)]
    assert [row["step"] for row in rows if row["heldout_loss"] is not None] == [20, 40, 60]
    assert all(0 <= row["dead_00"] <= 1 and 0 < row["nnz_00"] < TINY.d_ff for row in rows)

    card, record = (sparse / "README.md").read_text(), json.loads((sparse / "training.json").read_text())
    assert "twell train --config tiny.json --text topics.txt --out sparse --valid builtin:passages" in card
    for said in (
        "Licences of the text: Python Software Foundation License.",
        f"{record['heldout']['loss']:.3f} nats",
        f"is {record['unigram_loss']:.3f})",
        f"{record['valid']['builtin:passages']['loss']:.3f}",
        "15,360 tokens",
        "| `l1` | 0.03 |",
    ):
        assert said in card
    curves = card.split("## Curves")[1].split("## Text")[0]
    assert [line.split(" | ")[0] for line in curves.splitlines() if line[:3].strip("| ").isdigit()] == [
        f"| {step}" for step in (10, 20, 40, 60)
    ]
    assert str(sparse.parent) not in card


def test_a_killed_run_continues_to_the_same_bits(home: Path, sparse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = options(home, "killed", checkpoint_minutes=0.0, valid=("builtin:passages",))
    code = (
        "import sys, time, twell.workbench.train as t; from pathlib import Path\n"
        "from twell.workbench.options import TrainOptions\n"
        "step = t.Training.one_step\n"
        "t.Training.one_step = lambda self: (step(self), time.sleep(0.05))\n"  # long enough to be hit in the middle
        f"t.train(TrainOptions(**{vars(wanted)!r}))\n"
    ).replace("PosixPath", "Path")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    checkpoint = wanted.out / "work" / "checkpoint.safetensors"
    limit = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.2)  # some steps past the checkpoint, which are done again
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert json.loads((wanted.out / "training.json").read_text())["status"] == "training"

    with pytest.raises(UserError, match=r"another recipe rate \(0\.003 there, 0\.001 given\)"):
        train(dataclasses.replace(wanted, rate=1e-3))
    assert checkpoint.exists()
    train(wanted)
    said = re.search(r"Continuing .*killed from step (\d+)\.", capsys.readouterr().out)
    assert said
    assert 0 < int(said[1]) < TINY.steps
    assert (wanted.out / "model.safetensors").read_bytes() == (sparse / "model.safetensors").read_bytes()
    clock = ("seconds", "tokens_per_second")
    assert [{k: v for k, v in row.items() if k not in clock} for row in log(wanted.out)] == [
        {k: v for k, v in row.items() if k not in clock} for row in log(sparse)
    ]


def test_a_limit_in_minutes_becomes_a_number_of_steps(home: Path) -> None:
    begun = time.monotonic()
    out = train(options(home, "timed", minutes=0.05))
    rows, record = log(out), json.loads((out / "training.json").read_text())
    assert record["steps"] == rows[-1]["step"] == rows[-1]["total_steps"] > 30
    assert 1.0 < rows[-1]["seconds"] < 9.0
    assert time.monotonic() - begun < 30
    assert rows[-1]["rate"] < 0.2 * TINY.rate  # the decay was reached


def test_a_complete_run_is_left_alone_and_a_foreign_folder_refused(home: Path, sparse: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sparse.iterdir()}
    assert train(options(home, "sparse")) == sparse
    with pytest.raises(UserError, match="holdout"):
        train(options(home, "sparse", holdout=0.5))
    assert {path: path.stat().st_mtime_ns for path in sparse.iterdir()} == before
    (home / "foreign").mkdir()
    (home / "foreign" / "letter.txt").write_text("Dear reader")
    with pytest.raises(UserError, match="name another"):
        train(options(home, "foreign"))


def test_too_little_text_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A few words.\n" * 3)
    with pytest.raises(UserError, match="more text or a smaller vocab"):
        train(options(home, "short", text=(str(tmp_path / "short.txt"),), prepared=None))
    with pytest.raises(UserError, match=r"short\.txt must fill a row"):
        train(options(home, "short-valid", valid=(str(tmp_path / "short.txt"),)))


# ---- recipes


def test_recipes_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("steps = 7\nrate = 1\nbetas = [0.8, 0.9]\n")
    recipe = load_recipe(str(path))
    assert (recipe.name, recipe.steps, recipe.betas) == ("mine", 7, (0.8, 0.9))
    assert from_dict(json.loads(json.dumps(recipe.as_dict())), "itself") == recipe
    assert recipe.override(tokens=100, l1=None).tokens == 100
    assert recipe.override(tokens=100).steps is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 1\nwidth = 4", "no field 'width'"),
        ("steps = 1\nrate = 'high'", "rate must be float"),
        ("steps = 1\ntokens = 2", "sets tokens and steps"),
        ("rate = 0.1", "none of them"),
        ("steps = 1\nd_model = 100", "d_model must be whole heads"),
        ("steps = 1\nschedule = 'step'", "'wsd' or 'cosine'"),
        ("steps = ", "could not be read"),
    ],
)
def test_bad_recipes_are_refused_in_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(str(path))


def test_named_recipes_are_what_they_say() -> None:
    with pytest.raises(UserError, match="demo, h200-8x2048"):
        load_recipe("tiny")
    sizes = {}
    for name, recipe in RECIPES.items():
        model = build(recipe, 0, torch.device("meta"))
        sizes[name] = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert sizes["demo"] == 15_737_344  # bytes in bf16; the bundled file may have 16 000 000
    assert RECIPES["h200-8x2048"].step_tokens == 48 * 1024
