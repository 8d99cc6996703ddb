"""The same summaries from a Spark cluster: a master and two workers, started here and stopped again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pandas as pd
import pyarrow.parquet as pq
import pytest
from support.servers import free_port

from twell.analysis import by_layer, ensure, summarize
from twell.workbench.errors import UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, open_run

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # a run not worth compiling for
SMALL = f"""
spark.sql.codegen.wholeStage false
spark.sql.codegen.factoryMode NO_CODEGEN
spark.driver.extraJavaOptions {JAVA}
spark.executor.extraJavaOptions {JAVA}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a standalone cluster of a master and two workers, threads of one JVM; what they execute is not."""
    pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed (extra `spark`)")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none on this machine")
    from pyspark.java_gateway import launch_gateway

    folder, home = tmp_path_factory.mktemp("spark"), Path(pyspark.__file__).parent
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder),
            "SPARK_WORKER_DIR": str(folder),
            "PYSPARK_SUBMIT_ARGS": f"--driver-memory 256m --driver-java-options '{JAVA}' pyspark-shell",
        }.items():
            environment.setenv(name, value)
        gateway = launch_gateway()
    java = gateway.jvm.org.apache.spark
    servers = java.deploy.LocalSparkCluster.apply(2, 1, 1024, java.SparkConf())
    try:
        (address,) = servers.start()
        yield address
    finally:
        servers.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)


def test_identical_summaries(cluster: str, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers to the last bit, sums of z to the order in which they were added; words with how many there are."""
    (tmp_path / "spark-defaults.conf").write_text(SMALL)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    here = made.make(tmp_path / "duckdb", layers=2, sequences=40, parts=2, seed=4, fired=True)
    shutil.copytree(here.path, tmp_path / "spark")
    ensure(here)
    (there,) = summarize(SummarizeOptions(runs=(tmp_path / "spark",), engine=cluster))
    written = [name for name in SUMMARIES.tables if here.summary_path(name).exists()]
    assert len(written) == len(SUMMARIES.tables) - 1, "all but `used`"
    for name in written:
        one, other = (pq.read_table(run.summary_path(name)) for run in (here, there))
        assert one.schema.equals(other.schema), name
        if not SUMMARIES.tables[name].adds_up:
            pd.testing.assert_frame_equal(one.to_pandas(), other.to_pandas(), rtol=1e-12, atol=1e-12)
        else:
            assert one.equals(other), name
        assert one.schema.metadata == other.schema.metadata or name != "words"
    pd.testing.assert_frame_equal(by_layer(here), by_layer(there))


def test_no_master_there(small: Run) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (extra `spark`)")
    with pytest.raises(UserError, match=r"Expected a Spark master at spark://127\.0\.0\.1:\d+, got .*: start one"):
        ensure(small, engine=f"spark://127.0.0.1:{free_port()}")
    assert len(by_layer(open_run(small.path))) == small.layers


def test_unknown_engine(small: Run) -> None:
    with pytest.raises(UserError, match=r"Expected duckdb or spark://HOST:PORT as the engine, got 'polars'"):
        ensure(small, engine="polars")
    ensure(small)
    with pytest.raises(UserError, match=r"got 'polars'"):  # where nothing is to be built, too
        ensure(small, engine="polars")
