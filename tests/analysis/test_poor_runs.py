"""Every question asked of runs that lack something: an answer, or one sentence why not; nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import twell.analysis as analysis
from twell.analysis.exports.tables import ANALYSIS
from twell.workbench.errors import Missing
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.store import Run

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
POOR: dict[str, dict[str, Any]] = {
    "nothing but counts": {"timings": 0, "neurons": False, "tiles": False, "loss": False},
    "one layer": {"layers": 1, "fired": True, "bench": True},
    "few tokens": {"sequences": 2, "length": 4, "parts": 1},
    "one sequence": {"sequences": 1, "parts": 1, "fired": True},
    "interrupted": {"status": "interrupted", "sequences": 6, "parts": 2},
    "summary-only": {"sequences": 30, "fired": True, "bench": True},
}


@pytest.mark.parametrize("kind", list(POOR))
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_answer_or_a_reason(made: ModuleType, tmp_path: Path, kind: str) -> None:
    run = made.make(tmp_path / "poor", **{"sequences": 20, **POOR[kind]})
    if kind == "summary-only":
        (run,) = analysis.summarize(SummarizeOptions(runs=(run.path,), summary_only=tmp_path / "copy"))
    answered: set[str] = set()
    reasons: dict[str, str] = {}
    for name, question in QUESTIONS.items():
        try:
            question(run)
            answered.add(name)
        except Missing as reason:
            reasons[name] = str(reason)
    assert answered >= ALWAYS
    assert {name: text for name, text in reasons.items() if "\n" in text or not text.endswith(".")} == {}
    if kind == "summary-only":
        rows = {"by_word", "contexts", "loudest", "passages", "examples", "fired_csr", "together"}
        rows |= {"across_layers", "firing_clusters", "reuse", "reuse_cache", "token_covariates"}
        assert set(reasons) == rows | {"model_time", "model_speedup"}
