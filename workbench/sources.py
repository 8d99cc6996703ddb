"""Text sources: what a name given to `--text` stands for, read as a stream of documents.

A source is a file (`.txt`, `.jsonl`, either one also as `.zst`, `.gz` or `.xz`) or text that is always at hand:
`builtin:passages` (written for this workbench) and `builtin:python-docs` (the English that ships inside
every CPython). A name is checked when its Source is made, before anything slow begins; what is read is
hashed on the way, for the manifest. Cost: about 2 s for all of `builtin:python-docs`, which parses the
library's modules and imports none of them, and 0.5 s for 100 MB of text.

    source = Source("notes.jsonl")
    for chunks in source.read(): print("".join(chunks))
    source.manifest()

A new kind of source is one function from a Source to its documents, and one line in KINDS.
"""

from __future__ import annotations

import ast
import codecs
import gzip
import hashlib
import io
import json
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import as_file, files
from itertools import chain
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError

BLOCK = 1 << 18  # bytes read from a file at a time
BUILTIN = "builtin:"

# Tests, an editor, other people's packages; and the help topics, which are read as such.
_SKIPPED = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "pydoc_data"}

Documents = Iterator[Iterable[str]]  # each document in chunks of text; only a JSON line must fit in memory


class Source:
    """One text source by its name. Made, it is known to exist; read, it knows the bytes that it gave.

    Raises UserError for a name that is no source, a missing or an empty file.
    """

    def __init__(self, name: str) -> None:
        self.name = str(name)
        self._read = _kind(self.name)
        self.size = None if self.name.startswith(BUILTIN) else _file_size(Path(self.name))  # bytes, where known
        self.bytes = 0  # read so far
        self._sha256 = hashlib.sha256()

    def read(self) -> Documents:
        """Its documents, from the beginning. Raises UserError where it is not what its name says."""
        self.bytes, self._sha256 = 0, hashlib.sha256()
        return self._read(self)

    def hashed(self, block: bytes) -> bytes:
        """The block, counted and hashed: all that is read passes through here, once and in order."""
        self.bytes += len(block)
        self._sha256.update(block)
        return block

    def manifest(self) -> dict[str, Any]:
        """What was read: `sha256` is that of the first `bytes` bytes (packed files: as on disk)."""
        return {"source": self.name, "sha256": self._sha256.hexdigest(), "bytes": self.bytes}


# ---- kinds of source


def _text_file(source: Source) -> Documents:
    yield _decoded(source.name, _blocks(source, Path(source.name)))


def _decoded(name: str, blocks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for block in chain(blocks, [b""]):  # the empty block ends the text: half a character there is an error
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(name, done - pending + error.start, error) from None
        yield text if done else text.removeprefix("\ufeff")
        done += len(block)


def _json_lines(source: Source) -> Documents:
    return _json_texts(source, Path(source.name))


def _passages(source: Source) -> Documents:
    with as_file(files("twell.data") / "passages.jsonl") as path:
        yield from _json_texts(source, path)


def _json_texts(source: Source, path: Path) -> Documents:
    offset = 0
    for number, line in enumerate(_lines(_blocks(source, path)), start=1):
        if line.strip():
            yield [_json_text(source.name, number, offset, line)]
        offset += len(line)


def _json_text(name: str, number: int, offset: int, line: bytes) -> str:
    wanted = f'Expected a JSON object with a string field "text" on line {number} of {name}'
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(name, offset + len(line) - len(error.object) + error.start, error) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{wanted}, got invalid JSON ({error}): write one object a line.") from None
    if not isinstance(record, dict):
        raise UserError(f"{wanted}, got a {type(record).__name__}: write one object a line.")
    text = record.get("text")
    if not isinstance(text, str):
        got = f"text: {text!r:.40}" if "text" in record else f"the fields {', '.join(record) or '(none)'}"
        raise UserError(f"{wanted}, got {got}: put each document's text there.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fault = f"half a surrogate pair at character {error.start}"
        raise UserError(f"{wanted}, got {fault}: write the character itself.") from None
    return text


def _python_docs(source: Source) -> Documents:
    """Python's help topics in order of name, then the docstrings of its library, module by module."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    modules = (library / path for path in paths if not _SKIPPED.intersection(path.parts))
    for text in chain((topics[name] for name in sorted(topics)), map(_docstrings, modules)):
        if text:
            source.hashed(text.encode())
            yield [text]


def _docstrings(path: Path) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


KINDS: dict[str, Callable[[Source], Documents]] = {
    ".txt": _text_file,
    ".jsonl": _json_lines,
    f"{BUILTIN}passages": _passages,
    f"{BUILTIN}python-docs": _python_docs,
}


def builtins() -> str:
    """The names of the built-in sources, for a message."""
    return " or ".join(kind for kind in KINDS if kind.startswith(BUILTIN))


def _kind(name: str) -> Callable[[Source], Documents]:
    kind = name if name.startswith(BUILTIN) else Path(Path(name).stem if is_packed(name) else name).suffix
    if kind not in KINDS:
        suffixes = " or ".join(kind for kind in KINDS if not kind.startswith(BUILTIN))
        raise UserError(
            f"Expected a text file that ends in {suffixes} (or in {', '.join(UNPACKED)} after that), or {builtins()}, "
            f"got {name}: check the name, or convert the file."
        )
    return KINDS[kind]


# ---- files


def _zstd(file: io.FileIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(file, "zstd")


UNPACKED: dict[str, Callable[[io.FileIO], Any]] = {
    ".zst": _zstd,
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".xz": lzma.LZMAFile,
}


def is_packed(name: str) -> bool:
    """Whether a source of that name is unpacked as it is read; its size on disk tells little then."""
    return Path(name).suffix in UNPACKED


class _HashedFile(io.FileIO):
    """A file that passes everything read from it through its source's hash."""

    def __init__(self, source: Source, path: Path) -> None:
        super().__init__(path)
        self._source = source

    def read(self, size: int | None = -1, /) -> bytes:
        return self._source.hashed(super().read(size) or b"")


def _blocks(source: Source, path: Path) -> Iterator[bytes]:
    """The file's bytes, unpacked where it is packed. Raises UserError where it cannot be read."""
    try:
        with _HashedFile(source, path) as file:
            stream: Any = file
            if is_packed(path.name):
                stream = UNPACKED[path.suffix](file)
            while block := stream.read(BLOCK):
                yield block
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # what each kind of packing raises
        fault = getattr(error, "strerror", None) or error
        raise UserError(f"Expected to read {path}, got an error ({fault}): check the file.") from None


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    for block in blocks:
        for part in io.BytesIO(block):
            held.append(part)
            if part.endswith(b"\n"):
                yield b"".join(held)
                held = []
    if held:
        yield b"".join(held)


def _file_size(path: Path) -> int:
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise UserError(f"Expected a text file at {path}, got {got}: check the path, or use {builtins()}.")
    size = path.stat().st_size
    if not size:
        raise UserError(f"Expected text in {path}, got an empty file: give a file with text in it.")
    return size


def _not_utf8(name: str, offset: int, error: UnicodeDecodeError) -> UserError:
    byte = error.object[error.start]
    return UserError(
        f"Expected UTF-8 in {name}, got byte 0x{byte:02x} at byte offset {offset}: "
        "convert the file, for example with `iconv -t UTF-8`."
    )
