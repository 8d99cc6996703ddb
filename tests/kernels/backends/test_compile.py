"""Every CUDA source compiles for the architectures that it is for, with nothing left on the stack.

Cost: 90 s of processor time; none for sources that compiled before, since nvcc says the same of the same text. Its
answer is kept in the user's cache, under a hash of the compiler, the command, the source and every header.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from twell.kernels import build, predictions, strongest
from twell.kernels.backends import cuda, hopper_backward, hopper_libraries, selection_native, union_counts
from twell.kernels.build import Source

FOR_BOTH = tuple(each.library((8, 0)) for each in (union_counts, selection_native, strongest, predictions))
LIBRARIES = (hopper_libraries.library(), hopper_backward.library(), cuda.library(((8, 0), (9, 0))), *FOR_BOTH)
TRAINING_RELU2 = hopper_backward.library(relu2=True)
# of the flags for other activations: its kernel has the fewest registers free
ACTIVATED = hopper_libraries.library(relu2=True, up_relu=True).sources[0]
LISTED = [source for library in (*LIBRARIES, TRAINING_RELU2) for source in library.sources]
SOURCES = list(dict.fromkeys([*LISTED, ACTIVATED]))  # two libraries may share one
CUDA = [source for source in SOURCES if source.path.endswith(".cu")]
BINDINGS = [source for source in SOURCES if source.path.endswith(".cpp")]


def run(command: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in a thread, as subprocess.run does.

    Its environment is a copy: pytest changes the process's own before each test, and a start that reads it at that
    moment fails with "Bad address".
    """
    return subprocess.run(command, capture_output=True, text=True, check=check, env=os.environ.copy())


def compiled(nvcc: str, source: Source, out: Path, *how: str) -> tuple[bool, str]:
    """Return whether nvcc takes a source, and what it and the assembler say. how: options, of what to make in `out`"""
    command = [nvcc, *how, *build.compile_command(source, cuda=True), str(build.CSRC / source.path)]
    answer = build.cache_folder() / "checks" / f"{_digest(nvcc, command, build.CSRC / source.path)}.txt"
    if answer.exists():
        return True, answer.read_text(encoding="utf-8")
    done = run([*command, "-o", str(out)])
    if done.returncode == 0:  # an error is looked at again
        answer.parent.mkdir(parents=True, exist_ok=True)
        partial = answer.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        partial.write_text(done.stdout + done.stderr, encoding="utf-8")
        partial.replace(answer)
    return done.returncode == 0, done.stdout + done.stderr


def _digest(nvcc: str, command: list[str], source: Path) -> str:
    """Return a hash of what decides nvcc's answer: itself, the command, the source, every header, torch's version."""
    version = run([nvcc, "--version"], check=True).stdout
    words = " ".join(command)  # the same wherever the checkout and torch lie
    for folder in (build.CSRC, Path(torch.__file__).parent):
        words = words.replace(str(folder), "")
    digest = hashlib.sha256(f"{version}{words} {torch.__version__}".encode() + source.read_bytes())
    for header in sorted(path for end in ("h", "cuh") for path in build.CSRC.rglob(f"*.{end}")):
        digest.update(header.relative_to(build.CSRC).as_posix().encode() + header.read_bytes())
    return digest.hexdigest()[:32]


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return build.find_compiler(cuda=True)
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fatbins(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Source, Future[tuple[bool, str]]]]:
    """What nvcc says of each CUDA source, one on each processor at a time."""
    folder = tmp_path_factory.mktemp("fatbins")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            source: pool.submit(compiled, nvcc, source, folder / f"{at}.fatbin", "-fatbin", "-Xptxas=-v")
            for at, source in enumerate(CUDA)
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("source", CUDA, ids=lambda source: f"{source.path} {source.flags[-1]}")
def test_compiles_without_spills(fatbins: dict[Source, Future[tuple[bool, str]]], source: Source) -> None:
    fine, printed = fatbins[source].result()
    assert fine, printed
    assert "bytes spill stores" in printed
    assert printed.count("bytes spill stores") == printed.count(" 0 bytes spill stores"), printed
    assert "serialized" not in printed, printed  # what ptxas says of products that it cannot keep in flight


@pytest.mark.parametrize("source", BINDINGS, ids=lambda source: source.path)
def test_bindings_compile(nvcc: str, source: Source, tmp_path: Path) -> None:
    fine, printed = compiled(nvcc, source, tmp_path / "out.o", "-c")
    assert fine, printed


def test_a_source_with_an_error_does_not(nvcc: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void kernel() { return 1; }", encoding="utf-8")
    fine, printed = compiled(nvcc, Source(str(broken), CUDA[0].flags), tmp_path / "out.cubin", "-fatbin")
    assert not fine
    assert "error" in printed


def test_what_is_remembered_is_of_the_same_text(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("one", encoding="utf-8")
    first = _digest("true", ["nvcc", "-a"], source)
    assert _digest("true", ["nvcc", "-a"], source) == first
    assert _digest("true", ["nvcc", "-b"], source) != first
    source.write_text("other", encoding="utf-8")
    assert _digest("true", ["nvcc", "-a"], source) != first


def test_every_source_is_in_a_library() -> None:
    listed = {build.CSRC / source.path for source in (*SOURCES, *selection_native.CPU.sources)}
    folders = ("hopper", "cuda", "unions", "selection", "strongest", "predictions")
    assert listed == {
        path for name in folders for end in ("cu", "cpp") for path in build.CSRC.glob(f"{name}/**/*.{end}")
    }
