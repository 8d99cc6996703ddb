"""Some cases of the fuzzer of damaged runs: no traceback, and never another number in silence."""

from __future__ import annotations

from pathlib import Path

from support.fuzz import FAILED, REFUSED, SAME, damage


def test_damaged_runs(tmp_path: Path) -> None:
    """Each failure is run again by `python -m support.fuzz damage --only NUMBER --seed 0`, with all questions."""
    case = damage.cases(tmp_path, seed=0, asked=4)
    outcomes = [(number, outcome) for number in range(120) for outcome in case(number)]
    assert [(number, outcome) for number, outcome in outcomes if outcome.kind == FAILED] == []
    assert {SAME, REFUSED} <= {outcome.kind for _, outcome in outcomes}


def test_a_difference_is_seen(tmp_path: Path) -> None:
    """The fuzzer fails where a run answers otherwise: one whose file was listed anew after a value was changed."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from support import synthetic_runs
    from support.fuzz import run_questions
    from support.rewritten import relisted

    run = synthetic_runs.make(tmp_path / "run", damage.SHAPE)
    expected = run_questions.ALL["sql counts"](run)
    path = run.path / "activity" / "part-00000.parquet"
    table = pq.read_table(path, partitioning=None)
    counts = table["nnz_01"].to_numpy().copy()
    counts[3] += 1
    place = table.schema.names.index("nnz_01")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(counts)), path)
    answer = run_questions.ALL["sql counts"](relisted(run, "activity"))
    assert run_questions.difference(expected, expected) == ""
    assert "different" in run_questions.difference(expected, answer)
