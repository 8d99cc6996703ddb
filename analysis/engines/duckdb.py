"""DuckDB, embedded: the engine that runs in this process. Beside it `Run.sql` alone names DuckDB.

Nothing is fetched: the extensions that DuckDB would load from the network by itself are switched off, and Parquet is
built in. Summaries are not read through an engine: they are small, and pyarrow reads them faster than one starts.
Cost: 15 ms for the first engine of a process, 2 for another: they are connections of one DuckDB. Its memory is limited
to half of the machine's, at most 1.5 GiB; past that it spills to a temporary folder.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq

from twell.analysis.engines.accumulate import Tables, Total
from twell.analysis.engines.base import Engine
from twell.workbench.errors import UserError, first_line
from twell.workbench.run.part_files import unreadable_part

MEMORY = 3 * 2**29  # bytes
THREADS = 4  # most threads that run functions of files: each holds one part in memory

Result = TypeVar("Result")
_opening = threading.Lock()  # threads that open at once would open a DuckDB each


@functools.cache
def _opened(process: int) -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    """Return the DuckDB of a process, whose threads a fork of it would not have, and the folder that it spills to."""
    import duckdb

    spill = tempfile.TemporaryDirectory(prefix="twell-")
    options: dict[str, str | bool | int | float | list[str]] = {
        "threads": os.cpu_count() or 1,
        "memory_limit": f"{min(MEMORY, _machine_memory() // 2)}B",
        "temp_directory": spill.name,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(":memory:", config=options), spill


def _connected() -> Any:
    """Return a connection of its own of this process's DuckDB, with its own temporary tables."""
    import duckdb  # which begins a thread, so not before it is asked

    with _opening:
        try:
            return ibis.duckdb.from_connection(_opened(os.getpid())[0].cursor())
        except duckdb.Error:  # it has ended, by an error of an earlier engine that it does not survive
            _opened.cache_clear()
            return ibis.duckdb.from_connection(_opened(os.getpid())[0].cursor())


class DuckDBEngine(Engine):
    """One embedded connection, for one thread, in a `with` block."""

    def __init__(self) -> None:
        self._spill = tempfile.TemporaryDirectory(prefix="twell-")
        super().__init__(_connected())

    def close(self) -> None:
        self.connection.disconnect()
        self._spill.cleanup()

    def read(self, files: Sequence[Path]) -> ir.Table:
        return self.connection.read_parquet([str(file) for file in files], hive_partitioning=False)

    def add_up(
        self, files: Sequence[Path], function: Callable[[Path], Tables], tick: Callable[[Sequence[Path]], None]
    ) -> Tables:
        total, pending = Total(), deque[tuple[Path, Future[Tables]]]()

        def finish_first() -> None:
            file, future = pending.popleft()
            total.add(future.result())
            tick([file])

        with ThreadPoolExecutor(_threads()) as pool:
            try:
                for file in files:
                    pending.append((file, pool.submit(_call, function, file)))
                    if len(pending) > _threads():  # results wait in memory, so they are not to be many
                        finish_first()
                while pending:
                    finish_first()
            finally:
                pool.shutdown(cancel_futures=True)
        return total.tables()

    @contextmanager
    def map_files(
        self, files: Sequence[Path], function: Callable[[Path], pa.Table], schema: pa.Schema
    ) -> Iterator[ir.Table]:
        """Run a function on each file; the rows are kept on disk, since they may not fit into memory all at once."""
        with tempfile.TemporaryDirectory(dir=self._spill.name) as folder:

            def write(number: int) -> Path:
                path = Path(folder) / f"{number}.parquet"
                rows = _call(function, files[number]).cast(schema)
                pq.write_table(rows, path, compression="lz4", use_dictionary=False, write_statistics=False)
                return path

            with ThreadPoolExecutor(_threads()) as threads:
                try:
                    paths = list(threads.map(write, range(len(files))))
                except OSError as error:
                    raise UserError(
                        f"Expected to write to {folder}, got {error.strerror or error}: free some space there."
                    ) from error
            yield self.read(paths)

    def as_user_error(self, error: Exception) -> Exception:
        import duckdb

        if isinstance(error, duckdb.IOException | duckdb.InvalidInputException | duckdb.OutOfMemoryException):
            return UserError(f"Expected to read the run's parts, got {first_line(error)}.")
        return error


def _call(function: Callable[[Path], Result], file: Path) -> Result:
    """Return `function(file)`; errors of reading and overflows become a UserError that names the file."""
    try:
        return function(file)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_part(file, error) from error
    except OverflowError as error:
        raise UserError(f"{error} It is in {file}.") from error


def _threads() -> int:
    """Return how many threads run functions of files: one more than there are cores, at most THREADS.

    Each thread holds Python's lock at times, and parts differ in size.
    """
    return min(THREADS, 1 + (os.cpu_count() or 1))


def _machine_memory() -> int:
    """Return the machine's memory in bytes, or a guess where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2 * MEMORY
