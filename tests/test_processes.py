"""Tests that run in forked processes: each is reported, whatever becomes of its process, and those `alone` run last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = {
    "test_a.py": """
        import os, pytest
        def test_passes(once, tmp_path):
            (tmp_path / "x").touch()
        def test_fails():
            print("said by the test")
            assert os.environ["TWELL_TEST_FOLDER"] == "none"
        def test_ends_its_process():
            os._exit(7)
        def test_after_that(once):
            pass
        @pytest.mark.alone
        def test_alone():
            assert len((HERE / "begun").read_text().split()) == 6, "another test is left"
            assert os.environ.get("OMP_NUM_THREADS") is None
        """,
    "test_b.py": """
        import os, pytest, time, warnings
        def test_runs_beside(once):
            time.sleep(0.7)
            warnings.warn("heard of")
            assert os.environ["OMP_NUM_THREADS"] == "1"
        @pytest.mark.skip(reason="why not")
        def test_skipped():
            pass
        """,
    "test_c.py": """
        def test_in_a_process_of_another_file(once):
            pass
        """,
    "conftest.py": """
        import os, pytest
        @pytest.fixture(scope="session")
        def once():
            number = os.path.basename(os.environ["TWELL_TEST_FOLDER"])
            with (HERE / f"once-{number}").open("x"):  # fails where the session's are made twice in a process
                yield
            (HERE / f"closed-{number}").touch()
        def pytest_runtest_setup(item):
            if "alone" not in item.keywords:
                with (HERE / "begun").open("a") as file:
                    file.write(item.name + "\\n")
        """,
}


def command(folder: Path, *options: str) -> list[str]:
    """Write the tests into a folder; return the command that runs them in two processes."""
    for name, text in FILES.items():
        lines = text.replace("HERE", f"__import__('pathlib').Path({str(folder)!r})").splitlines()
        (folder / name).write_text("\n".join(line[8:] for line in lines))
    pytest = [sys.executable, "-m", "pytest", "-p", "support.processes", "--processes=2", *options, str(folder)]
    places = ["-c", "/dev/null", "--rootdir", str(folder), "--basetemp", str(folder / "tmp")]
    return [*pytest, *places, "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning"]


def ran(folder: Path, *options: str, ends_with: int = 1) -> str:
    """Run the tests of a folder in two processes; return what pytest says. ends_with: its exit code"""
    ended = subprocess.run(command(folder, "-rA", *options), capture_output=True, text=True, timeout=120, cwd=HERE)
    assert ended.returncode == ends_with, ended.stdout + ended.stderr
    return ended.stdout


def test_each_test_is_reported(tmp_path: Path) -> None:
    said = ran(tmp_path)
    assert "2 failed, 5 passed, 1 skipped, 1 warning" in said, said
    assert "said by the test" in said
    assert "UserWarning: heard of" in said
    assert "The process of this test ended with 7" in said
    assert said.index("test_after_that") < said.index("test_alone")
    assert [*tmp_path.glob("once-*")] and [*tmp_path.glob("closed-*")]


def test_no_test_begins_after_the_last_failure_allowed(tmp_path: Path) -> None:
    said = ran(tmp_path, "-x")
    assert "1 failed, " in said and "test_alone" not in said and "stopping after 1 failures" in said
    assert "test_ends_its_process" not in (tmp_path / "begun").read_text()


def test_the_tests_end_where_nobody_reads_what_they_print(tmp_path: Path) -> None:
    tests = command(tmp_path, "-v", "-k", "passes or beside")
    with subprocess.Popen(tests, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=HERE) as begun:
        assert begun.stdout
        while b"test_passes" not in begun.stdout.readline():
            pass
        begun.stdout.close()
        try:
            assert begun.wait(30) > 0
        finally:
            begun.kill()


def test_a_thread_that_begins_as_tests_are_collected_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    said = ran(tmp_path, ends_with=4)
    assert "Expected tests that begin no thread as they are collected, got [" in said
