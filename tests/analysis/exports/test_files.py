"""Files that tables are written to: what a CSV holds of columns that it has no type for."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from twell.analysis.exports.command import export
from twell.analysis.exports.files import replacing, write_table
from twell.workbench.errors import UserError
from twell.workbench.options import ExportOptions


def test_lists_of_a_csv_are_the_numbers_that_were_recorded(made: ModuleType, tmp_path: Path) -> None:
    """Neurons are whole numbers, as nothing can be indexed by 12.0; half floats are written as float32."""
    run = made.make(tmp_path / "run", sequences=4, fired=True)
    for name in ("fired", "examples"):
        export(ExportOptions(run=run.path, table=(name,), format="csv", out=tmp_path))
        read, recorded = pd.read_csv(tmp_path / f"{name}.csv"), run.frame(name)
        for column in {"neuron", "value", "window"} & {field for field in recorded if recorded[field].dtype == object}:
            for text, numbers in zip(read[column], recorded[column], strict=True):
                there = np.array(json.loads(text))
                assert there.dtype.kind == numbers.dtype.kind or not len(numbers) or not (there % 1).any(), column
                np.testing.assert_array_equal(there.astype(numbers.dtype), numbers)
                assert column != "neuron" or "." not in text


@pytest.mark.parametrize("type", [pa.float16(), pa.float32(), pa.float64()])
def test_what_is_not_finite_is_spelt_as_python_reads_it(tmp_path: Path, type: pa.DataType) -> None:
    rows = [[1.5, float("nan")], [], [float("-inf"), float("inf"), 2.0**-14]]
    lists = pa.chunked_array([pa.array(rows[:1], pa.list_(type)), pa.array([[0.0], *rows[1:]], pa.list_(type))[1:]])
    assert write_table([pa.table({"a": lists})], tmp_path / "a.csv", "csv") == 3
    read = [json.loads(text) for text in pd.read_csv(tmp_path / "a.csv")["a"]]
    for got, row in zip(read, rows, strict=True):
        np.testing.assert_allclose(got, row, rtol=1e-6)


def test_infinite_ends_of_a_json_are_read_back(tmp_path: Path) -> None:
    """As of an interval that has no upper end; the rest as json writes it."""
    rows = [
        {"a": 1.5, "b": [float("inf"), 2.0], "c": 'Infinity "é"', "d": True, "e": 2**40},
        {"a": float("-inf"), "b": [], "c": None, "d": False, "e": None},
        {"a": float("inf"), "b": None, "c": "", "d": None, "e": 0},
    ]
    assert write_table([pa.Table.from_pylist(rows)], tmp_path / "a.json", "json") == 3
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == rows
    assert pd.read_json(StringIO(text))["a"].tolist() == [1.5, -np.inf, np.inf]
    json.loads(text, parse_constant=pytest.fail)  # no constant that JSON does not know
    write_table([pa.table({"a": [float("nan")]})], tmp_path / "b.json", "json")
    assert json.loads((tmp_path / "b.json").read_text(encoding="utf-8")) == [{"a": None}]


def test_a_place_for_temporary_files_is_not_that_of_the_export(tmp_path: Path) -> None:
    """What DuckDB needs while a document is written is no fault of its path."""
    path = tmp_path / "a.html"
    with pytest.raises(UserError, match=r"a folder for temporary files, .* set TMPDIR"), replacing(path):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
    with pytest.raises(UserError, match=r"Expected to write .*a\.html, got No space left"), replacing(path):
        raise OSError(28, "No space left on device")
