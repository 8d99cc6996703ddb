"""A watch counts what plain hooks count, for each way of calling a model, and leaves the model as it was.

In float64, in which the kernel is the reference and sums come out the same, counts are compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import run_capture, save_model, sequences_of
from support.watched import PAD, by_hooks, rows_of, same_state, state_of

from twell.workbench import open_run, watch
from twell.workbench.run.schema import DECODE, nnz_columns


def right_padded(batch: Any) -> dict[str, torch.Tensor]:
    """Return the batch with its padding on the right."""
    ids, mask = torch.full_like(batch["input_ids"], PAD), torch.zeros_like(batch["attention_mask"])
    for row, (one, real) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        ids[row, : int(real.sum())] = one[real > 0]
        mask[row, : int(real.sum())] = 1
    return {"input_ids": ids, "attention_mask": mask}


def in_steps(model: Any, batch: Any) -> None:
    """Read a prompt and go on token by token, with a cache of one's own."""
    ids = batch["input_ids"][:1]
    out = model(input_ids=ids[:, :4], use_cache=True)
    out = model(input_ids=ids[:, 4:9], past_key_values=out.past_key_values)
    for at in range(9, 13):
        out = model(input_ids=ids[:, at : at + 1], past_key_values=out.past_key_values)


def generated(**options: Any) -> Callable[[Any, Any], Any]:
    def run(model: Any, batch: Any) -> Any:
        torch.manual_seed(3)
        return model.generate(
            **batch, max_new_tokens=6, pad_token_id=PAD, eos_token_id=None, suppress_tokens=[PAD], **options
        )

    return run


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, batch: model(**batch).logits,
    "padded on the right": lambda model, batch: model(**right_padded(batch)).logits,
    "decoder alone": lambda model, batch: model.get_decoder()(**batch).last_hidden_state,
    "positional": lambda model, batch: model(batch["input_ids"], batch["attention_mask"]).logits,
    "steps": in_steps,
    "greedy": generated(do_sample=False),
    "sampling": generated(do_sample=True, top_k=0),
    "beams": generated(num_beams=3),
    "static cache": generated(do_sample=False, cache_implementation="static"),
    "without a cache": generated(do_sample=False, use_cache=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_counts_are_those_of_hooks(model: Any, tokenizer: Any, batch: Any, way: str) -> None:
    with torch.no_grad():
        with by_hooks(model) as hooked:
            plain = WAYS[way](model, batch)
        before = state_of(model)  # now, as `generate` keeps a static cache on the model
        with watch(model, tokenizer) as w:
            ours = WAYS[way](model, batch)
    assert same_state(before, state_of(model))
    assert rows_of(w) == hooked.rows(skip=PAD)
    assert len(w.nnz) > 10
    if plain is not None:
        assert torch.allclose(plain.double(), ours.double(), rtol=1e-9, atol=1e-9)


def test_counts_are_those_of_a_capture(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], model: Any, tokenizer: Any
) -> None:
    """All tables, of the same sequences: `activity` and the sums of neurons and tiles."""
    run = run_capture(tiny, tmp_path / "run", texts, torch.float64, probes="neurons", loss=False)
    with torch.no_grad(), watch(model, tokenizer, out=tmp_path / "watched") as w:
        for ids in sequences_of(run):
            model(torch.from_numpy(ids.astype(np.int64))[None])
    ours = open_run(tmp_path / "watched")
    assert ours.manifest.status == "complete"
    assert (ours.manifest.tokens, ours.manifest.sequences) == (run.manifest.tokens, run.manifest.sequences)
    theirs, watched = (one.frame("activity").sort_values(["sequence", "position"]) for one in (run, ours))
    for name in ("sequence", "position", "token_id", "phase", "flags", *nnz_columns(run.layers)):
        np.testing.assert_array_equal(theirs[name], watched[name], err_msg=name)
    for table in ("neurons", "tiles"):
        keys = ["layer", "neuron"] if table == "neurons" else ["layer", "occupancy"]
        both = [one.frame(table).groupby(keys).sum(numeric_only=True) for one in (run, ours)]
        column = "fires" if table == "neurons" else "pairs"
        np.testing.assert_array_equal(both[0][column], both[1][column])
    assert run.frame("vocab").equals(ours.frame("vocab"))
    assert w.by_layer()["mean"].tolist() == pytest.approx(
        theirs[theirs["flags"] == 0][nnz_columns(run.layers)].mean().tolist(), abs=1e-12
    )


@pytest.mark.parametrize("way", ["forward", "padded on the right", "greedy", "beams"])
def test_families(family: Any, batch: Any, way: str) -> None:
    with torch.no_grad():
        with by_hooks(family) as hooked:
            plain = WAYS[way](family, batch)
        before = state_of(family)
        with watch(family) as w:
            ours = WAYS[way](family, batch)
    assert same_state(before, state_of(family))
    assert rows_of(w) == hooked.rows(skip=PAD)
    assert torch.allclose(plain.double(), ours.double(), rtol=1e-9, atol=1e-9)


def test_families_compiled(family: Any, batch: Any, compiler: Callable[..., Any]) -> None:
    """In one graph, but OPT's: it reads off the mask whether there is any padding, which no graph can tell."""
    with torch.no_grad():
        with by_hooks(family) as hooked:
            plain = family(**batch).logits
        compiled = compiler(family, backend="eager", fullgraph=family.config.model_type != "opt")
        with watch(family) as w:
            ours = compiled(**batch).logits
        assert torch.equal(compiled(**batch).logits, plain)
    assert rows_of(w) == hooked.rows(skip=PAD)
    assert torch.allclose(plain, ours, rtol=1e-9, atol=1e-9)


def test_families_with_gradients(family: Any, batch: Any) -> None:
    """Loss and gradients are those of the unwatched model, to the bit, and counts those of hooks."""
    given = dict(batch, labels=batch["input_ids"])
    with by_hooks(family) as hooked:
        loss = family(**given).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in family.named_parameters() if p.grad is not None}
    family.zero_grad()
    with watch(family) as w:
        watched = family(**given).loss
        watched.backward()
    assert torch.equal(watched, loss) and len(expected) > 20
    for name, p in family.named_parameters():
        assert p.grad is None if name not in expected else torch.equal(p.grad, expected[name]), name
    assert rows_of(w) == hooked.rows(skip=PAD)


def test_any_ffn_by_a_threshold(tmp_path: Path, load_object: Callable[..., Any], batch: Any) -> None:
    model = load_object(save_model(tmp_path / "silu", "llama", hidden_act="silu"))
    counts: list[torch.Tensor] = []
    before = state_of(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(lambda _m, x: counts.append((x[0].abs() > 0.5).sum(-1)))
        plain = model(**batch).logits
        for layer in model.model.layers:
            layer.mlp.down_proj._forward_pre_hooks.clear()
        with watch(model, threshold=0.5) as w:
            assert torch.equal(model(**batch).logits, plain)
    assert same_state(before, state_of(model))
    expected = torch.stack(counts, -1)[batch["attention_mask"] > 0]
    assert sorted(map(tuple, w.nnz.tolist())) == sorted(map(tuple, expected.tolist()))
    assert "|hidden| > 0.5" in w.run.manifest.nnz_definition


def test_phases_positions_and_text(model: Any, tokenizer: Any, batch: Any) -> None:
    with torch.no_grad(), watch(model, tokenizer) as w:
        text = generated(do_sample=False)(model, batch)
    table = w.table()
    for sequence, rows in table.groupby("sequence"):
        prompt = int(batch["attention_mask"][sequence].sum())
        assert rows["position"].tolist() == list(range(prompt + 5))  # the last token is never read
        assert (rows["phase"] == DECODE).tolist() == [False] * prompt + [True] * 5
        wide = text.shape[1]
        assert rows["token_id"].tolist() == text[sequence, wide - 6 - prompt : wide - 1].tolist()
    assert table["flags"][table["position"] == 0].tolist() == [3, 3, 3]
    assert "".join(table["text"][table["sequence"] == 0]).startswith("<|endoftext|>The harbour")


def test_a_sequence_ends_with_its_end(model: Any, tokenizer: Any, batch: Any) -> None:
    """`generate` goes on reading padding for sequences that have ended; none of it is a row."""
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "suppress_tokens": [PAD]}
    with torch.no_grad():
        free = model.generate(**batch, eos_token_id=None, **options)
        end = int(free[0, batch["input_ids"].shape[1] + 2])
        with watch(model, tokenizer) as w:
            text = model.generate(**batch, eos_token_id=end, **options)
    rows = w.table()
    assert PAD in text[0] and PAD not in rows["token_id"].to_numpy()
    first = rows[(rows["sequence"] == 0) & (rows["phase"] == DECODE)]
    assert first["token_id"].tolist()[-1] == end
    assert (first["token_id"] == end).sum() == 1


def test_the_last_call_waits_for_the_next(model: Any, batch: Any) -> None:
    with watch(model) as w, torch.no_grad():
        written = []
        for _ in range(3):
            model(**batch, use_cache=False)
            written.append(w._batches)
        assert written == [0, 1, 2]
        assert w.run.manifest.sequences == 3 * len(batch["input_ids"])  # what is asked for covers every call


def test_packed_rows(model: Any, tokenizer: Any) -> None:
    """Position ids that begin anew in a row begin a sequence, whose counts are those of the sequence by itself."""
    pieces = [
        tokenizer(text, return_tensors="pt")["input_ids"][0] for text in ("One text.", "And another one here.", "x")
    ]
    ids = torch.cat(pieces)[None]
    positions = torch.cat([torch.arange(len(piece)) for piece in pieces])[None]
    with torch.no_grad(), watch(model, tokenizer) as w:
        model(input_ids=ids, position_ids=positions, use_cache=False)
        for piece in pieces:
            model(input_ids=piece[None], use_cache=False)
    rows = w.table()
    lengths = [len(piece) for piece in pieces]
    assert rows.groupby("sequence").size().tolist() == lengths * 2
    assert rows["flags"].tolist() == rows["flags"].tolist()[: sum(lengths)] * 2
    half = sum(lengths)
    np.testing.assert_array_equal(w.nnz[:half], w.nnz[half:])


def test_embeddings(model: Any, tokenizer: Any, batch: Any) -> None:
    """Counts are those of the ids; what the ids are is not known."""
    with torch.no_grad(), watch(model, tokenizer) as w:
        model(**batch)
        model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]), attention_mask=batch["attention_mask"])
    half = len(w.nnz) // 2
    np.testing.assert_array_equal(w.nnz[:half], w.nnz[half:])
    assert w.table()["text"][half:].unique().tolist() == ["<320>"]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_compiled(model: Any, tokenizer: Any, batch: Any, compiler: Callable[..., Any], when: str) -> None:
    """A model compiled before the watch or in it counts the same, in one graph, and runs as before afterwards."""
    with torch.no_grad():
        with by_hooks(model) as hooked:
            plain = model(**batch).logits
        compiled = compiler(model, backend="eager", fullgraph=True)
        if when == "before":
            assert torch.equal(compiled(**batch).logits, plain)
        with watch(model, tokenizer) as w:
            ours = compiled(**batch).logits
        assert torch.equal(compiled(**batch).logits, plain)
    assert rows_of(w) == hooked.rows(skip=PAD)
    assert torch.allclose(plain, ours, rtol=1e-9, atol=1e-9)
