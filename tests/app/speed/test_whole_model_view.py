"""The Kernels page on the whole model: the figures of the recorded run, and nothing for runs that timed none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup, notices

from twell.analysis.exports import pages
from twell.workbench.bench.table import Sheet
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]
SPACE = "\u202f"
RECORDED = pages.folder() / "recorded"


@pytest.fixture
def shown(show: Show) -> AppTest:
    return show(RECORDED, "kernels", run=pages.WIDE)


def table_of(test: AppTest) -> Any:
    """Return the element of the table of whole models."""
    (table,) = [each for each in test.dataframe if "operation" in each.value]
    return table


def figures(run: Run) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return rows of `bench` by case, operation without its side, side and metric."""
    found = {}
    for row in run.arrow("bench").to_pylist():
        words = row["op"].split("_")
        if words[0] in ("whole", "generate", "step"):
            (side,) = {"dense", "sparse"} & set(words)
            case = row["case"].removeprefix("whole model").strip(" ,").replace(",0", f"{SPACE}0")
            found[case, ", ".join(word for word in words if word != side), f"{side} {row['metric']}"] = row
    return found


def rate(row: dict[str, Any]) -> str:
    return "{} ({} to {})".format(*(f"{row[end]:,.0f}".replace(",", SPACE) for end in ("value", "low", "high")))


def test_the_page_shows_the_whole_model_of_the_recorded_run(shown: AppTest) -> None:
    """Recomputed from the rows of its bench, without the code that the page uses."""
    assert not shown.exception
    measured, table = figures(open_run(RECORDED / pages.WIDE)), table_of(shown).value
    keys = {(case, operation) for case, operation, _ in measured}
    assert set(zip(table["case"], table["operation"], strict=True)) == keys and len(table) == len(keys) == 13
    for row in table.to_dict("records"):
        key = (row["case"], row["operation"])
        of = {name: figure for (*about, name), figure in measured.items() if (*about,) == key}
        for side in ("dense", "sparse"):
            assert row[f"{side}, tokens/s"] == rate(of[f"{side} tokens_per_second"])
        dense, sparse = of["dense microseconds"], of["sparse microseconds"]
        assert float(row["× dense"].strip(f"{SPACE}×")) == pytest.approx(dense["value"] / sparse["value"], rel=5e-3)
        joules = [of.get(f"{side} millijoules_per_token", {}).get("value") for side in ("dense", "sparse")]
        if None in joules:
            assert pd.isna(row["energy a token"])
        else:
            low, high, share = (f"{joules[0]:#.3g}", f"{joules[1]:#.3g}", 100 - 100 * joules[1] / joules[0])
            said = f"{low.rstrip('.')} to {high.rstrip('.')} mJ (−{share:.0f}{SPACE}%)"
            assert row["energy a token"] == said


def test_ratios_are_bold_where_the_turns_tell_and_the_caption_says_so(shown: AppTest) -> None:
    wide = open_run(RECORDED / pages.WIDE)
    table, measured = table_of(shown), figures(wide)
    told = []
    for number, row in enumerate(table.value.to_dict("records")):
        key = (row["case"], row["operation"])
        dense, sparse = (measured[*key, f"{side} microseconds"] for side in ("dense", "sparse"))
        if dense["low"] > sparse["high"] or sparse["low"] > dense["high"]:
            told.append(f"row{number}_col{list(table.value).index('× dense')}")
    cells, _, style = table.proto.arrow_data.styler.styles.partition("{")
    assert re.findall(r"row\d+_col\d+", cells) == told and len(told) == 10
    assert re.sub(r"\s", "", style) == "font-weight:bold}"
    html = markup(shown)
    commit = wide.arrow("bench")["commit"][0].as_py()
    assert "Medians of 7 turns" in html and f"NVIDIA H200, bfloat16, commit {commit}" in html
    assert "bold where the turns of the two sides do not overlap. Where they do" in html
    assert "The host sets its pace" in html


def test_a_run_without_whole_models_shows_no_such_section(show: Show, runs: Path) -> None:
    for folder, name in ((runs, "made"), (RECORDED, pages.RECORDED)):
        test = show(folder, "kernels", run=name)
        assert not test.exception
        assert "Whole model" not in markup(test) and not len(test.dataframe)
        assert "whole model" not in notices(test)


def test_a_bench_of_whole_models_alone_is_shown(show: Show, runs: Path) -> None:
    """`twell bench MODEL --whole --out RUN` is all that was measured: no layer, nor synthetic input."""
    run = open_run(runs / "made")
    about = {"d_model": 64, "d_ff": run.d_ff, "dtype": "float32", "weights": "warm", "tile": 256, "compression": 8}
    about |= {"device": "made", "commit": "0", "ffn": "gated", "graph": False, "repeats": 7, "input": "text"}
    about |= {"layer": -1, "rows": 64, "nnz_mean": 9.0, "case": "whole model on text, 64 rows"}
    rows = []
    for op, kernel, took in (("whole_dense", "torch", 300.0), ("whole_sparse", "cpu", 200.0)):
        for metric, unit, at in (("microseconds", "µs", took), ("tokens_per_second", "tokens/s", 64e6 / took)):
            measured = {"op": op, "kernel": kernel, "metric": metric, "unit": unit, "value": at, "low": at, "high": at}
            rows.append(about | measured)
    Sheet(run.path).add(rows)
    test = show(runs, "kernels", run="made")
    assert not test.exception
    assert table_of(test).value["× dense"].tolist() == [f"1.50{SPACE}×"]
    assert "Measured side by side" not in markup(test)
