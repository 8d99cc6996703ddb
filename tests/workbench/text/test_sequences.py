"""Text as the model reads it: no token is lost or made up between a source and its sequences."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from twell.workbench.errors import UserError
from twell.workbench.text import streams
from twell.workbench.text.sequences import Document, documents, sequences
from twell.workbench.text.sources import TextSource

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
    """Train a byte-level BPE of 600 tokens on the passages."""
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
    """Set blocks that cut characters, pieces that cut paragraphs, batches that cut documents."""
    monkeypatch.setattr(streams, "BLOCK", 7)
    monkeypatch.setattr("twell.workbench.text.sequences.PIECE", 90)
    monkeypatch.setattr("twell.workbench.text.sequences.BATCH", 1000)


def write(path: Path, content: str) -> str:
    path.write_bytes(content.encode())
    return str(path)


def test_passages_are_what_the_source_gives() -> None:
    read = list(documents(["builtin:passages"]))
    assert [d.text for d in read] == [passage["text"] for passage in PASSAGES]


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


# ---- documents


@pytest.mark.parametrize(
    "content",
    [PROSE, "a" * 1000, " " + "a" * 1000, "\n" * 1000 + "a", "\na" * 1000, " a" * 1000, "早上好" * 400, "aa\n\n" * 300],
    ids=["prose", "no border", "one border", "lines", "short lines", "words", "no spaces", "blank lines"],
)
@pytest.mark.usefixtures("small_steps")
def test_the_pieces_of_a_document_are_the_whole_of_it(tmp_path: Path, content: str) -> None:
    given = [write(tmp_path / "prose.txt", content), write(tmp_path / "other.txt", "other")]
    *pieces, other = documents(given)
    assert "".join(piece.text for piece in pieces) == content
    assert {(piece.source, piece.number) for piece in pieces} == {(given[0], 0)}
    assert 0 < min(len(piece.text) for piece in pieces) <= max(len(piece.text) for piece in pieces) <= 90
    assert other == Document(given[1], 0, "other")


@pytest.mark.usefixtures("small_steps")
def test_pieces_end_with_a_line_where_there_is_one(tmp_path: Path) -> None:
    pieces = list(documents([write(tmp_path / "lines.txt", "a line of some words\n" * 20)]))
    assert len(pieces) == 5
    assert all(piece.text.endswith("\n") for piece in pieces)


@pytest.mark.usefixtures("small_steps")
def test_where_pieces_end_does_not_depend_on_how_the_file_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(tmp_path / "prose.txt", PROSE)
    fine = list(documents([name]))
    monkeypatch.setattr(streams, "BLOCK", 100_000)
    assert list(documents([name])) == fine


def test_documents_keep_their_number_in_their_source(tmp_path: Path) -> None:
    lines = write(tmp_path / "some.jsonl", '{"text": "one"}\n\n{"text": ""}\n{"text": "three"}')
    other = write(tmp_path / "other.txt", "other")
    expected = [Document(lines, 0, "one"), Document(lines, 2, "three"), Document(other, 0, "other")]
    assert list(documents([lines, TextSource(other)])) == expected


def test_a_source_left_early_has_the_hash_of_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK", 1000)
    monkeypatch.setattr("twell.workbench.text.sequences.PIECE", 500)
    source = TextSource(write(tmp_path / "prose.txt", PROSE))
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


def test_reading_text_needs_no_torch() -> None:
    code = (
        "import sys; from twell.workbench.text.sequences import documents; list(documents(['builtin:passages']));"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


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
    joined: dict[tuple[str, int], list[int]] = {}
    for sequence in sequences(documents(names), tokenizer, seq_len):
        ids = joined.setdefault((sequence.source, sequence.document), [])
        assert sequence.start == len(ids)
        assert sequence.ids.dtype == "int32"
        assert 1 <= len(sequence.ids) <= seq_len
        assert len(ids) % seq_len == 0  # only the last sequence of a document is shorter
        ids += sequence.ids.tolist()
    assert list(joined) == list(expected)
    for key, ids in expected.items():
        differing = next((i for i, pair in enumerate(zip(joined[key], ids, strict=False)) if pair[0] != pair[1]), None)
        assert differing is None, f"{key}: first difference at token {differing}"
        assert len(joined[key]) == len(ids)


@pytest.mark.parametrize(
    ("template", "before", "after"), [("$A", [], []), ("<s> $A </s>", [0], [1]), ("$A </s>", [], [1])]
)
@pytest.mark.usefixtures("small_steps")
def test_special_tokens_stand_where_the_tokenizer_puts_them_and_once(
    template: str, before: list[int], after: list[int]
) -> None:
    tokenizer = build_tokenizer("gpt2", template)
    pieces = [Document("s", 0, "one line of text\n"), Document("s", 0, "and another one\n"), Document("s", 1, "two")]
    ids = [sequence.ids.tolist() for sequence in sequences(pieces, tokenizer, 1000)]
    whole = tokenizer(pieces[0].text + pieces[1].text, add_special_tokens=False)["input_ids"]
    assert ids == [before + whole + after, tokenizer("two")["input_ids"]]


def test_special_tokens_around_a_text_of_few_letters() -> None:
    """A vocabulary without the letters of the Latin alphabet, that leaves out what it does not know."""
    bases = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "A": 2, "C": 3, "G": 4, "T": 5}, merges=[]))
    bases.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bases, bos_token="<s>", eos_token="</s>")
    [sequence] = sequences([Document("s", 0, "GATTACA")], tokenizer, 100)
    assert sequence.ids.tolist() == tokenizer("GATTACA")["input_ids"] == [0, 4, 2, 5, 5, 2, 3, 2, 1]


def test_documents_without_text_give_no_sequence(tokenizer: PreTrainedTokenizerFast) -> None:
    given = [Document("s", 0, ""), Document("s", 1, "text"), Document("s", 2, "")]
    assert [sequence.document for sequence in sequences(given, tokenizer, 8)] == [1]


# ---- what is refused


def test_an_unreadable_length_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="at least 1 token, got 0"):
        list(sequences([], tokenizer, 0))


@pytest.mark.parametrize(("name", "content"), [("a.txt", " \n\t\n" * 50), ("a.jsonl", '\n{"text": ""}\n')])
@pytest.mark.usefixtures("small_steps")
def test_a_source_without_text_is_refused(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(UserError, match=r"Expected text in .*, got no document that has any: .*\.$"):
        list(documents([write(tmp_path / name, content)]))


def test_every_name_is_checked_before_the_first_document(tmp_path: Path) -> None:
    name = write(tmp_path / "a.txt", "text")
    with pytest.raises(UserError, match="nothing there"):
        documents([name, str(tmp_path / "gone.txt")])
    with pytest.raises(UserError, match=r"a\.txt more than once"):
        documents([name, name])
    with pytest.raises(UserError, match="at least one text source"):
        documents([])
