"""Share synthetic runs, servers over them and pages of the dashboard among its tests."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from plotly import basedatatypes
from streamlit.components.v2 import manifest_scanner
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.testing.v1 import AppTest, app_test, local_script_runner
from streamlit.util import calc_hash
from support.browser_pages import Watched
from support.servers import remove, served

from twell.analysis import ensure
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.summary_only import copy_without_activity

MAIN = Path(__file__).resolve().parents[2] / "app" / "main.py"
HOSTILE = {
    50: " <script>window.twellHurt=1</script>",
    51: "](javascript:window.twellHurt=1)",
    52: "</div><b>",
    53: "\u202eright to left",
    54: "<img src=x onerror=window.twellHurt=1>",
    55: " **bold** $x$ :material/home:",
    56: "%{x}&amp;<br>",
}


@pytest.fixture(scope="session", autouse=True)
def _prepared_once() -> None:
    """Let Streamlit scan the installed packages for components, 0.2 s, and compile pages once, not for each AppTest."""
    manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)
    polled = local_script_runner.require_widgets_deltas

    def awaited(runner: Any, timeout: float = 3) -> None:
        """Wait for the end of a script's thread, which asking for it a thousand times a second would hold up."""
        runner._script_thread.join(timeout)
        polled(runner, timeout)

    local_script_runner.require_widgets_deltas = awaited
    app_test.ScriptCache = local_script_runner.ScriptCache = functools.cache(ScriptCache)
    # plotly takes the name of each property apart, letter by letter, each time one is set: 3 % of the tests of pages
    basedatatypes._str_to_dict_path_full = functools.cache(basedatatypes._str_to_dict_path_full)


def load_made() -> ModuleType:
    """Load tests/support/synthetic_runs.py once more, as a module of its own that may be changed."""
    path = Path(__file__).resolve().parents[1] / "support" / "synthetic_runs.py"
    spec = importlib.util.spec_from_file_location("twell_made", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["twell_made"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def hostile() -> dict[int, str]:
    """Return the hostile token texts of the synthetic runs by their ids."""
    return HOSTILE


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """Return the module that makes runs, with a vocabulary of tokens that look like HTML, Markdown and scripts."""
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
    """Make a folder of runs: `made` (complete), `summary`, `interrupted`, `oracle`, `counts`, `broken` and `torn`."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    run = made.make(folder / "made", layers=5, d_ff=512, sequences=80, length=96, fired=True)
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
    """Open the complete run."""
    return open_run(runs / "made")


@pytest.fixture
def recording(made: ModuleType, tmp_path: Path) -> Path:
    """Make a folder with one run that is still being recorded."""
    made.make(tmp_path / "live", layers=3, sequences=20, status="recording")
    return tmp_path


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """Open a page of the dashboard over a folder: `show(folder, "tokens", run="made")`."""
    monkeypatch.setattr("twell.app.ui.run_catalog.recorded_folder", lambda: None)
    monkeypatch.setattr("twell.app.server.warm_up._start_thread", lambda *run: None)  # it would outlive the test

    def run(folder: Path, page: str = "overview", **address: str) -> AppTest:
        monkeypatch.setattr(sys, "argv", ["main.py", str(folder)])
        test = AppTest.from_file(str(MAIN), default_timeout=60)
        for name, value in address.items():
            test.query_params[name] = value
        if page != "overview":
            test._page_hash = calc_hash(page)  # a page of st.navigation goes by the hash of its address
        return test.run()

    return run


@pytest.fixture(scope="session")
def notebook() -> Callable[[str], Any]:
    """Return a function that runs code as a notebook does, and returns the value of its last line."""

    def made_by(lines: str) -> Any:
        cells, space = ast.parse(lines), dict[str, Any]()
        last = cells.body.pop()
        assert isinstance(last, ast.Expr)
        exec(compile(cells, "code", "exec"), space)
        return eval(compile(ast.Expression(last.value), "code", "eval"), space)

    return made_by


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Yield a folder that tests fill and empty in turn (`growing`), and the address of the dashboard over it."""
    folder = tmp_path_factory.mktemp("growing")
    with served(folder, tmp_path_factory.mktemp("empty")) as address:
        yield folder, address


@pytest.fixture
def growing(served_folder: tuple[Path, str]) -> Iterator[tuple[Path, str]]:
    """Yield a folder, empty before the test and after it, and the address of the dashboard over it."""
    while left := list(served_folder[0].iterdir()):  # a summary that the server was still writing
        for path in left:
            remove(path)
        time.sleep(1)
    yield served_folder
    for path in served_folder[0].iterdir():
        remove(path)


@pytest.fixture
def bundled_run(made: ModuleType, growing: tuple[Path, str]) -> Path:
    """Make the run `tiny`, of the bundled model, in the served folder, which is one that can be measured and asked."""
    made.bundled(growing[0])
    return growing[0] / "tiny"


@pytest.fixture
def growing_run(made: ModuleType, growing: tuple[Path, str]) -> Path:
    """Make a run that is being recorded in the served folder; return the folder."""
    made.make(growing[0] / "live", layers=3, sequences=20, status="recording")
    return growing[0]


@pytest.fixture(scope="session")
def demo_address(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of the dashboard over the demo run."""
    with served(demo.parent, tmp_path_factory.mktemp("empty")) as address:
        yield address


@pytest.fixture(scope="session")
def address(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of the dashboard over the synthetic runs."""
    with served(runs, tmp_path_factory.mktemp("empty")) as address:
        yield address


@pytest.fixture
def watched(new_page: Callable[..., Any], address: str) -> Watched:
    """Open a page of 1440 × 900 on the dashboard over the synthetic runs."""
    return Watched(new_page(), address)


@pytest.fixture
def growing_page(new_page: Callable[..., Any], growing: tuple[Path, str]) -> Watched:
    """Open a page of 1440 × 900 on the dashboard over the folder that the test fills."""
    return Watched(new_page(), growing[1])


@pytest.fixture
def watch() -> type[Watched]:
    """Return the class that watches a browser page: `watch(page, address)`."""
    return Watched
