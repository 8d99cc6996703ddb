"""What ablations do to the loss: sums and intervals from rows that were made, and a run without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.planted_effects import coverage, rows_of

from twell.analysis import effects
from twell.analysis.ablations.by_condition import SUMS, clustered, lines
from twell.workbench.ablations.appended import append
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run, open_run


def added(run: Run, study: int, **given: Any) -> Run:
    append(run.path, "effects", rows_of(np.random.default_rng(study), study=study, **given)[0], effects=[])
    return open_run(run.path)


def test_changes_are_sums_by_document(small: Run) -> None:
    run = added(small, 0, condition="dead", kind="dead")
    run = added(run, 1, documents=45)
    run = added(run, 2, documents=45, condition="weakest:0.5", share=0.5)
    table = effects(run).set_index("condition")
    rows = run.frame("effects")
    assert list(table.index) == ["dead", "weakest:0.5"]  # in the order of kinds; the later of two studies of one
    assert table.loc["weakest:0.5", "study"] == 2
    last = rows[rows["study"] == 2]
    n, y = last["tokens"].to_numpy(), (last["loss_sum"] - last["base_sum"]).to_numpy()
    mean = y.sum() / n.sum()
    assert table.loc["weakest:0.5", "change"] == pytest.approx(mean, rel=1e-12)
    kish = n.sum() ** 2 / (n**2).sum()
    error = np.sqrt(kish / (kish - 1) * ((y - mean * n) ** 2).sum()) / n.sum()
    assert 1.6 * error < table.loc["weakest:0.5", "high"] - mean < 4 * error
    assert 1.2 * error < mean - table.loc["weakest:0.5", "low"] < 2.5 * error
    assert table.loc["weakest:0.5", "kept"] == pytest.approx(last["firings"].sum() / last["base_firings"].sum())
    assert set(effects(run, study=1)["study"]) == {1}
    assert "weakest:0.5" in "\n".join(lines(effects(run)))
    with pytest.raises(UserError, match="a study of"):
        effects(run, study=7)


def test_one_document_has_no_interval_and_losses_that_are_not_finite_are_left_out(small: Run) -> None:
    columns, _ = rows_of(np.random.default_rng(0), documents=5)
    columns["loss_sum"][1] = np.nan
    columns["document"][1] = columns["document"][0]  # whose other rows are left out with that one
    columns["piece"] = np.zeros(5, int)
    append(small.path, "effects", columns)
    row = effects(open_run(small.path)).iloc[0]
    assert (row["documents"], row["left_out"]) == (3, 1) and np.isfinite(row["change"])
    columns, _ = rows_of(np.random.default_rng(0), study=1, documents=1)
    append(small.path, "effects", columns)
    assert np.isnan(effects(open_run(small.path), study=1).iloc[0]["low"])


@pytest.mark.parametrize(("documents", "clusters"), [(3, 6), (45, 45)])
def test_long_documents_count_in_pieces_where_there_are_few(documents: int, clusters: int) -> None:
    numbers = np.arange(2 * documents)
    rows = pd.DataFrame(dict.fromkeys(SUMS, numbers) | {"source": "a", "document": numbers // 2, "piece": numbers % 2})
    assert len(clustered(rows)) == clusters


def test_a_run_without_ablations_says_so(small: Run) -> None:
    with pytest.raises(Missing, match="twell ablate"):
        effects(small)


def test_intervals_hold_planted_changes(tmp_path: Path) -> None:
    """At a coverage of 95 %, under 23 of 30 once in 20 000 times; more: `python -m support.planted_effects 1000`."""
    assert coverage(30) >= 23 / 30
