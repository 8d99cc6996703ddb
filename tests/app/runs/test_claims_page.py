"""Page Findings: every claim with its verdict, who told it, and the studies."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from streamlit.testing.v1 import AppTest
from support.page_elements import markup
from support.rewritten import relisted
from support.synthetic_training import ROWS, make_training

from twell.analysis.claims.claim import scope
from twell.analysis.claims.whole import whole_claim
from twell.analysis.shipped import findings_at_hand
from twell.app.ui.formatting import typeset
from twell.workbench.run.store import Run, open_run

PEAK = "Peak training memory falls by 19 to 28 %, up to 1.5 B."
Show = Callable[..., AppTest]


def test_every_claim_stands_there_with_its_verdict(show: Show, runs: Path, made_run: Run) -> None:
    shown = markup(show(runs, "findings", run="made"))
    frame = findings_at_hand(made_run)
    for row in frame.itertuples():
        assert html.escape(typeset(row.claim)) in shown
    counts = frame["verdict"].value_counts()
    assert shown.count('class="tw-verdict yes">holds<') == counts["holds"]
    assert shown.count('class="tw-verdict part">holds in part<') == counts["holds in part"]
    assert shown.count('class="tw-verdict no"') == counts.get("does not hold", 0) + counts.get("reversed", 0)
    verdicts = [text for text in re.findall(r'class="tw-verdict \w+">([^<]+)<', shown) if text in counts.index]
    order = ("holds", "holds in part", "does not hold", "reversed", "cannot be told")
    assert verdicts == sorted(verdicts, key=order.index), "what holds comes first"
    lines = shown.split('class="tw-verdicts"')[1].split('class="tw-claims"')[0]
    measured = frame[frame["this_run"] != ""]
    assert lines.count("<div>") == len(measured) > 10, "a line a claim that was measured, above the cards"
    for row in measured.itertuples():
        assert html.escape(typeset(row.this_run)) in lines and f">{row.verdict}</span>" in lines
    own = (frame["this_run"] != "") & (frame["scope"] == scope(made_run))
    assert shown.count("data:image/svg+xml") >= own.sum() - 1
    assert "<code>twell train --config" in shown, "what would tell"
    whole = whole_claim(frame, scope(made_run))
    assert f", <b>{whole.verdict}</b>: of its 6 parts" in shown.split("tw-verdicts")[0]


def test_claims_that_other_runs_tell_name_them(show: Show, made: ModuleType, tmp_path: Path) -> None:
    """The trainings that ship, and those of the folder; what the run itself says stays what it is alone."""
    run = made.make(tmp_path / "mine", sequences=20)
    alone = findings_at_hand(run).set_index("claim")
    assert alone.loc[PEAK, "scope"] == "h200-28x2048-training"
    shipped = alone["verdict"][alone["scope"] != scope(run)]
    assert (shipped != "cannot be told").sum() >= 3
    shown = markup(show(tmp_path, "findings", run="mine"))
    assert "Told by h200-28x2048-training." in shown and "can be told by other runs" in shown
    lines = shown.split('class="tw-verdicts"')[1].split('class="tw-claims"')[0]
    assert lines.count(">other runs: ") == ((alone["this_run"] != "") & (alone["scope"] != scope(run))).sum() > 0
    hold = alone["scope"][alone["verdict"] == "holds"]
    assert f"{len(hold)} claims hold, {(hold != scope(run)).sum()} of them by other runs</h2>" in shown

    for name, kernels in (("dense-one", 0), ("sparse-one", 3)):  # of one recipe: their peaks are compared
        training = make_training(tmp_path / name)
        (part,) = training.parts("training")
        table = pq.read_table(part)
        at = table.schema.get_field_index("sparse_layers")
        pq.write_table(table.set_column(at, table.schema.field(at), pa.array([kernels] * ROWS, pa.int32())), part)
        relisted(training, "training")
    both = markup(show(tmp_path, "findings", run="mine"))
    assert "Told by sparse-one, dense-one." in both and "and 2 trainings of this folder" in both
    together = findings_at_hand([*map(open_run, (tmp_path / "dense-one", tmp_path / "sparse-one")), run])
    own = together.set_index("claim")["scope"] == scope(run)
    pd.testing.assert_frame_equal(together.set_index("claim")[own], alone[own])


def test_the_columns_of_the_studies_are_named_in_words(show: Show, runs: Path) -> None:
    (table,) = show(runs, "findings", run="made").dataframe
    assert not [name for name in table.value.columns if "_" in name]
