"""The query of the Findings page. Cost: a second or so for a long run, as a claim may take several tables."""

from __future__ import annotations

from twell import analysis
from twell.app.ui.query import Query

CLAIMS = Query(analysis.findings)
DEFAULT_QUERIES = (CLAIMS,)
