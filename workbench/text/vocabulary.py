"""Make the run's vocabulary: the bytes that each token adds to the text.

The idea: a run's text is shown by joining the bytes of its tokens and decoding the whole, so a character that two
tokens share comes out right. Tokenizers store pieces in one of two alphabets: byte-level BPE writes each byte as one
printable character, SentencePiece writes a space as ▁ and single bytes as <0xNN>. The tokenizer's own decoder shows
which one it uses. Special tokens add nothing to the text. Cost: half a second for 500 000 tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerFast

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> pa.Table:
    """Return the run's vocab table: token_id, bytes, text (for display), special."""
    added, special, known = tokenizer.added_tokens_decoder, special_ids(tokenizer), tokenizer.get_vocab()
    read = _reader(tokenizer)

    def adds(piece: str, number: int) -> bytes:
        return b"" if number in special else piece.encode() if number in added else read(piece, number)

    pieces = sorted(known, key=known.__getitem__)
    numbers = [known[piece] for piece in pieces]
    data = list(map(adds, pieces, numbers))
    marks = [number in special for number in numbers]
    texts = [piece if mark else display(one) for piece, mark, one in zip(pieces, marks, data, strict=True)]
    return pa.table({"token_id": numbers, "bytes": data, "text": texts, "special": marks})


def special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the ids of special tokens: those that the tokenizer adds by itself, and those only declared special."""
    declared = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return declared | set(tokenizer.all_special_ids)


def display(data: bytes) -> str:
    """Return bytes as text on one line: � for what does not decode, control characters escaped."""
    text = data.decode("utf-8", errors="replace")
    if text.isprintable():  # nearly every token
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each printable character that byte-level BPE writes.

    A printable byte is written as itself; the others, in order, as the characters from U+0100 on (as in GPT-2).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def _reader(tokenizer: PreTrainedTokenizerFast) -> Callable[[str, int], bytes]:
    """Return the function from a stored piece and its id to the piece's bytes."""
    backend = tokenizer.backend_tokenizer.decoder
    decoder: dict[str, Any] = json.loads(backend.__getstate__()) if backend is not None else {}
    kinds = {step.get("type") for step in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in kinds:
        return _byte_level()
    if kinds & {"Metaspace", "ByteFallback"}:
        return lambda piece, _: _sentencepiece(piece)
    return lambda _, number: str(tokenizer.decode([number])).encode()


def _byte_level() -> Callable[[str, int], bytes]:
    """Return the function for byte-level BPE.

    A piece with characters outside the alphabet was added to the tokenizer as text: its bytes are its UTF-8.
    """
    alphabet = byte_alphabet()
    known, table = frozenset(alphabet), str.maketrans({mark: chr(byte) for mark, byte in alphabet.items()})
    return lambda piece, _: piece.translate(table).encode("latin-1") if known.issuperset(piece) else piece.encode()


def _sentencepiece(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece."""
    match = BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()
