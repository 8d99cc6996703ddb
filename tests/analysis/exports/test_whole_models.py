"""The table of whole models on the page of benchmarks: both sides, their turns, and what they leave open."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from twell.analysis.exports import pages, whole_models
from twell.data.recorded import ship
from twell.workbench.run.store import Run, open_run

Figures = dict[tuple[str, str], dict[str, Any]]  # a row of `bench` by operation and metric


@pytest.fixture(scope="module")
def wide() -> Run:
    return open_run(pages.folder() / "recorded" / pages.WIDE)


@pytest.fixture(scope="module")
def page() -> str:
    return pages.pages()["BENCHMARKS.md"]


def test_a_row_is_bold_where_the_turns_tell_and_without_energy_where_none_was_measured() -> None:
    figures = {"nnz_mean": 12.0, "speedup": 1.5}
    figures |= {"dense_tokens": 2000.0, "dense_tokens_low": 1900.0, "dense_tokens_high": 2100.0}
    figures |= {"sparse_tokens": 3000.0, "sparse_tokens_low": 2900.0, "sparse_tokens_high": 3100.0}
    told = {"case": "on text", "operation": "whole, compiled", "apart": True, "energy_change": -0.25}
    untold = {"case": "on text", "operation": "step", "apart": False, "energy_change": math.nan}
    rates = ["2,000 (1,900 to 2,100)", "3,000 (2,900 to 3,100)"]
    assert whole_models.whole_models(pd.DataFrame([told | figures, untold | figures])) == [
        ["on text", "whole, compiled", "12.0", *rates, "**1.50**", "-25 %"],
        ["on text", "step", "12.0", *rates, "1.50", "–"],
    ]


def table_of(page: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of the page's table of whole models by case and operation."""
    lines = page.partition("| case | operation |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(case, operation): rest for case, operation, *rest in cells}


def figures_of(run: Run, case: str) -> Figures:
    rows = run.arrow("bench").to_pylist()
    return {(row["op"], row["metric"]): row for row in rows if row["case"].endswith(case)}


def expected(figures: Figures, dense: str, sparse: str) -> tuple[list[str], float, bool]:
    """Return the tokens a second of both sides as the page has them, × dense, and whether the turns are apart."""
    rates = [figures[op, "tokens_per_second"] for op in (dense, sparse)]
    shown = [f"{row['value']:,.0f} ({row['low']:,.0f} to {row['high']:,.0f})" for row in rates]
    times = [figures[op, "microseconds"] for op in (dense, sparse)]
    apart = times[0]["low"] > times[1]["high"] or times[1]["low"] > times[0]["high"]
    return shown, times[0]["value"] / times[1]["value"], apart


PASSES, DECODING = ("whole", "whole, compiled"), ("generate", "generate, graphed", "step")
CASES = {
    "on text, 131,072 rows": PASSES,
    "on uniform ids, 131,072 rows": PASSES,
    "decoding 1 sequence": DECODING,
    "decoding 8 sequences": DECODING,
    "decoding 64 sequences": DECODING,
}
OPS = {
    "whole": ("whole_dense", "whole_sparse"),
    "whole, compiled": ("whole_dense_compiled", "whole_sparse_compiled"),
    "generate": ("generate_dense", "generate_sparse"),
    "generate, graphed": ("generate_graphed_dense", "generate_graphed_sparse"),
    "step": ("step_dense", "step_sparse"),
}


def test_the_page_has_the_whole_model_of_the_recorded_run(wide: Run, page: str) -> None:
    """Recomputed from the rows of the run's bench, without the code that the page uses."""
    shown = table_of(page)
    assert shown.keys() == {(case, operation) for case, operations in CASES.items() for operation in operations}
    for (case, operation), (nnz, dense, sparse, ratio, energy) in shown.items():
        figures, (of_dense, of_sparse) = figures_of(wide, case), OPS[operation]
        rates, times_dense, apart = expected(figures, of_dense, of_sparse)
        assert [dense, sparse] == rates, (case, operation)
        assert ratio == (f"**{times_dense:.2f}**" if apart else f"{times_dense:.2f}"), (case, operation)
        assert nnz == f"{figures[of_sparse, 'microseconds']['nnz_mean']:.1f}"
        joules = [figures.get((op, "millijoules_per_token"), {}).get("value", math.nan) for op in OPS[operation]]
        less = "–" if math.isnan(sum(joules)) else f"{100 * (joules[1] / joules[0] - 1):+.0f} %"
        assert energy == less, (case, operation)


def test_the_page_says_where_the_turns_do_not_tell(page: str) -> None:
    """Eager generation waits for the host, whose turns differ: no ratio of it is bold, and all others are."""
    bold = {key: cells[3].startswith("**") for key, cells in table_of(page).items()}
    assert {operation for (_, operation), told in bold.items() if not told} == {"generate"}
    assert sum(not told for told in bold.values()) == 3
    assert "it is bold where the turns of the two sides do not overlap" in page.replace("\n", " ")


def test_the_section_names_its_run_model_and_layers(wide: Run, page: str) -> None:
    section = page.partition("\n## A whole model of 28 layers")[2].partition("\n## ")[0]
    model = wide.manifest.model
    for fact in (f"`{wide.name}`", wide.manifest.device, f"{model['parameters']:,}", "28 layers of 2048 × 5632"):
        assert fact in section
    assert "trained for a minute" in section and "--out paper-28x2048 --minutes 1.2\n" in str(ship.__doc__)
    totals = {
        op: sum(
            row["value"]
            for row in wide.arrow("bench").to_pylist()
            if (row["op"], row["metric"]) == (op, "microseconds") and row["layer"] >= 0
        )
        for op in ("ffn_dense", "ffn_sparse")
    }
    assert f"**{totals['ffn_dense'] / totals['ffn_sparse']:.2f} ×**" in section
    assert f"`{wide.name}` where it is named" in page
