"""DuckDB, as the analysis and as `Run.sql` run it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from twell.analysis.engines.open import open_engine

FETCHES = "select current_setting('autoinstall_known_extensions') as fetches"


def test_nothing_is_fetched(made: ModuleType, tmp_path: Path) -> None:
    """It would load extensions that a query names from the network."""
    run = made.make(tmp_path / "run", layers=1, d_ff=64, sequences=2, parts=1)
    assert not run.sql(FETCHES)["fetches"][0]
    with open_engine() as engine:
        assert not engine.connection.raw_sql(FETCHES).fetchone()[0]
