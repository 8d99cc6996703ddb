"""Studies against hooks of torch in float64, one sequence at a time and without padding; the derivative against
differences. Cost: 4 s."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import save_model
from support.studies import options
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from twell.analysis import effects, neuron_effects
from twell.workbench import ablate as silent
from twell.workbench import study
from twell.workbench.ablations.command import ablate, model_of
from twell.workbench.ablations.study import neuron_fires
from twell.workbench.capturing import progress
from twell.workbench.run.store import Run, open_run
from twell.workbench.text.recorded import recorded_sequences

CONDITIONS = (
    "ffn", "dead", "rarest:0.5", "busiest:0.1", "random:0.3", "weakest:0.5,0.9", "below:0.02", "neurons:L0/N3,L2/N5",
    "weakest:0.5@1",
)  # fmt: skip
Change = Callable[[int, torch.Tensor], torch.Tensor]


def by_hooks(folder: Path, sequences: list[np.ndarray], change: Change) -> list[np.ndarray]:
    """Return the losses of each sequence with hooks that change what goes into each map back."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args, number=number: (change(number, args[0]),))
    losses = []
    with torch.inference_mode():
        for ids in sequences:
            row = torch.from_numpy(ids.astype(np.int64))
            losses.append(cross_entropy(model(input_ids=row[None]).logits[0, :-1], row[1:], reduction="none").numpy())
    return losses


def oracle(fires: np.ndarray) -> dict[str, Change]:
    """Return what each condition does to hidden values [1, n, d_ff], written down once more and slowly."""

    def silent(chosen: Callable[[int], Any]) -> Change:
        def change(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.clone()
            hidden[..., torch.as_tensor(np.array(chosen(layer), dtype=int))] = 0
            return hidden

        return change

    def ranked(layer: int) -> list[int]:
        return sorted(np.flatnonzero(fires[layer]).tolist(), key=lambda neuron: (fires[layer][neuron], neuron))

    def strongest(share: float, only: int | None = None) -> Change:
        def change(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            if only is not None and layer != only:
                return hidden
            hidden = hidden.clone()
            for row in hidden[0]:
                order = sorted(row.nonzero().flatten().tolist(), key=lambda neuron: -abs(row[neuron]))
                row[order[int(np.ceil(share * len(order))) :]] = 0
            return hidden

        return change

    def drawn(layer: int) -> list[int]:
        living = ranked(layer)
        return np.random.default_rng([0, layer]).choice(living, round(0.3 * len(living)), replace=False).tolist()

    return {
        **{f"ffn@{one}": silent(lambda layer, one=one: range(264) if layer == one else []) for one in range(3)},
        "dead": silent(lambda layer: np.flatnonzero(fires[layer] == 0)),
        "rarest:0.5": silent(lambda layer: ranked(layer)[: round(0.5 * len(ranked(layer)))]),
        "busiest:0.1": silent(lambda layer: ranked(layer)[-round(0.1 * len(ranked(layer))) :]),
        "random:0.3": silent(drawn),
        "weakest:0.5": strongest(0.5),
        "weakest:0.9": strongest(1 - 0.9),
        "below:0.02": lambda layer, hidden: torch.where(hidden.abs() > 0.02, hidden, torch.zeros(())),
        "neurons:L0/N3,L2/N5": silent(lambda layer: {0: [3], 2: [5]}.get(layer, [])),
        "weakest:0.5@1": strongest(0.5, only=1),
    }


def test_losses_are_those_of_hooks(run: Run) -> None:
    """By document, to 1e-9 relative."""
    rows = ablate(options(run, *CONDITIONS)).frame("effects")
    sequences = recorded_sequences(run, 10**6)
    assert sum(len(one.ids) - 1 for one in sequences) == rows[rows["condition"] == "dead"]["tokens"].sum()
    changes = oracle(neuron_fires(run))
    assert set(rows["condition"]) == set(changes)
    folder = Path(str(model_of(run, None, "cpu").model.name_or_path))
    untouched = by_hooks(folder, [one.ids for one in sequences], lambda layer, hidden: hidden)
    seen = {}
    for name, change in changes.items():
        losses = by_hooks(folder, [one.ids for one in sequences], change)
        expected: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(2))
        for one, with_it, without in zip(sequences, losses, untouched, strict=True):
            expected[one.source, one.document] += with_it.sum(), without.sum()
        mine = rows[rows["condition"] == name].groupby(["source", "document"])[["loss_sum", "base_sum"]].sum()
        wanted = np.array([expected[key] for key in mine.index])
        assert len(mine) == len(expected)
        np.testing.assert_allclose(mine.to_numpy(), wanted, rtol=1e-9)
        seen[name] = float(np.abs(wanted[:, 0] - wanted[:, 1]).sum())
    assert sum(change > 1e-6 for change in seen.values()) >= len(changes) - 1, seen


def test_shares_of_layers_are_thresholds_of_each(run: Run) -> None:
    """Losses are those of hooks with the thresholds in the manifest; those are quantiles of a layer's values."""
    after = ablate(options(run, "shares:0.5,0,0.25", "smallest:0.5@0", "smallest:0.25@2"))
    values = after.manifest.effects[-1]["thresholds"]["shares:0.5,0,0.25"]
    assert values[0] > 0 == values[1] < values[2]
    folder, seen = Path(str(model_of(run, None, "cpu").model.name_or_path)), defaultdict(list)
    sequences = [one.ids for one in recorded_sequences(run, 10**6)]

    def change(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        fired = hidden[hidden != 0].abs()
        seen[layer].append((int((fired <= values[layer]).sum()), len(fired)))
        return torch.where(hidden.abs() > values[layer], hidden, torch.zeros(()))

    losses = by_hooks(folder, sequences, change)
    table = after.frame("effects").groupby("condition")["loss_sum"].sum()
    assert table["shares:0.5,0,0.25"] == pytest.approx(sum(each.sum() for each in losses), rel=1e-9)
    for layer, share in ((0, 0.5), (2, 0.25)):
        gone, fired = np.array(seen[layer]).sum(0)
        assert gone / fired == pytest.approx(share, abs=0.08)  # the quantile is that of the first batch
    assert table["shares:0.5,0,0.25"] not in (table["smallest:0.5@0"], table["smallest:0.25@2"])


def test_a_budget_is_divided_and_run(run: Run) -> None:
    """Every layer alone, then a mixture of them together."""
    studies: list[int] = []
    spelled = ["shares:0.5,0.5,0", "shares:0.25,0.5,0"]

    def allocated(run: Run, budget: float, broke: Sequence[str]) -> str:
        assert (budget, list(broke)) == (0.01, spelled[: len(broke)])
        return "" if len(broke) == 2 else spelled[len(broke)]

    after = ablate(options(run, budget=0.01), allocated, studies.append)
    assert studies == [entry["study"] for entry in after.manifest.effects[-3:]]
    assert [entry["conditions"] for entry in after.manifest.effects[-2:]] == [[name] for name in spelled]
    assert after.manifest.effects[-1]["budget"] == 0.01
    again = ablate(options(run, budget=0.02), lambda run, budget, broke: "" if broke else spelled[0])
    assert again.manifest.effects[-1]["conditions"] == spelled[:1], "the last one asked for, though measured before"
    alone = after.manifest.effects[-3]["conditions"]
    assert [name for name in alone if name.endswith("@2")] == [
        f"smallest:{s}@2" for s in (0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
    ]
    assert len(alone) == 18


def test_a_study_of_an_object_is_that_of_its_folder(run: Run, texts: tuple[str, ...]) -> None:
    """With the table of the command; inside a context that silences a neuron, that one is silent throughout."""
    folder = Path(str(model_of(run, None, "cpu").model.name_or_path))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    conditions = ["weakest:0.5", "neurons:L1/N7"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = effects(study(model, list(texts), conditions, batch_tokens=64)).set_index("condition")
    expected = effects(study(folder, list(texts), conditions, batch_tokens=64)).set_index("condition")
    np.testing.assert_allclose(table["change"], expected["change"], rtol=1e-3, atol=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with silent(model, {1: [7]}):
        inside = effects(study(model, list(texts), conditions, batch_tokens=64)).set_index("condition")
    assert table.loc["neurons:L1/N7", "change"] != 0 == inside.loc["neurons:L1/N7", "change"]
    assert inside["base"].iloc[0] == pytest.approx(table.loc["neurons:L1/N7", "loss"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'examples'"):
        study(model, list(texts), conditions, examples=8)  # type: ignore[call-arg]


def test_a_study_of_a_silu_object_counts_above_0(tmp_path: Path, texts: tuple[str, ...]) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "silu", hidden_act="silu")).eval()
    run = study(model, list(texts), ["smallest:0.5"])
    assert effects(run)["kept"].iloc[0] == pytest.approx(0.5, abs=0.05)
    assert run.manifest.options["threshold"] == 0


def test_first_order_is_the_derivative(run: Run) -> None:
    """Of the summed loss by a neuron's hidden values, against differences of passes with hooks; exact ones beside."""
    after = ablate(options(run, neurons=8))
    table = after.frame("neuron_effects").set_index(["layer", "neuron"])["estimate_sum"]
    sequences = [one.ids for one in recorded_sequences(run, 10**6)]
    folder, step = Path(str(model_of(run, None, "cpu").model.name_or_path)), 1e-2  # norms are in float32, also here
    strongest = table.abs().sort_values(ascending=False).index[:3]
    for layer, neuron in [*strongest, (2, 7)]:

        def scaled(at: int, hidden: torch.Tensor, by: float, layer: int = layer, neuron: int = neuron) -> torch.Tensor:
            hidden = hidden.clone()
            hidden[..., neuron] *= 1 + by if at == layer else 1
            return hidden

        ends = [
            sum(losses.sum() for losses in by_hooks(folder, sequences, partial(scaled, by=by))) for by in (step, -step)
        ]
        assert table[layer, neuron] == pytest.approx(-(ends[0] - ends[1]) / (2 * step), rel=2e-2, abs=1e-3)
    answer = neuron_effects(after)
    assert len(answer) == run.layers * run.d_ff and answer.attrs["measured"] == 8
    assert np.isfinite(answer.attrs["rank_correlation"])
    ablate(options(run, neurons=8))
    assert len([part for part in open_run(run.path).manifest.parts if part.table == "neuron_effects"]) == 1


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "next_line", lambda lines: 0.0)
    ablate(replace(options(run, "ffn@0"), neurons=3, batch_tokens=40, seed=5))
    printed = capsys.readouterr().out
    estimated, measured = printed.split("beside the untouched model", 1)
    for output in (estimated, measured):
        lines = re.findall(r"^\d+ of (\d+) batches", output, re.MULTILINE)
        assert len(lines) == int(lines[0]) - 1 > 0
