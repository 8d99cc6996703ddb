"""Open the query engine that a user named. Spark's module is imported only where Spark is asked for."""

from __future__ import annotations

from twell.analysis.engines.base import Engine
from twell.analysis.engines.duckdb import DuckDBEngine

DUCKDB = "duckdb"


def open_engine(address: str = DUCKDB) -> Engine:
    """Open the engine at an address: duckdb (embedded, here) or spark://HOST:PORT (a cluster), as `refresh` checks."""
    if address == DUCKDB:
        return DuckDBEngine()
    from twell.analysis.engines.spark import SparkEngine

    return SparkEngine(address)
