"""The claim as a whole: the verdict that those on its parts come to, and the sentence that says it."""

from __future__ import annotations

import pandas as pd
import pytest

from twell.analysis import findings
from twell.analysis.claims import across, activity, speed, training
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, scope
from twell.analysis.claims.whole import PARTS, SO_FAR, whole_claim
from twell.workbench.run.store import Run

CLAIMS = [claim for file in (activity, speed, training, across) for claim in file.CLAIMS if claim.check in PARTS]


def rows_of(verdicts: list[str]) -> pd.DataFrame:
    rows = pd.DataFrame({"claim": [claim.text for claim in CLAIMS], "verdict": verdicts})
    return rows.assign(scope="this run", interval="none: one reading", reason="It takes `twell train`.")


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([HOLDS] * 6, HOLDS),
        ([HOLDS] * 5 + [UNTOLD], SO_FAR),
        ([HOLDS] * 5 + [FAILS], IN_PART),
        ([FAILS] * 4 + [IN_PART, UNTOLD], IN_PART),
        ([FAILS] * 4 + [REVERSED, UNTOLD], FAILS),
        ([UNTOLD] * 6, UNTOLD),
    ],
)
def test_the_whole_follows_from_its_parts(verdicts: list[str], whole: str) -> None:
    assert len(CLAIMS) == len(PARTS) == 6
    rows = rows_of(verdicts)
    other = rows.head(1).assign(claim="The moon is made of cheese.", verdict=REVERSED)
    result = whole_claim(pd.concat([rows, other]), "this run")
    assert result.verdict == whole and f", {whole}: of its 6 parts " in result.sentence
    assert "other runs" not in result.sentence and result.sentence.count(".") == 1, "one sentence"
    told = whole_claim(rows.assign(scope="another"), "this run").sentence
    assert told.count("(other runs)") == sum(verdict != UNTOLD for verdict in verdicts)


def test_a_part_stands_beside_its_figure_or_why_there_is_none() -> None:
    rows = rows_of([FAILS, IN_PART, UNTOLD, UNTOLD, HOLDS, UNTOLD])
    rows.loc[:1, "interval"] = "4.63 to 4.77 %"
    rows.loc[1, "scope"] = "another"
    rows.loc[2:3, "reason"] = "The claim is of large models; this one runs 1.28 times as fast."
    sentence = whole_claim(rows, "this run").sentence
    first, second = (PARTS[claim.check] for claim in CLAIMS[:2])
    assert f"{first} (4.63 to 4.77 %)" in sentence and f"{second} (other runs)" in sentence
    assert sentence.endswith(". The claim is of large models; this one runs 1.28 times as fast.")
    assert sentence.count("1.28") == 1 and "twell train" not in sentence


def test_every_part_is_counted_once_in_the_sentence_of_a_run(run: Run) -> None:
    frame = findings(run)
    sentence = whole_claim(frame, scope(run)).sentence.partition(": of its ")[2]
    for claim in CLAIMS:
        assert sentence.count(PARTS[claim.check]) == 1
        assert (frame["claim"] == claim.text).sum() == 1
