"""Text sources: the bytes of a file are its documents, hashed, and what is wrong with one is said in one sentence."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import lzma
import re
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twell.workbench.errors import UserError
from twell.workbench.text import sources, streams
from twell.workbench.text.sources import TextSource, is_source_name, open_sources

PROSE = (files("twell.data") / "passages.jsonl").read_text("utf-8")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set blocks so small that they cut lines, and characters."""
    monkeypatch.setattr(streams, "BLOCK", 7)


def write(path: Path, content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".zst":
        with pa.output_stream(path, compression="zstd") as stream:
            stream.write(data)
    elif path.suffix in (".gz", ".xz"):
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}[path.suffix](data))
    else:
        path.write_bytes(data)
    return str(path)


def read(name: str) -> list[str]:
    return ["".join(chunks) for chunks in TextSource(name).read()]


@pytest.mark.parametrize(
    "name", ["prose.txt", "prose.txt.zst", "prose.txt.gz", "prose.txt.xz", "prose.md", "prose.md.gz"]
)
@pytest.mark.usefixtures("small_blocks")
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, PROSE)) == [PROSE]


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.zst"])
@pytest.mark.usefixtures("small_blocks")
def test_each_json_line_is_a_document(tmp_path: Path, name: str) -> None:
    texts = ["one", "a longer one\n" * 20, "", "é 🐈\u2028 and a line separator"]
    lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=False) for text in texts]
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": None}, {"content": "A moss."}]
    lines.append(json.dumps({"messages": chat}))
    assert read(write(tmp_path / name, "\r\n".join([lines[0], "", *lines[1:]]))) == [*texts, "Who?\nA moss."]


@pytest.mark.parametrize(("name", "content"), [("mark.txt", "mark"), ("mark.jsonl", '{"text": "mark"}')])
@pytest.mark.usefixtures("small_blocks")
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, content: str) -> None:
    assert read(write(tmp_path / name, "\ufeff" + content)) == ["mark"]


@pytest.mark.parametrize("name", ["prose.txt", "prose.txt.zst", "prose.txt.gz", "prose.txt.xz", "prose.jsonl"])
def test_the_manifest_has_the_hash_of_the_file(tmp_path: Path, name: str) -> None:
    source = TextSource(write(tmp_path / name, json.dumps({"text": PROSE})))
    for _ in range(2):  # reading again begins again
        for chunks in source.read():
            "".join(chunks)
        data = (tmp_path / name).read_bytes()
        expected = {"source": source.name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        assert source.manifest() == expected
        assert source.size == (None if streams.is_packed(name) else len(data))


def test_python_docs_are_the_docstrings_of_the_library_and_import_none_of_it() -> None:
    source = TextSource("builtin:python-docs")
    docstrings = ["".join(chunks) for chunks in source.read()]
    assert any((inspect.getdoc(json.dumps) or "") in text for text in docstrings)
    assert any(text.startswith('The "if" statement') for text in docstrings)
    assert sum(len(text.split()) for text in docstrings) > 250_000
    assert not {"antigravity", "turtle", "lib2to3"} & set(sys.modules)
    joined = "".join(docstrings).encode()
    expected = {"source": source.name, "sha256": hashlib.sha256(joined).hexdigest(), "bytes": len(joined)}
    assert source.manifest() == expected
    again = ["".join(chunks) for chunks in itertools.islice(source.read(), 150)]
    assert again == docstrings[:150]


def test_docstrings_come_in_the_order_of_the_module(tmp_path: Path) -> None:
    code = """'module'\nclass A:\n  'A'\n  def f(self):\n    'f'\nasync def g():\n  'g'\n'no docstring'\ndef h(): 0\n"""
    module = Path(write(tmp_path / "module.py", code))
    assert sources._docstrings(module) == "module\n\nA\n\nf\n\ng"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "Expected text in {path}, got an empty file"),
        ("a.txt", b"caf\xe9 au lait", "Expected UTF-8 in {path}, got byte 0xe9 at byte offset 3:"),
        ("a.txt", b"caf\xe9 au lait", "with `iconv -f LATIN1 -t UTF-8 FILE > NEW`."),
        ("a.txt", "café".encode("utf-16"), "offset 0: convert the file, for example with `iconv -f UTF-16 -t UTF-8 "),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": [1]}]}', "got the fields messages:"),
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
        ("a.jsonl", b'{"text": "ab\\ud83d"}', "got half a surrogate pair at character 2 of line 1 of "),
        ("a.csv", b"text", "ends in .txt, .md or .jsonl (or in .zst, .gz, .xz after that) or .parquet, builtin:"),
        ("a.zst", b"text", "ends in .txt, .md or .jsonl"),
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
    sentence = str(raised.value)
    assert message.format(path=path) in sentence
    assert sentence.startswith("Expected ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 250 + len(path)


@pytest.mark.parametrize("packed", [".zst", ".gz", ".xz"])
@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:40] + b"?" * 20 + data[60:]])
def test_a_damaged_packed_file_is_refused(tmp_path: Path, packed: str, damage: Callable[[bytes], bytes]) -> None:
    path = Path(write(tmp_path / f"prose.txt{packed}", PROSE))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="Expected to read"):
        read(str(path))


def write_parquet(path: Path, **columns: object) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


def test_a_parquet_column_is_a_document_a_row(tmp_path: Path) -> None:
    texts = ["one", "two\n\nlines", None, "é 🐈", ""]
    path = write_parquet(
        tmp_path / "web.parquet", text=texts, body=pa.array(texts[::-1]).dictionary_encode(), n=range(5)
    )
    assert read(path) == read(f"{path}:text") == ["one", "two\n\nlines", "", "é 🐈", ""]
    assert read(f"{path}:body") == ["", "é 🐈", "", "two\n\nlines", "one"]
    source = TextSource(f"{path}:text")
    assert [*source.read()] and source.size is None
    joined = "".join(text or "" for text in texts).encode()
    expected = {"source": f"{path}:text", "sha256": hashlib.sha256(joined).hexdigest(), "bytes": len(joined)}
    assert source.manifest() == expected


def test_a_parquet_text_that_is_no_utf8(tmp_path: Path) -> None:
    """As some writers call bytes strings."""
    ends = pa.py_buffer(np.array([0, 4, 7], dtype=np.int32).tobytes())
    bad = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"finea\xe9b")])
    name = write_parquet(tmp_path / "bad.parquet", body=bad)
    with pytest.raises(UserError, match=r"Expected UTF-8 in column body of .*bad\.parquet, got byte 0xe9"):
        list(TextSource(f"{name}:body").read())


def test_what_is_no_column_of_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "web.parquet", body=["one"], n=[1])
    for name, got in ((path, "got none: name one of its columns (body, n)"), (f"{path}:n", "got one of int64")):
        with pytest.raises(UserError, match=re.escape(got)):
            read(name)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(Path(path).read_bytes()[:-9])
    with pytest.raises(UserError, match=r"Expected to read .*broken.parquet, got an error"):
        read(str(broken))
    with pytest.raises(UserError, match="got nothing there"):
        read(str(tmp_path / "gone.parquet:text"))


def test_a_pattern_is_the_files_that_match_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.txt.gz", "deep/d.txt", "a[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, name)
    write_parquet(tmp_path / "one.parquet", body=["x"])

    def matches(pattern: str) -> list[str]:
        return [source.name.removeprefix(f"{tmp_path}/") for source in open_sources([str(tmp_path / pattern)])]

    assert matches("*.txt") == ["a.txt", "a[1].txt", "b.txt"]
    assert matches("**/*.txt*") == ["a.txt", "a[1].txt", "b.txt", "c.txt.gz", "deep/d.txt"]
    assert matches("a[1].txt") == ["a[1].txt"]  # a file's own name is no pattern
    assert matches("*.parquet:body") == ["one.parquet:body"]
    assert matches("b.txt") == ["b.txt"]
    with pytest.raises(UserError, match=r"Expected files that match .*, got none"):
        matches("*.jsonl")


def test_standard_input_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    data = "piped in, with é\n".encode() * 40
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    monkeypatch.setattr(streams, "BLOCK", 7)
    source = TextSource("-")
    assert ["".join(chunks) for chunks in source.read()] == [data.decode()]
    assert source.manifest() == {"source": "-", "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets")


def test_a_dataset_is_streamed_by_its_library(datasets: Any, tmp_path: Path) -> None:
    """A folder with a card, as on the hub: two configurations, of which one has two splits."""
    files = {"train": ["one", None, "é 🐈"], "late": ["two"], "en": ["three"]}
    for name, texts in files.items():
        write(
            tmp_path / f"{name}.jsonl", "".join(json.dumps({"text": one, "body": name, "n": 1}) + "\n" for one in texts)
        )
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: all\n  default: true\n  data_files:\n  - {split: train, path: train.jsonl}\n"
        "  - {split: late, path: late.jsonl}\n- config_name: en\n  data_files: en.jsonl\n---\n"
    )
    assert read(f"hf:{tmp_path}") == ["one", "", "é 🐈"]
    assert read(f"hf:{tmp_path}@late") == ["two"]
    assert read(f"hf:{tmp_path}@late:body") == ["late"]
    assert read(f"hf:{tmp_path},en:body") == ["en"]
    source = TextSource(f"hf:{tmp_path}")
    given = datasets.load_dataset
    asked: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *names, **how: asked.append(how) or given(*names, **how))
        assert [*source.read()] and asked == [{"split": "train", "streaming": True}]
    digest = hashlib.sha256("oneé 🐈".encode()).hexdigest()
    assert source.manifest() == {"source": source.name, "sha256": digest, "bytes": len("oneé 🐈".encode())}


def test_a_dataset_that_was_saved_to_disk(datasets: Any, tmp_path: Path) -> None:
    one, two = (datasets.Dataset.from_dict({"text": texts}) for texts in (["one", None], ["two"]))
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, late=two).save_to_disk(tmp_path / "both")
    assert read(f"hf:{tmp_path}/one") == read(f"hf:{tmp_path}/both") == ["one", ""]
    assert read(f"hf:{tmp_path}/both@late") == ["two"]


def test_what_is_no_dataset(datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "rows.jsonl", '{"body": "one", "n": 1}\n')
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "saved")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, got in (
        (f"hf:{folder}:n", "got one of int"),
        (f"hf:{folder}", "got the columns body, n: name another as :COLUMN."),
        (f"hf:{folder}@late:body", "Bad split: late"),
        (f"hf:{folder},en:body", "BuilderConfig 'en' not found"),
        (f"hf:{tmp_path}/saved@late", "saved to disk without a split"),
        (f"hf:{tmp_path}/saved,en", "saved to disk without a configuration"),
        (f"hf:{tmp_path}/gone", "got an error"),
        ("hf:nobody/no-such-dataset", "got an error"),
        ("hf:", "got hf:: correct the name"),
    ):
        with pytest.raises(UserError, match=re.escape(got)) as refused:
            read(name)
        assert str(refused.value).startswith("Expected ") and "\n" not in str(refused.value)


def test_without_the_datasets_library_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="it is not installed: pip install datasets"):
        TextSource("hf:org/name")


@pytest.mark.parametrize("text", ["word " * 60, "word\0", "w" * 300, "a text"])
def test_a_text_is_no_name(text: str) -> None:
    assert not is_source_name(text)
