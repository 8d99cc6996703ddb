"""Compiles a kernel's sources once, keeps the library, and says in one sentence what is missing when it cannot.

A family of kernels is a `Library`: sources under csrc/, each with flags of its own, that become one shared object
bound through torch's stable ABI (torch/csrc/stable), so that no torch or Python header but those is read.

    failure(CPU)  # None once torch.ops.twell has the library's ops, else the reason it does not

The library lies in the user's cache folder, under a name that holds a hash of the sources, their flags, torch and
the compiler; objects lie beside it under names of the same kind, so a changed source compiles alone. ninja runs
what is missing, all processes of a user take turns through one file lock, and whatever has its final name is whole.

Cost: what the compiler takes, the first time; then a hash of the sources, about a millisecond.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock

Function = TypeVar("Function", bound=Callable[..., Any])
CSRC = Path(__file__).parent / "csrc"
TORCH = Path(torch.__file__).parent
COMMON_FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-DTORCH_TARGET_VERSION=0x020a000000000000")  # torch 2.10's ABI
CXX_FLAGS = ("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
NVCC_FLAGS = ("-DUSE_CUDA", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr")


@dataclass(frozen=True)
class Source:
    """A file under csrc/ to be one object; two objects may come from one file with different flags."""

    path: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library:
    """The sources of one family of kernels.

    headers: patterns under csrc/ of the files that its sources include
    seconds: about what a first build takes, for the line that says it has begun
    cuda:    compiled and linked by nvcc, for CUDA
    fakes:   for each op that torch.compile shall trace, its name, and a function that makes empty results
    """

    name: str
    sources: tuple[Source, ...]
    headers: tuple[str, ...] = ()
    seconds: int = 20
    cuda: bool = False
    link: tuple[str, ...] = ()
    fakes: tuple[tuple[str, Callable[..., Any]], ...] = ()


class BuildError(RuntimeError):
    """Why a library could not be built, in one sentence."""


def constant(function: Function) -> Function:
    """A function that is asked once a process, which torch.compile takes for a constant: what
    torch.compiler.assume_constant_result does, without the second that its import of dynamo takes."""
    answer = cache(function)

    @wraps(function)
    def known(*arguments: Any) -> Any:
        return answer(*arguments)

    known._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return known  # type: ignore[return-value]


@constant
def failure(library: Library) -> str | None:
    """Makes the library's ops known to torch, building it if need be; the reason if that fails, and it stays so."""
    try:
        torch.ops.load_library(str(build(library)))
    except BuildError as error:
        return str(error)
    except OSError as error:
        return f"its library does not load: {str(error).splitlines()[0]}"
    for name, fake in library.fakes:
        torch.library.register_fake(name, fake)
    return None


def cache_folder() -> Path:
    """Where libraries are kept: twell/kernels under $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twell" / "kernels"


def build(library: Library) -> Path:
    """The compiled library; raises BuildError where it cannot be had."""
    compiler = find_compiler(library.cuda)
    if not (TORCH / "include/torch/csrc/stable/library.h").exists():
        raise BuildError(f"expected torch 2.10 or newer with its stable headers, got {torch.__version__}")
    folder = cache_folder()
    objects = dict(_objects(library, compiler, folder / "objects"))
    key = _digest(*(path.name for path in objects), *library.link)
    target = folder / f"{library.name}-{key}{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"
    if target.exists():
        return target
    ninja = find_ninja()
    try:
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not target.exists():
                _run_ninja(library, compiler, ninja, objects, target)
    except OSError as error:
        raise BuildError(f"expected to write to its cache folder, got: {error}; set XDG_CACHE_HOME") from error
    return target


def find_compiler(cuda: bool) -> str:
    """The path of nvcc ($CUDA_HOME, /usr/local/cuda, PATH), or of the C++ compiler ($CXX, PATH)."""
    if cuda:
        home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
        found = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
        if found is None:
            raise BuildError("expected CUDA's compiler, nvcc, under CUDA_HOME or on PATH, found none")
        return found
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"expected a C++ compiler ({', '.join(names)}) on PATH, found none; install one or set CXX")


def find_ninja() -> str:
    """The path of ninja: that of the Python package, or the system's."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        BIN_DIR = ""
    found = shutil.which("ninja", path=BIN_DIR or None) or shutil.which("ninja")
    if found is None:
        raise BuildError("expected ninja to drive the compiler, found none; install the Python package ninja")
    return found


def compile_command(source: Source, cuda: bool) -> list[str]:
    """The arguments after the compiler, without input and output."""
    include = TORCH / "include"
    return [*COMMON_FLAGS, *(NVCC_FLAGS if cuda else CXX_FLAGS), f"-I{CSRC}", "-isystem", str(include), *source.flags]


def _objects(library: Library, compiler: str, folder: Path) -> Iterator[tuple[Path, Source]]:
    """Each object's path, named after everything that decides its bits."""
    stat = os.stat(os.path.realpath(compiler))
    headers = sorted(path for pattern in library.headers for path in CSRC.glob(pattern))
    shared = _digest(
        torch.__version__, compiler, str(stat.st_size), str(stat.st_mtime_ns), *(path.read_bytes() for path in headers)
    )
    for source in library.sources:
        command = compile_command(source, library.cuda)
        key = _digest(shared, *command, (CSRC / source.path).read_bytes())
        yield folder / f"{Path(source.path).stem}-{key}.o", source


def _digest(*parts: str | bytes) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()[:16]


def _run_ninja(library: Library, compiler: str, ninja: str, objects: dict[Path, Source], target: Path) -> None:
    """Compiles the objects that are missing, and links; every file gets its name once it is whole."""
    missing = {path: source for path, source in objects.items() if not path.exists()}
    if missing:
        seconds = max(1, library.seconds * len(missing) // len(objects))
        print(f"Compiling the {library.name} kernel once, about {seconds} s …", file=sys.stderr, flush=True)
    lines = ["rule make", "  command = $tool $before -o $out.part $in $after && mv $out.part $out"]

    def edge(out: Path, inputs: Iterable[Path], before: Iterable[str] = (), after: Iterable[str] = ()) -> None:
        lines.append(f"build {_escaped([out])}: make {_escaped(inputs)}")
        for name, words in (("tool", [compiler]), ("before", before), ("after", after)):
            lines.append(f"  {name} = {_escaped(map(shlex.quote, words))}")

    for path, source in missing.items():
        edge(path, [CSRC / source.path], ["-c", *compile_command(source, library.cuda)])
    edge(target, objects, after=_link_command(library))
    script, log = target.with_suffix(".ninja"), target.with_suffix(".log")
    script.write_text("\n".join([*lines, ""]), encoding="utf-8")
    done = subprocess.run([ninja, "-f", script.name], cwd=script.parent, capture_output=True, text=True, check=False)
    script.unlink()
    if done.returncode:
        output = done.stdout + done.stderr
        log.write_text(output, encoding="utf-8")
        raise BuildError(f"its sources do not compile: {_first_error(output)} (all of it in {log})")


def _link_command(library: Library) -> list[str]:
    lib = TORCH / "lib"
    shared = ["-dynamiclib", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    libraries = ["-ltorch_cpu", "-ltorch_cuda"] if library.cuda else ["-ltorch_cpu"]
    return [*shared, f"-L{lib}", "-Xlinker", "-rpath", "-Xlinker", str(lib), *libraries, *library.link]


def _escaped(words: Iterable[object]) -> str:
    """Words as ninja reads them."""
    return " ".join(str(word).replace("$", "$$").replace(" ", "$ ").replace(":", "$:") for word in words)


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines()]
    told = (
        [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        or [line for line in lines if line]
        or ["no message"]
    )
    return told[0]
