"""Run a query of DuckDB over tables whose files were compared with their checksums."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twell.workbench.errors import UserError, first_line, not_installed

if TYPE_CHECKING:
    import pandas as pd

# A query that may put the name of a table together, or list all of them.
ANY_TABLE = re.compile(r"\bquery(_table)?\s*\(|\bshow\b|\binformation_schema\b", re.IGNORECASE)


def answer(
    query: str, tables: Collection[str], files: Callable[[str], Sequence[Path]], lacking: Collection[str]
) -> pd.DataFrame:
    """Return the result of a query.

    tables: the names that the query can use; files: returns the checked files of one, and is called for those that the
    query may read; lacking: tables that are not there, for which `files` raises an error that says why
    """
    try:
        import duckdb
    except ImportError:
        raise UserError(not_installed("duckdb")) from None
    every = ANY_TABLE.search(query) is not None
    named = [name for name in tables if every or re.search(rf"\b{name}\b", query, re.IGNORECASE)]
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as connection:  # nothing is fetched
        try:
            for name in named:
                paths = [str(file) for file in files(name)]
                rows = connection.read_parquet(paths, hive_partitioning=False, union_by_name=True)  # type: ignore[arg-type]
                rows.create_view(name)
            return connection.sql(query).df()
        except (duckdb.Error, RuntimeError) as error:
            unknown = re.search(r"Table with name (\w+) does not exist", str(error))
            if unknown is not None and unknown[1].lower() in lacking:
                files(unknown[1].lower())
            raise UserError(
                f"Expected a DuckDB query over this run's tables, got: {first_line(error).rstrip('!')}."
            ) from None
