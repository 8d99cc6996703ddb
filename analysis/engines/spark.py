"""Spark: the engine for runs larger than one machine, on a cluster that runs already.

    twell summarize runs/large --engine spark://HOST:PORT

Workers read parts by pyarrow, since Spark's own reader knows neither half floats nor unsigned integers. They need this
Python (`PYSPARK_PYTHON`), numpy, scipy, pyarrow, and the run's folder under the same path; they write nothing to it.
Cost: 5 to 10 s to start, and a second or two a query; worth it from hundreds of millions of tokens.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ibis
import ibis.expr.types as ir
import pyarrow as pa

from twell.analysis.engines.accumulate import Tables, Total, added_up
from twell.analysis.engines.base import Engine
from twell.workbench.errors import UserError, first_line
from twell.workbench.run.part_files import open_part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASKS = 2  # tasks for each core, in each shuffle
FILES = 8  # files for each task
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
}
PLAIN = {"halffloat": pa.float32(), "uint8": pa.int16(), "uint16": pa.int32(), "uint32": pa.int64()}
PACKAGES = ("twell.analysis", "twell.workbench.run")  # tasks need the code of these, subpackages included


class SparkEngine(Engine):
    """A session on a Spark cluster, for one thread, in a `with` block."""

    def __init__(self, address: str) -> None:
        self._session = _session(address)
        tasks = TASKS * self._session.sparkContext.defaultParallelism
        self._session.conf.set("spark.sql.shuffle.partitions", str(tasks))
        self._tables = 0
        super().__init__(ibis.pyspark.connect(self._session))

    def close(self) -> None:
        self._session.stop()

    def read(self, files: Sequence[Path]) -> ir.Table:
        from pyspark.sql.pandas.types import from_arrow_schema

        kinds = open_part(files[0]).schema_arrow
        schema = pa.schema([(field.name, PLAIN.get(str(field.type), field.type)) for field in kinds])
        return self._named(self._paths(files).mapInArrow(_reader(schema), from_arrow_schema(schema)))

    def add_up(
        self, files: Sequence[Path], function: Callable[[Path], Tables], tick: Callable[[Sequence[Path]], None]
    ) -> Tables:
        """Run a function on each file and add up its tables. Workers add up the results of their own tasks.

        Files are sent FILES a task at a time.
        """
        context, total = self._session.sparkContext, Total()
        tasks = TASKS * context.defaultParallelism
        with _by_value():
            for first in range(0, len(files), tasks * FILES):
                batch = files[first : first + tasks * FILES]
                paths = context.parallelize([file.absolute() for file in batch], min(tasks, len(batch)))
                try:
                    total.add(paths.map(function).treeReduce(added_up))
                except Exception as error:
                    raise self.as_user_error(error) from error
                tick(batch)
        return total.tables()

    @contextmanager
    def map_files(
        self, files: Sequence[Path], function: Callable[[Path], pa.Table], schema: pa.Schema
    ) -> Iterator[ir.Table]:
        from pyspark.sql.pandas.types import from_arrow_schema

        with _by_value():
            mapped = self._paths(files).mapInArrow(_mapper(function, schema), from_arrow_schema(schema))
            with self.cached(self._named(mapped)) as rows:
                yield rows

    def _paths(self, files: Sequence[Path]) -> DataFrame:
        """Return the files' names as rows, one task for each."""
        paths = self._session.createDataFrame([(str(file.absolute()),) for file in files], "path string")
        return paths.repartition(len(files))

    def _named(self, rows: DataFrame) -> ir.Table:
        self._tables += 1
        rows.createOrReplaceTempView(f"twell_{self._tables}")
        return self.connection.table(f"twell_{self._tables}")

    def as_user_error(self, error: Exception) -> Exception:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        if isinstance(error, PySparkException | Py4JError):
            return UserError(f"Expected Spark to read the run's parts, got {first_line(error)}.")
        return error


@contextmanager
def _by_value() -> Iterator[None]:
    """Send functions and classes of PACKAGES to the workers by value, since workers have no copy of the code."""
    from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value

    packages = [sys.modules[name] for name in PACKAGES]
    for package in packages:
        register_pickle_by_value(package)
    try:
        yield
    finally:
        for package in packages:
            unregister_pickle_by_value(package)


def _session(address: str) -> SparkSession:
    """Open a session on a cluster. Raises UserError where Spark or Java is not installed or no master answers."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        raise UserError("Expected Spark, it is not installed: pip install 'twell-workbench[spark]'.") from None
    target = urlsplit(address)
    try:
        socket.create_connection((target.hostname or "", target.port or 7077), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"Expected a Spark master at {address}, got {error.strerror or error}: start one there, or name another."
        ) from None
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(address).appName("twell summarize")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise UserError(f"Expected a Spark session, got {first_line(error)}. Is Java 17 or newer installed?") from None


def _reader(schema: pa.Schema) -> Any:
    """Return a function for the workers, which takes names of files in batches and yields the rows of the files."""

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for path in batch.column(0).to_pylist():
                for piece in open_part(path).iter_batches(columns=schema.names):
                    yield piece.cast(schema)

    return rows


def _mapper(function: Callable[[Path], pa.Table], schema: pa.Schema) -> Any:
    """Return a function for the workers, which takes names of files in batches and yields the rows that `function`
    returns for each file."""

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for path in batch.column(0).to_pylist():
                yield from function(Path(path)).cast(schema).to_batches()

    return rows
