"""What a watch answers: single firings, hidden values, gradients, metrics, text, saved runs; ablation and capture."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import save_model
from support.watched import PAD, SENTENCES, by_hooks, first_map, rows_of, same_state, state_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from twell.analysis import by_layer, by_neuron
from twell.kernels.modules import SparseFFN
from twell.workbench import ablate, capture, open_run, threshold, watch
from twell.workbench.errors import UserError
from twell.workbench.run.schema import FLAG_NOT_FINITE, nnz_columns


def gates_of(model: Any, layer: int, batch: Any) -> torch.Tensor:
    """Return a layer's gate pre-activations, [sequences, columns, d_ff], by a plain hook."""
    gates: list[torch.Tensor] = []
    handle = first_map(model.model.layers[layer]).register_forward_hook(lambda _m, _x, gate: gates.append(gate))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return gates[0]


@contextmanager
def always_warned() -> Iterator[None]:
    """Let torch warn each time of what it otherwise does once in a process."""
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


def test_single_firings(model: Any, tokenizer: Any, batch: Any) -> None:
    """A row of the matrix for each row of the table, with the ReLU's values; of prompts and of generated tokens."""
    gates = gates_of(model, 1, batch)[batch["attention_mask"] > 0].relu().numpy()
    with torch.no_grad(), watch(model, tokenizer, fired=[1]) as w:
        model(**batch)
        model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    matrix, n = w.fired(1), len(gates)
    assert matrix.shape == (len(w.table()), 264)
    np.testing.assert_allclose(matrix.toarray()[:n], gates, rtol=1e-3)
    np.testing.assert_array_equal(np.diff(matrix.indptr), w.nnz[:, 1])
    with warnings.catch_warnings(), always_warned():
        warnings.simplefilter("error")
        csr = w.fired(1, form="torch")
    assert torch.equal(csr.to_dense(), torch.from_numpy(matrix.toarray()))
    loudest = w.neurons(5, 1)
    assert loudest["neuron"][0] == gates[5].argmax() and (loudest["value"].diff().dropna() <= 0).all()
    text = w.text(0)
    assert str(text) == SENTENCES[0]
    assert f"L1/N{int(gates[5].argmax())} {gates[5].max():.2f}" in text.notes[5]
    assert 'title="position 5, nnz' in text._repr_html_() and "background" in text._repr_html_()


def test_gradients(model: Any, tokenizer: Any, batch: Any) -> None:
    """In training the model's own code runs: the loss and every gradient are those of the unwatched model, to the bit;
    counts too, and a pass that activation checkpointing repeats is counted once."""
    given = dict(batch, labels=batch["input_ids"])
    with by_hooks(model) as hooked:
        loss = model(**given).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for checkpointing in (False, True):
        model.zero_grad()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with watch(model, tokenizer, hidden=[2]) as w:
            watched = model(**given).loss
            watched.backward()
            hidden = w.hidden(2)
        assert torch.equal(watched, loss)
        for name, p in model.named_parameters():
            assert p.grad is None if name not in expected else torch.equal(p.grad, expected[name]), name
        assert rows_of(w) == hooked.rows(skip=PAD)
        assert hidden.shape == (*batch["input_ids"].shape, 264)


def test_hidden_values(model: Any, batch: Any) -> None:
    """Of a dense pass they are part of the graph; of a sparse one they are what the dense one has."""
    with watch(model, hidden=[1]) as w:
        model(**batch).logits[0, -1, 7].backward(inputs=[model.model.layers[1].mlp.gate_proj.weight])
        dense = w.hidden(1)
        loss = model(**batch).logits[0, -1, 7]
        gradient = torch.autograd.grad(loss, w.hidden(1))[0]
        with torch.no_grad():
            model(**batch)
            sparse = w.hidden(1)
    assert gradient.shape == dense.shape and bool(gradient[0, -1].abs().sum() > 0)
    torch.testing.assert_close(sparse, dense.detach(), rtol=1e-9, atol=1e-12)


def test_metrics(model: Any, tokenizer: Any, batch: Any) -> None:
    """Means and dead shares over the unflagged tokens since the last time, by hand; the same without rows, and where
    the model's own code runs."""
    real = (batch["attention_mask"] > 0) & (batch["attention_mask"].cumsum(1) > 1)
    fired = [(gates_of(model, layer, batch)[real] > 0) for layer in range(3)]
    ways: list[dict[str, Any]] = [{}, {"rows": False}, {"rows": False, "dense": True}, {"probes": "counts"}]
    for options in ways:
        with torch.no_grad(), watch(model, tokenizer, **options) as w:
            model(**batch)
            metrics = w.metrics()
            model(**batch)
            assert w.metrics() == metrics
        assert metrics["tokens"] == int(real.sum())
        for layer, each in enumerate(fired):
            assert metrics[f"nnz/layer_{layer:02}"] == pytest.approx(float(each.sum(1).double().mean()))
            if "probes" not in options:
                assert metrics[f"dead/layer_{layer:02}"] == pytest.approx(float((~each.any(0)).double().mean()))
        assert metrics["sparsity"] == pytest.approx(1 - metrics["nnz"] / 264)
        assert np.isnan(w.metrics()["nnz"])


@pytest.mark.parametrize("options", [{}, {"probes": "counts"}, {"rows": False}, {"rows": False, "dense": True}])
def test_metrics_of_tokens_that_are_not_finite(model: Any, options: dict[str, Any]) -> None:
    """They are no tokens of the metrics, as of the tables: a training that diverges does not get sparse."""
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
        ids = torch.tensor([[5, 6, 8, 9, 12], [5, 9, 10, 11, 7], [7, 5, 6, 8, 9]])
        gates = [gates_of(model, layer, {"input_ids": ids}) for layer in range(3)]
        with watch(model, **options) as w:
            model(input_ids=ids)
            metrics = w.metrics()
            model(input_ids=torch.full((1, 4), 7))
            none = w.metrics()
    counted = gates[-1].isfinite().all(-1)  # attention may spoil the tokens before it too
    counted[:, 0] = False
    assert metrics["tokens"] == int(counted.sum()) and 4 <= metrics["tokens"] < 8
    for layer, each in enumerate(gates):
        assert metrics[f"nnz/layer_{layer:02}"] == float((each[counted] > 0).sum(-1).double().mean())
    assert none["tokens"] == 0 and all(np.isnan(value) for name, value in none.items() if name != "tokens")


def test_rows_of_tokens_that_are_not_finite_say_so(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
        ids = torch.tensor([[5, 6, 8, 9, 12], [5, 9, 10, 11, 7]])
        finite = gates_of(model, 2, {"input_ids": ids}).isfinite().all(-1)
        with watch(model) as w:
            model(input_ids=ids)
    flags = w.run.activity()["flags"].to_numpy().reshape(2, 5)
    assert ((flags & FLAG_NOT_FINITE > 0) == ~finite.numpy()).all() and (flags[0, 1:] == 0).any()
    assert w.by_layer()["tokens"].tolist() == [int(finite[:, 1:].sum())] * 3


def test_a_run_while_it_grows_and_saved(model: Any, tokenizer: Any, batch: Any, tmp_path: Path) -> None:
    """The analysis' tables of the watch, of its run on disk and of a copy are one; the run can be read meanwhile."""
    with torch.no_grad(), watch(model, tokenizer, out=tmp_path / "out") as w:
        model(**batch)
        assert len(w.table()) == int(batch["attention_mask"].sum())
        assert open_run(tmp_path / "out").manifest.status == "recording"
        model(**batch)
        saved = w.save(tmp_path / "saved")
    run = open_run(tmp_path / "out")
    assert run.manifest.tokens == saved.manifest.tokens == 2 * int(batch["attention_mask"].sum())
    assert (run.manifest.status, saved.manifest.name) == ("complete", "saved")
    for table in (w.by_layer(), by_layer(saved)):
        assert table.equals(by_layer(run))
    assert w.by_neuron().equals(by_neuron(run))
    assert {"z", "text"} <= set(w.by_token()) and {"position", "mean"} <= set(w.by_position())
    assert "sparsity" in run._repr_html_() and SENTENCES[1] in [str(run.text(n)) for n in range(6)]
    with pytest.raises(UserError, match="already holds a run"):
        w.save(tmp_path / "saved")


@pytest.mark.parametrize("family", ["llama", "opt", "silu", "gpt_neox"])
def test_ablation(family: str, tmp_path: Path, load_object: Callable[..., Any], batch: Any) -> None:
    """Neurons that are ablated have hidden values of 0 and fire nowhere, whichever context is the outer one; others are
    as they were where nothing before them was ablated."""
    kind = {"silu": "llama"}.get(family, family)
    act = {"silu": {"hidden_act": "silu"}, "gpt_neox": {"hidden_act": "gelu"}}.get(family, {})
    model = load_object(save_model(tmp_path / family, kind, **act))
    threshold = 0.0 if act else None
    before = state_of(model)
    off = torch.arange(0, 264, 2)
    with torch.no_grad():
        plain = model(**batch).logits
        with watch(model, threshold=threshold, hidden=[0]) as w, ablate(model, {0: off, 1: [3]}):
            inner, hidden = model(**batch).logits, w.hidden(0)
            counts = w.by_neuron(layer=0)["fires"].to_numpy()
        with ablate(model, {0: off.tolist(), 1: torch.arange(264) == 3}), watch(model, threshold=threshold):
            outer = model(**batch).logits
    assert same_state(before, state_of(model))
    assert torch.equal(inner, outer) and not torch.allclose(inner, plain)
    real = batch["attention_mask"] > 0
    assert not hidden[real][:, off].any() and hidden[real][:, off + 1].any()
    assert not counts[::2].any() and counts[1::2].any()
    with pytest.raises(UserError, match="neurons from 0 to 263"), ablate(model, {0: [264]}):
        pass
    with pytest.raises(UserError, match="layer from 0 to 2"), ablate(model, {3: [0]}):
        pass
    assert same_state(before, state_of(model))


def test_numbers_of_other_kinds(small: Any) -> None:
    """A threshold is one number whoever's type it has, and a capture takes layers as a watch does."""
    ids, outputs = torch.arange(1, 9)[None], []
    for value in (0.01, np.float32(0.01), torch.tensor(0.01), [0.01, 0.01]):
        with torch.no_grad(), threshold(small, value):
            outputs.append(small(ids).logits)
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    with torch.no_grad(), watch(small, threshold=np.float32(0.01), fired=True) as w:
        small(ids)
    assert w.run.manifest.options["threshold"] == pytest.approx(0.01)
    with pytest.raises(UserError, match=r"Expected form= as scipy or torch, got 'numpy'\.$"):
        w.fired(0, form="numpy")  # type: ignore[arg-type]


def test_capture_from_objects(tiny: Path, model: Any, texts: tuple[str, ...], tmp_path: Path) -> None:
    """A path and an object, sources and strings: the rows are the same."""
    options: dict[str, Any] = {"timings": 0, "seq_len": 24, "batch_tokens": 64, "examples": 2}
    before = state_of(model)
    strings = [Path(text).read_text(encoding="utf-8") for text in texts]
    run = capture(model, strings, out=tmp_path / "object", **options)
    assert same_state(before, state_of(model))
    other = capture(model, list(texts), fired=True, **options)
    assert other.has("fired") and not run.has("fired")
    for table in ("activity", "neurons", "examples"):
        assert (
            run.frame(table)
            .drop(columns="window", errors="ignore")
            .equals(other.frame(table).drop(columns="window", errors="ignore"))
        ), table
    assert [source["source"] for source in run.manifest.text] == ["text"]
    assert run.manifest.text[0]["documents"] == len(texts)
    path = capture(tiny, Path(texts[0]), device="cpu", **options)
    assert path.manifest.dtype == "float32"
    assert (
        path.frame("activity")["token_id"].tolist()
        == other.frame("activity")["token_id"].tolist()[: path.manifest.tokens]
    )
    with torch.no_grad(), watch(model) as w:
        for _, rows in run.activity().groupby("sequence"):
            model(torch.from_numpy(rows["token_id"].to_numpy(np.int64))[None])
    np.testing.assert_array_equal(w.nnz, run.activity()[nnz_columns(3)])
    for wrong, expected in (
        ({"nonsense": 1}, "got nonsense"),
        ({"revision": "x"}, "got revision"),
        ({"tokens": 0}, "at least 1"),
        ({"timings_share": 5}, "timings_share= from 0 to 1, got 5"),
    ):
        with pytest.raises(UserError, match=expected):
            capture(model, "a text", **wrong)
    with pytest.raises(UserError, match="nothing there"):
        capture(model, "missing.txt")
    assert capture(model, "a text", fired=[1, 2]).manifest.options["fired"] == "1,2", "as a watch takes them"
    numbers = {"tokens": np.int64(3), "threshold": np.float32(0.5)}  # as a DataFrame gives them
    assert capture(model, "a text", **numbers).manifest.options["tokens"] == 3


def test_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python runs as it stands, on the bundled model."""
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "watch(" in block)
    assert code.count("\n") <= 15
    folder = str(files("twell.data") / "demo-model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
    names["inputs"] = tokenizer("The harbour lay quiet.", return_tensors="pt", return_token_type_ids=False)
    monkeypatch.chdir(tmp_path)
    exec(code, names)
    assert open_run(tmp_path / "runs" / "mine").manifest.tokens == len(names["w"].nnz)
    assert names["run"].manifest.sequences == 2
    assert isinstance(model.model.layers[0].mlp, SparseFFN)
