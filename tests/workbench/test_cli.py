"""The command line: every option of the dataclasses is there, and every error is one sentence with its exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from twell.workbench import cli, options
from twell.workbench.errors import UserError
from twell.workbench.run import schema


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twell.workbench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_help_names_every_command_with_its_whole_first_line() -> None:
    printed = run("--help").stdout
    for name, (dataclass, _) in cli.COMMANDS.items():
        assert f"  {name:<9}  {cli.help_and_examples(dataclass)[0].splitlines()[0]}\n" in printed
    assert "..." not in printed.partition("Commands:")[2]


def test_threads_spin_for_a_moment_unless_told_otherwise() -> None:
    at_exit = "import atexit, os; atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'))); "
    code = at_exit + "from twell.workbench import cli; cli.main()"
    for given, expected in (({}, cli.SPIN), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        plain = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        command = [sys.executable, "-c", code, "--version"]
        printed = subprocess.run(command, capture_output=True, text=True, env=plain | given).stdout
        assert printed.splitlines()[-1] == expected


def test_version() -> None:
    assert run("--version").stdout == f"twell-workbench {version('twell-workbench')}\n"


ROOT = Path(__file__).parents[2]
EXAMPLES = [
    line for dataclass, _ in cli.COMMANDS.values() for line in cli.help_and_examples(dataclass)[1].splitlines()[2:]
]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
README = re.findall(r"^\$ ((?:twell|torchrun) .*)$", PAGE, re.MULTILINE)
PROOFS = re.findall(r"`(test_\w+\.py)(::\w+)?`", PAGE)


@pytest.mark.parametrize("line", EXAMPLES + README)
def test_every_command_that_is_shown_can_be_typed(line: str) -> None:
    words = shlex.split(line.replace(" -m twell.workbench", " twell"), comments=True)
    name, *arguments = words[words.index("twell") + 1 :]
    typed = typer.main.get_command(cli.cli).commands[name]  # type: ignore[attr-defined]
    assert typed.make_context(name, arguments).args == []


@pytest.mark.parametrize("proof", PROOFS, ids="".join)
def test_every_test_that_the_readme_names_is_there(proof: tuple[str, str]) -> None:
    file, name = proof
    held = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
    assert any(not name or f"\ndef {name.strip(':')}(" in text for text in held)


def test_every_command_is_shown_in_its_help_and_in_the_readme() -> None:
    commands = {line.split()[1] for line in EXAMPLES}
    assert commands == set(cli.COMMANDS)
    assert {line.split()[1] for line in README if line.startswith("twell")} >= commands - {"demo", "summarize"}


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_of_a_command_names_every_option_with_its_unit(name: str) -> None:
    printed = " ".join(CliRunner().invoke(cli.cli, [name, "--help"]).stdout.split())
    for item in fields(cli.COMMANDS[name][0]):
        assert item.metadata["argument"] or "--" + item.name.rstrip("_").replace("_", "-") in printed
        assert item.metadata["help"].split()[0] in printed
        if item.metadata["unit"]:
            assert f"[{item.metadata['unit']}]" in printed


def test_help_tells_that_a_named_kernel_gives_way_where_it_cannot_run() -> None:
    printed = " ".join(CliRunner().invoke(cli.cli, ["capture", "--help"]).stdout.split())
    assert "where a named one cannot run, another does" in printed


def test_options_reach_the_function_as_the_dataclass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):  # a text that is not there is refused before
        (tmp_path / name).write_text("words")
    seen: list[Any] = []
    target: Any = SimpleNamespace(work=seen.append)
    monkeypatch.setitem(sys.modules, "made_target", target)
    made = typer.Typer()
    made.command()(cli.command(options.CaptureOptions, "made_target:work"))
    made(
        ["model", "--text", "a.txt", "--text", "b.txt", "--out", str(tmp_path / "new"), "--no-loss"],
        standalone_mode=False,
    )
    expected = options.CaptureOptions(model="model", text=("a.txt", "b.txt"), out=tmp_path / "new", loss=False)
    assert seen == [expected]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("Expected this, got that: do so."), 2, "twell: Expected this, got that: do so.\n"),
        (KeyboardInterrupt(), 130, "twell: Stopped.\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a/b"),
            2,
            "twell: Expected to read and write a/b, got Permission denied: choose a place that you may use.\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "twell: Expected to read and write files and standard output, got No space left on device: free some "
            "room, or choose a place that has it.\n",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            2,
            "twell: Expected a folder for temporary files, found none that can be written to: set TMPDIR to one with "
            "room.\n",
        ),
    ],
)
def test_errors_are_one_sentence(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "cli", fail)
    monkeypatch.setattr(sys, "argv", ["twell", "capture"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == code
    assert capsys.readouterr().err == message


def test_a_file_of_its_own_that_is_gone_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "cli", lambda **_: Path("/no/such/file").read_text())
    monkeypatch.setattr(sys, "argv", ["twell", "capture"])
    with pytest.raises(FileNotFoundError):
        cli.main()


def test_what_a_terminal_cannot_show_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that its encoding lacks, and the bytes of a file's name that is no UTF-8."""
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["twell", "doctor"])
    monkeypatch.setattr(cli, "cli", lambda **_: print("2 ×", os.fsdecode(b"\xff")))
    cli.main()
    terminal.seek(0)
    assert terminal.read() == "2 \\xd7 \\udcff\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise UserError("one sentence")

    monkeypatch.setattr(cli, "cli", fail)
    monkeypatch.setattr(sys, "argv", ["twell", "capture", "--debug"])
    with pytest.raises(UserError):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capture"], "twell: Expected MODEL, got none: give it, as in `twell capture path/to/model --text "),
        (["capture", "m", "--out", "x"], "twell: Expected --text SOURCE, got none: give it, as in `twell capture "),
        (
            ["capture", "m", "--text", "t", "--out", "x", "--kernel", "magic"],
            "twell: Expected one of 'auto', 'reference', 'cpu', 'cuda', 'hopper' for --kernel, got 'magic'.\n",
        ),
        (["app", "--port", "x"], "twell: Expected a whole number for --port, got 'x'.\n"),
        (["bench", "--seconds", "1,5"], "twell: Expected a number for --seconds, got '1,5'.\n"),
        (["nonsense"], "twell: No such command 'nonsense': see `"),
        (["summarize", "long" * 100], "Expected a "),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(*arguments, folder=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1000


def test_the_column_dictionary_is_the_schema() -> None:
    """data/README.md holds the generated dictionary: `python -m twell.workbench.run.schema` prints it anew."""
    page = (Path(__file__).parents[2] / "data" / "README.md").read_text(encoding="utf-8")
    assert schema.dictionary().strip() in page
