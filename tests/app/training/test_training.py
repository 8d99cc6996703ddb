"""Page Training: its numbers are those of the log; other pages of a training point to it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.synthetic_training import DENSE, SPARSE, make_training

from twell.analysis import compare_trainings, training_layers, training_steps
from twell.analysis.figures.training import WIDEST, layer_map, loss_curves, training_went_sparse
from twell.app.ui.formatting import number, percent, times, whole
from twell.workbench.errors import Missing
from twell.workbench.run.store import open_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainings")
    make_training(path / "done")
    make_training(path / "going", status="recording", rows=2, seed=1)
    return path


def text(test: AppTest) -> str:
    return " ".join(str(block.proto.body) for block in test.get("html"))


def test_its_numbers_are_the_log_s(folder: Path, show: Callable[..., AppTest]) -> None:
    test = show(folder, "training", run="done")
    assert not test.exception
    body = text(test)
    nnz = 512 * (3 * SPARSE + DENSE) / 4
    values = (f"of 120; {whole(30720)} tokens", f"{number(4.4)} nats", number(nnz), percent(1 - nnz / 512), times(1.5))
    for expected in (*values, "median of 6 turns, with 3 of 4 layers sparse"):
        assert expected in body, expected
    assert len(test.get("plotly_chart")) == 5
    assert "1 layer without a dot did not get there" in body


def test_one_that_goes_on_is_shown_as_far_as_it_is(folder: Path, show: Callable[..., AppTest]) -> None:
    test = show(folder, "training", run="going")
    assert not test.exception
    body = text(test)
    assert "recording" in body
    assert "tokens so far" not in body
    assert len(test.get("plotly_chart")) == 5


def test_a_log_without_an_l1_term_has_no_panel_of_it(folder: Path) -> None:
    """As that of a `Trainer`, whose objective has none that is known."""
    steps = training_steps(open_run(folder / "done"))
    both, alone = loss_curves(steps), loss_curves(steps.assign(l1=np.nan))
    assert [len(figure.layout.annotations) for figure in (both, alone)] == [2, 1]
    assert {trace.xaxis for trace in alone.data} == {"x"}


def test_no_mark_is_named_that_no_row_has(folder: Path) -> None:
    steps = training_steps(open_run(folder / "done"))
    titles = [loss_curves(rows).layout.annotations[0].text for rows in (steps, steps.assign(heldout_loss=np.nan))]
    assert "held-out" in titles[0] and "held-out" not in titles[1]


def test_a_stronger_shade_is_named_by_what_both_themes_have(folder: Path, show: Callable[..., AppTest]) -> None:
    """On dark pages what is more is brighter."""
    body = text(show(folder, "training", run="done"))
    assert "the stronger the blue" in body and "darker" not in body


def test_the_command_that_captures_its_model_is_told(folder: Path, show: Callable[..., AppTest]) -> None:
    make_training(run := folder / "one more")
    assert "twell capture FOLDER" in text(show(folder, "training", run="one more"))
    (run / "config.json").write_text("{}")
    assert f"twell capture '{run}' --text" in html.unescape(text(show(folder, "training", run="one more")))


@pytest.mark.parametrize("page", ["overview", "layers", "kernels"])
def test_pages_about_activity_point_to_it(folder: Path, show: Callable[..., AppTest], page: str) -> None:
    test = show(folder, page, run="done")
    assert not test.exception
    assert "This run is a training" in text(test)
    assert [link.proto.label for link in test.get("page_link") if link.proto.label == "See how it gets sparse"]


def test_compare_puts_trainings_side_by_side(folder: Path, show: Callable[..., AppTest]) -> None:
    test = show(folder, "compare", run="done")
    assert not test.exception
    assert len(test.get("plotly_chart")) == 1
    assert "2 trainings" in text(test)
    table = test.dataframe[0].value
    assert list(table) == ["done", "going"]
    assert table.loc["Dense step / sparse step"].tolist() == [times(1.5), "–"]
    assert table.loc["seed"].tolist() == ["0", "1"]
    ratios = [float(found[1]) for cell in table["going"] if (found := re.search(r"\(([\d.]+)\u202f×\)", cell))]
    assert len(ratios) > 3 and ratios == sorted(ratios, key=lambda ratio: -abs(np.log(ratio or 1e-99))), (
        "what changed most first"
    )
    logs = compare_trainings([open_run(folder / name) for name in ("going", "done")])
    last = logs.groupby("run")["nnz"].agg(lambda values: values.dropna().iloc[-1])
    assert table.loc["nnz per token and layer", "going"].endswith(f"({times(last['going'] / last['done'])})")


def test_a_log_of_few_steps_has_whole_steps_on_its_axes(tmp_path: Path) -> None:
    run = make_training(tmp_path / "short", rows=1)
    figures = loss_curves(training_steps(run)), layer_map(training_layers(run), "nnz")
    assert [figure.layout.xaxis.dtick for figure in figures] == [1, 1]
    run = make_training(tmp_path / "long")
    assert loss_curves(training_steps(run)).layout.xaxis.dtick is None


def test_the_bar_links_to_it_only_for_trainings(folder: Path, show: Callable[..., AppTest], runs: Path) -> None:
    assert "Training" in [link.proto.label for link in show(folder, "export", run="done").get("page_link")]
    test = show(runs, "training", run="made")
    assert "Training" not in [link.proto.label for link in test.get("page_link")]
    assert "`twell train` records how a model gets sparse" in test.info[0].value.replace("\\", "")


def test_where_no_layer_went_sparse_a_sentence_says_so(tmp_path: Path, show: Callable[..., AppTest]) -> None:
    """A figure without a dot would look as if it had not been drawn."""
    make_training(tmp_path / "dense", rows=1)
    test = show(tmp_path, "training", run="dense")
    assert not test.exception
    assert "sparse-since" not in [chart.key for chart in test.get("plotly_chart")]
    assert "No layer is sparse by step 10" in text(test) and "without a dot" not in text(test)
    with pytest.raises(Missing, match="L0 then fires the fewest neurons, 256 a token"):
        training_went_sparse(open_run(tmp_path / "dense"))


@pytest.mark.parametrize(("least", "most"), [(79.5, 81.7), (0.5, 400.0), (80.0, 80.0), (0.0, 0.0)])
def test_the_colours_of_the_nnz_map_span_what_is_there(least: float, most: float) -> None:
    """Up to all neurons, a training that is barely sparse was a white map."""
    layers = pd.DataFrame({"layer": [0, 1], "step": [10, 10], "nnz": [least, most]})
    (cells,) = layer_map(layers, "nnz").data
    assert cells.zmin < cells.zmax
    if least < most:
        assert (cells.z.min(), cells.z.max()) == pytest.approx((cells.zmin, cells.zmax))
        assert [cells.colorbar.ticktext[end] for end in (0, -1)] == [number(least), number(most)]
    assert [cells.colorbar.tickvals[end] for end in (0, -1)] == [cells.zmin, cells.zmax]


def test_maps_go_to_the_browser_as_numbers(folder: Path) -> None:
    """A text a cell took a long log half a second of the server and 2.5 MB."""
    layers = training_layers(open_run(folder / "done"))
    for column, key in (("nnz", "customdata"), ("dead", "z")):
        (cells,) = layer_map(layers, column).data
        assert cells.text is None and cells[key].dtype == np.float32
        np.testing.assert_allclose(cells[key], layers.pivot(index="layer", columns="step", values=column), rtol=1e-6)
        assert f"%{{{key}:" in cells.hovertemplate


def test_a_long_log_is_drawn_by_means_of_neighbouring_rows() -> None:
    steps = 2 * WIDEST + 1
    layers = pd.DataFrame({"layer": np.repeat([0, 1], steps), "step": 10 * np.tile(np.arange(steps), 2)})
    layers["dead"] = layers["step"] / (10 * steps) + layers["layer"]
    cells = layer_map(layers, "dead").data[0]
    assert len(cells.x) == -(-steps // 3)
    assert list(cells.x[:2]) == [10, 40]
    assert np.allclose(cells.z[1] - cells.z[0], 1) and np.allclose(cells.z[0], np.asarray(cells.x) / (10 * steps))
