"""`twell check`: every row of a run, its tables against each other, its summaries against its parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rewritten import forget_checksums, relisted

from twell.analysis import ensure, summarize
from twell.analysis.checks.command import check
from twell.workbench.errors import UserError
from twell.workbench.options import CheckOptions, SummarizeOptions
from twell.workbench.run.store import Run, open_run


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a Parquet file anew."""
    pq.write_table(change(pq.read_table(path, partitioning=None)), path)


def plus_one(column: str) -> Callable[[pa.Table], pa.Table]:
    """Return a change of a table: one more in the first row of a column."""

    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_numpy().copy()
        values[0] += 1
        field = table.schema.field(column)
        return table.set_column(table.schema.names.index(column), field, pa.array(values, field.type))

    return change


def without_first(table: pa.Table, column: str) -> pa.Table:
    """Return a table without the first value of a column."""
    field, values = table.schema.field(column), table[column].to_pylist()
    return table.set_column(table.schema.names.index(column), field, pa.array([None, *values[1:]], field.type))


def sentences(capsys: pytest.CaptureFixture[str], run: Run) -> list[str]:
    """Return the faults that the command prints of a run; they are as many as its error says."""
    with pytest.raises(UserError, match=r"^Expected whole runs, got (a fault|\d+ faults): copy what is damaged"):
        check(CheckOptions(runs=(run.path,)))
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.endswith(".") and not line.startswith(" ")]


def test_a_whole_run_and_its_copy(small: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    capsys.readouterr()
    assert check(CheckOptions(runs=(small.path, tmp_path / "copy"))) == []
    printed = capsys.readouterr().out
    assert "activity" in printed and "1,170 rows" in printed
    assert "damaged" not in printed


def test_two_damaged_parts_are_two_sentences(small: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (small.path / "tiles" / "part-00001.parquet").write_bytes(b"PAR1")
    (small.path / "vocab.parquet").unlink()
    assert sentences(capsys, small) == [
        "vocab.parquet is missing.",
        "tiles/part-00001.parquet differs from its checksum in the manifest.",
    ]


@pytest.mark.parametrize(
    ("table", "change", "expected"),
    [
        ("neurons", plus_one("fires"), "firings in layer 0, and its unflagged tokens"),
        ("sequences", plus_one("tokens"), "sequences of .* are not those that its activity table holds"),
        ("activity", plus_one("position"), "position twice"),
        ("activity", lambda table: without_first(table, "entropy"), "has a loss without an entropy"),
        ("neurons", lambda table: pa.concat_tables([table, table.slice(0, 1)]), "has a neuron twice"),
    ],
)
def test_rows_that_do_not_agree(
    small: Run, capsys: pytest.CaptureFixture[str], table: str, change: Callable[[pa.Table], pa.Table], expected: str
) -> None:
    """Also where the file is listed as it is now."""
    rewrite(small.path / table / "part-00000.parquet", change)
    (sentence,) = sentences(capsys, relisted(small, table))
    assert re.search(expected, sentence), sentence


def test_a_summary_that_its_parts_do_not_add_up_to(small: Run, capsys: pytest.CaptureFixture[str]) -> None:
    ensure(small)
    rewrite(small.summary_path("tokens"), plus_one("nnz_sum"))
    (sentence,) = sentences(capsys, forget_checksums(open_run(small.path)))
    assert "tokens of" in sentence and "is not what its parts add up to" in sentence


def test_a_run_that_cannot_be_opened_is_one_sentence(small: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it is the error; beside others each is printed, and no parts are left that could be used."""
    (small.path / "run.json").write_text("{")
    missing = small.path / "nowhere"
    for path, sentence in ((small.path, "Expected a readable manifest"), (missing, "Expected a run in")):
        with pytest.raises(UserError, match=f"^{sentence}"):
            check(CheckOptions(runs=(path,)))
        assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match=r"got 2 faults: copy what is damaged again from where it was recorded\.$"):
        check(CheckOptions(runs=(small.path, missing)))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_folder_of_runs_is_told_how_to_be_checked(small: Run) -> None:
    folder = small.path.parent
    with pytest.raises(
        UserError, match=re.escape(f"Expected a run in {folder}, found a folder of runs: give {folder}/*")
    ):
        check(CheckOptions(runs=(folder,)))
