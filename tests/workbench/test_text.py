"""Text: what sources give, what they refuse, and that no token is lost or made up on the way to the sequences."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pyarrow
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from twell.workbench import sources, text
from twell.workbench.errors import UserError
from twell.workbench.sources import Source
from twell.workbench.text import Document, documents, sequences

PASSAGES = [json.loads(line) for line in (files("twell.data") / "passages.jsonl").read_text("utf-8").splitlines()]
PROSE = "\n\n".join(passage["text"] for passage in PASSAGES)

# How Llama 3 and Qwen split text: line breaks stay together, numbers fall apart, a word keeps what stands before it.
_RECENT = r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITTERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "recent": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_RECENT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def build_tokenizer(splitter: str, template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """A byte-level BPE of 600 tokens, trained on the passages."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = SPLITTERS[splitter]
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([passage["text"] for passage in PASSAGES], trainer)
    bpe.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module", params=list(SPLITTERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return build_tokenizer(request.param)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cut characters, pieces that cut paragraphs, batches that cut documents."""
    monkeypatch.setattr(sources, "BLOCK", 7)
    monkeypatch.setattr(text, "PIECE", 90)
    monkeypatch.setattr(text, "BATCH", 1000)


def write(path: Path, content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as stream:
            stream.write(data)
    else:
        path.write_bytes(data)
    return str(path)


def by_number(found: list[Document]) -> dict[int, str]:
    return {number: "".join(d.text for d in own) for number, own in itertools.groupby(found, lambda d: d.number)}


# ---- documents


@pytest.mark.parametrize("name", ["prose.txt", "prose.txt.zst"])
@pytest.mark.usefixtures("small_steps")
def test_a_streamed_file_is_the_whole_file(tmp_path: Path, name: str) -> None:
    found = list(documents([write(tmp_path / name, PROSE)]))
    assert "".join(d.text for d in found) == PROSE
    assert {d.number for d in found} == {0}
    assert 0 < min(len(d.text) for d in found) <= max(len(d.text) for d in found) <= 90


@pytest.mark.usefixtures("small_steps")
def test_where_pieces_end_does_not_depend_on_how_the_file_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(tmp_path / "prose.txt", PROSE)
    fine = list(documents([name]))
    monkeypatch.setattr(sources, "BLOCK", 100_000)
    assert list(documents([name])) == fine


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.zst"])
@pytest.mark.usefixtures("small_steps")
def test_json_lines_are_a_document_each_and_keep_their_numbers(tmp_path: Path, name: str) -> None:
    texts = ["one", PASSAGES[0]["text"], "", "é 🐈\u2028 and a line separator"]
    lines = [json.dumps({"text": t, "n": 1}, ensure_ascii=False) for t in texts]
    source = write(tmp_path / name, "\r\n".join([lines[0], "", *lines[1:]]))
    assert by_number(list(documents([source]))) == {0: texts[0], 1: texts[1], 3: texts[3]}


@pytest.mark.parametrize("name", ["mark.txt", "mark.jsonl"])
@pytest.mark.usefixtures("small_steps")
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = '{"text": "mark"}' if name.endswith("jsonl") else "mark"
    assert by_number(list(documents([write(tmp_path / name, "\ufeff" + content)]))) == {0: "mark"}


def test_sources_follow_each_other_and_number_their_own_documents(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.txt", "first"), write(tmp_path / "b.txt", "second")
    found = list(documents([first, Source(second)]))
    assert found == [Document(first, 0, "first"), Document(second, 0, "second")]


@pytest.mark.parametrize("name", ["prose.txt", "prose.txt.zst", "prose.jsonl"])
def test_the_manifest_has_the_hash_of_the_file(tmp_path: Path, name: str) -> None:
    source = Source(write(tmp_path / name, json.dumps({"text": PROSE})))
    for _ in range(2):  # reading again begins again
        list(documents([source]))
        data = (tmp_path / name).read_bytes()
        expected = {"source": source.name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        assert source.manifest() == expected
        assert source.size == len(data)


def test_a_source_left_early_has_the_hash_of_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 1000)
    monkeypatch.setattr(text, "PIECE", 500)
    source = Source(write(tmp_path / "prose.txt", PROSE))
    next(documents([source]))
    read = source.manifest()
    assert 0 < read["bytes"] < len(PROSE)
    assert read["sha256"] == hashlib.sha256(PROSE.encode()[: read["bytes"]]).hexdigest()


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    name = write(tmp_path / "large.txt", PROSE * 200)
    tracemalloc.start()
    try:
        characters = sum(len(d.text) for d in documents([name]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert characters == 200 * len(PROSE) > 10_000_000
    assert peak < 5_000_000


# ---- the built-in sources


def test_python_docs_are_the_docstrings_of_the_library_and_import_none_of_it() -> None:
    source = Source("builtin:python-docs")
    found = by_number(list(documents([source])))
    assert any((inspect.getdoc(json.dumps) or "") in own for own in found.values())
    assert any(own.startswith('The "if" statement') for own in found.values())
    assert sum(len(own.split()) for own in found.values()) > 250_000
    assert not {"antigravity", "turtle", "lib2to3"} & set(sys.modules)
    read = source.manifest()
    assert read["bytes"] == sum(len(own.encode()) for own in found.values())
    assert by_number(list(documents([source]))) == found  # twice the same
    assert source.manifest() == read


def test_reading_text_needs_no_torch() -> None:
    code = (
        "import sys, twell.workbench.text as t; list(t.documents(['builtin:passages'])); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_passages_are_what_the_source_gives() -> None:
    found = list(documents(["builtin:passages"]))
    assert [d.text for d in found] == [passage["text"] for passage in PASSAGES]


def test_passages_are_many_and_varied() -> None:
    assert len(PASSAGES) >= 52
    assert len({passage["id"] for passage in PASSAGES}) == len(PASSAGES)
    lengths = {passage["id"]: len(passage["text"].split()) for passage in PASSAGES}
    assert {name: n for name, n in lengths.items() if not 120 <= n <= 300} == {}
    assert sum(lengths.values()) >= 9000
    genres = Counter(passage["genre"] for passage in PASSAGES)
    wanted = "encyclopedic news dialogue code legal recipe chemistry medicine names urls list poetry numbers"
    assert not [genre for genre in wanted.split() if genres[genre] < 2]
    words = Counter(re.findall(r"[a-z']+", PROSE.lower()))
    wanted = "doesn't couldn't wouldn't they've doi gov www vermont greeks formaldehyde congenital phosphorylation"
    assert {word: words[word] for word in wanted.split() if words[word] < 3} == {}


# ---- sequences


@pytest.mark.parametrize("seq_len", [1, 7, 64, 10**6])
@pytest.mark.usefixtures("small_steps")
def test_sequences_hold_every_id_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, seq_len: int) -> None:
    """Cut in any way, a document has the ids that the tokenizer gives its whole text."""
    lines = [json.dumps({"text": passage["text"]}) for passage in PASSAGES[:12]]
    names = [write(tmp_path / "prose.txt", PROSE), write(tmp_path / "some.jsonl", "\n".join(lines))]
    expected = {(names[0], 0): tokenizer(PROSE, verbose=False)["input_ids"]}
    for number, passage in enumerate(PASSAGES[:12]):
        expected[names[1], number] = tokenizer(passage["text"])["input_ids"]
    found: dict[tuple[str, int], list[int]] = {}
    for sequence in sequences(documents(names), tokenizer, seq_len):
        ids = found.setdefault((sequence.source, sequence.document), [])
        assert sequence.start == len(ids)
        assert sequence.ids.dtype == "int32"
        assert 1 <= len(sequence.ids) <= seq_len
        assert len(ids) % seq_len == 0  # only the last sequence of a document is shorter
        ids += sequence.ids.tolist()
    assert list(found) == list(expected)
    for key, ids in expected.items():
        differing = next((i for i, pair in enumerate(zip(found[key], ids, strict=False)) if pair[0] != pair[1]), None)
        assert differing is None, f"{key}: first difference at token {differing}"
        assert len(found[key]) == len(ids)


@pytest.mark.parametrize(
    ("template", "before", "after"), [("$A", [], []), ("<s> $A </s>", [0], [1]), ("$A </s>", [], [1])]
)
@pytest.mark.usefixtures("small_steps")
def test_special_tokens_stand_where_the_tokenizer_puts_them_and_once(
    template: str, before: list[int], after: list[int]
) -> None:
    tokenizer = build_tokenizer("gpt2", template)
    pieces = [Document("s", 0, "one line of text\n"), Document("s", 0, "and another one\n"), Document("s", 1, "two")]
    found = [sequence.ids.tolist() for sequence in sequences(pieces, tokenizer, 1000)]
    whole = tokenizer(pieces[0].text + pieces[1].text, add_special_tokens=False)["input_ids"]
    assert found == [before + whole + after, tokenizer("two")["input_ids"]]


def test_documents_without_text_give_no_sequence(tokenizer: PreTrainedTokenizerFast) -> None:
    given = [Document("s", 0, ""), Document("s", 1, "text"), Document("s", 2, "")]
    assert [sequence.document for sequence in sequences(given, tokenizer, 8)] == [1]


# ---- what is refused


def test_an_unreadable_length_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="at least 1 token, got 0"):
        list(sequences([], tokenizer, 0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "Expected text in {path}, got an empty file"),
        ("a.txt", b" \n\t\n" * 50, "Expected text in {path}, got no document that has any"),
        ("a.txt.zst", b"\n", "Expected text in {path}, got no document that has any"),
        ("a.jsonl", b'\n{"text": ""}\n', "Expected text in {path}, got no document that has any"),
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
        ("a.csv", b"text", "ends in .txt or .jsonl (or in .zst after that), or builtin:passages"),
        ("a.zst", b"text", "ends in .txt or .jsonl"),
        ("builtin:pasages", None, "got builtin:pasages: check the name"),
        ("gone.txt", None, "Expected a text file at {path}, got nothing there"),
        ("a.txt/", None, "Expected a text file at {path}, got a folder"),
    ],
)
@pytest.mark.usefixtures("small_steps")
def test_bad_input_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = name if name.startswith("builtin:") else str(tmp_path / name)
    if content is not None:
        write(Path(path), content)
    elif name.endswith("/"):
        Path(path).mkdir()
    with pytest.raises(UserError) as raised:
        list(documents([path]))
    said = str(raised.value)
    assert message.format(path=path) in said
    assert said.startswith("Expected ")
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 250 + len(path)


def test_a_packed_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "prose.txt.zst", PROSE))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="Expected to read"):
        list(documents([str(path)]))


def test_every_name_is_checked_before_the_first_document(tmp_path: Path) -> None:
    name = write(tmp_path / "a.txt", "text")
    with pytest.raises(UserError, match="nothing there"):
        documents([name, str(tmp_path / "gone.txt")])
    with pytest.raises(UserError, match=r"a\.txt more than once"):
        documents([name, name])
    with pytest.raises(UserError, match="at least one text source"):
        documents([])
