"""Share synthetic runs, written once by the real writer, among the tests of the analysis.

    MADE_TOKENS=200000 pytest tests/analysis    `run` as a run of that many tokens or some more: 20 minutes, 2 GB

Its tests compare every table with numpy and pandas on the rows, and none may take for granted that it is small.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import support.planted
import support.questions
from support import synthetic_runs

from twell.analysis import ensure
from twell.analysis.exports.documents import cells
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.summary_only import copy_without_activity

TOKENS = int(os.environ.get("MADE_TOKENS", "5600"))
SEQUENCE = 47  # tokens of a made sequence, a little under the mean of their lengths


@pytest.fixture(scope="session")
def made() -> ModuleType:
    return synthetic_runs


@pytest.fixture(scope="session")
def questions() -> ModuleType:
    return support.questions


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    return support.planted


@pytest.fixture(scope="session")
def _small(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make(tmp_path_factory.mktemp("unsummarised") / "small", sequences=24).path


@pytest.fixture
def small(_small: Path, tmp_path: Path) -> Run:
    """Copy a small run that nothing has summarised; a test may change it."""
    return open_run(shutil.copytree(_small, tmp_path / "small"))


@pytest.fixture(scope="session")
def summarised(_small: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Summarise a run equal to `small`. Read it, never change it."""
    run = open_run(shutil.copytree(_small, tmp_path_factory.mktemp("summarised") / "small"))
    ensure(run)
    return run


@pytest.fixture
def small_copy(summarised: Run, tmp_path: Path) -> Run:
    """Copy a small run without its rows of single tokens, which can be computed from no more; a test may change it."""
    copy_without_activity(summarised.path, tmp_path / "copy")
    return open_run(tmp_path / "copy")


@pytest.fixture
def without_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the images out of exported notebooks: drawing them takes a browser and, for a whole run, 10 s."""

    def no_images(_figures: object) -> list[bytes]:
        raise Missing("No images here.")

    monkeypatch.setattr(cells, "png_images", no_images)


@pytest.fixture(scope="session")
def run(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Make a run of four layers and three parts, first tokens flagged, a few not finite. Read it, never change it."""
    path = tmp_path_factory.mktemp("runs") / "made"
    return made.make(path, sequences=-(-TOKENS // SEQUENCE), fired=True, bench=True)


@pytest.fixture(scope="session")
def bos_run(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Make a run of eight layers in which the first token of each sequence is special."""
    path = tmp_path_factory.mktemp("runs") / "made-bos"
    return made.make(path, layers=8, sequences=40, parts=1, bos=True, seed=3)


@pytest.fixture(scope="session")
def rows(run: Run) -> pd.DataFrame:
    """Return the run's rows as plain numbers, with their documents; columns 0, 1, … are the layers' counts."""
    frame = run.frame("activity")
    names = [name for name in frame if name.startswith("nnz_")]
    frame = frame.rename(columns={name: layer for layer, name in enumerate(names)})
    frame["loss"] = frame["loss"].astype(np.float64)
    frame["document"] = frame["sequence"].map(run.frame("sequences").set_index("sequence")["document"])
    return frame.astype(dict.fromkeys(range(len(names)), np.float64))


@pytest.fixture(params=[False, True], ids=["unflagged", "flagged"])
def flagged(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def used(rows: pd.DataFrame, flagged: bool) -> pd.DataFrame:
    """Return the rows that a statistic includes: all, or those without flags."""
    return rows if flagged else rows[rows["flags"] == 0]


@pytest.fixture
def scored(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Return all rows with z and nnz, means over layers."""
    layers = list(range(run.layers))
    plain = rows.loc[rows["flags"] == 0, layers]
    return rows.assign(
        z=((rows[layers] - plain.mean()) / plain.std(ddof=0)).mean(axis=1), nnz=rows[layers].mean(axis=1)
    )


@pytest.fixture(scope="session")
def sparser(run: Run, made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """As the made run, the same text, but layers 0 to 2 fire four fifths of it and layer 3 the same."""

    def change(columns):
        rng = np.random.default_rng(2)
        for name in nnz_columns(3):
            columns[name] = rng.binomial(columns[name], 0.8).astype(np.uint16)
        return columns

    return made.make(tmp_path_factory.mktemp("other") / "sparser", change=change, sequences=run.manifest.sequences)


@pytest.fixture(scope="session")
def other_text(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made.make(tmp_path_factory.mktemp("text") / "other", seed=5, sequences=90)
