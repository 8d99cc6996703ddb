"""Every question asked of runs that lack something: an answer, or one sentence why not; nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

import twell.analysis as analysis
from twell.analysis.exports.tables import ANALYSIS
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run

QUESTIONS: dict[str, Callable[[Run], Any]] = {
    **ANALYSIS,
    "overview": analysis.overview,
    "model_speedup": analysis.model_speedup,
    "speedup_correlation": analysis.speedup_correlation,
    "dead_mask": analysis.dead_mask,
    "token_profile": lambda run: analysis.token_profile(run, 3),
    "contexts": lambda run: analysis.contexts(run, 3),
    "loudest": analysis.loudest,
    "passages": analysis.passages,
    "examples": lambda run: analysis.examples(run, 0, 4),
    "fired_csr": lambda run: analysis.fired_csr(run, 0),
    "together": lambda run: analysis.together(run, 0),
}
ALWAYS = {"by_layer", "layer_histogram", "by_position", "position_blocks", "findings", "overview", "peer_audit"}


def one_long(columns: dict[str, Any]) -> dict[str, Any]:
    """Cut every sequence but the first to two tokens: documents of lengths a thousand apart."""
    kept = (columns["sequence"] == 0) | (columns["position"] < 2)
    return {name: values[kept] for name, values in columns.items()}


def silent(columns: dict[str, Any]) -> dict[str, Any]:
    """Let nothing fire, as with a threshold that is too large."""
    return {name: values * 0 if name.startswith("nnz_") else values for name, values in columns.items()}


POOR: dict[str, dict[str, Any]] = {
    "nothing but counts": {"timings": 0, "neurons": False, "tiles": False, "loss": False},
    "one layer": {"layers": 1, "fired": True, "bench": True},
    "few tokens": {"sequences": 2, "length": 4, "parts": 1},
    "one sequence": {"sequences": 1, "parts": 1, "fired": True},
    "interrupted": {"status": "interrupted", "sequences": 6, "parts": 2},
    "summary-only": {"sequences": 30, "fired": True, "bench": True},
    "no vocabulary": {"fired": True},
    "documents not known": {"sequences": 30},
    "one document": {"sequences": 16, "of_document": 16, "fired": True},
    "one long document": {"sequences": 20, "length": 2000, "of_document": 1, "layers": 2, "change": one_long},
    "nothing fires": {"sequences": 40, "timings": 0, "neurons": False, "tiles": False, "fired": True, "change": silent},
}
LACKING = {"no vocabulary": "vocab", "documents not known": "sequences"}  # tables that are taken out of the run
NO_TEXT = {"by_word", "token_covariates", "loudest", "passages", "contexts"}  # what tells words or shows text
INTERVALS = ("low", "high", "se", "mean_se", "z_se", "shrunk_se", "nnz_se")
# over tokens; over batches, of all rows or of each layer; ends of bins
OF_OTHER_THINGS = {"token_classes", "gain_correlations", "speedup", "neuron_histogram"}
OF_WHOLE_RUN = (
    "by_layer",
    "first_positions",
    "by_source",
    "across_layers",
    "surprisal_correlation",
    "surprisal_within",
    "entropy_correlation",
)


@pytest.mark.parametrize("kind", list(POOR))
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_answer_or_a_reason(made: ModuleType, tmp_path: Path, kind: str) -> None:
    run = made.make(tmp_path / "poor", **{"sequences": 20, **POOR[kind]})
    if kind == "summary-only":
        (run,) = analysis.summarize(SummarizeOptions(runs=(run.path,), summary_only=tmp_path / "copy"))
    if kind in LACKING:
        parts = [part for part in run.manifest.parts if part.table != LACKING[kind]]
        manifests.update(run.path, parts=parts)
        run = open_run(run.path)
    answered: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, question in QUESTIONS.items():
        try:
            answered[name] = question(run)
        except Missing as reason:
            reasons[name] = str(reason)
    assert answered.keys() >= ALWAYS
    assert {name: text for name, text in reasons.items() if "\n" in text or not text.endswith(".")} == {}
    if kind == "summary-only":
        rows = {"by_word", "contexts", "loudest", "passages", "examples", "fired_csr", "together"}
        rows |= {"across_layers", "firing_clusters", "reuse", "reuse_cache", "token_covariates"}
        assert set(reasons) == rows | {"model_time", "model_speedup"}
    if kind == "no vocabulary":
        assert reasons.keys() >= NO_TEXT
    if kind == "one document":
        assert {name for name, table in answered.items() if interval_columns(table)} <= OF_OTHER_THINGS
    if kind in ("documents not known", "one long document"):
        assert not any(interval_columns(answered[name]) for name in OF_WHOLE_RUN)


OF_RUNS = {  # and what each calls its first argument
    name: first
    for name in analysis.__all__
    if (first := next(iter(inspect.signature(getattr(analysis, name)).parameters), "")) in ("run", "runs")
}


@pytest.mark.parametrize("name", OF_RUNS)
def test_what_is_no_run_is_refused(name: str) -> None:
    """A path in a run's place is the likeliest slip in a notebook."""
    assert len(OF_RUNS) > 60
    default = inspect.signature(getattr(analysis, name)).parameters[OF_RUNS[name]].default
    for given in ("runs/mine", Path("runs/mine"), *(() if default is None else (None,))):
        others = {"layer": 0, "token": 0, "neuron": 0, "tau": 0.1, "budget": 0.1}
        taken = inspect.signature(getattr(analysis, name)).parameters
        more = {key: value for key, value in others.items() if key in taken}
        for value in (given, [given]) if OF_RUNS[name] == "runs" else (given,):
            with pytest.raises(UserError, match=rf"Expected a run, got a {type(given).__name__}: open it first"):
                getattr(analysis, name)(**{OF_RUNS[name]: value}, **more)


def test_what_is_no_number_of_a_sequence_is_not_called_damage(small: Run) -> None:
    with pytest.raises(UserError, match="Expected a sequence's number, got 'a': small has 0 to"):
        str(small.text("a"))  # type: ignore[arg-type]


def interval_columns(table: Any) -> list[str]:
    """Return the columns of an answer that hold any end, or half, of an interval."""
    return [
        name for name in INTERVALS if isinstance(table, pd.DataFrame) and name in table and table[name].notna().any()
    ]
