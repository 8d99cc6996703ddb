"""A run that is used without its damaged parts answers as one that never had them, and says what it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import synthetic_runs
from support.fuzz import run_questions
from support.rewritten import relisted

import twell.analysis as analysis
from twell.analysis.memo import memo_scope
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import CompareOptions, ExportOptions, SummarizeOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter

SHAPE = synthetic_runs.Shape(d_ff=64, vocab=60, sequences=48, length=40, parts=3, fired=True, bench=True)
NUMBER = 1  # of the part that is damaged
SKIPPED = run_questions.SLOW - {"overview"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three parts, summarised."""
    run = synthetic_runs.make(tmp_path_factory.mktemp("whole") / "run", SHAPE)
    analysis.ensure(run)
    return run


@pytest.fixture(scope="module")
def rest(whole: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run, recorded without the tokens of one part."""
    path, losses = tmp_path_factory.mktemp("rest") / "run", np.zeros(0)
    writer = RunWriter(path, synthetic_runs.manifest(SHAPE, "run"))
    for part in whole.manifest.parts:
        if part.number != NUMBER and part.table != "examples":
            rows = pq.ParquetFile(whole.path / part.file).read()
            writer.add(part.table, rows)
            if part.table == "activity":
                losses = np.append(losses, pa.compute.drop_null(rows["loss"]).to_numpy().astype(np.float64))
    writer.finish(COMPLETE, loss_sum=float(losses.sum()), loss_tokens=len(losses))
    return open_run(path)


def damaged(whole: Run, folder: Path, file: str) -> Path:
    """Return the folder of a copy of a run in which a bit of a file is flipped."""
    shutil.copytree(whole.path, folder / "run")
    data = bytearray((folder / "run" / file).read_bytes())
    data[len(data) // 2] ^= 8
    (folder / "run" / file).write_bytes(data)
    return folder / "run"


def answer(run: Run, question: str) -> Any:
    """Return an answer, or Missing in its place."""
    try:
        return run_questions.ALL[question](run)
    except Missing as reason:
        return type(reason)


def test_answers_are_those_of_the_rest(whole: Run, rest: Run, tmp_path: Path) -> None:
    file = f"tiles/part-{NUMBER:05d}.parquet"
    run = open_run(damaged(whole, tmp_path, file), without_damaged=True)
    for question in run_questions.ALL.keys() - SKIPPED:
        expected, got = answer(rest, question), answer(run, question)
        if isinstance(got, dict) and question not in run_questions.WITHOUT_WORDS:
            assert file in got.pop("left_out")
        elif question not in run_questions.WITHOUT_WORDS and got is not Missing:
            assert file in got.attrs["left_out"], question
        if question == "overview":
            expected, got = ({**numbers, "missing": list(numbers["missing"])} for numbers in (expected, got))
        assert not run_questions.difference(expected, got), question
    assert (run.manifest.tokens, run.manifest.sequences) == (rest.manifest.tokens, rest.manifest.sequences)
    assert run.manifest.loss == pytest.approx(rest.manifest.loss, rel=1e-12)
    assert file in repr(run) and file in run._repr_html_()


@pytest.mark.parametrize("table", ["activity", "neurons", "value_bins"])
def test_values_are_those_of_the_tokens_that_are_left(table: str, whole: Run, rest: Run, tmp_path: Path) -> None:
    """The firings of each neuron by their value add up to those of the same tokens, whichever file is damaged."""
    run = open_run(damaged(whole, tmp_path, f"{table}/part-{NUMBER:05d}.parquet"), without_damaged=True)
    values = analysis.neuron_histogram(run)
    assert values.equals(analysis.neuron_histogram(rest))
    fires = analysis.by_neuron(run).query("fires > 0").set_index(["layer", "neuron"])["fires"]
    assert values.groupby(["layer", "neuron"])["fires"].sum().to_dict() == fires.to_dict()


def test_nothing_is_left_out_unasked(whole: Run, tmp_path: Path) -> None:
    path = damaged(whole, tmp_path, "activity/part-00001.parquet")
    mean = analysis.by_layer(whole)["mean"]
    without = analysis.by_layer(open_run(path, without_damaged=True))
    run = open_run(path)
    with pytest.raises(UserError, match=r"part-00001.*--without-damaged"):
        run.frame("activity")
    with memo_scope():  # the summaries of the whole run are still there, and are its own
        assert analysis.by_layer(run)["mean"].equals(mean) and not run.left_out
        assert analysis.by_layer(open_run(path, without_damaged=True))["mean"].equals(without["mean"])
    assert not without["mean"].equals(mean)
    assert not open_run(whole.path, without_damaged=True).left_out


def test_a_table_that_stands_alone_is_left_out_alone(whole: Run, tmp_path: Path) -> None:
    path = damaged(whole, tmp_path, "timings/part-00000.parquet")
    run = open_run(path, without_damaged=True)
    assert run.manifest.tokens == whole.manifest.tokens and run.has("examples") and not run.has("timings")
    with pytest.raises(Missing, match=r"timings/part-00000\.parquet differs from its checksum"):
        analysis.speedup(run)
    assert "timings" in analysis.by_layer(run).attrs["left_out"]


def test_a_run_in_which_nothing_fires_says_so_without_its_timings(tmp_path: Path) -> None:
    """All neurons are dead in what is left, as they are in the whole run."""

    def nothing(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {name: np.zeros_like(columns[name]) for name in nnz_columns(4)}

    made = synthetic_runs.make(tmp_path / "none", sequences=4, parts=1, change=nothing)
    manifests.update(made.path, options={"probes": "all"})
    (made.path / "timings/part-00000.parquet").unlink()
    run = open_run(made.path, without_damaged=True)
    assert run.left_out
    assert analysis.by_layer(run)["dead"].fillna(0).tolist() == [run.d_ff] * run.layers
    with pytest.raises(Missing, match="no neuron fired"):
        analysis.neuron_histogram(run)


def test_commands_say_it(whole: Run, rest: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = "neurons/part-00001.parquet"
    path = damaged(whole, tmp_path, file)
    table = analysis.export(ExportOptions(run=path, table=("by_neuron",), out=tmp_path / "n.csv", without_damaged=True))
    assert table and file in capsys.readouterr().out
    analysis.summarize(SummarizeOptions(runs=(path,), summary_only=tmp_path / "copy", without_damaged=True))
    assert file in capsys.readouterr().out
    copy = open_run(tmp_path / "copy")  # which says so itself, whoever opens it
    assert file in analysis.by_layer(copy).attrs["left_out"]
    assert analysis.by_layer(copy)["mean"].equals(analysis.by_layer(rest)["mean"])
    together = analysis.compare_runs([whole, open_run(path, without_damaged=True)])
    assert not together.attrs["comparable"] and file in together.attrs["note"]
    from twell.analysis.compare import compare

    compare(CompareOptions(runs=(whole.path, path), without_damaged=True))
    assert file in capsys.readouterr().out


def test_a_run_without_any_whole_part(whole: Run, tmp_path: Path) -> None:
    path = damaged(whole, tmp_path, "activity/part-00000.parquet")
    for number in (1, 2):
        (path / f"sequences/part-{number:05d}.parquet").unlink()
    run = open_run(path, without_damaged=True)
    assert run.manifest.tokens == 0
    with pytest.raises(Missing, match=r"holds no rows of single tokens without its damaged parts.*is missing"):
        analysis.by_layer(run)


def test_losses_that_went_are_missed(whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "run")
    path = tmp_path / "run" / "activity" / "part-00002.parquet"
    rows = pq.ParquetFile(path).read()
    pq.write_table(rows.set_column(rows.schema.names.index("loss"), "loss", pa.nulls(len(rows), pa.float16())), path)
    run = relisted(open_run(tmp_path / "run"), "activity")
    with pytest.raises(UserError, match=r"part-00002.*where the manifest counts"):
        run.frame("activity")
    assert "activity/part-00002.parquet" in open_run(run.path, without_damaged=True).left_out


def test_a_part_that_other_software_wrote(whole: Run, tmp_path: Path) -> None:
    """Without a null its columns may be nullable, and its text large; with a null in place of a list it is refused."""
    shutil.copytree(whole.path, tmp_path / "run")
    path = tmp_path / "run" / "sequences" / "part-00001.parquet"
    rows = pq.ParquetFile(path).read()
    columns = {name: rows[name] for name in rows.schema.names}
    pq.write_table(pa.table({**columns, "source": rows["source"].cast("large_string")}), path)
    run = relisted(open_run(tmp_path / "run"), "sequences")
    assert run.frame("sequences").equals(whole.frame("sequences"))
    assert run.rows("sequences", [("tokens", ">", 1)]).num_rows == whole.manifest.sequences
    path = run.path / "fired" / "part-00001.parquet"
    rows = pq.ParquetFile(path).read()
    values = pa.nulls(len(rows), rows["value"].type)
    pq.write_table(rows.set_column(rows.schema.names.index("value"), "value", values), path)
    with pytest.raises(UserError, match="has nulls in value"):
        relisted(run, "fired").frame("fired")
