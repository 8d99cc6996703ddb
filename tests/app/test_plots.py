"""`twell.analysis.plots`: each function of a run is the very figure that the page draws."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from plotly.graph_objects import Figure
from streamlit.testing.v1 import AppTest
from support.synthetic_training import make_training

from twell.analysis import plots
from twell.analysis.figures import table_plots
from twell.app.ui.widgets import LINKS
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run, open_run

PAGES: dict[str, dict[str, Callable[[Run], Figure]]] = {
    "overview": {"layer-by-layer": plots.overview},
    "layers": {"ridges": plots.nnz_distributions, "surprisal": plots.nnz_by_loss},
    "positions": {"positions": plots.nnz_by_position, "decay": plots.decay_lengths},
    "tokens?view=tokens&rank=shrunk": {"ranking": lambda run: plots.top_tokens(run)},
    "tokens?view=words": {"words": lambda run: plots.top_words(run)},
    "tokens?view=classes": {"classes": plots.token_class_dots},
    "token?token=40": {"profile": lambda run: plots.token_by_layer(run, 40)},
    "neurons": {"densities": plots.neuron_densities},
    "neuron?neuron=L1/N5": {
        "rank": lambda run: plots.neuron_rank(run, 1, 5),
        "values": lambda run: plots.neuron_values(run, 1, 5),
    },
    "kernels": {
        "layer-times": plots.layer_times,
        "speedup": plots.speedup_by_nnz,
        "audit": plots.tile_overflow,
        "batches": plots.times_over_capture,
    },
}
RECORDED: dict[str, Callable[[Run], Figure]] = {
    "time-split": plots.pass_time,
    "potential": plots.speedup_potential,
    "calls": plots.live_calls,
    "bench-layers": plots.bench_by_layer,
    "bench-nnz": plots.bench_by_nnz,
    "settings": plots.compression_times,
}
TRAINING: dict[str, Callable[[Run], Figure]] = {
    "losses": plots.training_loss,
    "nnz-map": plots.training_nnz,
    "dead-map": plots.training_silent,
    "sparse-since": plots.training_went_sparse,
    "training-speed": plots.training_speed,
}
COMPARED: dict[str, Callable[[list[Run]], Figure]] = {
    "layers": plots.compared_layers,
    "differences": plots.layer_differences,
    "ratios": plots.ratio_by_position,
}


def drawn(test: AppTest) -> dict[str, Any]:
    """The figures of a page by key, as the browser gets them."""
    assert not test.exception
    return {chart.key: json.loads(chart.proto.spec) for chart in test.get("plotly_chart")}


def plain(value: Any) -> Any:
    """A part of a figure with its arrays as lists, and floats with seven digits, as pages have them."""
    if isinstance(value, dict) and "bdata" in value:
        shape = [int(size) for size in str(value.get("shape", "-1")).split(",")]
        value = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"]).reshape(shape).tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if value == value else None
    return value


def same(ours: Figure, page: dict[str, Any]) -> bool:
    """Whether data and layout are equal; only the page's has a name of its content, and points on the cells of maps."""
    own, page = (plain(figure) for figure in (json.loads(ours.to_json()), page))
    for figure in (own, page):
        figure["layout"].pop("template", None)
        figure["layout"].pop("datarevision", None)
        figure["layout"].pop("hoverdistance", None)
        figure["data"] = [trace for trace in figure["data"] if trace.get("name") != LINKS]
    return bool(own["data"] == page["data"] and own["layout"] == page["layout"])


@pytest.mark.parametrize("page", PAGES)
def test_a_function_is_the_figure_of_its_page(
    show: Callable[..., AppTest], runs: Path, made_run: Run, page: str
) -> None:
    name, _, address = page.partition("?")
    query = dict(pair.split("=") for pair in address.split("&")) if address else {}
    figures = drawn(show(runs, name, run="made", **query))
    on_page = {key: figures.get(key) for key in PAGES[page]}
    assert None not in on_page.values(), f"{page} draws {sorted(figures)}"
    assert [key for key, figure in on_page.items() if figure and not same(PAGES[page][key](made_run), figure)] == []


def test_of_the_recorded_run(show: Callable[..., AppTest]) -> None:
    folder = Path(str(resources.files("twell.data") / "recorded"))
    run = open_run(folder / "h200-8x2048")
    figures = drawn(show(folder, "kernels", run=run.name))
    keys = RECORDED.keys() & figures.keys()
    assert [key for key in keys if not same(RECORDED[key](run), figures[key])] == []
    assert len(keys) >= 4, sorted(figures)


def test_of_a_training_and_of_two_runs(
    show: Callable[..., AppTest], made: ModuleType, tmp_path: Path, runs: Path, made_run: Run
) -> None:
    training = make_training(tmp_path / "training")
    figures = drawn(show(tmp_path, "training", run="training"))
    assert all(same(draw(training), figures[key]) for key, draw in TRAINING.items())
    other = open_run(runs / "oracle")
    figures = drawn(show(runs, "compare", run="made", **{"with": "oracle"}))
    for key in figures.keys() & COMPARED.keys():
        assert same(COMPARED[key]([other, made_run]), figures[key])
    assert {"layers", "differences"} <= figures.keys()


def test_what_a_run_lacks_is_a_sentence(runs: Path) -> None:
    with pytest.raises(Missing, match="bench"):
        plots.bench_by_layer(open_run(runs / "made"))
    with pytest.raises(UserError, match="Expected a neuron from 0 to 511, got 512"):
        plots.neuron_values(open_run(runs / "made"), 1, 512)


def test_each_function_of_a_run_names_its_page() -> None:
    for name in plots.__all__:
        function = getattr(plots, name)
        if not function.__module__.startswith(table_plots.__name__):
            assert "Page " in (function.__doc__ or ""), name
