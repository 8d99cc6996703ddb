"""Why neurons are dead, with counts, where a newcomer asks it: on Overview, and at the top of page Neurons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis import by_neuron
from twell.analysis.neurons.top_tokens import GONE, dead_kinds
from twell.app.jobs.dead_weights import SHORT, because
from twell.app.ui.formatting import whole
from twell.workbench.errors import Missing
from twell.workbench.run import manifest as manifests
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run

BUNDLED = Path(__file__).resolve().parents[3] / "data" / "demo-model"


@pytest.fixture(scope="module")
def tiny(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that says it is of the bundled model."""
    return open_run(made.bundled(tmp_path_factory.mktemp("weights")) / "tiny")


def test_the_dead_are_counted_by_their_weights(tiny: Run) -> None:
    tensors, gone, dead = load_file(BUNDLED / "model.safetensors"), 0, 0
    for layer in range(tiny.layers):
        fires = by_neuron(tiny, layer=layer)["fires"].to_numpy() > 0
        small = np.ones(tiny.d_ff, bool)
        for name, axis in (("gate_proj", 1), ("down_proj", 0)):
            lengths = np.linalg.norm(tensors[f"model.layers.{layer}.mlp.{name}.weight"].float().numpy(), axis=axis)
            small &= lengths < GONE * np.median(lengths[fires])
        gone, dead = gone + int((small & ~fires).sum()), dead + int((~fires).sum())
    assert dead_kinds(tiny, str(BUNDLED)) == (gone, dead - gone)
    assert 0 < gone < dead, "the made-up firings silence neurons of both kinds"


def test_why_they_are_dead_is_on_the_first_view(show: Callable[..., AppTest], tiny: Run) -> None:
    gone, kept = dead_kinds(tiny, str(BUNDLED))
    why = f"{whole(gone)} have {SHORT}, {whole(kept)} have longer ones"
    assert because(gone, kept) == why
    assert f"tokens: {why}" in markup(show(tiny.path.parent, run="tiny"))
    neurons = markup(show(tiny.path.parent, "neurons", run="tiny"))
    assert neurons.index(f"are dead: they never fired on this text; {why}.") < neurons.index("How often they fire")
    assert 'href="neurons?run=tiny&amp;kind=dead"' in neurons


def test_without_the_weights_the_reason_is_said_to_be_unknown(show: Callable[..., AppTest], runs: Path) -> None:
    assert "cannot be told without the model" in markup(show(runs, "neurons", run="made"))
    assert SHORT not in markup(show(runs, run="made"))
    assert (because(0, 0), because(7, 0)) == ("", f"all have {SHORT}")


def test_where_nothing_fires_weights_are_compared_with_none(
    show: Callable[..., AppTest], made: ModuleType, tmp_path: Path
) -> None:
    def nothing(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {name: np.zeros_like(columns[name]) for name in nnz_columns(8)}

    run = made.make(tmp_path / "none", layers=8, d_ff=768, sequences=10, change=nothing)
    model = {**run.manifest.model, "name": "demo-model", "d_model": 256, "weights": None}
    manifests.update(run.path, model=model, options={"probes": "all"})
    with pytest.raises(Missing, match="have none to be compared with"):
        dead_kinds(open_run(run.path), str(BUNDLED))
    for page, address in (("overview", {}), ("neurons", {}), ("neurons", {"kind": "dead"})):
        test = show(tmp_path, page, run="none", **address)
        assert not test.exception and SHORT not in markup(test)
    assert "No neuron fires, so there is none that their weights could be compared with." in markup(test)
    assert "are under a quarter" not in markup(test) and "gate_norm" not in test.dataframe[0].value


def test_weights_that_take_too_long_are_left_to_the_list(tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.analysis.neurons.top_tokens.READABLE", 2 * 8 * 768 * 256 - 1)
    with pytest.raises(Missing, match="too many"):
        dead_kinds(tiny, str(BUNDLED))
