"""data/BENCHMARKS.md, data/CLAIMS.md and the columns in data/README.md hold what is generated, and nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.copied_runs import copy_run
from support.rewritten import relisted

from twell.analysis.exports import benchmarks, pages
from twell.analysis.exports.bench_cases import cases, layer_sums
from twell.workbench.run.store import Run, open_run

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDED = pages.folder() / "recorded" / pages.RECORDED
WIDE = pages.folder() / "recorded" / pages.WIDE
PAGES = ("BENCHMARKS.md", "CLAIMS.md")


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return pages.pages()


def stale(folder: Path, generated: dict[str, str]) -> list[str]:
    """Return the names of the files that differ from what is generated."""
    return [name for name, text in generated.items() if (folder / name).read_text(encoding="utf-8") != text]


def test_the_pages_are_those_of_the_recorded_run(generated: dict[str, str]) -> None:
    assert stale(pages.folder(), generated) == [], "run `make docs`"


def test_energy_says_how_often_it_was_read(generated: dict[str, str]) -> None:
    watts = pd.concat(pd.read_parquet(path) for path in (RECORDED / "timings").glob("*.parquet"))
    read = watts.query("op == 'model_sparse'")["watts"].notna().sum()
    assert read == 1 and "less energy (readings: 1)" in generated["BENCHMARKS.md"]


@pytest.mark.parametrize("name", PAGES)
def test_a_changed_figure_is_noticed(name: str, generated: dict[str, str], tmp_path: Path) -> None:
    """Whichever digit of a table changes, the page is stale."""
    for each in generated:
        shutil.copy(pages.folder() / each, tmp_path)
    text = generated[name]
    rows = [match.start() for match in re.finditer(r"^\|.*\d", text, re.MULTILINE)]
    for start in (rows[1], rows[len(rows) // 2], rows[-1]):
        place = next(match.start() for match in re.compile(r"\d").finditer(text, start))
        changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        (tmp_path / name).write_text(changed, encoding="utf-8")
        assert stale(tmp_path, generated) == [name]


def test_a_changed_record_changes_the_page(generated: dict[str, str], tmp_path: Path) -> None:
    """The figures come from the record: a bench with another time of dense gives other ratios."""
    copy_run(RECORDED, tmp_path / RECORDED.name)
    path = tmp_path / RECORDED.name / "bench.parquet"
    table = pq.read_table(path)
    frame = table.to_pandas()
    frame.loc[(frame["op"] == "ffn_dense") & (frame["metric"] == "microseconds"), "value"] *= 0.5
    pq.write_table(pa.Table.from_pandas(frame, schema=table.schema, preserve_index=False), path)
    page = benchmarks.page(relisted(open_run(path.parent), "bench"), open_run(WIDE))
    assert "267 cases. None of them" in generated["BENCHMARKS.md"]
    assert "267 cases. None of them" not in page


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(RECORDED)


def test_ratios_are_dense_over_sparse_of_one_case(run: Run) -> None:
    """Recomputed figure by figure from the table, without the code that the page uses."""
    bench = run.frame("bench")
    times = bench[bench["metric"] == "microseconds"].set_index(["case", "kernel", "op"])["value"]
    frame = cases(run).set_index(["case", "kernel"])
    for case, whole in (("fully dense, 8 rows", True), ("layer 0 on text", True), ("recorded layer 3", False)):
        ops = ["ffn_sparse"] if whole else ["gate", "up_down"]
        took = sum(times[case, "hopper", op] for op in ops)
        assert frame.loc[(case, "hopper"), "ratio"] == pytest.approx(times[case, "torch", "ffn_dense"] / took)


def test_another_models_cases_and_errors_of_nothing_are_left_out(run: Run) -> None:
    """Of FFNs of another width; and where dense has no error, as nothing fires, no other is so many times as great."""
    bench = run.frame("bench")
    exact = (bench["case"] == "layer 0 on text") & (bench["op"] == "ffn_dense") & (bench["metric"] == "error_max")
    changed = pd.concat(
        [bench.assign(value=bench["value"].where(~exact, 0.0)), bench.assign(d_ff=7, case="of another width")]
    )
    frame, expected = cases(cast(Run, SimpleNamespace(d_ff=run.d_ff, frame=lambda _: changed))), cases(run)
    assert exact.sum() == 1 and expected.loc[expected["case"] == "layer 0 on text", "error_max"].notna().all()
    expected.loc[expected["case"] == "layer 0 on text", "error_max"] = np.nan
    pd.testing.assert_frame_equal(frame, expected)


def test_layers_are_added_before_they_are_divided() -> None:
    common = {"input": "text", "rows": 8, "weights": "cold", "graph": True, "repeats": 30}
    rows = [common | {"layer": n, "dense_us": 10.0, "sparse_us": us, "ratio": 10 / us} for n, us in enumerate((5, 15))]
    (sums,) = layer_sums(pd.DataFrame(rows)).to_dict("records")
    assert (sums["ratio"], sums["low"], sums["high"], sums["layers"]) == (1.0, 10 / 15, 2.0, 2)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str, generated: dict[str, str]) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", generated[name])
    assert links
    assert [link for link in links if not (pages.folder() / link).exists()] == []


RESULTS = re.findall(r"^\|([^|]+)\|([^|]+)\|[^|]*BENCHMARKS[^|]*\|$", README, re.MULTILINE)


@pytest.mark.parametrize("row", RESULTS, ids=lambda row: row[0].strip())
def test_figures_of_the_readme_stand_on_the_page_that_it_names(row: tuple[str, str], generated: dict[str, str]) -> None:
    """Each number of a result whose source is BENCHMARKS.md; small whole numbers prove nothing and are left out."""
    figures = [figure for figure in re.findall(r"\d[\d,.]*\d", row[1])]
    assert figures
    assert [
        figure for figure in figures if not re.search(rf"(?<!\d){re.escape(figure)}(?!\d)", generated["BENCHMARKS.md"])
    ] == []


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert README.count("\n") <= 120
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_path_of_the_readme_is_there() -> None:
    """Files and rooms in the folders' table and in "Where to change what"; those to be added are in italics."""
    named = re.findall(r"`((?:kernels|workbench|analysis|app|tests|data)/[\w./]*)`", README)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
