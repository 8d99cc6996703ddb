"""Stream a file's bytes and texts: unpack it, cut it into lines, decode it.

Cost: a block in memory, or a line of JSON of at most LONGEST bytes. Every byte passes through the source's hash as it
is on disk. A damaged packed file, and bytes that are not UTF-8, are refused with their offset.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError, quoted

BLOCK = 1 << 18  # bytes read from a file at a time
LONGEST = 1 << 24  # bytes of a line or a row, which must fit in memory several times over
STDIN = "-"

Hash = Callable[[bytes], bytes]  # counts and hashes a block, and returns it


def _zstd(file: io.FileIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(file, "zstd")


UNPACKED: dict[str, Callable[[io.FileIO], Any]] = {
    ".zst": _zstd,
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".xz": lzma.LZMAFile,
}


def is_packed(name: str) -> bool:
    """Return whether a source is unpacked as it is read, so that its size on disk is not that of its text."""
    return Path(name).suffix in UNPACKED


class _HashedFile(io.FileIO):
    """A file that passes everything read from it through a hash."""

    def __init__(self, path: Path, hashed: Hash) -> None:
        super().__init__(path)
        self._hashed = hashed

    def read(self, size: int | None = -1, /) -> bytes:
        return self._hashed(super().read(size) or b"")


def blocks(path: Path, hashed: Hash) -> Iterator[bytes]:
    """Yield the file's bytes, unpacked if it is packed. Raises UserError if it cannot be read.

    hashed: called with each block as it is on disk
    """
    try:
        with _HashedFile(path, hashed) as file:
            stream: Any = file
            if is_packed(path.name):
                stream = UNPACKED[path.suffix](file)
            while block := stream.read(BLOCK):
                yield block
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # what each kind of packing raises
        fault = getattr(error, "strerror", None) or error
        raise UserError(f"Expected to read {path}, got an error ({fault}): check the file.") from None


def refuse_closed_stdin() -> None:
    """Raise UserError if there is no standard input to read from."""
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("Expected text on standard input for -, got one that is closed: pipe text into the command.")


def stdin_blocks(hashed: Hash) -> Iterator[bytes]:
    """Yield the blocks of standard input as they arrive. Raises UserError if it is closed."""
    refuse_closed_stdin()
    while block := sys.stdin.buffer.read(BLOCK):
        yield hashed(block)


def lines(blocks: Iterable[bytes], longest: int | None = None) -> Iterator[bytes]:
    """Yield the lines of the blocks together, each with its line break; the last may have none.

    longest: bytes; of a longer line the beginning is yielded once it is past them, and then nothing more
    """
    line: list[bytes] = []
    size = 0
    for block in blocks:
        for piece in io.BytesIO(block):
            line.append(piece)
            size += len(piece)
            if longest is not None and size > longest:
                yield b"".join(line)
                return
            if piece.endswith(b"\n"):
                yield b"".join(line)
                line, size = [], 0
    if line:
        yield b"".join(line)


def decoded(name: str, blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of each block, decoded from UTF-8. Raises UserError with the offset of a byte that does not fit.

    name: the source's name, for the error
    """
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


def json_texts(name: str, blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the field `text` of each line's JSON object, or the contents of its `messages`, joined by line breaks.

    A model's chat template, and who says what, are left out: they differ from model to model. Raises UserError for
    another line.
    name: the source's name, for the error
    """
    offset = 0
    for number, line in enumerate(lines(blocks, LONGEST), start=1):
        if len(line) > LONGEST:
            raise too_long(f"line {number} of {name}")
        if line.strip():
            yield _json_text(name, number, offset, line)
        offset += len(line)


def _json_text(name: str, number: int, offset: int, line: bytes) -> str:
    """Return the text of one line. number: of the line, from 1; offset: of its first byte in the source"""
    expected = f'Expected a JSON object with a string field "text" on line {number} of {name}'
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(name, offset + len(line) - len(error.object) + error.start, error) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{expected}, got invalid JSON ({error}): write one object a line.") from None
    if not isinstance(record, dict):
        raise UserError(f"{expected}, got a {type(record).__name__}: write one object a line.")
    text = record.get("text", _contents(record.get("messages")))
    if not isinstance(text, str):
        got = f"text: {text!r:.40}" if "text" in record else f"the fields {quoted(record)}"
        raise UserError(f"{expected}, got {got}: put each document's text there.")
    encoded(text, f"line {number} of {name}")
    return text


def _contents(messages: Any) -> str | None:
    """Return the contents of a chat's messages, those that are null left out; None for anything else."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    contents = [message.get("content") for message in messages]
    texts = [content for content in contents if isinstance(content, str)]
    return "\n".join(texts) if len(texts) + contents.count(None) == len(contents) and texts else None


def encoded(text: str, where: str) -> bytes:
    """Return text in UTF-8. Raises UserError for half a surrogate pair. where: the text's line or row, in words"""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        fault = f"half a surrogate pair at character {error.start} of {where}"
        raise UserError(f"Expected text of whole characters, got {fault}: write the character itself.") from None


def too_long(where: str) -> UserError:
    """Return the error for a line or a row of more than LONGEST bytes. where: it, in words"""
    return UserError(
        f"Expected at most {LONGEST >> 20} MiB of text in {where}, got more: give so long a document as a .txt file, "
        "which is read in pieces, or cut it."
    )


def _not_utf8(name: str, offset: int, error: UnicodeDecodeError) -> UserError:
    bad = error.object[error.start :]
    encoding = "UTF-16" if not offset and bad.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
    return UserError(
        f"Expected UTF-8 in {name}, got byte 0x{bad[0]:02x} at byte offset {offset}: "
        f"convert the file, for example with `iconv -f {encoding} -t UTF-8 FILE > NEW`."
    )
