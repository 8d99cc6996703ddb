"""Odd texts: files of every kind, packing and name, whole or spoiled, read as a capture reads them.

The expected documents come from reading the whole file at once, with Python's own modules. A text that cannot be read
that way must be refused in one sentence; every other one must give the same documents, and tokens that decode to them.
Lines and rows may be MOST bytes here, so that longer ones cost no memory.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Callable
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from support.fuzz import Outcome, generator, outcome
from support.fuzz.kernel_calls import pick
from transformers import PreTrainedTokenizerFast

from twell.workbench.text import streams, tables
from twell.workbench.text.sequences import documents, sequences
from twell.workbench.text.sources import open_sources
from twell.workbench.text.vocabulary import vocabulary

Rng = np.random.Generator
MOST = 1 << 16  # bytes of a line or a row
PACKED = ("", "", ".gz", ".xz", ".zst")
STEMS = ("plain", "with space", "ünï日本", "tab\tname", "line\nbreak", "-", "[ab]", "a" * 200, "quote'\"", "é\u202e")
IMPOSSIBLE = ("b" * 300, "half\udc80", "nul\0byte", "no/such/folder", "b" * 5000)
WORDS = (
    "word",
    "naïve",
    "日本語",
    "🎈",
    "\u2028",
    "\x00",
    "\ufeff",
    "a" * 300,
    " ",
    "\r",
    "\t",
    "{",
    '"',
    "\\u0000",
    "x\n",
)
ODD_NAMES = ("", "te\nxt", "\x1b[31mred", "n" * 5000, "\udcff", "тext", "text ", "Text")


def cases(folder: Path, seed: int) -> Callable[[int], list[Outcome]]:
    """Return the function from a case's number to its outcomes."""
    streams.LONGEST = tables.LONGEST = MOST
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(files("twell.data") / "demo-model" / "tokenizer.json"))
    adds = vocabulary(tokenizer).column("bytes").to_pylist()

    def case(number: int) -> list[Outcome]:
        own = folder / str(number)
        own.mkdir()
        try:
            return [_case(own, tokenizer, adds, generator(seed, number))]
        finally:
            shutil.rmtree(own)

    return case


def _case(folder: Path, tokenizer: PreTrainedTokenizerFast, adds: list[bytes], rng: Rng) -> Outcome:
    """Write one odd text, read it, and judge what came. adds: what each token adds to the text"""
    if rng.random() < 0.05:
        name, expected = f"{folder}/{pick(rng, IMPOSSIBLE)}{pick(rng, ('.txt', '.jsonl', '.parquet:body'))}", None
    else:
        name, expected = _written(folder, rng)
    before = sorted(os.listdir(folder))

    def read() -> list[str]:
        pieces = groupby(documents(open_sources([name])), key=lambda piece: piece.number)
        texts = {number: list(group) for number, group in pieces}
        for number, group in texts.items():
            ids = [sequence.ids for sequence in sequences(group, tokenizer, 512)]
            joined = "".join(piece.text for piece in group)
            if ids and b"".join(adds[token] for token in np.concatenate(ids)) != joined.encode():
                raise AssertionError(f"the tokens of document {number} decode to another text")
        if sorted(os.listdir(folder)) != before:
            raise AssertionError("reading wrote a file")
        by_number = {number: "".join(piece.text for piece in group) for number, group in texts.items()}
        return [by_number.get(number, "") for number in range(max(by_number, default=-1) + 1)]

    def differs(got: Any) -> str:
        if expected is None:
            return f"read {len(got)} documents of a text that cannot be read"
        wanted = list(expected)
        while wanted and not wanted[-1]:  # documents without a piece at the end leave no trace
            wanted.pop()
        return "" if got == wanted else f"{len(got)} documents, expected {len(wanted)}, or other text in them"

    judged = outcome(f"{name[len(str(folder)) :]!r:.90}", read, differs, lambda _: False)
    if judged.kind == "one sentence" and expected is not None and any(text.strip() for text in expected):
        return Outcome("FAILED", judged.where, f"refused though it can be read: {judged.details}")
    return judged


def _written(folder: Path, rng: Rng) -> tuple[str, list[str] | None]:
    """Write a text to a file; return the source's name and the expected documents, None for a refusal."""
    kind, stem = pick(rng, (".txt", ".jsonl", ".jsonl", ".parquet")), pick(rng, STEMS)
    if kind == ".parquet":
        return _parquet(folder / f"{stem}.parquet", rng)
    packing = pick(rng, PACKED)
    path = folder / f"{stem}{kind}{packing}"
    data = _text(rng).encode() if kind == ".txt" else b"".join(_line(rng) for _ in range(int(rng.integers(1, 8))))
    if rng.random() < 0.2:
        data = _damaged(data, rng)
    if rng.random() < 0.1:
        data = b"\xef\xbb\xbf" + data
    packed = _pack(packing, data)
    if rng.random() < 0.2:
        packed = _damaged(packed, rng)
    path.write_bytes(packed)
    return str(path), _whole(path, kind, packing)


def _text(rng: Rng) -> str:
    """Return a text of random words, sometimes without any, or longer than a piece."""
    some = int(pick(rng, (0, 1, 5, 40, 40, 400)))
    return pick(rng, ("", " ", "\n")).join(pick(rng, WORDS) for _ in range(some)) * int(pick(rng, (1, 1, 1, 1, 9)))


def _line(rng: Rng) -> bytes:
    """Return a line of JSON, mostly one with a text."""
    text = _text(rng)
    if rng.random() < 0.85:
        return json.dumps({"n": 1, "text": text}, ensure_ascii=bool(rng.random() < 0.5)).encode() + b"\n"
    odd = pick(rng, ODD_NAMES).encode(errors="replace").decode()
    lines = (
        json.dumps({odd: text}), json.dumps({"text": None}), "[]", "3", "null", '{"text": "\\ud83d"}', '{"text": "a"',
        "{}",
        "[" * 100_000, json.dumps({"text": 5, odd: 1}), '{"text": "x", "n": ' + "9" * 5000 + "}", " ",
        '{"text": "a"}{}',
        json.dumps({"text": "y" * (MOST + int(rng.integers(-40, 40)))}), '{"text": NaN}',
    )  # fmt: skip
    return pick(rng, lines).encode() + pick(rng, (b"\n", b"\r\n", b""))


def _damaged(data: bytes, rng: Rng) -> bytes:
    """Return bytes that are cut, flipped, doubled or strange."""
    place = int(rng.integers(len(data) + 1))
    ways = (
        data[:place], data[:place] + b"\xff" + data[place:], data[:place] + b"\xc3", data + data[place:], b"",
        data[:place] + b"\x00" * 40 + data[place:], data[:place] + bytes([int(rng.integers(256))]) + data[place + 1 :],
        data + b"rest", b"\xff\xfe" + data,
    )  # fmt: skip
    return pick(rng, ways)


def _pack(packing: str, data: bytes) -> bytes:
    """Return data packed."""
    if packing == ".gz":
        return gzip.compress(data, 1)
    if packing == ".xz":
        return lzma.compress(data, preset=0)
    return pa.compress(data, "zstd", asbytes=True) if packing else data


def _whole(path: Path, kind: str, packing: str) -> list[str] | None:
    """Return the documents of a file that is read at once; None if it cannot be read, or has no text."""
    try:
        data = path.read_bytes()
        if not data:
            return None
        if packing == ".zst":
            data = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        elif packing:
            data = gzip.decompress(data) if packing == ".gz" else lzma.LZMAFile(io.BytesIO(data)).read()  # noqa: SIM115
        if kind == ".txt":
            texts = [data.decode().removeprefix("\ufeff")]
        else:
            lines = [line for line in data.split(b"\n") if line.strip()]
            if any(len(line) + 1 > MOST for line in data.split(b"\n")[:-1]) or len(data.split(b"\n")[-1]) > MOST:
                return None
            texts = [json.loads(line.decode("utf-8-sig"))["text"] for line in lines]
            if not all(isinstance(text, str) and text.encode() is not None for text in texts):
                return None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, TypeError, KeyError, RecursionError):
        return None
    return texts if any(text and not text.isspace() for text in texts) else None


def _parquet(path: Path, rng: Rng) -> tuple[str, list[str] | None]:
    """Write a Parquet file; return the source's name and the expected documents, None for a refusal."""
    texts = [None if rng.random() < 0.1 else _text(rng) for _ in range(int(rng.integers(1, 30)))]
    name = pick(rng, ("text", "text", "text", "body", *ODD_NAMES[1:4], "a.b"))
    column = pa.array(texts, pa.string())
    column = pick(rng, (column, column, column.dictionary_encode(), column.cast(pa.large_string())))
    columns, names, readable = [pa.array(range(len(texts))), column], ["n", name], True
    if rng.random() < 0.2:
        odd, readable = (
            pick(rng, (pa.array([b"x"] * len(texts)), pa.array([1.5] * len(texts)), pa.nulls(len(texts)))),
            False,
        )
        columns[1] = odd
    elif rng.random() < 0.1:
        columns, names, readable = [*columns, column], [*names, name], False
    table = pa.table(columns, names=names)
    options = {"use_dictionary": bool(rng.random() < 0.5), "row_group_size": int(pick(rng, (1, 7, 1000)))}
    pq.write_table(table, path, compression=pick(rng, ("none", "snappy", "zstd")), **options)
    source = f"{path}:{name}" if name != "text" or rng.random() < 0.3 else str(path)
    if rng.random() < 0.1:
        source, readable = f"{path}:{pick(rng, ODD_NAMES[1:4])}x", False
    expected = [text or "" for text in texts]
    whole = readable and all(len(text.encode()) <= MOST for text in expected) and any(text.strip() for text in expected)
    if rng.random() < 0.1:
        os.truncate(path, int(rng.integers(path.stat().st_size)))
        whole = False
    return source, expected if whole else None
