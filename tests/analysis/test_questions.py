"""A question that is asked with a wrong argument says so in one sentence that names it, at the call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import planted_effects, synthetic_runs

from twell import analysis
from twell.analysis.exports.tables import ANALYSIS
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    shape = synthetic_runs.Shape(d_ff=64, vocab=60, sequences=24, length=40, fired=True)
    return planted_effects.add_effects(synthetic_runs.make(tmp_path_factory.mktemp("arguments") / "run", shape))


WRONG: dict[str, Callable[[Any], Any]] = {
    "of=.* one of next, own, got 'x'": lambda run: analysis.surprisal(run, of="x"),  # once that of `own`
    "rank=.* one of shrunk, z, z_position, got 'x'": lambda run: analysis.by_token(run, rank="x"),
    "order=.* one of loudest, quietest, text, got None": lambda run: analysis.loudest(run, order=None),
    "layer= as an int, got '1'": lambda run: analysis.fired_csr(run, "1"),  # once an unreadable part
    "layer= as an int, got True": lambda run: analysis.by_neuron(run, layer=True),
    "layer= as an int, got 1.5": lambda run: analysis.neuron_histogram(run, layer=1.5),
    "sequence= as an int, got 'x'": lambda run: analysis.neurons_at(run, "x", 0),
    "token_id= as an int, got 'the'": lambda run: analysis.contexts(run, "the"),
    "flagged= as True or False, got 'x'": lambda run: analysis.by_layer(run, flagged="x"),
    "min_count= as an int, got None": lambda run: analysis.by_token(run, min_count=None),
    "min_count= of at least 1, got 0": lambda run: analysis.by_token(run, min_count=0),
    "limit= of at least 1, got -1": lambda run: analysis.together(run, 0, limit=-1),  # once all but the last
    "width= of at least 0, got -1": lambda run: analysis.loudest(run, width=-1),
    "lags= as a list, each an int, got 3": lambda run: analysis.reuse(run, lags=3),
    "lags= as a list, each an int, got 'ab'": lambda run: analysis.reuse(run, lags="ab"),
    "windows= of at least 1, got 0": lambda run: analysis.reuse_cache(run, windows=[2, 0]),
    "a run, got several in a list: ask for each": lambda run: analysis.by_layer([run, run]),
    r"runs in a list, got one run: put them in one, as in compare_layers\(\[first, other": (
        lambda run: analysis.compare_layers(run)
    ),
    "a run, got several in a list": lambda run: analysis.findings(run, [run]),
    "options= as a SummarizeOptions": lambda run: analysis.summarize(run),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_arguments(run: Run, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^Expected {sentence}"):
        WRONG[sentence](run)


def test_an_unknown_argument_names_the_question(run: Run) -> None:
    with pytest.raises(TypeError, match=r"^by_layer: got an unexpected keyword argument 'layers'"):
        analysis.by_layer(run, layers=[1])  # type: ignore[call-arg]


def test_a_run_is_exported_by_itself(run: Run, tmp_path: Path) -> None:
    """Without options that are made first; each table is what pandas reads back."""
    (path,) = analysis.export(run, tmp_path / "layers.csv", "by_layer")
    pd.testing.assert_frame_equal(pd.read_csv(path), analysis.by_layer(run), check_dtype=False)
    names = {one.name for one in analysis.export(run, str(tmp_path), ["by_layer", "by_neuron"], format="json")}
    assert names == {"by_layer.json", "by_neuron.json"}
    with pytest.raises(UserError, match="Expected a file or a folder for out=, got None"):
        analysis.export(run)
    with pytest.raises(UserError, match=r"Expected out= with an ending of .*, got .*x\.doc: name another file"):
        analysis.export(run, tmp_path / "x.doc")
    with pytest.raises(UserError, match="Expected format= as one of parquet, csv, json"):
        analysis.export(run, tmp_path, format="excel")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("question", "argument"),
    [(analysis.loudest, 1), (analysis.compare_positions, 2), (analysis.studies, 1)],
    ids=["loudest", "positions", "studies"],
)
def test_help_names_every_column(run: Run, question: Callable[..., pd.DataFrame], argument: int) -> None:
    """Of those that once sent to another question's."""
    table = question(run if argument == 1 else [run] * argument)
    assert not [name for name in table if not re.search(rf"\b{name}\b", question.__doc__ or "")]


def test_several_runs_in_either_form(run: Run) -> None:
    """In a list, or one after another, to every question that takes several."""
    for question in (analysis.findings, analysis.compare_layers, analysis.compare_runs):
        pd.testing.assert_frame_equal(question([run, run]), question(run, run))  # type: ignore[operator]
    tokens: Any = analysis.compare_tokens
    pd.testing.assert_frame_equal(tokens([run, run], 30), tokens(run, run, 30))
    with pytest.raises(UserError, match="Expected a run or several, got none"):
        analysis.findings([])
    with pytest.raises(UserError, match="Expected a run, got a str"):
        analysis.findings([run, "runs/mine"])  # type: ignore[list-item]


TOLD = {"layer": 0, "neuron": 0, "sequence": 0, "position": 1, "token_id": synthetic_runs.LOUD}


def tables(run: Run) -> dict[str, pd.DataFrame]:
    """Return every table of the package's that a run can fill, by its question."""
    answers = {}
    for name, question in questions(run):
        with suppress(Missing):
            answers[name] = question()
    return {name: answer for name, answer in answers.items() if isinstance(answer, pd.DataFrame)}


def questions(run: Run) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every question of the package by its name, as it is asked about a run."""
    for name in analysis.__all__:
        question: Callable[..., Any] = getattr(analysis, name)
        given: dict[str, Any] = {"run": run, "runs": [run, run], **TOLD}
        required = [
            one.name
            for one in inspect.signature(question).parameters.values()
            if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        if name not in ("ensure", "export", "summarize"):  # which return no table
            yield name, partial(question, **{one: given[one] for one in required})


def test_what_to_record_is_told_to_python_too(tmp_path: Path) -> None:
    """Behind the command line's option stands the argument of `capture`."""
    told = {}
    for name, question in questions(synthetic_runs.make(tmp_path / "bare", neurons=False, timings=0)):
        try:
            question()
        except Missing as error:
            told[name] = str(error)
    named = {
        name: flag[1] for name, said in told.items() if (flag := re.search("--(fired|examples|probes|timings)", said))
    }
    assert set(named.values()) == {"fired", "examples", "probes", "timings"}
    assert {name: told[name] for name, flag in named.items() if f" {flag}=" not in told[name]} == {}


PLACE = re.compile("layer|neuron|token_id|document|(first_)?sequence|position(_from|_to)?")  # columns of one type


def test_places_have_one_type(run: Run, tmp_path: Path) -> None:
    """That of the run's own tables: some were int64 once, which neither compared nor concatenated as equal."""
    told = tables(run) | {"fired_csr": analysis.fired_csr(run, 0)[1]}
    exported = analysis.export(run, tmp_path, [name for name in told if name in ANALYSIS], format="parquet")
    told |= {path.name: pd.read_parquet(path) for path in exported}
    columns = {f"{name}.{one}": table[one] for name, table in told.items() for one in table}
    types = {name: str(one.dtype) for name, one in columns.items() if PLACE.fullmatch(str(one.name))}
    assert len(types) > 80
    assert {name: one for name, one in types.items() if one != "int32"} == {}


def test_each_table_says_what_it_is_of(run: Run) -> None:
    """In its attrs, as the package's help promises; the log of a training too."""
    training = analysis.study_runs()[0]
    silent = [name for name, table in (tables(run) | tables(training)).items() if not table.attrs.get("note")]
    assert silent == []
    assert "from number 2 on" in analysis.effects(run, half=1).attrs["note"]
    assert analysis.layer_histogram(run, flagged=True).attrs["note"] == "every token of the run"


def test_an_exported_table_has_the_same_types(run: Run, tmp_path: Path) -> None:
    (path,) = analysis.export(run, tmp_path / "layers.parquet", "by_layer")
    pd.testing.assert_frame_equal(pd.read_parquet(path), analysis.by_layer(run))


def test_numbers_of_other_libraries(run: Run) -> None:
    """What arrays, DataFrames and tensors give is taken as Python's."""
    expected = analysis.by_neuron(run, layer=1)
    for one in (np.int32(1), torch.tensor(1), pd.Series([1], dtype="Int64")[0]):
        pd.testing.assert_frame_equal(analysis.by_neuron(run, layer=one), expected)
    wide = analysis.reuse(run, lags=[1, 2])
    for some in (np.array([1, 2]), range(1, 3), torch.tensor([1, 2])):
        pd.testing.assert_frame_equal(analysis.reuse(run, lags=some), wide)
