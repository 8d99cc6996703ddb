"""Building: once, for several processes too, and one sentence about what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from twell.kernels import build
from twell.kernels.build import BuildError, Library, Source

GOOD = """
#include <torch/csrc/stable/library.h>
int64_t answer() { return FIRST; }
STABLE_TORCH_LIBRARY_FRAGMENT(twell_test, m) { m.def("OP() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(twell_test, CompositeExplicitAutograd, m) { m.impl("OP", TORCH_BOX(&answer)); }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, with what ninja and shells read in their own ways in its name."""
    folder = tmp_path / "a $cache: 'one'"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "twell/kernels"


def library(folder: Path, text: str, *flags: str) -> Library:
    source = folder / "one source.cpp"
    source.write_text(text)
    return Library("test", (Source(str(source), flags),))


def test_flags_and_sources_name_the_library_and_it_loads(tmp_path, cache, capfd) -> None:
    import torch

    first = library(tmp_path, GOOD.replace("OP", "op_a"), "-DFIRST=7")
    assert build.failure(first) is None
    assert torch.ops.twell_test.op_a() == 7
    assert capfd.readouterr().err == "Compiling the test kernel once, about 20 s …\n"
    assert not list(cache.rglob("*.part")) + list(cache.rglob("*.log"))
    built = build.build(first)
    stamp = built.stat().st_mtime_ns
    assert build.build(first) == built
    assert built.stat().st_mtime_ns == stamp, "a second build is none"
    again = library(tmp_path, GOOD.replace("OP", "op_b"), "-DFIRST=8")
    assert build.build(again) != built
    assert len(list(cache.glob("objects/*.o"))) == 2


def test_whatever_decides_its_bits_names_it(tmp_path, cache, monkeypatch) -> None:
    """Nothing is compiled: what stands for the compiler is a file."""
    folder, compiler = tmp_path / "csrc", tmp_path / "compiler"
    folder.mkdir()
    written = {folder / "one.cpp": "1", folder / "one.h": "1", folder / "other.h": "1", compiler: "1"}
    for path, text in written.items():
        path.write_text(text)
    monkeypatch.setattr(build, "CSRC", folder)
    monkeypatch.setattr(build, "find_compiler", lambda cuda: str(compiler))
    monkeypatch.setattr(build, "_run_ninja", lambda *given: given[-1].write_text("built"))

    def name(*flags: str, link: tuple[str, ...] = (), version: str = build.torch.__version__) -> str:
        os.utime(compiler, ns=(0, int(compiler.read_text())))  # as a new one of the same size would have
        with monkeypatch.context() as changed:
            changed.setattr(build.torch, "__version__", version)
            return build.build(Library("test", (Source("one.cpp", flags),), headers=("*.h",), link=link)).name

    names = [name(), name("-DA"), name(link=("-lm",)), name(version="2.99")]
    for path in written:
        path.write_text("2")
        names.append(name())
        path.write_text("1")
    assert len(set(names)) == len(names) == 8
    assert name() == names[0]
    assert sorted(path.name for path in cache.glob("test-*")) == sorted(names)


def test_processes_take_turns(tmp_path, cache) -> None:
    """Two at once: both get the library, one of them compiled it, and the other's load is quick and quiet."""
    source = tmp_path / "slow source.cpp"
    source.write_text(GOOD.replace("OP", "op_d"))
    program = (
        "import os, torch\nfrom twell.kernels import build\nbuild.PATIENCE, begin = 100.0, os.times()\n"
        f"assert build.failure(build.Library('slow', (build.Source({str(source)!r}, ('-DFIRST=3',)),))) is None\n"
        "took = sum(os.times()[:4]) - sum(begin[:4])\nprint(torch.ops.twell_test.op_d(), took)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    out = [process.communicate(timeout=120) for process in both]
    answers = {"Compiling" in stderr: stdout.split() for stdout, stderr in out}
    assert [answers[compiled][0] for compiled in (True, False)] == ["3", "3"], out
    assert sorted(stderr for _, stderr in out)[0] == ""
    assert 4 * float(answers[False][1]) < float(answers[True][1])  # s of processor time
    assert len(list(cache.glob("slow-*"))) == 1


def test_a_long_wait_for_another_process_is_said(tmp_path, cache, capfd, monkeypatch) -> None:
    monkeypatch.setattr(build, "PATIENCE", 0.0)
    cache.mkdir(parents=True)
    other = FileLock(cache / "lock", thread_local=False)
    other.acquire()
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(build.build, library(tmp_path, GOOD.replace("OP", "op_c"), "-DFIRST=9"))
        said = ""
        while "Waiting for another process" not in said:
            assert not building.done()
            said += capfd.readouterr().err
            time.sleep(0.05)
        other.release()
        assert building.result().exists()
    assert str(cache / "lock") in said


def test_a_broken_source_is_one_sentence(tmp_path, cache) -> None:
    broken = library(tmp_path, "int twell( { return 1; }")
    message = build.failure(broken)
    assert message is not None
    assert message.startswith("its sources do not compile: ")
    assert "one source.cpp:1:" in message
    assert "error: " in message
    assert "\n" not in message
    (log,) = cache.glob("*.log")
    assert str(log) in message
    assert not list(cache.glob("objects/*")) + list(cache.glob("*.so"))
    assert build.failure(broken) is message, "asked once a process"


@pytest.mark.parametrize(
    ("cuda", "variables", "message"),
    [
        (False, {"PATH": ""}, r"expected a C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\) on PATH, found none"),
        (False, {"CXX": "no-such-compiler"}, r"expected a C\+\+ compiler \(no-such-compiler\) on PATH, found none"),
        (True, {"PATH": "", "CUDA_HOME": "/nowhere"}, "expected CUDA's compiler, nvcc, under CUDA_HOME or on PATH"),
    ],
)
def test_a_missing_compiler_is_named(tmp_path, monkeypatch, cuda, variables, message) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BuildError, match=message):
        build.build(Library("test", (Source(__file__),), cuda=cuda))


def test_missing_headers_and_ninja_are_named(tmp_path, monkeypatch) -> None:
    one = library(tmp_path, GOOD.replace("OP", "op_e"), "-DFIRST=1")
    with monkeypatch.context() as changed:
        changed.setattr(build, "TORCH", tmp_path)
        with pytest.raises(BuildError, match=r"expected torch 2\.10 or newer with its stable headers, got 2\."):
            build.build(one)
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "ninja", None)
        changed.setattr(build, "find_compiler", lambda cuda: sys.executable)
        changed.setenv("PATH", "")
        with pytest.raises(BuildError, match="expected ninja to drive the compiler, found none; install"):
            build.build(one)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"expected to write to its cache folder, got: .*; set XDG_CACHE_HOME"):
        build.build(library(tmp_path, GOOD, "-DFIRST=1"))


def test_a_user_without_a_home_is_told_where_to_keep_kernels(tmp_path, monkeypatch) -> None:
    """As in a container that runs under a number: `Path.home` finds none."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(build.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    reason = build.failure(library(tmp_path, GOOD, "-DHOMELESS=1"))
    assert reason == "expected a home folder to keep compiled kernels in, found none; set XDG_CACHE_HOME"


def test_a_cache_that_cannot_be_looked_into_is_named(tmp_path, monkeypatch) -> None:
    """As with the HOME of another user, kept by sudo."""
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.suffix == ".so":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    one = library(tmp_path, GOOD, "-DREFUSED=1")
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(BuildError, match=r"expected to write to its cache folder, got: .*; set XDG_CACHE_HOME"):
        build.build(one)
