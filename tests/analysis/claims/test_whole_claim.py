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
    rows = pd.DataFrame({"claim": [claim.text for claim in CLAIMS], "verdict": verdicts, "scope": "this run"})
    other = pd.DataFrame([{"claim": "The moon is made of cheese.", "verdict": REVERSED, "scope": "this run"}])
    result = whole_claim(pd.concat([rows, other]), "this run")
    assert result.verdict == whole and f", {whole}: of its 6 parts " in result.sentence
    assert "other runs" not in result.sentence and result.sentence.count(".") == 1, "one sentence"
    told = whole_claim(rows.assign(scope="another"), "this run").sentence
    assert told.count("(other runs)") == sum(verdict != UNTOLD for verdict in verdicts)


def test_every_part_is_counted_once_in_the_sentence_of_a_run(run: Run) -> None:
    frame = findings(run)
    sentence = whole_claim(frame, scope(run)).sentence.partition(": of its ")[2]
    for claim in CLAIMS:
        assert sentence.count(PARTS[claim.check]) == 1
        assert (frame["claim"] == claim.text).sum() == 1
