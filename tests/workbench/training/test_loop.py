"""What a training step computes and reads: the loss against hooks on a plain Llama, rates, rows, recipes."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.durable import Durable
from transformers import LlamaForCausalLM

from twell.workbench.errors import UserError
from twell.workbench.training import corpus as corpora
from twell.workbench.training.command import tf32
from twell.workbench.training.corpus import TrainingBatches, prepare, unigram_loss
from twell.workbench.training.optimizer import rate_factor
from twell.workbench.training.recipes import RECIPES, Recipe, from_dict, load_recipe
from twell.workbench.training.sparse_llama import Objective, build, ffns

CPU = torch.device("cpu")


# ---- the loss


def test_loss_l1_and_counts_equal_those_of_a_plain_llama_with_hooks(tiny_recipe: Recipe) -> None:
    ours = build(tiny_recipe, 0, CPU).double()
    plain = LlamaForCausalLM(ours.config).double()
    plain.load_state_dict(ours.state_dict())  # strict: the parameters keep their plain names
    seen: dict[tuple[int, str], torch.Tensor] = {}
    for index, layer in enumerate(plain.model.layers):
        for name in ("gate_proj", "up_proj"):
            keep = lambda _m, _x, y, key=(index, name): seen.__setitem__(key, y.detach())  # noqa: E731
            getattr(layer.mlp, name).register_forward_hook(keep)
    rows = torch.randint(0, tiny_recipe.vocab, (3, tiny_recipe.seq_len + 1), generator=torch.Generator().manual_seed(1))

    loss, l1, fires = Objective(ours)(rows)
    logits = plain(rows[:, :-1]).logits
    expected = -logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).mean()
    hidden = [seen[i, "gate_proj"].clamp(min=0) * seen[i, "up_proj"] for i in range(tiny_recipe.layers)]
    terms = [h.abs().sum(-1).mean().item() for h in hidden]

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert l1.item() == pytest.approx(sum(terms) / len(terms), rel=1e-6)
    counts = torch.stack([(seen[i, "gate_proj"] > 0).sum((0, 1)) for i in range(tiny_recipe.layers)])
    assert torch.equal(fires, counts)


def test_layers_share_the_code_of_one_and_a_sparse_one_is_compiled_once(tiny_recipe: Recipe) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []
    model = build(dataclasses.replace(tiny_recipe, layers=4), 0, CPU)
    rows = torch.randint(0, tiny_recipe.vocab, (2, tiny_recipe.seq_len + 1))
    plain = Objective(model)(rows)
    compiled = Objective(model, compiled=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for sparse, expected in ((0, 2), (1, 3), (4, 3), (0, 3)):  # layers, and graphs so far: a layer's and the head's
        for number, ffn in enumerate(ffns(model)):
            ffn.sparse = number < sparse
        loss, l1, fires = compiled(rows)
        (loss + l1).backward()
        assert len(graphs) == expected
        assert torch.equal(fires, plain[2])
        assert loss.item() == pytest.approx(plain[0].item(), rel=1e-5)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_products_in_tf32_end_with_the_training() -> None:
    before = torch.get_float32_matmul_precision()
    with tf32(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with tf32(CPU):
        assert torch.get_float32_matmul_precision() == before


def test_rates_rise_stay_and_fall(tiny_recipe: Recipe) -> None:
    recipe = dataclasses.replace(tiny_recipe, warmup=10, decay=0.4)
    rates = [rate_factor(recipe, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert set(rates[10:61]) == {1.0}
    assert rates[60:] == pytest.approx([1 - i / 40 for i in range(40)])
    cosine = dataclasses.replace(recipe, schedule="cosine")
    assert rate_factor(cosine, 50, 100) == pytest.approx(0.5)
    assert rate_factor(recipe, 70, None) == 1.0  # the total not yet known


# ---- the text


def test_ids_are_on_disk_before_the_corpus_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that goes on after a power cut would read what is left of them."""
    (tmp_path / "text.txt").write_text("".join(f"Line {i} of a text about rivers.\n" for i in range(3000)))
    disk = Durable(monkeypatch)
    prepare((str(tmp_path / "text.txt"),), tmp_path / "ids", vocab=300, holdout=0.02, bpe_megabytes=1.0)
    assert disk.renamed == ["corpus.json"]
    assert all(disk.holds(path) for path in (tmp_path / "ids").iterdir())


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


def test_trainings_that_begin_at_once_tokenise_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "text.txt"
    source.write_text("".join(f"Line {i} of an ordinary text about rivers and boats.\n" for i in range(500)))
    real, trained = corpora.train_bpe, []

    def slow(*given: Any) -> Any:
        trained.append(1)
        time.sleep(0.3)
        return real(*given)

    monkeypatch.setattr(corpora, "train_bpe", slow)
    given: dict[str, Any] = {"vocab": 300, "holdout": 0.1, "bpe_megabytes": 1.0}
    with ThreadPoolExecutor(2) as pool:
        ids = list(pool.map(lambda _: prepare((str(source),), tmp_path / "ids", **given).train, range(2)))
    assert len(trained) == 1
    assert np.array_equal(*ids)


def test_an_epoch_reads_every_window_once_and_follows_from_seed_and_step() -> None:
    ids = np.arange(10_000, dtype=np.uint16)
    rows = TrainingBatches(ids, seq_len=10, rows=4, seed=3, mark=65_000)
    batches = [rows.batch(step) for step in range(rows.steps)]
    firsts = torch.cat(batches)[:, 1] - 1
    assert len(set(firsts.tolist())) == 4 * rows.steps >= rows.windows - 3
    assert len({first % 10 for first in firsts.tolist()}) == 1
    assert all((batch[::2, 0] == 65_000).all() and (batch[1::2, 0] < 10_000).all() for batch in batches)
    again = TrainingBatches(ids, seq_len=10, rows=4, seed=3, mark=65_000)
    late = 2 * rows.steps + 5
    assert torch.equal(again.batch(late), rows.batch(late))
    assert not torch.equal(again.batch(0), again.batch(rows.steps))


def test_unigram_loss_by_hand() -> None:
    train_ids, heldout = np.array([0, 0, 1], np.uint16), np.array([2, 0, 2], np.uint16)
    expected = -(math.log(3 / 6) + math.log(1 / 6)) / 2  # counts 2, 1, 0, each and one; the first has no prediction
    assert unigram_loss(train_ids, heldout, 3) == pytest.approx(expected)


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
        ("steps = 1\ntokens = 2", "got tokens and steps"),
        ("rate = 0.1", "none of them"),
        ("steps = 1\nd_model = 104", "d_model must be whole heads"),
        ("steps = 1\nschedule = 'step'", "Expected schedule to be one of wsd, cosine, got 'step'"),
        ("tokens = 0", "Expected tokens above 0, got 0"),
        ("minutes = -1", "Expected minutes above 0, got -1"),
        ("steps = 1\nrate = -0.1", "Expected rate above 0, got -0.1"),
        ("steps = 1\nl1 = -1", "Expected l1 of at least 0, got -1"),
        ("steps = 1\nrows = 0", "Expected rows of at least 1, got 0"),
        ("steps = 1\nrate = inf", "Expected rate above 0, got inf"),
        ("minutes = nan", "Expected minutes above 0, got nan"),
        ("steps = 1\nclip = 0", "Expected clip above 0, got 0"),
        ("steps = 1\nbpe_megabytes = 0", "Expected bpe_megabytes above 0, got 0"),
        ("steps = 1\nkv_heads = 0", "Expected kv_heads of at least 1, got 0"),
        ("steps = 1\nhead_size = 0", "Expected head_size in multiples of 2, as positions turn its pairs, got 0"),
        ("steps = 1\nhead_size = 1\nkv_heads = 1", "Expected head_size in multiples of 2, .*, got 1"),
        ("steps = 1\nseed = -1", "Expected seed of at least 0, got -1"),
        ("steps = 1\nwarmup = -1", "Expected warmup of at least 0, got -1"),
        ("steps = 1\nweight_decay = -0.1", "Expected weight_decay of at least 0, got -0.1"),
        ("steps = 1\ndecay = 1.5", "Expected decay from 0 to 1, a share of the steps, got 1.5"),
        ("steps = 1\nbetas = [0.9]", r"Expected betas of two numbers from 0 to below 1, got \[0.9\]"),
        ("steps = 1\nbetas = [0.9, 1]", r"Expected betas of two numbers from 0 to below 1, got \[0.9, 1\]"),
        ("steps = 1\nbetas = [0.9, 'x']", r"Expected betas of two numbers .*, got \[0.9, 'x'\]"),
        ("steps = 1\nd_ff = 100", "Expected d_ff in multiples of 8, as the FFN kernels take them, got 100"),
        ("steps = 1\nd_ff = 0", "Expected d_ff in multiples of 8, as the FFN kernels take them, got 0"),
        ("steps = 1\nvocab = 256", "Expected vocab of at least 257, every byte and the end of a text, got 256"),
        ("steps = 1\nd_model = 36\nhead_size = 18", "Expected d_model in multiples of 8, as the FFN"),
        ("steps = 1\nactivation = 'gelu'", "Expected activation to be one of relu, relu2, silu, got 'gelu'"),
        ("steps = 1\ngated = 1", "gated must be bool, but is 1"),
        (
            "steps = 1\nmicro_batches = 3",
            "Expected rows that divide into micro_batches of equal size, got 64 rows and 3",
        ),
        ("steps = 1\nl1_weights = [1, 2]", r"Expected l1_weights of 8 factors of at least 0, .*, got \[1, 2\]"),
        ("steps = 1\nrestart_every = 30", "Expected restart_every to be a multiple of log_every, 20, got 30"),
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
