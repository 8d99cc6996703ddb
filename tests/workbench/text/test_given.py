"""What a caller gives as texts: words, names, and folders, which are neither."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from twell.workbench import capture, study
from twell.workbench.errors import UserError
from twell.workbench.text.given import sources_of
from twell.workbench.text.sequences import documents
from twell.workbench.text.sources import open_sources


def test_a_folder_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is not read as words, but where it may be a word: in a list, without a slash."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").touch()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.jsonl.zst").touch()
    monkeypatch.chdir(tmp_path)
    for texts, got in (
        ("runs/mine", "at runs/mine, got the folder of a run: give the text that it was captured from."),
        (["words", "runs/mine"], "at runs/mine, got the folder of a run: "),
        (Path("runs"), "at runs, got a folder: give its files, as in 'runs/*.txt'."),
        (
            "shards",
            "at shards, got a folder: give its files, as in 'shards/*.jsonl*', or ['shards'] if that is the text.",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(f"Expected a text file {got}")):
            sources_of(texts)
    assert ["".join(text) for text in sources_of("")[0].read()] == [""]
    (source,) = sources_of(["shards", "runs"])
    assert ["".join(text) for text in source.read()] == ["shards", "runs"]
    with pytest.raises(UserError, match="Expected a text file at shards, got a folder"):
        open_sources(["shards"])


def test_half_a_character_is_no_text() -> None:
    """As the words of a command line have one where they are not UTF-8."""
    with pytest.raises(UserError, match="got half a surrogate pair at character 3 of text 2: write the character"):
        sources_of(["words", "caf\udce9 au lait"])


def test_a_path_with_nothing_there_is_no_text() -> None:
    with pytest.raises(
        UserError, match=re.escape("got runs/gone, a path with nothing there: check it, or ['runs/gone'] if")
    ):
        sources_of("runs/gone")
    for text in ("either / or", ["either/or"]):
        assert ["".join(one) for one in sources_of(text)[0].read()] == [text if isinstance(text, str) else text[0]]


def test_errors_say_the_words_of_python(tmp_path: Path) -> None:
    """From Python an option is an argument, and a folder is no --out."""
    (tmp_path / "other").touch()
    for options, message in (
        ({"tokens": 0}, "Expected tokens= of at least 1, got 0."),
        ({"seq_len": 0}, "Expected seq_len= of at least 2, got 0."),
        ({"out": tmp_path}, f"Expected an empty output folder, {tmp_path} holds other files: choose another folder."),
    ):
        with pytest.raises(UserError) as refused:
            capture("builtin:demo", "a few words", **options)
        assert str(refused.value) == message
    with pytest.raises(UserError, match="Expected tokens= of at least 2, got 1"):
        study("builtin:demo", "a few words", ["dead"], tokens=1)


def test_blank_texts_are_called_what_is_given() -> None:
    """Their source is named text, and the sentence read: Expected text in text."""
    with pytest.raises(UserError, match=r"Expected text in what is given, got no document that has any: "):
        list(documents(sources_of(["", "  "])))
