"""Pruned models: the logits of the whole one on the run's text, by plain transformers. Cost: 2 s."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.captures import run_capture, save_model
from transformers import AutoModelForCausalLM

from twell.workbench import threshold, watch
from twell.workbench.ablations.options import PruneOptions
from twell.workbench.ablations.prune import command, prune
from twell.workbench.errors import UserError
from twell.workbench.text.recorded import recorded_sequences


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_logits_are_those_of_the_whole_model(family: str, tmp_path: Path, texts: tuple[str, ...]) -> None:
    """A third of each layer never fires, by weights of 0; in layer 1 more, which is filled up."""
    folder = save_model(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for number, layer in enumerate(model.get_decoder().layers):
        first = layer.fc1 if family == "opt" else layer.mlp.gate_proj
        with torch.no_grad():
            first.weight[:: 2 if number == 1 else 3] = 0
            if first.bias is not None:
                first.bias.copy_(-torch.linspace(0, 0.05, len(first.bias)))
    model.save_pretrained(folder)
    run = run_capture(folder, tmp_path / "run", texts)
    result = command(PruneOptions(model=str(folder), run=run.path, out=tmp_path / "small", device="cpu"))
    assert result.width == 176 and result.kept[1] <= 132 and max(result.kept) <= 176
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float64).eval()
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        for one in recorded_sequences(run, 10**6):
            ids = torch.from_numpy(one.ids.astype(np.int64))[None]
            ours, theirs = small(input_ids=ids).logits, whole(input_ids=ids).logits
            assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()  # norms are in float32
    assert result.error < 1e-5 and result.parameters[1] < result.parameters[0]
    with pytest.raises(UserError, match="empty output folder"):
        command(PruneOptions(model=str(folder), run=run.path, out=tmp_path / "small", device="cpu"))


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
