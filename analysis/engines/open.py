"""Open the query engine that a user named. Spark's module is imported only where Spark is asked for."""

from __future__ import annotations

from twell.analysis.engines.base import Engine
from twell.analysis.engines.duckdb import DuckDBEngine
from twell.workbench.errors import UserError

DUCKDB, SPARK = "duckdb", "spark://"


def check_address(address: str) -> None:
    """Raise UserError for an address that is neither duckdb nor spark://HOST:PORT."""
    if address != DUCKDB and not address.startswith(SPARK):
        raise UserError(f"Expected duckdb or spark://HOST:PORT as the engine, got {address!r}.")


def open_engine(address: str = DUCKDB) -> Engine:
    """Open the engine at an address: duckdb (embedded, here) or spark://HOST:PORT (a cluster)."""
    check_address(address)
    if address == DUCKDB:
        return DuckDBEngine()
    from twell.analysis.engines.spark import SparkEngine

    return SparkEngine(address)
