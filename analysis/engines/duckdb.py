"""Where queries run: DuckDB, embedded, and the only module that knows its name; `spark` has the other engine.

The questions are ibis expressions over the run's Parquet parts; an `Engine` reads files as tables, keeps an
intermediate result, and turns an expression into Arrow. What is taken of a part at a time (`sums`, `scores`) is a
function of its file, which an engine runs where the file lies. Only what it takes to read the rows of single tokens
goes through here: summaries are small, and pandas reads them faster than any engine starts. Nothing is fetched: the
extensions that DuckDB would load by itself from the network are switched off, and Parquet is built in.
Cost: 15 ms to open; memory is limited to half of the machine's, at most 1.5 GiB, and past that DuckDB spills to a
temporary folder.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq

from twell.analysis.engines.accumulate import Tables, Total
from twell.workbench.errors import UserError

MEMORY = 3 * 2**29
THREADS = 4  # for functions of a file, at most: each holds one part in memory
DUCKDB = "duckdb"

Given = TypeVar("Given")


class Engine:
    """One embedded connection, for one thread, in a `with` block."""

    def __init__(self) -> None:
        self._spill = tempfile.TemporaryDirectory(prefix="twell-")
        self._connection = ibis.duckdb.connect(
            ":memory:",
            threads=os.cpu_count() or 1,
            memory_limit=f"{min(MEMORY, _machine_memory() // 2)}B",
            temp_directory=self._spill.name,
            autoinstall_known_extensions=False,
            autoload_known_extensions=False,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the connection go, and what it spilled."""
        self._connection.disconnect()
        self._spill.cleanup()

    def read(self, files: Sequence[Path]) -> ir.Table:
        """Parquet files of one table as one table, read when a query asks."""
        return self._connection.read_parquet([str(file) for file in files])

    def sums(
        self, files: Sequence[Path], function: Callable[[Path], Tables], tick: Callable[[Sequence[Path]], None]
    ) -> Tables:
        """The sums that a function gives of each file, added up. `tick` is told which files are through."""
        total, waiting = Total(), deque[tuple[Path, Future[Tables]]]()

        def finish() -> None:
            file, found = waiting.popleft()
            total.add(found.result())
            tick([file])

        with ThreadPoolExecutor(_threads()) as pool:
            try:
                for file in files:
                    waiting.append((file, pool.submit(_of_file, function, file)))
                    if len(waiting) > _threads():  # what is found waits in memory
                        finish()
                while waiting:
                    finish()
            finally:
                pool.shutdown(cancel_futures=True)
        return total.tables()

    @contextmanager
    def each(
        self, files: Sequence[Path], function: Callable[[Path], pa.Table], schema: pa.Schema
    ) -> Iterator[ir.Table]:
        """The rows that a function gives of each file, as one table, as long as the block lasts.

        They wait on disk, since all of them need not fit into memory at once.
        """
        with tempfile.TemporaryDirectory(dir=self._spill.name) as folder:

            def written(number: int) -> Path:
                path = Path(folder) / f"{number}.parquet"
                rows = _of_file(function, files[number]).cast(schema)
                pq.write_table(rows, path, compression="lz4", use_dictionary=False, write_statistics=False)
                return path

            with ThreadPoolExecutor(_threads()) as threads:
                try:
                    paths = list(threads.map(written, range(len(files))))
                except OSError as error:
                    raise UserError(
                        f"Expected to write to {folder}, got {error.strerror or error}: free some space there."
                    ) from error
            yield self.read(paths)

    def keep(self, table: ir.Table) -> ir.Table:
        """Compute a table once and keep it; `with engine.keep(table) as kept` lets it go again."""
        try:
            return table.cache()
        except Exception as error:
            raise self._readable(error) from error

    def table(self, rows: pa.Table) -> ir.Table:
        """Arrow rows as a table to query or join with."""
        return ibis.memtable(rows)

    def arrow(self, table: ir.Table) -> pa.Table:
        """The rows of an expression."""
        try:
            return self._connection.to_pyarrow(table)
        except Exception as error:
            raise self._readable(error) from error

    def _readable(self, error: Exception) -> Exception:
        """What DuckDB says of files, memory and disk as one sentence; anything else is a mistake of ours, as it is."""
        import duckdb

        if isinstance(error, duckdb.IOException | duckdb.InvalidInputException | duckdb.OutOfMemoryException):
            return UserError(f"Expected to read the run's parts, got {_first_line(error)}.")
        return error


def open_engine(address: str = DUCKDB) -> Engine:
    """The engine of that name: duckdb, or spark://HOST:PORT, as `refresh` lets through."""
    if address == DUCKDB:
        return Engine()
    from twell.analysis.engines.spark import SparkEngine

    return SparkEngine(address)


def _of_file(function: Callable[[Path], Given], file: Path) -> Given:
    try:
        return function(file)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"Expected a readable part at {file}, got {_first_line(error)}.") from error
    except OverflowError as error:
        raise UserError(f"{error} It is in {file}.") from error


def _threads() -> int:
    """One more than there are cores, as each holds Python's lock at times, and parts seldom come out even."""
    return min(THREADS, 1 + (os.cpu_count() or 1))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2 * MEMORY
