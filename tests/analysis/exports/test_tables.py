"""Export: every table as files, read back and compared."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from support.planted_effects import add_effects
from support.synthetic_runs import make
from support.synthetic_training import make_training

from twell import analysis
from twell.analysis import by_layer, by_token
from twell.analysis.exports.command import export
from twell.analysis.exports.dictionary import dictionary
from twell.analysis.exports.tables import ANALYSIS
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import ExportOptions
from twell.workbench.run.schema import TABLES
from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def run(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that lacks nothing: the whole model timed, and every table recorded."""

    def whole(table):
        ops = (("model_dense", 5000.0), ("model_sparse", 4000.0))
        return made.more_timings(table, [{"batch": 0, "layer": -1, "op": op, "microseconds": time} for op, time in ops])

    return made.make(
        tmp_path_factory.mktemp("export") / "made", sequences=60, fired=True, bench=True, change_timings=whole
    )


def test_every_analysis_table(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    written = export(ExportOptions(run=run.path, out=tmp_path / "tables"))
    assert [path.name for path in written] == [f"{name}.parquet" for name in ANALYSIS]
    printed = capsys.readouterr().out
    for name, question in ANALYSIS.items():
        expected, path = question(run), tmp_path / "tables" / f"{name}.parquet"
        pd.testing.assert_frame_equal(pd.read_parquet(path), expected, check_dtype=False, obj=name)
        assert f"{path}: {len(expected):,} rows" in printed
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == sorted(path.name for path in written)


@pytest.mark.parametrize("table", list(ANALYSIS))
def test_csv(run: Run, tmp_path: Path, table: str) -> None:
    path = tmp_path / "one.csv"
    assert export(ExportOptions(run=run.path, table=(table,), format="csv", out=path)) == [path]
    text = pd.read_csv(path, dtype=object, keep_default_na=False)  # numbers as they are written
    expected = ANALYSIS[table](run)
    assert list(text.columns) == list(expected.columns)
    for name in expected.select_dtypes("number"):
        there = text[name].replace("", "nan").astype(expected[name].dtype)  # as many digits as the type has
        np.testing.assert_array_equal(there, expected[name], err_msg=name)
    for name in expected.select_dtypes(exclude=["number", "bool"]):
        assert text[name].tolist() == expected[name].tolist(), name


@pytest.mark.parametrize("table", list(TABLES))
def test_tables_of_the_run_part_by_part(run: Run, tmp_path: Path, table: str) -> None:
    path = tmp_path / f"{table}.parquet"
    run = make_training(tmp_path / "trained") if table == "training" else run
    run = add_effects(make(tmp_path / "ablated", sequences=4)) if table.endswith("effects") else run
    export(ExportOptions(run=run.path, table=(table,), out=path))
    pd.testing.assert_frame_equal(pd.read_parquet(path), run.frame(table))
    assert pq.read_schema(path).equals(run.arrow(table).schema)
    export(ExportOptions(run=run.path, table=(table,), format="csv", out=tmp_path / "x.csv"))
    assert len(pd.read_csv(tmp_path / "x.csv")) == len(run.frame(table))


def test_a_training(tmp_path: Path) -> None:
    """Its recorded tables; a document, which is about activity, is refused with the reason."""
    run = make_training(tmp_path / "trained")
    written = export(ExportOptions(run=run.path, out=tmp_path / "tables"))
    assert [path.stem for path in written] == ["training"]
    for name in ("it.ipynb", "it.html"):
        with pytest.raises(Missing, match="it is a training"):
            export(ExportOptions(run=run.path, out=tmp_path / name))
        assert not (tmp_path / name).exists()


def test_csv_of_bytes_and_half_floats(run: Run, tmp_path: Path) -> None:
    export(ExportOptions(run=run.path, table=("vocab", "activity"), format="csv", out=tmp_path))
    vocab = pd.read_csv(tmp_path / "vocab.csv", keep_default_na=False, dtype=str)
    assert [bytes.fromhex(digits) for digits in vocab["bytes"]] == run.frame("vocab")["bytes"].tolist()
    loss = pd.read_csv(tmp_path / "activity.csv")["loss"]
    np.testing.assert_allclose(loss, run.frame("activity")["loss"].astype(float), rtol=1e-6)


def test_one_table_into_a_folder_that_is_there(run: Run, tmp_path: Path) -> None:
    written = export(ExportOptions(run=run.path, table=("by_layer",), format="csv", out=tmp_path))
    assert written == [tmp_path / "by_layer.csv"]


def test_a_file_there_is_replaced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "layers.parquet"
    path.write_text("old")
    export(ExportOptions(run=run.path, table=("by_layer",), out=path))
    assert len(pd.read_parquet(path)) == run.layers


def test_several_tables_over_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(UserError, match="Expected a folder"):
        export(ExportOptions(run=run.path, out=path))
    assert path.read_text() == "mine"


def test_unknown_table(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"by_layer, .*activity, .*got 'by_leyer'"):
        export(ExportOptions(run=run.path, table=("by_leyer",), out=tmp_path / "x"))
    with pytest.raises(UserError, match=r"got 'by_leyer': did you mean by_layer\?$"):
        export(ExportOptions(run=run.path, table=("by_leyer",), out=tmp_path / "x"))


@pytest.mark.usefixtures("without_images")
def test_the_format_is_what_the_file_ends_in(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where none is asked for; so that no file holds another than it says."""
    table, out = ("by_layer",), tmp_path / "t.csv"
    assert export(ExportOptions(run=run.path, table=table, out=out)) == [out]
    assert pd.read_csv(out)["layer"].tolist() == list(range(run.layers))
    export(ExportOptions(run=run.path, table=table, out=tmp_path / "t.JSON"))
    assert len(json.loads((tmp_path / "t.JSON").read_text())) == run.layers
    export(ExportOptions(run=run.path, table=table, out=tmp_path / "t"))
    assert len(pd.read_parquet(tmp_path / "t")) == run.layers
    export(ExportOptions(run=run.path, out=tmp_path / "run.ipynb"))
    cells = json.loads((tmp_path / "run.ipynb").read_text())["cells"]
    assert f"run.ipynb: {len(cells)} cells" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"with the ending of --format parquet \(\.parquet\), got .*other\.csv"):
        export(ExportOptions(run=run.path, table=table, format="parquet", out=tmp_path / "other.csv"))
    (tmp_path / "folder.csv").mkdir()
    assert export(ExportOptions(run=run.path, table=table, format="parquet", out=tmp_path / "folder.csv"))


def test_an_unknown_ending_is_refused_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    for chosen in ({}, {"table": ("by_layer",)}, {"table": ("by_layer",), "format": "csv"}):
        with pytest.raises(UserError, match=r"ending of \.parquet, .*\.html, or a folder without one, got .*x\.docx"):
            export(ExportOptions(run=run.path, out=tmp_path / "x.docx", **chosen))
    assert not list(tmp_path.iterdir())
    assert export(ExportOptions(run=run.path, table=("by_layer", "by_word"), out=tmp_path / "tables-1.2"))


def test_many_files_do_not_go_into_a_folder_named_as_a_file(run: Run, tmp_path: Path) -> None:
    for chosen, said in (
        (
            {"out": tmp_path / "all.csv"},
            r"\d+ tables, got the file .*all\.csv: name a folder, or one table with --table",
        ),
        ({"out": tmp_path / "x.npz", "table": ("fired",)}, r"fired, .*, got the file .*x\.npz: name a folder\."),
    ):
        with pytest.raises(UserError, match=f"Expected a folder for {said}"):
            export(ExportOptions(run=run.path, **chosen))
    assert not list(tmp_path.iterdir())


def test_what_the_run_lacks(made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = made.make(tmp_path / "poor", sequences=10, parts=1, neurons=False, timings=0)
    written = export(ExportOptions(run=run.path, out=tmp_path / "tables"))
    more = "neuron_histogram timings_by_batch tile_settings reuse reuse_cache firing_clusters token_covariates"
    more += " whole_model"
    lacking = "by_neuron concentration lorenz dead_curve dead_neurons speedup layer_gains gain_correlations model_time"
    assert {path.stem for path in written} == set(ANALYSIS) - {*lacking.split(), *more.split()}
    assert "by_neuron: left out." in capsys.readouterr().out
    with pytest.raises(Missing, match="--probes counts"):
        export(ExportOptions(run=run.path, table=("by_neuron",), out=tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_damaged_part(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "damaged", sequences=10, parts=2)
    path = run.parts("activity")[1]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"readable part at .*part-00001\.parquet"):
        export(ExportOptions(run=run.path, table=("activity",), out=tmp_path / "rows.parquet"))
    assert not list(tmp_path.glob("rows*"))


def test_notes_travel_with_parquet(run: Run, tmp_path: Path) -> None:
    export(ExportOptions(run=run.path, table=("by_token", "by_layer"), out=tmp_path / "t"))
    assert pd.read_parquet(tmp_path / "t" / "by_token.parquet").attrs == by_token(run).attrs
    assert pd.read_parquet(tmp_path / "t" / "by_layer.parquet").attrs == by_layer(run).attrs


def test_every_exported_table_is_a_public_name() -> None:
    """Notebooks call the tables by their names after `from twell.analysis import *`."""
    assert set(ANALYSIS) <= set(analysis.__all__)
    assert all(inspect.unwrap(getattr(analysis, name)) is inspect.unwrap(compute) for name, compute in ANALYSIS.items())


def test_the_dictionary_has_every_table_and_column(run: Run) -> None:
    """data/README.md holds it: `python -m twell.analysis.exports.dictionary` prints it anew."""
    page = (Path(__file__).parents[3] / "data" / "README.md").read_text(encoding="utf-8")
    assert dictionary() in page
    for name, question in ANALYSIS.items():
        words = set(re.findall(r"\w+", page.partition(f"### {name}\n")[2].partition("\n### ")[0]))
        assert set(question(run).columns) - words == set(), name
