"""The dashboard shows a damaged run without its damaged parts only if it was started so, and then names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from twell.app.server.launch import command
from twell.app.ui import run_cache
from twell.app.ui.formatting import message_markdown
from twell.app.ui.query import query
from twell.app.ui.widgets import facts_html
from twell.workbench.options import AppOptions
from twell.workbench.run.store import open_run

NOTE = "Left out as damaged: activity/part-00000.parquet"


def notes(test: AppTest) -> str:
    """Return the text of a page's notes."""
    return " ".join(element.value for element in test.get("html") if "tw-note" in element.value)


def test_every_page_names_what_it_lacks(
    runs: Path, show: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = show(runs, "layers", run="torn")
    assert NOTE not in notes(before)
    monkeypatch.setattr(run_cache, "leaves_out_damaged", lambda: True)
    for page in ("overview", "layers"):
        test = show(runs, page, run="torn")
        assert NOTE in notes(test) and not test.exception
    assert "Left out" not in notes(show(runs, run="made"))


def test_a_page_tells_of_a_damaged_file_once(runs: Path, show: Callable[..., AppTest]) -> None:
    for page in ("overview", "layers", "positions"):
        test = show(runs, page, run="torn")
        (box,) = test.warning
        text = box.value.replace("\\", "")
        assert text.startswith("torn is damaged, and what needs this file is left out: activity/part-00000.parquet")
        assert "differs from its checksum" not in notes(test) + "".join(info.value for info in test.info)
    assert "layers that are busy on the same tokens" in notes(show(runs, "layers", run="torn"))


def test_commands_in_messages_look_like_commands(runs: Path, show: Callable[..., AppTest]) -> None:
    """What a message names in backquotes is set as code; names around it stay as they are."""
    (warning,) = show(runs, "text", run="torn").warning
    assert "`twell check`" in warning.value and "\\`" not in warning.value
    assert message_markdown("a_b: see `twell check a_b`.") == r"a\_b\: see `twell check a_b`\."
    assert "<code>twell check</code>" in facts_html({"torn": "see `twell check`"})


def test_how_it_is_asked_for(runs: Path) -> None:
    assert command(AppOptions(runs=runs, without_damaged=True))[-1] == run_cache.WITHOUT_DAMAGED
    assert run_cache.WITHOUT_DAMAGED not in command(AppOptions(runs=runs))
    run = open_run(runs / "torn", without_damaged=True)
    assert "without_damaged=True)" in query(run, lambda run: run).code
