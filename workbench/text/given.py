"""Texts in memory as a source, each a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from twell.workbench.errors import UserError
from twell.workbench.text.sources import TextSource, is_source_name, open_sources

NAME = "text"  # of the source that given texts are


class GivenTexts(TextSource):
    """The texts that a caller gives, as one source."""

    def __init__(self, texts: Sequence[str]) -> None:
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
    Raises UserError for a name that is no source, and for no text at all.
    """
    given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, (str, Path, TextSource)) else [texts]
    sources: list[TextSource] = []
    plain: list[str] = []
    for one in given:
        if isinstance(one, TextSource):
            sources.append(one)
        elif isinstance(one, Path) or (isinstance(one, str) and is_source_name(one)):
            sources += open_sources([str(one)])
        elif isinstance(one, str):
            plain.append(one)
        else:
            raise UserError(f"Expected texts as strings, paths or sources, got a {type(one).__name__}.")
    if plain:
        sources.append(GivenTexts(plain))
    if not sources:
        raise UserError("Expected at least one text, got none: give a string, or a file's path.")
    return sources
