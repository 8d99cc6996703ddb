"""Every CUDA source compiles for the architectures that it is for, with nothing left on the stack."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from twell.kernels import build
from twell.kernels.backends import cuda, hopper, hopper_backward, union_counts
from twell.kernels.build import Source

LIBRARIES = (hopper.LIBRARY, hopper_backward.LIBRARY, cuda.library(((8, 0), (9, 0))), union_counts.library((8, 0)))
SOURCES = list(dict.fromkeys(source for library in LIBRARIES for source in library.sources))  # two may share one
CUDA = [source for source in SOURCES if source.path.endswith(".cu")]
BINDINGS = [source for source in SOURCES if source.path.endswith(".cpp")]


def compiled(nvcc: str, source: Source, out: Path, *how: str) -> tuple[bool, str]:
    """Whether nvcc takes it, and what it and the assembler say."""
    command = [nvcc, *how, *build.compile_command(source, cuda=True), str(build.CSRC / source.path)]
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


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
    fine, said = fatbins[source].result()
    assert fine, said
    assert "bytes spill stores" in said
    assert said.count("bytes spill stores") == said.count(" 0 bytes spill stores"), said
    assert "serialized" not in said, said  # what ptxas says of products that it cannot keep in flight


@pytest.mark.parametrize("source", BINDINGS, ids=lambda source: source.path)
def test_bindings_compile(nvcc: str, source: Source, tmp_path: Path) -> None:
    fine, said = compiled(nvcc, source, tmp_path / "out.o", "-c")
    assert fine, said


def test_a_source_with_an_error_does_not(nvcc: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void kernel() { return 1; }", encoding="utf-8")
    fine, said = compiled(nvcc, Source(str(broken), CUDA[0].flags), tmp_path / "out.cubin", "-fatbin")
    assert not fine
    assert "error" in said


def test_every_source_is_in_a_library() -> None:
    listed = {build.CSRC / source.path for source in SOURCES}
    folders = ("hopper", "cuda", "unions")
    assert listed == {
        path for name in folders for end in ("cu", "cpp") for path in build.CSRC.glob(f"{name}/**/*.{end}")
    }
