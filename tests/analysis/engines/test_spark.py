"""The same summaries from a Spark cluster: a master and two workers, started here and stopped again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
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
DEPLOY = "org.apache.spark.deploy"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a standalone cluster of two workers."""
    pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed (extra `spark`)")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none on this machine")
    folder, port, home = tmp_path_factory.mktemp("spark"), free_port(), Path(pyspark.__file__).parent
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    env |= {"SPARK_LOCAL_DIRS": str(folder), "SPARK_WORKER_DIR": str(folder), "SPARK_DAEMON_MEMORY": "256m"}
    env |= {"SPARK_DAEMON_JAVA_OPTS": JAVA}

    def start(name: str, *arguments: str) -> None:
        line = [str(home / "bin" / "spark-class"), f"{DEPLOY}.{name}", "--host", "127.0.0.1", "--webui-port", "0"]
        with open(folder / f"{len(running)}.log", "wb") as log:
            running.append(subprocess.Popen([*line, *arguments], env=env, stdout=log, stderr=log))

    running: list[subprocess.Popen[bytes]] = []
    try:
        start("master.Master", "--port", str(port))
        for _ in range(2):
            start("worker.Worker", "--cores", "1", "--memory", "1g", f"spark://127.0.0.1:{port}")
        until, log = time.monotonic() + 120, folder / "0.log"
        while log.read_text().count("Registering worker") < 2:
            assert time.monotonic() < until, log.read_text()[-2000:]
            assert all(process.poll() is None for process in running), log.read_text()[-2000:]
            time.sleep(0.2)
        yield f"spark://127.0.0.1:{port}"
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)


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
