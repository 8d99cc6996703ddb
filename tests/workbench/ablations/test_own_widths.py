"""A pruned model whose layers have widths of their own: what fills them up for the kernels is no neuron of the model.

Cost: 3 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import counts_of, run_capture, save_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from twell import analysis
from twell.analysis.figures import plots
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.examples import examples
from twell.analysis.neurons.logit_lens import written
from twell.analysis.neurons.top_tokens import dead_kinds, weight_norms
from twell.analysis.speed.ffn_speedup import caveats, filled
from twell.analysis.training import training_layers, training_results, training_steps
from twell.workbench import TwellCallback, ablate, load_pruned, study, watch
from twell.workbench.ablations.before_after import Pruned, compare
from twell.workbench.ablations.conditions import Facts, TakesNothing, intervention_of
from twell.workbench.ablations.options import PruneOptions
from twell.workbench.ablations.prune import command, prune
from twell.workbench.ablations.spelled import parse
from twell.workbench.bench.cases import filled_up
from twell.workbench.errors import UserError
from twell.workbench.models.load import load
from twell.workbench.models.own_code import OwnModel, open_own, own_of
from twell.workbench.models.threshold_ffn import sizes
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run
from twell.workbench.text.recorded import recorded_sequences

WIDTHS = [176, 136, 176]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, texts: tuple[str, ...]) -> tuple[Path, Run, Run]:
    """Return a pruned model, a run of it, and the run of the whole model that it was pruned by."""
    folder = tmp_path_factory.mktemp("narrow")
    save_model(folder / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for number, layer in enumerate(model.model.layers):
        with torch.no_grad():
            layer.mlp.gate_proj.weight[:: 2 if number == 1 else 3] = 0
    model.save_pretrained(folder / "model")
    whole = run_capture(folder / "model", folder / "whole", texts)
    given = {"model": str(folder / "model"), "run": whole.path, "device": "cpu", "per_layer": True}
    command(PruneOptions(out=folder / "small", **given))
    return folder / "small", run_capture(folder / "small", folder / "run", texts), whole


def test_the_run_knows_the_layers_widths(narrow: tuple[Path, Run, Run]) -> None:
    folder, run, whole = narrow
    model = run.manifest.model
    assert run.widths.tolist() == WIDTHS and run.neurons == sum(WIDTHS) and run.d_ff == 176
    assert model["parameters"] == sum(one.numel() for one in load_pruned(folder).parameters())
    assert "3 layers of 136 to 176 neurons" in repr(run)
    assert "widths" not in whole.manifest.model and whole.widths.tolist() == [264] * 3
    assert np.array_equal(counts_of(run), counts_of(whole))


def test_tables_count_the_models_neurons_alone(narrow: tuple[Path, Run, Run]) -> None:
    """Against those of the whole model, less the neurons that were removed."""
    _, run, whole = narrow
    ours, theirs = analysis.by_layer(run), analysis.by_layer(whole)
    removed = 264 - run.widths
    assert ours["mean"].tolist() == theirs["mean"].tolist()
    assert (theirs["dead"] - ours["dead"]).tolist() == removed.tolist()
    assert ours["dead_share"].tolist() == (ours["dead"] / WIDTHS).tolist()
    assert ours["sparsity"].to_numpy() == pytest.approx(1 - ours["mean"] / WIDTHS)
    numbers = analysis.overview(run)
    assert numbers["dead"] == ours["dead"].sum() and numbers["dead_share"] == numbers["dead"] / sum(WIDTHS)
    assert numbers["sparsity"] == pytest.approx(1 - ours["mean"].sum() / sum(WIDTHS))
    compared = analysis.compare_runs([run, whole]).iloc[0]
    assert compared[["sparsity", "dead_share"]].tolist() == pytest.approx([numbers["sparsity"], numbers["dead_share"]])
    concentrated = analysis.concentration(run)
    assert concentrated["neurons"].tolist() == WIDTHS and concentrated["dead"].tolist() == ours["dead"].tolist()
    dead = analysis.dead_neurons(run)
    assert len(dead) == numbers["dead"] and (dead["neuron"].to_numpy() < run.widths[dead["layer"]]).all()
    assert analysis.dead_curve(run).groupby("layer")["dead_share"].min().tolist() == pytest.approx(
        ours["dead_share"].tolist()
    )


def test_neurons_are_the_models(narrow: tuple[Path, Run, Run]) -> None:
    folder, run, _ = narrow
    neurons = analysis.by_neuron(run)
    assert neurons.groupby("layer").size().tolist() == WIDTHS
    assert neurons["label"].iloc[[0, 176, 176 + 135, -1]].tolist() == ["L0/N0", "L1/N0", "L1/N135", "L2/N175"]
    alone = analysis.by_neuron(run, layer=2)
    assert alone["fires"].tolist() == neurons["fires"].tolist()[-176:] and alone["label"].iloc[-1] == "L2/N175"
    assert parse_neuron("L1/N135", run) and parse_neuron("L2/N175", run) and not parse_neuron("L1/N136", run)
    with pytest.raises(UserError, match="from 0 to 135"):
        plots.neuron_rank(run, 1, 136)
    with pytest.raises(UserError, match="L0/N0 to L2/N175, got L1/N136"):
        examples(run, 1, 136)
    assert len(weight_norms(run, str(folder), 1)) == 136  # of the narrow matrices in the folder
    assert sum(dead_kinds(run, str(folder))) == analysis.overview(run)["dead"]
    assert len(written(run, str(folder), 1, 3))


def test_a_watch_in_ones_own_code(narrow: tuple[Path, Run, Run]) -> None:
    folder, run, _ = narrow
    model: Any = load_pruned(folder, torch.float64, widened=True)
    with torch.inference_mode(), watch(model) as watched:
        for sequence in recorded_sequences(run, 10**6):
            model(input_ids=torch.from_numpy(sequence.ids.astype(np.int64))[None])
        metrics = watched.metrics()
    layers = analysis.by_layer(watched.run)
    assert watched.run.manifest.model["widths"] == WIDTHS
    assert metrics["dead"] == pytest.approx(layers["dead"].sum() / sum(WIDTHS))
    assert metrics["dead/layer_01"] == pytest.approx(layers["dead_share"][1])
    assert metrics["sparsity/layer_01"] == pytest.approx(layers["sparsity"][1])
    assert metrics["sparsity"] == pytest.approx(analysis.overview(watched.run)["sparsity"])


def test_studies_silence_the_models_neurons_alone(narrow: tuple[Path, Run, Run]) -> None:
    folder = narrow[0]
    own = open_own(str(folder), device="cpu")
    assert own.widths == WIDTHS
    fires = np.ones((3, 176), np.int64)
    fires[1, 130:] = 0
    facts = Facts(own.widths, own.d_ff, fires)
    assert [intervention_of(one, facts).silenced for one in parse(["ffn"], 3)] == WIDTHS
    assert intervention_of(parse(["dead"], 3)[0], facts).silenced == 6
    with pytest.raises(UserError, match="from 0 to 135"):
        intervention_of(parse(["neurons:L1/N136"], 3)[0], facts)
    fires[1, 130:136] = 1
    with pytest.raises(TakesNothing):
        intervention_of(parse(["dead"], 3)[0], facts)


def test_pruned_once_more(narrow: tuple[Path, Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run, _ = narrow
    given = {"model": str(folder), "run": run.path, "device": "cpu", "per_layer": True}
    result = command(PruneOptions(out=tmp_path / "again", **given))
    plain = command(PruneOptions(out=tmp_path / "plain", **{**given, "per_layer": False}))
    assert plain.widths == WIDTHS and plain.parameters == result.parameters, "it keeps widths of its own"
    assert result.widths == WIDTHS and result.parameters[0] == result.parameters[1] == run.manifest.model["parameters"]
    assert result.bytes[0] == result.bytes[1]
    shown = capsys.readouterr().out
    assert "136 to 176 of 136 to 176 neurons a layer" in shown and "Nothing was removed" in shown
    assert (
        "no layer can have a narrower width (a multiple of 8); prune with a higher --least" in shown
        and "with --per-layer" not in shown
    )
    kept = prune(load_pruned(folder, widened=True), ~analysis.dead_mask(run))
    narrowed = prune(load_pruned(folder), ~analysis.dead_mask(run))
    for one in (kept, narrowed):
        assert [down.in_features for down in own_of("again", one).downs] == WIDTHS
    half = prune(load_pruned(folder, widened=True), np.arange(176) < np.array([[64], [64], [64]]))
    assert own_of("half", half).widths == [64] * 3


def test_pruning_once_more_is_compared_with_the_model_as_it_is_stored(
    narrow: tuple[Path, Run, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dense pass has no neurons of zeros, which fill it up only to count what fires."""
    ran: list[list[int]] = []

    def watched(own: OwnModel, *given: Any) -> Pruned:
        ran.append([sizes(down)[0] for down in own.downs])
        return compare(own, *given)

    monkeypatch.setattr("twell.workbench.ablations.prune.compare", watched)
    folder, run, _ = narrow
    result = command(PruneOptions(out=tmp_path / "again", model=str(folder), run=run.path, device="cpu"))
    assert ran == [WIDTHS] == [result.widths] and result.error == 0


def test_what_fills_a_layer_up_cannot_be_silenced(narrow: tuple[Path, Run, Run]) -> None:
    """A mask that the widest layer's row has too says nothing of it."""
    model: Any = load_pruned(narrow[0], widened=True)
    weight = model.model.layers[1].mlp.gate_proj.weight
    for neurons in ([135, 136], [150]):
        with pytest.raises(UserError, match=r"from 0 to 135 of layer 1, which has 136, got \["):
            ablate(model, {1: neurons}).__enter__()
    everything = torch.ones(176, dtype=torch.bool)
    assert weight.shape[0] == 176 and weight[135].any()
    with ablate(model, {0: everything, 1: everything, 2: [175]}):
        assert not weight.any()


def test_a_speedup_says_what_both_sides_ran(narrow: tuple[Path, Run, Run]) -> None:
    _, run, whole = narrow
    quiet = {"turns": 2, "tells": True, "busy": "", "short": float("nan")}
    assert caveats({**quiet, "filled": filled(whole)}) == []
    assert caveats({**quiet, "filled": filled(run)}) == [
        "Dense and sparse ran every layer at 176 neurons; a dense FFN as narrow as each layer has 92% of that work."
    ]


def test_a_bench_says_it_too(narrow: tuple[Path, Run, Run]) -> None:
    loaded = load(str(narrow[0]), device="cpu")
    assert filled_up(loaded) == " (layers of 136 to 176 neurons, dense and sparse filled up to the widest)"
    assert filled_up(load("builtin:demo", device="cpu")) == ""


def test_widths_that_are_not_the_layers_are_refused(narrow: tuple[Path, Run, Run], tmp_path: Path) -> None:
    _, run, _ = narrow
    for widths in ([176, 136], [176, 136, 184], [176, 0, 136], "176", []):
        folder = tmp_path / str(widths)
        folder.mkdir()
        changed = manifests.read(run.path)
        changed.model = {**changed.model, "widths": widths}
        manifests.write(folder, changed)
        with pytest.raises(UserError, match="Expected widths"):
            manifests.read(folder)


def test_a_training_goes_by_the_layers_widths(narrow: tuple[Path, Run, Run], tmp_path: Path) -> None:
    """Its tables are what the trainer's logs say."""
    pytest.importorskip("accelerate")
    model, ids = load_pruned(narrow[0], widened=True), torch.randint(60, 300, (8, 12))
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=2, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[TwellCallback(every=1, out=tmp_path / "run")],
    )
    trainer.train()
    logged = next(one for one in trainer.state.log_history if "twell/nnz" in one)
    run = open_run(tmp_path / "run")
    steps, layers, ended = training_steps(run).iloc[-1], training_layers(run), training_results([run]).iloc[0]
    assert run.widths.tolist() == WIDTHS
    for name in ("sparsity", "dead"):
        assert steps[name] == pytest.approx(logged[f"twell/{name}"])
        assert layers[name].tolist() == pytest.approx([logged[f"twell/{name}/layer_{n:02}"] for n in range(3)])
    assert ended["sparsity"] == pytest.approx(logged["twell/sparsity"])
    assert "that of training" in training_results([run]).attrs["note"]
    assert training_results([run, run])["rise"].isna().all(), "nothing tells that two Trainers had one recipe"


def test_around_a_model_and_within_a_study(
    narrow: tuple[Path, Run, Run], tmp_path: Path, texts: tuple[str, ...]
) -> None:
    """A module of one's own around the model, and estimates of every neuron."""
    folder = narrow[0]

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = load_pruned(folder, torch.float64, widened=True)

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.inner(input_ids=input_ids)

    maps = ("gate_proj", "up_proj", "down_proj")
    around = Around()
    with watch(around, ffns={f"inner.model.layers.{n}.mlp": maps for n in range(3)}) as watched:
        around(torch.arange(60, 80)[None])
    assert watched.run.widths.tolist() == WIDTHS
    studied = study(str(folder), texts[:2], ["ffn@0"], neurons=2, tokens=100, out=tmp_path / "run")
    assert studied.manifest.effects[-1]["has_zeros"] is True
    assert len(studied.frame("neuron_effects")) == sum(WIDTHS)
    estimates = analysis.neuron_effects(studied)
    assert estimates.groupby("layer").size().tolist() == WIDTHS and estimates["label"].notna().all()
