"""Studies against hooks of torch in float64, one sequence at a time and without padding; bad input; a study that was
killed. Cost: 4 s."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import run_capture, save_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from twell.analysis import effects, neuron_effects
from twell.analysis.ablations.by_condition import lines
from twell.workbench import ablate as silent
from twell.workbench import study
from twell.workbench.ablations.command import ablate, measure, model_of
from twell.workbench.ablations.options import AblateOptions
from twell.workbench.ablations.study import neuron_fires
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run, open_run
from twell.workbench.text.recorded import recorded_sequences

CONDITIONS = (
    "ffn", "dead", "rarest:0.5", "busiest:0.1", "random:0.3", "weakest:0.5,0.9", "below:0.02", "neurons:L0/N3,L2/N5",
    "weakest:0.5@1",
)  # fmt: skip
Change = Callable[[int, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, texts: tuple[str, ...]) -> Run:
    folder = tmp_path_factory.mktemp("ablated")
    return run_capture(save_model(folder / "model"), folder / "run", texts, torch.float64)


def options(run: Run, *conditions: str, **given: Any) -> AblateOptions:
    return AblateOptions(
        target=str(run.path), condition=conditions, batch_tokens=64, tokens=10**6, device="cpu", **given
    )


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
    after = ablate(options(run, budget=0.01), lambda run, budget: f"shares:{budget},0.5,0", studies.append)
    assert studies == [entry["study"] for entry in after.manifest.effects[-2:]]
    assert after.manifest.effects[-1]["conditions"] == ["shares:0.01,0.5,0"]
    alone = after.manifest.effects[-2]["conditions"]
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
    with pytest.raises(UserError, match="Expected options of a study"):
        study(model, list(texts), conditions, examples=8)


def test_a_study_of_a_silu_object_counts_above_0(tmp_path: Path, texts: tuple[str, ...]) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "silu", hidden_act="silu")).eval()
    run = study(model, list(texts), ["smallest:0.5"])
    assert effects(run)["kept"].iloc[0] == pytest.approx(0.5, abs=0.05)
    assert run.manifest.options["threshold"] == 0


def test_a_killed_study_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those of one that ran through, each batch once; and a study that is complete is not run again."""
    chosen = options(run, "weakest:0.25", "scattered:0.5", "ffn@2")
    own = model_of(run, None, "cpu")
    through = measure(run, own, replace(chosen, seed=1))
    whole = through.frame("effects").query(f"study == {through.manifest.effects[-1]['study']}")
    calls = []
    monkeypatch.setattr("twell.workbench.ablations.study.PART_SECONDS", 0.0)
    import twell.workbench.ablations.study as module

    rows_of = module._rows

    def stopping(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return rows_of(*given)

    monkeypatch.setattr(module, "_rows", stopping)
    with pytest.raises(KeyboardInterrupt):
        measure(run, own, chosen)
    assert not open_run(run.path).manifest.effects[-1]["complete"]
    again = measure(open_run(run.path), own, chosen)
    entry = again.manifest.effects[-1]
    assert entry["complete"] and again.damaged() == []
    rows = again.frame("effects").query(f"study == {entry['study']}")
    assert len(rows) == len(whole) and not rows.duplicated(["condition", "batch", "source", "document", "piece"]).any()
    for name in ("weakest:0.25", "ffn@2"):  # not by chance
        a, b = (each[each["condition"] == name].drop(columns="study").reset_index(drop=True) for each in (rows, whole))
        assert a.equals(b)
    done, studies = len(calls), list[int]()
    measure(measure(again, own, replace(chosen, seed=2)), own, chosen, measured=studies.append)
    assert len(calls) == done + len(whole.groupby("batch")) and studies == [entry["study"]]


def test_another_text_of_the_same_name_is_another_study(run: Run, tmp_path: Path) -> None:
    """As standard input is, and a file that was edited; the same text again is not measured again."""
    bases = []
    for text in ("one two three four " * 40, "nine seven five " * 60, "nine seven five " * 60):
        (tmp_path / "text.txt").write_text(text)
        after = ablate(replace(options(run, "ffn@1", text=(str(tmp_path / "text.txt"),)), tokens=40))
        bases.append(effects(after, after.manifest.effects[-1]["study"])["base"].item())
    assert bases[0] != bases[1] == bases[2]
    first, second = after.manifest.effects[-2:]
    assert first["text"] == second["text"] and first["tokens"] == second["tokens"] == 40


def test_long_lists_of_neurons_are_told_apart(run: Run, tmp_path: Path) -> None:
    """Two of one length, in one study and one after the other, each with its own change."""
    names = []
    for name, first in (("a", 0), ("b", 100)):
        (tmp_path / name).write_text("\n".join(f"L0/N{neuron}" for neuron in range(first, first + 50)))
        names.append(f"neurons:{tmp_path / name}")
    both = effects(ablate(options(run, *names, seed=7))).query("condition.str.startswith('neurons:50')")
    assert len(both) == both["change"].nunique() == 2
    studies = [ablate(options(run, name, seed=8)).manifest.effects[-1]["study"] for name in names]
    alone = [effects(open_run(run.path), study)["change"].item() for study in studies]
    assert set(alone) == set(both["change"])


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        ("rarest:0", "a share above 0"),
        ("rarest:1", "all of a layer"),
        ("rarest:0.0001", "so small a share"),
        ("neurons:", "none named"),
        ("busiest", "a share above 0"),
        ("ffn@3", "a layer from 0 to 2, got 3"),
        ("fnn", "Expected a condition such as"),
        ("below:-1", "at least 0"),
        ("shares:0.5,0.5", "Expected 3 shares from 0"),
        ("shares:0,0,0", "Expected 3 shares from 0"),
        ("shares:0.5,1,0", "Expected 3 shares from 0"),
        ("neurons:L0/N264", "from 0 to 263"),
        ("neurons:none.txt", "L3/N17"),
        ("neurons:" + ",".join(f"L1/N{neuron}" for neuron in range(264)), "got all of it"),
    ],
)
def test_a_wrong_condition_is_one_sentence(run: Run, condition: str, sentence: str) -> None:
    before = open_run(run.path).manifest
    with pytest.raises(UserError, match=sentence):
        ablate(options(run, condition))
    assert open_run(run.path).manifest == before


def test_a_condition_that_takes_nothing_is_left_out_and_the_others_are_measured(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.txt").write_text("\n")
    after = ablate(options(run, f"neurons:{tmp_path / 'none.txt'}", "below:0.03", "rarest:0.0001", "smallest:0.4"))
    entry = after.manifest.effects[-1]
    assert entry["complete"] and entry["conditions"] == ["below:0.03", "smallest:0.4"]
    rows = after.frame("effects").query(f"study == {entry['study']}")
    assert set(rows["condition"]) == set(entry["conditions"])
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "Left out 'neurons:': there are no neurons named in it.",
        "Left out 'rarest:0.0001': there are no neurons in so small a share.",
    ]
    assert "2 conditions on" in out


def test_where_nothing_fires_the_dead_are_left_alone(
    run: Run, tmp_path: Path, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """It counted its neurons, so it is not told to; all of them are dead, and no condition takes all away unasked."""
    folder = Path(str(model_of(run, None, "cpu").model.name_or_path))
    none = run_capture(folder, tmp_path / "none", texts, torch.float64, threshold=1e9)
    fires = neuron_fires(none)
    assert fires is not None and not fires.any() and not none.has("neurons")
    after = ablate(options(none, "dead", "rarest:0.5", "dead@1", "ffn@1", neurons=4))
    kinds = [name.partition(":")[0] for name in after.manifest.effects[-1]["conditions"]]
    assert kinds == ["ffn@1", *["neurons"] * 4]
    assert all(line.endswith("–") for line in lines(effects(after))[1:6])
    assert capsys.readouterr().err.splitlines() == [
        "Left out 'dead': there are no neurons that fire beside them in layer 0.",
        "Left out 'rarest:0.5': there are no neurons that fire.",
        "Left out 'dead@1': there are no neurons that fire beside them in layer 1.",
    ]


def test_a_run_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    for target, sentence in ((tmp_path / "none", "there is no such folder"), (tmp_path, "give a run's folder, or a")):
        with pytest.raises(UserError, match=sentence):
            ablate(AblateOptions(target=str(target)))


def test_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Expected the weights that"):
        ablate(options(run, "dead", model=str(save_model(tmp_path / "other", intermediate_size=128))))


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
