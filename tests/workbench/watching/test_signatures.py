"""What editors and help() show of the calls in notebooks: every argument by its name, and what comes back."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args, get_overloads, get_type_hints

import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix

from twell import analysis
from twell.workbench import capture, load_pruned, prune, study, watch
from twell.workbench.ablations.options import AblateOptions
from twell.workbench.options import CaptureOptions
from twell.workbench.run.shaded import ShadedPassage
from twell.workbench.run.store import Run
from twell.workbench.watching.from_objects import CaptureArguments


@pytest.mark.parametrize("name", ["by_layer", "by_token", "by_neuron", "by_position"])
def test_a_watch_asks_with_the_arguments_of_the_analysis(name: str) -> None:
    """But for the least occurrences of a token, as a watch reads little."""
    ours, theirs = getattr(watch, name), getattr(analysis, name)
    asked = [one for one in inspect.signature(theirs).parameters.values() if one.name != "run"]
    shown = [one for one in inspect.signature(ours).parameters.values() if one.name != "self"]
    assert [one.name for one in shown] == [one.name for one in asked]
    for one, other in zip(shown, asked, strict=True):
        assert one.default == other.default or one.name == "min_count"
        hints = [get_type_hints(each, {**vars(inspect.getmodule(each)), "pd": pd}) for each in (ours, theirs)]
        assert hints[0][one.name] == hints[1][one.name]


def test_a_capture_lists_the_options_of_the_command() -> None:
    options = {item.name: item for item in fields(CaptureOptions) if item.name not in ("model", "text", "out")}
    declared, parameters = get_type_hints(CaptureOptions), inspect.signature(capture).parameters
    typed = get_type_hints(CaptureArguments)
    assert list(typed) == list(options)
    assert {name for name in options if typed[name] != declared[name]} == {"fired"}  # which takes lists here
    assert {name: parameters[name].default for name in options} == {name: one.default for name, one in options.items()}
    assert not [one for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]


def test_a_study_lists_its_options() -> None:
    parameters = inspect.signature(study).parameters
    defaults = {item.name: item.default for item in fields(AblateOptions)}
    for name in ("neurons", "tokens", "batch_tokens", "seed"):
        assert parameters[name].default == defaults[name]


@pytest.mark.parametrize("function", [watch.text, Run.text, prune, load_pruned], ids=lambda one: one.__qualname__)
def test_what_comes_back_has_a_type(function: Callable[..., Any]) -> None:
    assert get_type_hints(function, {**vars(inspect.getmodule(function)), "pd": pd})["return"] is not Any


def test_firings_are_of_the_form_that_is_asked_for() -> None:
    names = {"csr_matrix": csr_matrix, **vars(inspect.getmodule(watch.fired))}
    hints = [get_type_hints(one, names) for one in get_overloads(watch.fired)]
    returned = {form: one["return"] for one in hints for form in get_args(one["form"])}
    assert returned == {"scipy": csr_matrix, "torch": torch.Tensor}


def test_a_shaded_text_has_the_form_that_a_run_promises() -> None:
    promised = {name for name in vars(ShadedPassage) if not name.startswith("__") and name not in ("_abc_impl",)}
    made = analysis.shaded_text.__wrapped__.__globals__["ShadedText"]  # type: ignore[attr-defined]
    assert {"rows", "texts", "_repr_html_"} <= promised
    assert {"rows", "texts"} <= set(made.__dataclass_fields__) and hasattr(made, "_repr_html_")


def test_completion_names_figures_and_questions_alone() -> None:
    """In a process of its own: the figures are listed before plotly, which draws them, is imported."""
    code = (
        "import sys; from twell import analysis; assert {'plots', 'by_layer'} <= set(dir(analysis));"
        "assert not {'plotly', 'torch'} & set(sys.modules), 'early'; from twell.analysis import plots;"
        "assert dir(plots) == sorted(plots.__all__) and callable(plots.overview)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
