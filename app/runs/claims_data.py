"""The queries of the Findings page. Cost: about a second for a long run, because a claim may need several tables."""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.analysis.figures.claims.evidence import drawings
from twell.app.ui.query import Query

CLAIMS = Query(analysis.findings)
EVIDENCE = Query(drawings)
STUDIES = Query(analysis.studies)
DEFAULT_QUERIES = (CLAIMS, EVIDENCE)


def sweep_and_own(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `analysis.studies` that have a training without L1 beside them, and that of this run."""
    return table[table["rise"].notna() | table["this_run"]]
