"""Export: any table as a file that equals it, and the whole run in each form."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from streamlit.testing.v1 import AppTest
from support.synthetic_training import make_training

from twell.analysis import by_layer, by_token
from twell.analysis.exports.documents import cells
from twell.analysis.exports.documents.images import SCALE, WIDTH
from twell.analysis.exports.documents.notebook import PASSAGES
from twell.workbench.run.store import Run

Show = Callable[..., AppTest]


def warned(test: AppTest) -> str:
    return "\n".join(element.value for element in (*test.info, *test.warning))


def test_export_shows_any_table_and_says_what_is_missing(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "export", run="made", table="by_token")
    assert not test.exception
    assert len(test.dataframe[0].value) == min(200, len(by_token(made_run)))
    test.selectbox(key="table").set_value("recorded: vocab").run()
    assert test.query_params["table"] == "recorded: vocab"
    assert set(test.dataframe[1].value["column"]) == {"token_id", "bytes", "text", "special"}
    assert "records" not in warned(test)
    page = " ".join(str(block.proto.body) for block in test.get("html"))
    assert "takes some seconds to a minute" in page, "50 s on a machine that did other things"
    lacking = show(runs, "export", run="interrupted", table="speedup")
    assert not lacking.exception
    assert "timings" in warned(lacking)
    assert not show(runs, "export", run="torn", table="recorded: activity").exception


@pytest.mark.parametrize("rows", [2, 0])
def test_a_training_gives_what_it_has_recorded(show: Show, tmp_path: Path, rows: int) -> None:
    run = make_training(tmp_path / "a training", rows=rows, status="recording")
    test = show(tmp_path, "export", run="a training")
    assert not test.exception
    assert ["twell", "export", str(run.path)] in [shlex.split(element.value)[:3] for element in test.code]
    assert "The whole run" not in "".join(str(element.proto.body) for element in test.get("html"))
    assert not re.search("notebook|html|analysis", "".join(element.value for element in test.code))
    if rows:
        assert warned(test) == ""
        pd.testing.assert_frame_equal(test.dataframe[0].value, run.frame("training"))


def test_columns_of_a_second_relu_are_described(show: Show, made: ModuleType, tmp_path: Path) -> None:
    for name, used in (("two", True), ("one", False)):
        run = made.make(tmp_path / name, layers=3, sequences=20, up_relu=used)
        test = show(tmp_path, "export", run=name, table="recorded: activity")
        described = test.dataframe[1].value
        assert set(described["column"]) == set(run.frame("activity").columns)
        assert ("used_02" in set(described["column"])) == used
        assert (described["meaning"].str.len() > 10).all()


@pytest.mark.parametrize("table", ["by_token", "recorded: activity", "recorded: vocab", "recorded: examples"])
def test_saved_files_equal_the_table(watched: Any, made_run: Run, table: str) -> None:
    page = watched.page
    watched.open(f"/export?run=made&table={table}", '[data-testid="stDataFrame"]')
    saved = {}
    for name in ("CSV", "Parquet"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=f"Save as {name}").first.click()
        saved[name] = Path(waiting.value.path()).read_bytes()
    truth = by_token(made_run) if table == "by_token" else made_run.frame(table.removeprefix("recorded: "))
    read = pd.read_parquet(io.BytesIO(saved["Parquet"]))
    assert list(read.columns) == list(truth.columns)
    columns = [name for name in truth if name not in ("bytes", "window")]
    pd.testing.assert_frame_equal(read[columns], truth[columns], check_dtype=False)
    text = pd.read_csv(io.BytesIO(saved["CSV"]), keep_default_na=True)
    assert len(text) == len(truth)
    numeric = [name for name in columns if pd.api.types.is_numeric_dtype(truth[name])]
    pd.testing.assert_frame_equal(
        text[numeric].astype(float), truth[numeric].astype(float), check_dtype=False, rtol=1e-6, check_exact=False
    )
    watched.check()


def assert_images(bundles: list[dict[str, Any]]) -> None:
    """Expect a PNG, on which something is drawn, beside plotly's data of each figure, and of each passage."""
    figures = [data for data in bundles if cells.PLOTLY in data]
    passages = [data for data in bundles if cells.PNG in data and cells.PLOTLY not in data]
    assert len(figures) > 10 and len(passages) == PASSAGES
    for data in (*figures, *passages):
        with Image.open(io.BytesIO(base64.b64decode(data[cells.PNG]))) as image:
            assert image.width == WIDTH * SCALE
            assert len(image.convert("RGB").getcolors(1 << 24)) > 8


def test_the_whole_run_is_saved_in_each_form(watched: Any, made_run: Run) -> None:
    """The notebook's cells are valid code that names the run's folder, its figures images too, drawn without a network;
    the page asks nobody for anything."""
    pytest.importorskip("kaleido")
    page, saved = watched.page, {}
    watched.open("/export?run=made", '[data-testid="stDataFrame"]')
    for name in ("as notebook", "as one page", "every table"):
        with page.expect_download(timeout=120_000) as waiting:
            page.get_by_role("button", name=f"Save {name}").click()
        saved[name] = Path(waiting.value.path()).read_bytes()
    assert len(saved["as notebook"]) < 6_000_000
    code = [cell for cell in json.loads(saved["as notebook"])["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        compile("".join(cell["source"]), "cell", "exec")
    assert str(made_run.path.absolute()) in "".join(code[0]["source"])
    assert_images([output.get("data", {}) for cell in code for output in cell["outputs"]])
    document = saved["as one page"].decode()
    assert document.startswith("<!doctype html>")
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=(?!.data:image)", document)
    with zipfile.ZipFile(io.BytesIO(saved["every table"])) as archive:
        layers = pd.read_parquet(io.BytesIO(archive.read("made/by_layer.parquet")))
        assert {"made/by_token.parquet", "made/findings.parquet"} <= set(archive.namelist())
    pd.testing.assert_frame_equal(layers, by_layer(made_run), check_dtype=False)
    watched.check()
