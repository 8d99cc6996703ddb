"""The queries of the Findings page. Cost: about a second for a long run, because a claim may need several tables."""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.analysis.figures.claims.evidence import drawings
from twell.analysis.shipped import findings_at_hand
from twell.app.ui.query import Query
from twell.app.ui.run_catalog import RECORDED, RunCatalog
from twell.workbench.run.store import Run

MOST = 24  # trainings of the folder that claims are checked on beside those that ship, the newest first
CLAIMS = Query(findings_at_hand)
EVIDENCE = Query(drawings)
STUDIES = Query(analysis.studies)
DEFAULT_QUERIES = (CLAIMS, EVIDENCE)


def other_trainings(run: Run, catalog: RunCatalog) -> list[Run]:
    """Return the trainings of the folder that claims of this run's page may be checked on too."""
    mine = (other for name, other in catalog.runs.items() if not name.startswith(RECORDED))
    return [other for other in mine if other.has("training") and other.path != run.path][:MOST]


def sweep_and_own(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `analysis.studies` that have a training without L1 beside them, and that of this run."""
    return table[table["rise"].notna() | table["this_run"]]
