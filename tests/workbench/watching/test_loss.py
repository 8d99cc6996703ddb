"""The loss in a watch, and a share of single firings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.watched import PAD
from torch.nn.functional import cross_entropy

from twell.workbench import watch
from twell.workbench.errors import Missing


def test_the_loss_is_that_of_the_logits(model: Any, tokenizer: Any, batch: Any) -> None:
    """At each token whose next one the same call reads: padding has none, nor has the last token of a sequence."""
    with torch.no_grad(), watch(model, tokenizer, loss=True, dense=True) as w:
        logits = model(**batch).logits
    table, real = w.table(), batch["attention_mask"].bool()
    expected = torch.full(real.shape, torch.nan)
    for row in range(len(real)):
        expected[row, :-1] = cross_entropy(logits[row, :-1], batch["input_ids"][row, 1:], reduction="none")
    expected[:, -1] = torch.nan
    expected[:, :-1][~real[:, 1:]] = torch.nan
    np.testing.assert_allclose(table["loss"], expected[real].numpy(), rtol=1e-3)
    mean = expected[real].nanmean()
    assert w.metrics()["loss"] == pytest.approx(float(mean), rel=1e-5)
    assert w.run.manifest.loss == pytest.approx(float(mean), rel=1e-5)
    assert w.run.arrow()["entropy"].null_count == len(table), "which a capture alone takes: none, not NaN"


def test_packed_rows_and_generation(model: Any, tokenizer: Any, batch: Any) -> None:
    """No loss crosses from one text to the next in a packed row; `generate` asks for the last logits alone, so what it
    decodes has a loss, and the prompt has none."""
    ids = torch.cat([batch["input_ids"][0, -6:], batch["input_ids"][2, -5:]])[None]
    positions = torch.tensor([[*range(6), *range(5)]])
    with torch.no_grad(), watch(model, tokenizer, loss=True) as w:
        model(ids, position_ids=positions)
    assert np.flatnonzero(w.table()["loss"].isna()).tolist() == [5, 10]
    with torch.no_grad(), watch(model, tokenizer, loss=True) as w:
        written = model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    table = w.table()
    last = table.groupby("sequence")["position"].transform("max") - table["position"]
    assert table["loss"].notna().tolist() == ((last > 0) & (last < 4)).tolist()
    with torch.no_grad():
        mask = torch.cat([batch["attention_mask"], torch.ones(len(written), 4)], 1)
        logits = model(written, attention_mask=mask, position_ids=(mask.cumsum(1).long() - 1).clamp(min=0)).logits
    expected = cross_entropy(logits[:, -5:-2].transpose(1, 2), written[:, -4:-1], reduction="none")
    np.testing.assert_allclose(table["loss"].dropna(), expected.flatten(), rtol=2e-3, atol=1e-3)
    with torch.no_grad(), watch(model, tokenizer) as w:
        model(ids)
    assert "loss" not in w.table() and "loss" not in w.metrics()


def test_a_text_in_several_calls(model: Any, tokenizer: Any, batch: Any) -> None:
    """Its losses are those of one call: the last logits of a call tell the loss of the first token of the next."""
    ids = batch["input_ids"][:1, -9:]
    with torch.no_grad(), watch(model, tokenizer, loss=True) as w:
        model(ids)
    whole, mean = w.table()["loss"].to_numpy(), w.metrics()["loss"]
    with torch.no_grad(), watch(model, tokenizer, loss=True) as w:
        cache = None
        for piece in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            cache = model(piece, past_key_values=cache, use_cache=True).past_key_values
        model(ids)  # a text of its own, of which nothing was predicted
    np.testing.assert_allclose(w.table()["loss"], np.tile(whole, 2), rtol=2e-3)
    assert w.metrics()["loss"] == pytest.approx(mean, rel=1e-4)


def test_a_cut_of_nothing(model: Any, tokenizer: Any, batch: Any) -> None:
    """A sequence goes on where its cache is cut to what it holds, as after drafts that were all taken; after a real
    cut another goes on from there."""
    ids = batch["input_ids"][:1, -9:]
    with torch.no_grad(), watch(model, tokenizer, loss=True) as w:
        cache = model(ids[:, :4], use_cache=True).past_key_values
        cache.crop(0)
        model(ids[:, 4:], past_key_values=cache)
        cache.crop(-2)
        model(ids[:, 7:], past_key_values=cache)
    table = w.table()
    assert table["sequence"].tolist() == [0] * 9 + [1] * 2 and table["position"].tolist() == [*range(9), 7, 8]
    assert table["loss"].notna().tolist() == [True] * 8 + [False, True, False]


def test_with_gradients_and_without_rows(model: Any, tokenizer: Any, batch: Any) -> None:
    firsts = batch["attention_mask"].cumsum(1) == 1  # transformers has padding predict a first token, a watch does not
    labels = batch["input_ids"].masked_fill((batch["attention_mask"] == 0) | firsts, -100)
    with watch(model, tokenizer, loss=True, rows=False, dense=True) as w:
        loss = model(**batch, labels=labels).loss
        loss.backward()
        assert w.metrics()["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_share_of_single_firings(model: Any, tokenizer: Any, batch: Any) -> None:
    with torch.no_grad(), watch(model, tokenizer, fired="0-1:0.5") as w:
        for _ in range(4):
            model(**batch)
    table, matrix = w.table(), w.fired(1)
    assert 0.2 * len(table) < matrix.shape[0] < 0.8 * len(table)
    keys = w.run.frame("fired", ["sequence", "position", "layer", "neuron"]).query("layer == 1")
    counts = table.set_index(["sequence", "position"])["nnz_01"]
    drawn = list(zip(keys["sequence"], keys["position"], strict=True))
    assert [len(neurons) for neurons in keys["neuron"]] == counts.loc[drawn].tolist()
    kept = set(drawn)
    pairs = list(zip(table["sequence"], table["position"], strict=True))
    inside = next(row for row, pair in enumerate(pairs) if pair in kept)
    outside = next(row for row, pair in enumerate(pairs) if pair not in kept)
    assert len(w.neurons(inside, 1)) == table["nnz_01"].iloc[inside]
    with pytest.raises(Missing, match="keeps no firings"):
        w.neurons(outside, 1)
