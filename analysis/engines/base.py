"""The interface of a query engine: read Parquet files as tables, run functions on files, turn expressions into Arrow.

Questions about single tokens are ibis expressions over the run's parts. Summaries are built by Python functions of one
part's file (`part_sums`, `z_scores`), which an engine runs where the file is. `open.open_engine` chooses the engine:
`duckdb` runs in this process, `spark` on a cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ibis.expr.types as ir
import pyarrow as pa

from twell.analysis.engines.accumulate import Tables


class Engine(ABC):
    """A connection for one thread, in a `with` block.

    connection: the ibis backend that runs the expressions.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connection and remove its temporary files."""

    @abstractmethod
    def read(self, files: Sequence[Path]) -> ir.Table:
        """Return the Parquet files of one table as one table, which is read when a query needs it."""

    @abstractmethod
    def add_up(
        self, files: Sequence[Path], function: Callable[[Path], Tables], tick: Callable[[Sequence[Path]], None]
    ) -> Tables:
        """Run a function on each file and add up the tables that it returns.

        function: returns partial summaries by name (see `accumulate`); tick: is called with the files that are done.
        Raises UserError, with the file's name, where a file cannot be read or its sums overflow.
        """

    @abstractmethod
    def map_files(
        self, files: Sequence[Path], function: Callable[[Path], pa.Table], schema: pa.Schema
    ) -> AbstractContextManager[ir.Table]:
        """Run a function on each file; the `with` block's table has the rows of all files, cast to the schema."""

    def cached(self, table: ir.Table) -> AbstractContextManager[ir.Table]:
        """Compute a table once, and keep its rows until the `with` block ends."""
        try:
            return table.cache()
        except Exception as error:
            raise self.as_user_error(error) from error

    def arrow(self, table: ir.Table) -> pa.Table:
        """Return the rows of an expression as an Arrow table."""
        try:
            return self.connection.to_pyarrow(table)
        except Exception as error:
            raise self.as_user_error(error) from error

    @abstractmethod
    def as_user_error(self, error: Exception) -> Exception:
        """Return an engine's error about files, memory, disk or network as a UserError of one sentence.

        Any other error is a mistake in this package, and is returned as it is, to be seen with its traceback.
        """
