"""Captured counts, losses and sums against an independent count, and what else a run says. Cost: 30 s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import counts_of, run_capture, run_plain, save_model, sequences_of
from torch.nn.functional import cross_entropy

from twell.workbench.capturing import recorder
from twell.workbench.capturing.command import capture, record
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.run import writer
from twell.workbench.run.schema import VALUE_SCALE
from twell.workbench.run.store import Run
from twell.workbench.text import batches
from twell.workbench.text.sources import TextSource

DATA = Path(__file__).resolve().parents[3] / "data"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "nemotron": {"hidden_act": "relu2", "mlp_bias": True},
    "opt": {},
}
KEYS = ["sequence", "position", "token_id", "phase", "flags", "loss", "entropy"]


def assert_counts(folder: Path, out: Path, text: tuple[str, ...], **given: Any) -> None:
    """Compare every (token, layer) cell: equal in float64; in float32 but for the few within rounding of zero."""
    exact = run_capture(folder, out / "64", text, torch.float64, loss=False, **given)
    expected = run_plain(folder, sequences_of(exact), torch.float64, keep=False)
    np.testing.assert_array_equal(counts_of(exact), expected.nnz)
    single = run_capture(folder, out / "32", text, torch.float32, loss=False, **given)
    np.testing.assert_array_equal(single.activity()["token_id"], exact.activity()["token_id"])
    differs = counts_of(single) != expected.nnz
    assert not (differs & ~expected.near).any()
    assert differs.mean() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_counts(family: str, tmp_path: Path, texts: tuple[str, ...]) -> None:
    folder = save_model(tmp_path / "model", family, **FAMILIES[family])
    assert_counts(folder, tmp_path, texts)


@pytest.mark.skipif(not (DATA / "demo-model" / "config.json").exists(), reason="data/demo-model is not trained yet")
def test_counts_of_the_bundled_model(tmp_path: Path) -> None:
    text = (str(DATA / "passages.jsonl"),)
    given = {"batch_tokens": 2048, "seq_len": None, "probes": "counts", "tokens": 4_000}
    assert_counts(DATA / "demo-model", tmp_path, text, **given)


def test_rows_are_the_text(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    run = run_capture(tiny, tmp_path / "run", texts)
    activity, sequences = run.activity(), run.frame("sequences")
    assert len(activity) == run.manifest.tokens == sequences["tokens"].sum() == sum(map(len, sequences_of(run)))
    assert run.manifest.sequences == len(sequences)
    expected = np.concatenate([np.arange(length) for length in sequences["tokens"]])  # no padding, nothing twice
    np.testing.assert_array_equal(activity["position"], expected)
    np.testing.assert_array_equal(activity["sequence"], np.repeat(sequences["sequence"], sequences["tokens"]))
    assert len(set(sequences["tokens"])) > 4  # so there was padding
    for name, group in sequences.groupby("source"):
        ids = activity[activity["sequence"].isin(group["sequence"])]["token_id"]
        assert run.decode(ids) == Path(str(name)).read_text(encoding="utf-8")
        assert group["start"].tolist() == [24 * place for place in range(len(group))]
    stated = {source["source"]: source for source in run.manifest.text}
    assert [stated[name]["tokens"] for name in texts] == sequences.groupby("source", sort=False)[
        "tokens"
    ].sum().tolist()
    assert run.damaged() == []


def test_sequences_name_their_documents(tiny: Path, tmp_path: Path) -> None:
    """By its number in their source, of which the manifest counts them."""
    lengths = {"a": [60, 5, 30], "b": [1, 50]}
    paths = [tmp_path / f"{name}.jsonl" for name in lengths]
    for path, letters in zip(paths, lengths.values(), strict=True):
        path.write_text("".join(json.dumps({"text": "q" * length}) + "\n" for length in letters))
    run = run_capture(tiny, tmp_path / "run", tuple(map(str, paths)))
    documents = run.frame("sequences").groupby(["source", "document"], sort=False)
    counted = [length for letters in lengths.values() for length in letters]
    assert [document for _, document in documents.groups] == [0, 1, 2, 0, 1]
    assert (documents["tokens"].sum() - 1).tolist() == counted  # a mark before each
    assert [source["documents"] for source in run.manifest.text] == [3, 2]


def test_the_number_of_tokens_asked_for(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    whole = run_capture(tiny, tmp_path / "whole", texts).activity()
    part = run_capture(tiny, tmp_path / "part", texts, tokens=77).activity()
    assert len(part) == 77
    np.testing.assert_array_equal(part[KEYS[:5]], whole[KEYS[:5]][:77])


def test_flags(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_text("ab<|endoftext|>cd" + "e" * 40)
    flags = run_capture(tiny, tmp_path / "run", (str(path),)).activity().set_index(["sequence", "position"])["flags"]
    expected = {(0, 0): 3, (0, 3): 1, (1, 0): 2}  # special and first; special; first
    assert {place: flag for place, flag in flags.items() if flag} == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss(tiny: Path, tmp_path: Path, texts: tuple[str, ...], dtype: torch.dtype) -> None:
    run = run_capture(tiny, tmp_path / "run", texts, dtype)
    ids = sequences_of(run)
    logits = run_plain(tiny, ids, torch.float64).logits
    expected = [
        cross_entropy(rows[:-1], torch.from_numpy(one[1:].astype(np.int64)), reduction="none").numpy()
        for rows, one in zip(logits, ids, strict=True)
    ]
    entropies = [(rows[:-1].softmax(1) * -rows[:-1].log_softmax(1)).sum(1).numpy() for rows in logits]
    for (_, group), losses, entropy in zip(run.activity().groupby("sequence"), expected, entropies, strict=True):
        assert group["loss"].isna().tolist() == group["entropy"].isna().tolist() == [False] * len(losses) + [True]
        np.testing.assert_allclose(group["loss"].to_numpy()[:-1].astype(float), losses, rtol=1e-3)
        np.testing.assert_allclose(group["entropy"].to_numpy()[:-1], entropy, rtol=1e-5)
    assert run.manifest.loss_tokens == sum(map(len, expected))
    assert run.manifest.loss_sum == pytest.approx(sum(map(np.sum, expected)), rel=1e-5)


def test_without_loss_and_neurons(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    full = run_capture(tiny, tmp_path / "full", texts)
    run = run_capture(tiny, tmp_path / "run", texts, loss=False, probes="counts")
    assert run.activity()[["loss", "entropy"]].isna().all(axis=None)
    assert (run.manifest.loss, run.manifest.loss_tokens) == (None, 0)
    assert not run.has("neurons")
    np.testing.assert_array_equal(counts_of(run), counts_of(full))


def assert_neurons(run: Run, gates: list[list[np.ndarray]]) -> None:
    """Compare the neurons table, its parts added up, with sums over the unflagged rows of the gates."""
    activity = run.activity()
    plain_rows = (activity["flags"] == 0).to_numpy()
    ids, sequence = (activity[name].to_numpy()[plain_rows] for name in ("token_id", "sequence"))
    frame = run.frame("neurons")
    sums = frame.groupby(["layer", "neuron"]).agg(
        {"fires": "sum", "value_sum": "sum", "value_max": "max", "token_min": "min", "token_max": "max",
         "first_sequence": "min"}
    )  # fmt: skip
    for layer in range(run.layers):
        gate = np.concatenate([layers[layer] for layers in gates])[plain_rows]
        fired = gate > 0
        ours = sums.loc[layer]
        assert ours.index.tolist() == np.nonzero(fired.any(0))[0].tolist()
        mask, gate = fired[:, ours.index], gate[:, ours.index]
        np.testing.assert_array_equal(ours["fires"], mask.sum(0))
        rounding = ours["fires"] * (0.5 / VALUE_SCALE) + 1e-6
        assert (np.abs(ours["value_sum"] / VALUE_SCALE - np.where(mask, gate, 0).sum(0)) <= rounding).all()
        np.testing.assert_allclose(ours["value_max"], gate.max(0).astype(np.float32), rtol=1e-6)
        np.testing.assert_array_equal(ours["token_min"], np.where(mask, ids[:, None], 2**31 - 1).min(0))
        np.testing.assert_array_equal(ours["token_max"], np.where(mask, ids[:, None], -1).max(0))
        np.testing.assert_array_equal(ours["first_sequence"], np.where(mask, sequence[:, None], 2**31 - 1).min(0))


def test_neurons(tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 100)
    monkeypatch.setattr(batches, "WINDOW", 1)
    run = run_capture(tiny, tmp_path / "run", texts, torch.float64)
    assert len(run.parts("activity")) > 2
    assert_neurons(run, run_plain(tiny, sequences_of(run), torch.float64).gates)
    assert (1, 5) not in set(zip(run.frame("neurons")["layer"], run.frame("neurons")["neuron"], strict=True))


def test_a_value_that_is_not_finite(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    """One row of the last layer: it is flagged, has no loss, and is in no layer's sums."""
    loaded = load(str(tiny), device="cpu", dtype=torch.float64)

    def spoil(_module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = inputs[0].clone()
        x[0, 3] = torch.inf
        return (x,)

    loaded.ffns[2].register_forward_pre_hook(spoil)
    options = CaptureOptions(
        model=str(tiny), text=texts, out=tmp_path / "run", seq_len=24, batch_tokens=2**20, timings=0
    )
    run = record(loaded, options, [TextSource(name) for name in texts])
    activity = run.activity().set_index(["sequence", "position"])
    assert activity.index[activity["flags"] >= 4].tolist() == [(0, 3)]
    assert activity.loc[(0, 3), "flags"] == 4
    assert activity.loc[(0, 3), "nnz_02"] == 0 < activity.loc[(0, 3), "nnz_01"]
    assert activity.loc[(0, 3), ["loss", "entropy"]].isna().all()
    assert run.manifest.loss_tokens == len(activity) - run.manifest.sequences - 1
    assert_neurons(run, run_plain(tiny, sequences_of(run), torch.float64).gates)


def test_batches_change_no_count(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    runs = [run_capture(tiny, tmp_path / f"{size}", texts, torch.float64, batch_tokens=size) for size in (1, 64, 4096)]
    for other in runs[1:]:
        np.testing.assert_array_equal(counts_of(other), counts_of(runs[0]))
        assert (
            other.frame("neurons").drop(columns="value_sum").equals(runs[0].frame("neurons").drop(columns="value_sum"))
        )


def test_manifest(tiny: Path, tmp_path: Path, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    options = CaptureOptions(model=str(tiny), text=texts, out=tmp_path / "run", device="cpu", timings=0)
    run = capture(options)
    manifest = run.manifest
    assert (manifest.status, manifest.name, manifest.dtype) == ("complete", "run", "float32")
    assert "gate pre-activation > 0" in manifest.nnz_definition
    assert all((manifest.kernel["name"], manifest.kernel["reason"], manifest.device, manifest.driver))
    assert manifest.layout == {"tile": 256, "compression": 8, "slots": 31}
    assert (manifest.options["seq_len"], manifest.options["model"]) == (128, "tiny-llama")
    assert str(tiny.parent) not in (run.path / "run.json").read_text()  # no path but those typed to name the text
    assert all(len(source["sha256"]) == 64 for source in manifest.text)
    *plan, outcome = capsys.readouterr().out.strip().split("\n")
    assert len(plan) == 3
    assert all(words in line for words, line in zip(("tiny-llama", "kernel", "MB on disk"), plan, strict=True))
    facts = (f"{manifest.tokens:,} tokens", "sparsity", f"{manifest.loss:.3f} nats")
    assert all(words in outcome for words in facts)


def test_the_vocabulary_is_made_while_the_device_has_work(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str) -> Any:
        before = getattr(recorder, name)

        def tells(*args: Any, **given: Any) -> Any:
            order.append(name)
            return before(*args, **given)

        return tells

    for name in ("forward", "vocabulary"):
        monkeypatch.setattr(recorder, name, noted(name))
    run = run_capture(tiny, tmp_path / "run", texts)
    assert order[0] == "forward" and order.count("vocabulary") == 1
    assert len(run.vocab) == run.manifest.tokenizer["vocab_size"]
