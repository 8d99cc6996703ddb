"""Starting the dashboard: its settings, and one sentence where it cannot start."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from twell.app.server.launch import check_address, command, launch, url
from twell.app.ui.theme import SETTINGS
from twell.workbench.cli import demo
from twell.workbench.errors import UserError
from twell.workbench.options import AppOptions, DemoOptions

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port of this host that something listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_one_sentence(tmp_path: Path, taken: int) -> None:
    with pytest.raises(UserError, match=rf"Expected port {taken} to be free.*--port"):
        launch(AppOptions(runs=tmp_path, port=taken, browser=False))


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")])
def test_the_address_can_be_opened(host: str, shown: str) -> None:
    assert url(host, 8501) == f"http://{shown}:8501"


def test_a_taken_port_names_an_address_that_can_be_opened() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=re.escape(f"open http://[::1]:{port} if")):
            check_address("::1", port)


def test_the_demo_looks_at_its_port_before_it_captures(tmp_path: Path, taken: int) -> None:
    with pytest.raises(UserError, match=rf"Expected port {taken} to be free"):
        demo(DemoOptions(out=tmp_path / "demo", port=taken))
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Expected a port from 1 to 65535, got 70000"):
        launch(AppOptions(runs=tmp_path, port=70000, browser=False))


def test_an_address_of_another_machine_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Expected an address of this machine, got 192\.0\.2\.1 port 8501"):
        launch(AppOptions(runs=tmp_path, host="192.0.2.1", browser=False))


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Expected a folder of runs at .*gone.*twell capture"):
        launch(AppOptions(runs=tmp_path / "gone", browser=False))


def test_the_server_binds_to_this_machine_and_sends_no_statistics(tmp_path: Path) -> None:
    *_, runs, settings = command(AppOptions(runs=tmp_path, port=1234))
    assert runs == str(tmp_path)
    assert json.loads(settings) == SETTINGS | {
        "server.address": "127.0.0.1",
        "server.port": 1234,
        "browser.serverAddress": "127.0.0.1",
    }
    private = {"browser.gatherUsageStats": False, "client.toolbarMode": "minimal", "server.fileWatcherType": "none"}
    assert private.items() <= SETTINGS.items()
    assert SETTINGS["server.headless"] is True


def test_files_where_it_is_started_are_no_libraries(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('taken for a library')")
    line = command(AppOptions(runs=tmp_path))
    started = subprocess.run([*line[: line.index("-m")], "-c", "import click"], cwd=tmp_path, capture_output=True)
    assert (started.returncode, started.stderr) == (0, b"")


def test_the_config_file_repeats_the_settings() -> None:
    """A bare `streamlit run` in the repository must behave as `twell app` does."""
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    assert config["server"].pop("address") == "127.0.0.1"
    settings = {}
    for section, values in config.items():
        for name, value in values.items():
            if isinstance(value, dict):
                settings |= {f"{section}.{name}.{inner}": v for inner, v in value.items()}
            else:
                settings[f"{section}.{name}"] = value
    assert settings == SETTINGS
