"""Made runs for the pages: a whole one with hostile tokens, and what is left of one in every other state."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from twell.analysis import ensure
from twell.workbench.store import Run, copy_without_activity, open_run

MAIN = Path(__file__).resolve().parents[2] / "app" / "pages" / "main.py"
HOSTILE = {
    50: " <script>window.twellHurt=1</script>",
    51: "](javascript:window.twellHurt=1)",
    52: "</div><b>",
    53: "\u202eright to left",
    54: "<img src=x onerror=window.twellHurt=1>",
    55: " **bold** $x$ :material/home:",
    56: "%{x}&amp;<br>",
}


def load_made() -> ModuleType:
    """tests/analysis/made.py, which is not part of any package."""
    path = Path(__file__).resolve().parents[1] / "analysis" / "made.py"
    spec = importlib.util.spec_from_file_location("twell_made", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["twell_made"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def hostile() -> dict[int, str]:
    """Token ids of the made runs, and what stands there."""
    return HOSTILE


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The module that makes runs, its vocabulary replaced by one with tokens that try to be more than text."""
    module = load_made()
    plain: Callable[[int], dict[str, Any]] = module.vocabulary

    def replaced(size: int) -> dict[str, Any]:
        columns = plain(size)
        for token, text in HOSTILE.items():
            columns["text"][token] = text
            columns["bytes"][token] = text.encode()
        return columns

    module.vocabulary = replaced
    return module


@pytest.fixture(scope="session")
def runs(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: `made` (complete), `summary`, `interrupted`, `oracle`, `counts`, `broken` and `torn`."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    run = made.make(folder / "made", layers=5, d_ff=512, sequences=80, length=96)
    ensure(run)
    made.make(folder / "interrupted", layers=3, sequences=20, status="interrupted", timings=0)
    made.make(folder / "oracle", layers=3, sequences=20, kernel="reference")
    made.make(folder / "counts", layers=3, sequences=20, neurons=False, loss=False)
    copy_without_activity(run.path, folder / "summary")
    torn = made.make(folder / "torn", layers=3, sequences=20)
    part = torn.parts("activity")[0]
    part.write_bytes(part.read_bytes()[:100])
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text('{"schema_version": 1, "name": "broken"')
    return folder


@pytest.fixture(scope="session")
def made_run(runs: Path) -> Run:
    """The complete run."""
    return open_run(runs / "made")


@pytest.fixture
def recording(made: ModuleType, tmp_path: Path) -> Path:
    """A folder with one run that is still being recorded."""
    made.make(tmp_path / "live", layers=3, sequences=20, status="recording")
    return tmp_path


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """Open a page of the dashboard over a folder: `show(folder, "tokens", run="made")`."""
    monkeypatch.setattr("twell.app.state.recorded_folder", lambda: None)

    def run(folder: Path, page: str = "overview", **address: str) -> AppTest:
        monkeypatch.setattr(sys, "argv", ["main.py", str(folder)])
        test = AppTest.from_file(str(MAIN), default_timeout=60)
        for name, value in address.items():
            test.query_params[name] = value
        test.run()
        if page != "overview":
            test.switch_page(f"{page}.py").run()
        return test

    return run
