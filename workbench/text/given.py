"""Texts in memory as a source, each a document."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from twell.workbench.errors import UserError
from twell.workbench.text.sources import TextSource, is_source_name, open_sources, refuse_folder
from twell.workbench.text.streams import encoded

NAME = "text"  # of the source that given texts are


class GivenTexts(TextSource):
    """The texts that a caller gives, as one source."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Raises UserError for a text with half a character in it."""
        for number, text in enumerate(texts, start=1):
            encoded(text, f"text {number}")
        self.texts = tuple(texts)
        self._begin(NAME, None, _documents)


def _documents(source: TextSource) -> Iterator[list[str]]:
    assert isinstance(source, GivenTexts)
    for text in source.texts:
        source.hashed(text.encode())
        yield [text]


def sources_of(texts: str | Path | TextSource | Sequence[str | Path | TextSource]) -> list[TextSource]:
    """Return the sources that are given by name, and the other strings as one more.

    A string is a name where it has a source's form and no white space, or is a file's; a Path always is one.
    Raises UserError for a name that is no source, a folder's too (a word in a list may be one), for a string that looks
    like a path and is none, and for no text at all.
    """
    if isinstance(texts, Mapping | bytes):  # whose keys and numbers are no texts
        raise UserError(f"Expected texts as strings, paths or sources, got a {type(texts).__name__}.")
    given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, (str, Path, TextSource)) else [texts]
    sources: list[TextSource] = []
    plain: list[str] = []
    for one in given:
        if isinstance(one, TextSource):
            sources.append(one)
        elif isinstance(one, Path) or (isinstance(one, str) and is_source_name(one)):
            sources += open_sources([str(one)])
        elif isinstance(one, str):
            _refuse_path(one, alone=texts is one)
            plain.append(one)
        else:
            raise UserError(f"Expected texts as strings, paths or sources, got a {type(one).__name__}.")
    if plain:
        sources.append(GivenTexts(plain))
    if not sources:
        raise UserError("Expected at least one text, got none: give a string, or a file's path.")
    return sources


def _refuse_path(text: str, alone: bool) -> None:
    """Raise UserError for a text that is a path: a folder's, or where nothing is. A word in a list may name a folder.

    alone: whether it was given by itself, not in a list
    """
    itself, has_slash = f", or {[text]!r} if that is the text", os.sep in text
    if alone or has_slash:
        refuse_folder(text, "" if has_slash else itself)
    if alone and has_slash and not any(letter.isspace() for letter in text):
        raise UserError(f"Expected a text, got {text}, a path with nothing there: check it{itself}.")
