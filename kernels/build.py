"""Compile a kernel's sources once and load the library, or say in one sentence why it cannot be built.

A family of kernels is a `Library`: sources under csrc/, each with flags of its own, that become one shared object. It
is bound through torch's stable ABI (torch/csrc/stable), so no other header of torch or Python is included.

    failure(CPU)  # None once torch.ops.twell has the library's ops, else the reason it does not

The library is in the user's cache folder, under a name with a hash of the sources, their flags, torch and the compiler.
Objects are in the same folder under names of the same kind, so a changed source is compiled alone. ninja builds what is
missing. All processes of a user take turns through one file lock, and a file gets its final name once it is complete.

Cost: the compiler's time, once; later a hash of the sources, about a millisecond.
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

Function = TypeVar("Function", bound=Callable[..., Any])
CSRC = Path(__file__).parent / "csrc"
TORCH = Path(torch.__file__).parent
COMMON_FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-DTORCH_TARGET_VERSION=0x020a000000000000")  # torch 2.10's ABI
CXX_FLAGS = ("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
PATIENCE = 5.0  # seconds of waiting for another process before it is said
NVCC_FLAGS = ("-DUSE_CUDA", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr")


@dataclass(frozen=True)
class Source:
    """A file under csrc/ that is compiled to one object; one file with different flags gives two objects.

    path: relative to csrc/; flags: of the compiler, besides those of all sources
    """

    path: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library:
    """The sources of one family of kernels.

    headers: patterns under csrc/ of the files that the sources include
    seconds: approximate time of a first build, for the line that announces it
    cuda:    whether nvcc compiles and links it
    link:    further arguments of the linker
    fakes:   name, and a function that returns empty results, of each op that torch.compile traces
    """

    name: str
    sources: tuple[Source, ...]
    headers: tuple[str, ...] = ()
    seconds: int = 20
    cuda: bool = False
    link: tuple[str, ...] = ()
    fakes: tuple[tuple[str, Callable[..., Any]], ...] = ()


class BuildError(RuntimeError):
    """A library that could not be built; the message is the reason, in one sentence."""


def constant(function: Function) -> Function:
    """Cache a function's results, and let torch.compile take them for constants.

    It does what torch.compiler.assume_constant_result does, without the second that importing dynamo takes.
    """
    cached = cache(function)

    @wraps(function)
    def constant_function(*arguments: Any) -> Any:
        return cached(*arguments)

    constant_function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return constant_function  # type: ignore[return-value]


@constant
def failure(library: Library) -> str | None:
    """Load a library's ops into torch, building it if needed. Returns None, or the reason if that fails.

    The result stays the same for the rest of the process.
    """
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
    """Return the folder of built libraries: twell/kernels under $XDG_CACHE_HOME or, without that, under ~/.cache.

    Raises BuildError for a user without a home, as in a container that runs under a number.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twell" / "kernels"
    except RuntimeError:
        raise BuildError("expected a home folder to keep compiled kernels in, found none; set XDG_CACHE_HOME") from None


def build(library: Library) -> Path:
    """Return the path of the compiled library, which is built if it is missing. Raises BuildError if that fails."""
    compiler = find_compiler(library.cuda)
    if not (TORCH / "include/torch/csrc/stable/library.h").exists():
        raise BuildError(f"expected torch 2.10 or newer with its stable headers, got {torch.__version__}")
    folder = cache_folder()
    objects = dict(_objects(library, compiler, folder / "objects"))
    key = _digest(*(path.name for path in objects), *library.link)
    target = folder / f"{library.name}-{key}{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"
    try:
        if target.exists():
            return target
        ninja = find_ninja()
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        with _turn(folder / "lock"):
            if not target.exists():
                _run_ninja(library, compiler, ninja, objects, target)
    except OSError as error:
        raise BuildError(f"expected to write to its cache folder, got: {error}; set XDG_CACHE_HOME") from error
    return target


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock of all processes that compile; say so where another one holds it for long."""
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=PATIENCE)
    except Timeout:
        print(f"Waiting for another process that compiles kernels and holds {path} …", file=sys.stderr, flush=True)
        held = lock.acquire()
    with held:
        yield


def find_compiler(cuda: bool) -> str:
    """Return the path of nvcc ($CUDA_HOME, /usr/local/cuda, PATH), or of the C++ compiler ($CXX, PATH).

    Raises BuildError if there is none.
    """
    if cuda:
        home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
        path = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
        if path is None:
            raise BuildError("expected CUDA's compiler, nvcc, under CUDA_HOME or on PATH, found none")
        return path
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError(f"expected a C++ compiler ({', '.join(names)}) on PATH, found none; install one or set CXX")


def find_ninja() -> str:
    """Return the path of ninja, of the Python package if it is installed, else the system's. Raises BuildError if there
    is none."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        BIN_DIR = ""
    path = shutil.which("ninja", path=BIN_DIR or None) or shutil.which("ninja")
    if path is None:
        raise BuildError("expected ninja to drive the compiler, found none; install the Python package ninja")
    return path


def compile_command(source: Source, cuda: bool) -> list[str]:
    """Return the compiler's arguments, without the compiler itself, input and output."""
    include = TORCH / "include"
    return [*COMMON_FLAGS, *(NVCC_FLAGS if cuda else CXX_FLAGS), f"-I{CSRC}", "-isystem", str(include), *source.flags]


def _objects(library: Library, compiler: str, folder: Path) -> Iterator[tuple[Path, Source]]:
    """Yield the path and source of each object; the name has a hash of everything that determines the object's bits."""
    stat = os.stat(os.path.realpath(compiler))
    headers = sorted(path for pattern in library.headers for path in CSRC.glob(pattern))
    shared = _digest(
        torch.__version__, compiler, str(stat.st_size), str(stat.st_mtime_ns), *(path.read_bytes() for path in headers)
    )
    for source in library.sources:
        command = compile_command(source, library.cuda)
        key = _digest(shared, *command, (CSRC / source.path).read_bytes())
        yield folder / f"{Path(source.path).stem}-{key}.o", source


def _digest(*fields: str | bytes) -> str:
    hashed = hashlib.sha256()
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()[:16]


def _run_ninja(library: Library, compiler: str, ninja: str, objects: dict[Path, Source], target: Path) -> None:
    """Compile the objects that are missing, and link them all to `target`. A file gets its name once it is complete.

    Raises BuildError, with the compiler's first error, if that fails.
    """
    missing = {path: source for path, source in objects.items() if not path.exists()}
    if missing:
        seconds = max(1, library.seconds * len(missing) // len(objects))
        print(f"Compiling the {library.name} kernel once, about {seconds} s …", file=sys.stderr, flush=True)
    lines = ["rule make", "  command = $tool $before -o $out.part $in $after && mv $out.part $out"]

    def add_rule(out: Path, inputs: Iterable[Path], before: Iterable[str] = (), after: Iterable[str] = ()) -> None:
        lines.append(f"build {_escaped([out])}: make {_escaped(inputs)}")
        for name, words in (("tool", [compiler]), ("before", before), ("after", after)):
            lines.append(f"  {name} = {_escaped(map(shlex.quote, words))}")

    for path, source in missing.items():
        add_rule(path, [CSRC / source.path], ["-c", *compile_command(source, library.cuda)])
    add_rule(target, objects, after=_link_command(library))
    script, log = target.with_suffix(".ninja"), target.with_suffix(".log")
    script.write_text("\n".join([*lines, ""]), encoding="utf-8")
    result = subprocess.run([ninja, "-f", script.name], cwd=script.parent, capture_output=True, text=True, check=False)
    script.unlink()
    if result.returncode:
        output = result.stdout + result.stderr
        log.write_text(output, encoding="utf-8")
        raise BuildError(f"its sources do not compile: {_first_error(output)} (all of it in {log})")


def _link_command(library: Library) -> list[str]:
    lib = TORCH / "lib"
    shared = ["-dynamiclib", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    libraries = ["-ltorch_cpu", "-ltorch_cuda"] if library.cuda else ["-ltorch_cpu"]
    return [*shared, f"-L{lib}", "-Xlinker", "-rpath", "-Xlinker", str(lib), *libraries, *library.link]


def _escaped(words: Iterable[object]) -> str:
    """Return words escaped for a ninja file, separated by spaces."""
    return " ".join(str(word).replace("$", "$$").replace(" ", "$ ").replace(":", "$:") for word in words)


def _first_error(output: str) -> str:
    """Return the compiler's first line that names an error, or its first line."""
    lines = [line.strip() for line in output.splitlines()]
    candidates = (
        [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        or [line for line in lines if line]
        or ["no message"]
    )
    return candidates[0]
