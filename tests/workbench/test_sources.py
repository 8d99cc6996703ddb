"""Text sources: the bytes of a file are its documents, hashed, and what is wrong with one is said in one sentence."""

from __future__ import annotations

import gzip
import hashlib
import inspect
import itertools
import json
import lzma
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pyarrow
import pytest

from twell.workbench import sources
from twell.workbench.errors import UserError
from twell.workbench.sources import Source

PROSE = (files("twell.data") / "passages.jsonl").read_text("utf-8")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that they cut lines, and characters."""
    monkeypatch.setattr(sources, "BLOCK", 7)


def write(path: Path, content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as stream:
            stream.write(data)
    elif path.suffix in (".gz", ".xz"):
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}[path.suffix](data))
    else:
        path.write_bytes(data)
    return str(path)


def read(name: str) -> list[str]:
    return ["".join(chunks) for chunks in Source(name).read()]


@pytest.mark.parametrize("name", ["prose.txt", "prose.txt.zst", "prose.txt.gz", "prose.txt.xz"])
@pytest.mark.usefixtures("small_blocks")
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, PROSE)) == [PROSE]


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.zst"])
@pytest.mark.usefixtures("small_blocks")
def test_each_json_line_is_a_document(tmp_path: Path, name: str) -> None:
    texts = ["one", "a longer one\n" * 20, "", "é 🐈\u2028 and a line separator"]
    lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=False) for text in texts]
    assert read(write(tmp_path / name, "\r\n".join([lines[0], "", *lines[1:]]))) == texts


@pytest.mark.parametrize(("name", "content"), [("mark.txt", "mark"), ("mark.jsonl", '{"text": "mark"}')])
@pytest.mark.usefixtures("small_blocks")
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, content: str) -> None:
    assert read(write(tmp_path / name, "\ufeff" + content)) == ["mark"]


@pytest.mark.parametrize("name", ["prose.txt", "prose.txt.zst", "prose.txt.gz", "prose.txt.xz", "prose.jsonl"])
def test_the_manifest_has_the_hash_of_the_file(tmp_path: Path, name: str) -> None:
    source = Source(write(tmp_path / name, json.dumps({"text": PROSE})))
    for _ in range(2):  # reading again begins again
        for chunks in source.read():
            "".join(chunks)
        data = (tmp_path / name).read_bytes()
        expected = {"source": source.name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        assert source.manifest() == expected
        assert source.size == len(data)


def test_python_docs_are_the_docstrings_of_the_library_and_import_none_of_it() -> None:
    source = Source("builtin:python-docs")
    found = ["".join(chunks) for chunks in source.read()]
    assert any((inspect.getdoc(json.dumps) or "") in text for text in found)
    assert any(text.startswith('The "if" statement') for text in found)
    assert sum(len(text.split()) for text in found) > 250_000
    assert not {"antigravity", "turtle", "lib2to3"} & set(sys.modules)
    joined = "".join(found).encode()
    expected = {"source": source.name, "sha256": hashlib.sha256(joined).hexdigest(), "bytes": len(joined)}
    assert source.manifest() == expected
    again = ["".join(chunks) for chunks in itertools.islice(source.read(), 150)]
    assert again == found[:150]


def test_docstrings_come_in_the_order_of_the_module(tmp_path: Path) -> None:
    code = """'module'\nclass A:\n  'A'\n  def f(self):\n    'f'\nasync def g():\n  'g'\n'no docstring'\ndef h(): 0\n"""
    module = Path(write(tmp_path / "module.py", code))
    assert sources._docstrings(module) == "module\n\nA\n\nf\n\ng"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "Expected text in {path}, got an empty file"),
        ("a.txt", b"caf\xe9 au lait", "Expected UTF-8 in {path}, got byte 0xe9 at byte offset 3:"),
        ("a.txt", "é".encode() * 50 + b"\xff", "got byte 0xff at byte offset 100:"),
        ("a.txt.zst", "é".encode() * 50 + b"\xff", "got byte 0xff at byte offset 100:"),
        ("a.txt", b"\xef\xbb\xbfabc\xff", "got byte 0xff at byte offset 6:"),
        ("a.txt", "ends in half a 🐈".encode()[:-1], "got byte 0xf0 at byte offset 15:"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "caf\xe9"}', "got byte 0xe9 at byte offset 28:"),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "\xff"}', "got byte 0xff at byte offset 13:"),
        ("a.jsonl", b'{"text": "ok"}\n\n{"txt": 1}', '"text" on line 3 of {path}, got the fields txt:'),
        ("a.jsonl", b"{}", '"text" on line 1 of {path}, got the fields (none):'),
        ("a.jsonl", b'{"text": 5}', "got text: 5:"),
        ("a.jsonl", b'["text"]', "got a list:"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"', "line 2 of {path}, got invalid JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 of {path}, got invalid JSON"),
        ("a.jsonl", b'{"text": "ab\\ud83d"}', "got half a surrogate pair at character 2:"),
        ("a.csv", b"text", "ends in .txt or .jsonl (or in .zst, .gz, .xz after that), or builtin:passages"),
        ("a.zst", b"text", "ends in .txt or .jsonl"),
        ("builtin:pasages", None, "got builtin:pasages: check the name"),
        ("gone.txt", None, "Expected a text file at {path}, got nothing there"),
        ("a.txt/", None, "Expected a text file at {path}, got a folder"),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_bad_input_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = name if name.startswith("builtin:") else str(tmp_path / name)
    if content is not None:
        write(Path(path), content)
    elif name.endswith("/"):
        Path(path).mkdir()
    with pytest.raises(UserError) as raised:
        read(path)
    said = str(raised.value)
    assert message.format(path=path) in said
    assert said.startswith("Expected ")
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 250 + len(path)


@pytest.mark.parametrize("packed", [".zst", ".gz", ".xz"])
@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:40] + b"?" * 20 + data[60:]])
def test_a_damaged_packed_file_is_refused(tmp_path: Path, packed: str, damage: Callable[[bytes], bytes]) -> None:
    path = Path(write(tmp_path / f"prose.txt{packed}", PROSE))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="Expected to read"):
        read(str(path))
