"""What a recipe may vary, and how a step may run: the same training, whichever kernel, pieces or processes it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from twell.kernels.dispatch import Choice
from twell.kernels.training import capacity_for
from twell.workbench.errors import UserError
from twell.workbench.training.corpus import Corpus
from twell.workbench.training.ffn import SparseLayers
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.optimizer import make_optimizer, restart_dead
from twell.workbench.training.recipes import RECIPES, Recipe
from twell.workbench.training.sparse_llama import Objective, build, ffns

CPU = torch.device("cpu")
STEPS = 4


def losses(recipe: Recipe, corpus: Corpus, kernel: str = "dense") -> tuple[list[float], TrainingLoop]:
    """Train for some steps; return the loss of each, and the training."""
    training = TrainingLoop(recipe, corpus, CPU, compiled=False, kernel=kernel)
    rows = []
    for _ in range(STEPS):
        training.one_step()
        rows.append(training.log_row())
    return [row["loss"] for row in rows], training


@pytest.fixture(scope="module")
def dense(corpus: Corpus, tiny_recipe: Recipe) -> tuple[list[float], TrainingLoop]:
    return losses(tiny_recipe, corpus)


@pytest.mark.parametrize("change", [{"kernel": "sparse"}, {"micro_batches": 4}, {"checkpointing": True}], ids=str)
def test_the_way_a_step_runs_does_not_change_it(
    dense: tuple[list[float], TrainingLoop], corpus: Corpus, tiny_recipe: Recipe, change: dict[str, Any]
) -> None:
    kernel = change.pop("kernel", "dense")
    changed, training = losses(dataclasses.replace(tiny_recipe, **change), corpus, kernel)
    assert training.layers.count == (tiny_recipe.layers if kernel == "sparse" else 0)
    assert changed == pytest.approx(dense[0], rel=1e-5)
    for one, other in zip(training.state.model.parameters(), dense[1].state.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("gated", "activation", "family"),
    [(True, "relu2", "llama"), (True, "silu", "llama"), (False, "relu", "nemotron"), (False, "relu2", "nemotron")],
)
def test_plain_transformers_computes_the_same_loss(
    tiny_recipe: Recipe, tmp_path: Path, gated: bool, activation: str, family: str
) -> None:
    model = build(dataclasses.replace(tiny_recipe, gated=gated, activation=activation), 0, CPU)
    rows = torch.randint(0, tiny_recipe.vocab, (2, 33), generator=torch.Generator().manual_seed(0))
    loss, _, fires = Objective(model)(rows)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config.model_type == family
    expected = F.cross_entropy(plain(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert 0.3 < fires.double().mean() / rows[:, 1:].numel() < 0.7  # half of them, before a step


def test_each_layer_has_its_own_weight_in_the_l1_term(tiny_recipe: Recipe) -> None:
    model = build(tiny_recipe, 0, CPU)
    rows = torch.randint(0, tiny_recipe.vocab, (2, 33), generator=torch.Generator().manual_seed(0))
    first, second, both = (Objective(model, weights)(rows)[1].item() for weights in ([1, 0], [0, 1], [3, 0.5]))
    assert both == pytest.approx(3 * first + 0.5 * second, rel=1e-6)
    assert Objective(model)(rows)[1].item() == pytest.approx(first + second, rel=1e-6)


def test_dead_neurons_start_anew_and_the_loss_stays(tiny_recipe: Recipe) -> None:
    model = build(tiny_recipe, 0, CPU)
    optimizer = make_optimizer(tiny_recipe, model)
    rows = torch.randint(0, tiny_recipe.vocab, (2, 33), generator=torch.Generator().manual_seed(0))
    layers = ffns(model)
    with torch.no_grad():
        layers[1].up_proj.weight[:10] = 0  # so that what they add is nothing, whatever their gate
    objective = Objective(model)
    sum(objective(rows)[:2]).backward()  # type: ignore[union-attr]
    optimizer.step()
    with torch.no_grad():
        layers[1].up_proj.weight[:10] = 0
    before, gate = objective(rows)[0].item(), layers[1].gate_proj.weight.clone()
    fires = torch.ones(tiny_recipe.layers, tiny_recipe.d_ff, dtype=torch.int64)
    fires[1, :10] = 0
    assert restart_dead(layers, fires, optimizer, 0.02, torch.Generator().manual_seed(1)) == 10
    assert objective(rows)[0].item() == pytest.approx(before, rel=1e-6)
    changed = (layers[1].gate_proj.weight != gate).any(1)
    assert changed.nonzero()[:, 0].tolist() == list(range(10))
    assert layers[1].gate_proj.weight[:10].std().item() == pytest.approx(0.02, rel=0.2)
    assert not layers[1].down_proj.weight[:, :10].any()
    for weight, neurons in ((layers[1].gate_proj.weight, slice(10)), (layers[1].down_proj.weight.T, slice(10))):
        moment = optimizer.state[weight if weight.is_leaf else layers[1].down_proj.weight]["exp_avg"]
        moment = moment if weight.is_leaf else moment.T
        assert not moment[neurons].any()
        assert moment[10:].any()


def test_layers_go_sparse_as_their_counts_fall(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ffns(build(tiny_recipe, 0, CPU))
    auto = SparseLayers(layers, "auto", CPU, 256)
    assert auto.choice.kernel == "dense"
    assert "no sparse kernel has a backward pass for this training" in auto.choice.reason
    assert not auto.update([1.0, 1.0])
    monkeypatch.setattr("twell.workbench.training.ffn.choose", lambda *_, **__: Choice("hopper", "as on a GPU"))
    auto = SparseLayers(layers, "auto", CPU, 256)
    few, many = 0.05 * tiny_recipe.d_ff, 0.5 * tiny_recipe.d_ff
    assert (auto.update([many, many]), auto.count) == (False, 0)
    assert (auto.update([many, few]), auto.count) == (True, 1)
    assert [ffn.capacity for ffn in layers] == [capacity_for(mean, tiny_recipe.d_ff) for mean in (many, few)]
    with auto.all_dense():
        assert auto.count == 0
    assert [ffn.sparse for ffn in layers] == [False, True]
    assert (auto.update([many, many]), auto.count) == (True, 0)


def test_sparse_kernels_of_an_activation_without_zeros_are_refused(corpus: Corpus, tiny_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="Expected --kernel auto or dense with SiLU"):
        TrainingLoop(dataclasses.replace(tiny_recipe, activation="silu"), corpus, CPU, compiled=False, kernel="sparse")


def test_a_step_is_timed_both_ways_and_changes_nothing(corpus: Corpus, tiny_recipe: Recipe) -> None:
    training = TrainingLoop(tiny_recipe, corpus, CPU, compiled=False, kernel="sparse")
    training.one_step()
    before = [parameter.clone() for parameter in training.state.model.parameters()]
    times = training.compare()
    assert times.keys() == {"dense_step", "sparse_step"}
    assert all(value > 0 for value in times.values())
    assert training.compare() == {}, "its share of the time is used up"
    assert all(map(torch.equal, before, training.state.model.parameters()))
    assert all(parameter.grad is None for parameter in training.state.model.parameters())


def test_the_paper_s_shapes_are_recipes() -> None:
    for layers in (8, 18, 28, 38):
        recipe = RECIPES[f"paper-{layers}x2048"]
        assert (recipe.layers, recipe.d_model, recipe.d_ff) == (layers, 2048, 5632)
