"""What is asked of a study: conditions and texts that are told apart, bad ones, those that take nothing; one that
was killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import run_capture, save_model
from support.studies import options

from twell.analysis import effects
from twell.analysis.ablations.by_condition import lines
from twell.workbench.ablations.command import ablate, measure, model_of
from twell.workbench.ablations.options import AblateOptions
from twell.workbench.ablations.study import neuron_fires
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run, open_run


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
