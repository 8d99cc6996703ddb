"""The query of the Findings page. Cost: about a second for a long run, because a claim may need several tables."""

from __future__ import annotations

from twell import analysis
from twell.app.ui.query import Query

CLAIMS = Query(analysis.findings)
DEFAULT_QUERIES = (CLAIMS,)
