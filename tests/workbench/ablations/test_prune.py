"""Pruned models: the logits of the whole one on the run's text, by plain transformers. Cost: 2 s."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import counts_of, run_capture, save_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from twell.analysis.ablations.by_condition import paired_change
from twell.workbench import load_pruned, threshold, watch
from twell.workbench.ablations.before_after import Pruned, report
from twell.workbench.ablations.options import PruneOptions
from twell.workbench.ablations.prune import command, prune
from twell.workbench.errors import UserError
from twell.workbench.models.load import load
from twell.workbench.models.own_code import maps_back, own_of
from twell.workbench.models.threshold_ffn import sizes
from twell.workbench.run.store import Run
from twell.workbench.text.recorded import recorded_sequences


def silenced(folder: Path, family: str) -> Path:
    """Save a model of which a third of each layer never fires, by weights of 0, and in layer 1 a half."""
    save_model(folder, family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for number, layer in enumerate(model.get_decoder().layers):
        first = layer.fc1 if family == "opt" else layer.mlp.gate_proj
        with torch.no_grad():
            first.weight[:: 2 if number == 1 else 3] = 0
            if first.bias is not None:
                first.bias.copy_(-torch.linspace(0, 0.05, len(first.bias)))
    model.save_pretrained(folder)
    return folder


def assert_same_logits(run: Run, one: Any, other: Any) -> None:
    with torch.inference_mode():
        for sequence in recorded_sequences(run, 10**6):
            ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
            ours, theirs = one(input_ids=ids).logits, other(input_ids=ids).logits
            assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()  # norms are in float32


def assert_watched_when_widened(folder: Path, run: Run) -> None:
    """What a watch counts is what the run has; as narrow as it is stored, a model is refused, with what to do."""
    for refuse in (lambda model: watch(model), lambda model: watch(model, threshold=0.01)):
        with pytest.raises(UserError, match=r"got 136 to 176, .* by load_pruned\(FOLDER, widened=True\)"):
            refuse(load_pruned(folder)).__enter__()
    ids = [torch.from_numpy(sequence.ids.astype(np.int64))[None] for sequence in recorded_sequences(run, 10**6)]
    with torch.inference_mode(), watch(model := load_pruned(folder, torch.float64, widened=True)) as watched:
        for each in ids:
            model(input_ids=each)
    assert watched.loaded.d_ff == 176 and np.array_equal(np.array(watched.nnz), counts_of(run))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_logits_are_those_of_the_whole_model(family: str, tmp_path: Path, texts: tuple[str, ...]) -> None:
    """A third of each layer never fires, by weights of 0; in layer 1 more, which is filled up."""
    folder = silenced(tmp_path / "model", family)
    run = run_capture(folder, tmp_path / "run", texts)
    result = command(PruneOptions(model=str(folder), run=run.path, out=tmp_path / "small", device="cpu"))
    assert result.width == 176 and result.kept[1] <= 132 and max(result.kept) <= 176
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float64).eval()
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert_same_logits(run, small, whole)
    assert result.error < 1e-5 and result.parameters[1] < result.parameters[0]
    with pytest.raises(UserError, match="empty output folder"):
        command(PruneOptions(model=str(folder), run=run.path, out=tmp_path / "small", device="cpu"))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_each_layer_has_its_own_width(
    family: str, tmp_path: Path, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Narrow as it is stored, and filled up for a capture: equal logits; plain transformers does not misread it."""
    folder = silenced(tmp_path / "model", family)
    run = run_capture(folder, tmp_path / "run", texts)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"text": "Salt marshes, {name}, lie between sea and land."}}\n' for name in "abcde"))
    given = {"model": str(folder), "run": run.path, "device": "cpu", "per_layer": True}
    result = command(PruneOptions(out=tmp_path / "small", text=(str(other),), **given), paired_change)
    assert result.widths == [176, 136, 176] and result.error < 1e-5
    assert (
        result.parameters[1]
        < command(PruneOptions(out=tmp_path / "one", **{**given, "per_layer": False})).parameters[1]
    )
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    small = load_pruned(tmp_path / "small", torch.float64)
    assert [sizes(down)[0] for down in maps_back("small", small)] == [176, 136, 176]
    assert_same_logits(run, small, whole)
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    again = run_capture(tmp_path / "small", tmp_path / "again", texts)
    assert again.d_ff == 176
    assert np.array_equal(counts_of(again), counts_of(run))
    shown = capsys.readouterr().out
    assert "136 to 176 of 264 neurons a layer" in shown and "+0.0000 [+0.0000, +0.0000] of 5 documents" in shown
    assert f"{result.parameters[0]:,}" in shown and f"{result.parameters[1]:,}" in shown and "Nothing was" not in shown
    assert_watched_when_widened(tmp_path / "small", run)
    tokens, before, after = result.unseen
    assert len(tokens) == 5
    for model, sums in ((whole, before), (small, after)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = json.loads(other.read_text().splitlines()[0])["text"]
        ids = torch.tensor(tokenizer(text)["input_ids"])[None]
        pieces = ids.split(24, 1)  # as the run's text was cut
        with torch.inference_mode():
            losses = [cross_entropy(model(input_ids=one).logits[0, :-1], one[0, 1:], reduction="sum") for one in pieces]
        assert sum(losses).item() == pytest.approx(sums[0], rel=1e-5)


def test_a_copy_that_lacks_nothing_is_called_one(tiny: Path, tmp_path: Path) -> None:
    """Of 264 neurons a layer: with what to do, which is --per-layer only where that would remove some."""
    own = own_of("tiny", AutoModelForCausalLM.from_pretrained(tiny))
    result = Pruned([264] * 3, [260, 200, 256], (9, 9), (9, 9), (4.0, 4.0), (1.0, 1.0), 0.0, np.zeros((3, 0)))
    copied = f"  Nothing was removed, {tmp_path} is a copy of the model: "
    told = report(result, own, tmp_path, None)[-1]
    assert told.startswith(f"{copied}layer 0 needs 260 of 264 neurons, and all layers have one width (a multiple of 8)")
    assert "prune with --per-layer for a width of its own in 2 of 3 layers, or --least, such as 0.0001" in told
    told = report(replace(result, kept=[260, 264, 257]), own, tmp_path, None)[-1]
    assert told.startswith(f"{copied}every layer needs more than 256 of 264 neurons") and "--per-layer" not in told
    timed = "a dense pass"
    assert timed not in "".join(report(result, own, tmp_path, None)), "of a copy it would tell of the machine"
    assert timed in "".join(report(replace(result, widths=[264, 200, 256]), own, tmp_path, None))
    assert "copy" not in report(replace(result, widths=[264, 200, 256]), own, tmp_path, None)[-1]


def test_text_that_the_run_read_and_wrong_widths_are_refused(tmp_path: Path, texts: tuple[str, ...]) -> None:
    folder = silenced(tmp_path / "model", "llama")
    run = run_capture(folder, tmp_path / "run", texts)
    given = {"model": str(folder), "run": run.path, "device": "cpu", "out": tmp_path / "small"}
    with pytest.raises(UserError, match="did not see, got"):
        command(PruneOptions(text=texts[:1], **given))
    command(PruneOptions(per_layer=True, **given))
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    for widths in ([176, 136], [176, 136, 177], "176", [176, 136, 184]):
        (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"ffn_widths": widths}))
        with pytest.raises(UserError, match="Expected 3 widths of FFNs"):
            load_pruned(tmp_path / "small")
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"ffn_widths": [176, 128, 176]}))
    with pytest.raises(UserError, match="got mismatched"):
        load_pruned(tmp_path / "small")


def test_a_threshold_leaves_values_above_it(tmp_path: Path, texts: tuple[str, ...]) -> None:
    """In a SiLU model: logits of hooks, and counts of a watch beside it; afterwards the model is as it was."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "silu", hidden_act="silu")).eval()
    ids, values = torch.arange(1, 41).view(2, 20), [0.02, 0.0, 0.05]
    with torch.inference_mode():
        untouched = model(input_ids=ids).logits
        with threshold(model, values), watch(model, threshold=0.02) as watched:
            ours = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, untouched) and not torch.equal(ours, untouched)
        left = []
        for layer, value in zip(model.model.layers, values, strict=True):

            def cut(_module: torch.nn.Module, args: tuple[torch.Tensor], value: float = value) -> torch.Tensor:
                hidden = torch.where(args[0].abs() > value, args[0], torch.zeros(()))
                left.append(int((hidden.abs() > 0.02).sum()))
                return hidden

            layer.mlp.down_proj.register_forward_pre_hook(cut)
        assert torch.equal(model(input_ids=ids).logits, ours)
    assert [int(total) for total in watched.nnz.sum(0)] == left
    with pytest.raises(UserError, match="or 3 of them"), threshold(model, [0.1]):
        pass


def test_wrong_masks_are_one_sentence(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with pytest.raises(UserError, match="a mask of bools"):
        prune(model, np.ones((3, 100), bool))
    keep = np.ones((3, 264), bool)
    keep[1] = False
    with pytest.raises(UserError, match="none in layer 1"):
        prune(model, keep)


def test_refusals_name_no_option_that_the_command_lacks(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of another model, to `twell prune`; a SiLU model, to `twell bench`: neither has the option."""
    run = run_capture(tiny, tmp_path / "run", texts)
    with pytest.raises(UserError, match="got others in builtin:demo: give the folder of that model"):
        command(PruneOptions(model="builtin:demo", run=run.path, out=tmp_path / "small", device="cpu"))
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "silu").mkdir()
    (tmp_path / "silu" / "config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
    with pytest.raises(UserError, match=r"has no zeros to count; `twell capture` and .* above --threshold 0.01"):
        load(str(tmp_path / "silu"), None, "cpu")
