"""Smoke of one half without the other: `python .ci/smoke.py capture|dashboard FOLDER`; capture leaves its run there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def twell(*words: str) -> None:
    """Run a command of `twell`. Raises CalledProcessError if it fails."""
    print("$ twell", *words, flush=True)
    subprocess.run([sys.executable, "-m", "twell.workbench", *words], check=True)


def absent(*modules: str) -> None:
    """Raise AssertionError for a module that this half must not need, and that is there."""
    assert not [name for name in modules if importlib.util.find_spec(name)], modules


def capture(folder: Path) -> None:
    """Capture, generate, count by a threshold, verify, measure."""
    absent("streamlit", "plotly", "ibis", "duckdb")
    text = ("--text", "builtin:passages", "--tokens", "2000")
    twell("capture", "builtin:demo", *text, "--examples", "2", "--fired", "0:0.1", "--out", str(folder / "demo"))
    twell("capture", "builtin:demo", *text[:3], "60", "--generate", "4", "--out", str(folder / "made"))
    twell("capture", "builtin:demo", *text, "--threshold", "0.1", "--out", str(folder / "above"))
    twell("verify", str(folder / "demo"), "--tokens", "200")


def dashboard(folder: Path) -> None:
    """Summarise, export, compare, and open every page."""
    absent("torch", "transformers", "tokenizers")
    demo = str(folder / "demo")
    twell("summarize", demo)
    for out in ("by_layer.csv", "demo.html", "demo.ipynb"):
        twell("export", demo, *(["--table", "by_layer"] if out.endswith("csv") else []), "--out", str(folder / out))
    twell("compare", demo, str(folder / "above"))
    from streamlit.testing.v1 import AppTest

    from twell.app.server.serve import MAIN
    from twell.app.ui.pages import PAGES

    sys.argv = ["main.py", str(folder)]
    for page in PAGES.values():
        test = AppTest.from_file(str(MAIN), default_timeout=120)
        test.query_params["run"] = "demo"
        test.run()
        test.switch_page(page.file).run()
        assert not test.exception, (page.title, test.exception)
        print("page", page.title, flush=True)


if __name__ == "__main__":
    {"capture": capture, "dashboard": dashboard}[sys.argv[1]](Path(sys.argv[2]))
