"""Text sources: read the source that a name given to `--text` stands for, as a stream of documents.

| name | documents |
|---|---|
| `book.txt`, `notes.md` | one document, as it stands |
| `chats.jsonl` | a document a line: its field `text`, or the contents of its `messages`, without a chat template |
| `shards/*.jsonl.zst` | those of each file that matches, by name; these kinds may be packed: `.zst`, `.gz`, `.xz` |
| `web.parquet:body` | a document a row: its column `body`, or `text` if none is named |
| `-` | standard input, one document |
| `hf:org/name:body` | a dataset through the `datasets` library, streamed; `hf:org/name,CONFIG@SPLIT:body` in full |
| `builtin:passages` | 65 passages written for this workbench |
| `builtin:python-docs` | the English that ships inside every CPython |

A name is checked when its TextSource is constructed, before anything slow begins; everything read is hashed for the
manifest. Cost: about 2 s for all of `builtin:python-docs`, which parses the library's modules and imports none of them,
and 0.5 s for 100 MB of text.

    for source in open_sources(["notes.jsonl", "shards/*.txt.gz"]):
        for chunks in source.read(): print("".join(chunks))
        source.manifest()

A new kind of source is one function from a TextSource to its documents, and one line in KINDS.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import as_file, files
from itertools import chain
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError, usable, utf8
from twell.workbench.text import streams, tables
from twell.workbench.text.streams import STDIN, UNPACKED, is_packed

BUILTIN = "builtin:"

# Tests, an editor, other people's packages; and the help topics, which are read as such.
_SKIPPED = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "pydoc_data"}

DocumentTexts = Iterator[Iterable[str]]  # each in chunks of text, so that only a JSON line or a row must fit in memory


class TextSource:
    """One text source. Reading it counts and hashes its bytes.

    size: bytes of text if they are known before it is read, else None; bytes: read so far
    """

    def __init__(self, name: str) -> None:
        """Check that the source exists. Raises UserError for a name that is no source or not UTF-8, for a folder, and
        for a missing or an empty file.
        """
        refuse_folder(name)
        kind = _kind(utf8(name))
        self._begin(name, None, KINDS[kind])
        if kind.startswith("."):
            size = _file_size(usable(tables.path_and_column(self.name)[0]))
            self.size = None if kind == PARQUET or is_packed(self.name) else size
        elif kind == HF:
            tables.check_datasets(self.name)
        elif kind == STDIN:
            streams.refuse_closed_stdin()

    def _begin(self, name: str, size: int | None, read: Callable[[TextSource], DocumentTexts]) -> None:
        """Set what a source has. read: returns its documents"""
        self.name, self.size, self._read = name, size, read
        self.bytes, self._sha256 = 0, hashlib.sha256()

    def read(self) -> DocumentTexts:
        """Return the documents, from the beginning. Raises UserError if the content does not fit the name."""
        self.bytes, self._sha256 = 0, hashlib.sha256()
        return self._read(self)

    def hashed(self, block: bytes) -> bytes:
        """Count and hash a block, and return it. Everything read passes through here once, in order."""
        self.bytes += len(block)
        self._sha256.update(block)
        return block

    def manifest(self) -> dict[str, Any]:
        """Return name, SHA-256 and bytes of everything read so far, for the manifest.

        Files read from front to back are hashed as they are on disk; of Parquet, datasets and Python's documentation
        the texts are hashed.
        """
        return {"source": self.name, "sha256": self._sha256.hexdigest(), "bytes": self.bytes}


def open_sources(names: Iterable[str]) -> list[TextSource]:
    """Return the sources of these names, patterns replaced by the files that match. Raises UserError for no match."""
    return [TextSource(name) for given in names for name in _matching(str(given))]


def is_folder(text: str) -> bool:
    """Return whether a text is the name of a folder that exists."""
    try:
        return bool(text) and Path(text).is_dir()  # Path("") is this folder
    except (OSError, ValueError):  # no name that the system can hold: a text
        return False


def refuse_folder(name: str, or_else: str = "") -> None:
    """Raise UserError for the name of a folder. or_else: what else could be meant by it, and how to say so."""
    if not is_folder(name):
        return
    folder = Path(name)
    if (folder / "run.json").is_file():
        raise UserError(
            f"Expected a text file at {name}, got the folder of a run: give the text that it was captured from."
        )
    kinds = (f"*{kind}*" for kind in KINDS if kind.startswith(".") and any(folder.glob(f"*{kind}*")))
    pattern = str(folder / next(kinds, "*.txt"))
    raise UserError(f"Expected a text file at {name}, got a folder: give its files, as in {pattern!r}{or_else}.")


def is_source_name(text: str) -> bool:
    """Return whether a text names a source: a file, or what has the form of a name and no white space in it."""
    try:
        if Path(text).is_file():
            return True
    except (OSError, ValueError):  # no name that the system can hold: a text
        return False
    try:
        _kind(tables.path_and_column(text)[0])
    except UserError:
        return False
    return not any(letter.isspace() for letter in text)


def _matching(name: str) -> list[str]:
    """Return the names of the files that a pattern matches, each with the pattern's column; other names as they are."""
    path, column = tables.path_and_column(name)
    usable(path)
    if ":" in path.partition("/")[0] or not glob.has_magic(path) or Path(path).exists():
        return [name]
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise UserError(f"Expected files that match {path}, got none: check the pattern.")
    return [f"{match}:{column}" if column else match for match in matches]


# ---- kinds of source


def _text_file(source: TextSource) -> DocumentTexts:
    yield streams.decoded(source.name, streams.blocks(Path(source.name), source.hashed))


def _json_lines(source: TextSource) -> DocumentTexts:
    return ([text] for text in streams.json_texts(source.name, streams.blocks(Path(source.name), source.hashed)))


def _stdin(source: TextSource) -> DocumentTexts:
    yield streams.decoded("standard input", streams.stdin_blocks(source.hashed))


def _rows(texts: Callable[[str], Iterator[str]]) -> Callable[[TextSource], DocumentTexts]:
    """Return the reader of a kind whose texts are hashed, a row each. texts: yields them for a source's name"""

    def read(source: TextSource) -> DocumentTexts:
        for number, text in enumerate(texts(source.name), start=1):
            if len(encoded := streams.encoded(text, f"row {number} of {source.name}")) > streams.LONGEST:
                raise streams.too_long(f"row {number} of {source.name}")
            source.hashed(encoded)
            yield [text]

    return read


def _passages(source: TextSource) -> DocumentTexts:
    with as_file(files("twell.data") / "passages.jsonl") as path:
        yield from ([text] for text in streams.json_texts(source.name, streams.blocks(path, source.hashed)))


def _python_docs(source: TextSource) -> DocumentTexts:
    """Yield Python's help topics in order of name, then the docstrings of its library, module by module."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    modules = (library / path for path in paths if not _SKIPPED.intersection(path.parts))
    for text in chain((topics[name] for name in sorted(topics)), map(_docstrings, modules)):
        if text:
            source.hashed(text.encode())
            yield [text]


def _docstrings(path: Path) -> str:
    """Return a module's docstrings in order of line, with blank lines between them."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


PARQUET, HF = ".parquet", "hf:"
KINDS: dict[str, Callable[[TextSource], DocumentTexts]] = {
    ".txt": _text_file,
    ".md": _text_file,
    ".jsonl": _json_lines,
    PARQUET: _rows(tables.parquet_texts),
    STDIN: _stdin,
    HF: _rows(tables.hf_texts),
    f"{BUILTIN}passages": _passages,
    f"{BUILTIN}python-docs": _python_docs,
}


def builtins() -> str:
    """Return the names of the built-in sources, for a message."""
    return " or ".join(kind for kind in KINDS if kind.startswith(BUILTIN))


def _kind(name: str) -> str:
    """Return the key of KINDS that a name belongs to. Raises UserError if there is none."""
    if name.startswith((HF, BUILTIN)) or name == STDIN:
        kind = HF if name.startswith(HF) else name
    else:
        path = tables.path_and_column(name)[0]
        kind = Path(Path(path).stem if is_packed(path) else path).suffix
        kind = "" if kind == PARQUET and is_packed(path) else kind
    if kind not in KINDS:
        raise UserError(
            f"Expected a text file that ends in .txt, .md or .jsonl (or in {', '.join(UNPACKED)} after that) or "
            f".parquet, {builtins()}, hf:DATASET, or - for standard input, got {name}: check the name, or convert the "
            "file."
        )
    return kind


def _file_size(path: Path) -> int:
    """Return a file's size in bytes. Raises UserError if it is missing or empty."""
    if not path.is_file():
        raise UserError(f"Expected a text file at {path}, got nothing there: check the path, or use {builtins()}.")
    size = path.stat().st_size
    if not size:
        raise UserError(f"Expected text in {path}, got an empty file: give a file with text in it.")
    return size
