"""Draw a shaded passage as SVG: letters of one width, a rectangle behind each token, lines broken between words.

Code hosts take the colors out of HTML, so that a passage shown there has to be an image. Letters are placed by their
width alone, which needs no browser. What a token holds is text, whatever it looks like.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twell.analysis.exports.notebook import STRONG, ShadedText

WIDTH, MARGIN = 900, 12  # pixels
LETTER, LINE = 8.4, 22  # of a letter of 14 px, and from line to line
COLUMNS = int((WIDTH - 2 * MARGIN) / LETTER)
MOST_LINES = 24
FONT = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Piece:
    """A part of a token that stands on one line: its place, in letters and lines, text, width and shade (0 to 1)."""

    column: int
    line: int
    text: str
    width: int
    share: float


def svg(passage: ShadedText) -> tuple[str, int]:
    """Return a passage as SVG, WIDTH pixels wide, and its height; of a long one its first MOST_LINES lines."""
    pieces = []
    for piece in _placed(passage):
        if piece.line >= MOST_LINES:
            pieces.append(Piece(0, MOST_LINES, "…", 1, 0.0))
            break
        pieces.append(piece)
    lines = 1 + max((piece.line for piece in pieces), default=0)
    tall = 2 * MARGIN + (lines + 1) * LINE
    scale = passage.scale
    legend = f"{scale.name}: {scale.low:,.0f} to {scale.high:,.0f}, the darker, the more"
    drawn = [_drawn(piece) for piece in pieces]
    drawn.append(f'<text x="{MARGIN}" y="{tall - MARGIN}" font-size="12" fill="#56606c">{_xml(legend)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{tall}" viewBox="0 0 {WIDTH} {tall}" '
        f'font-family="{FONT}" font-size="14" fill="#1c2128">'
        f'<rect width="{WIDTH}" height="{tall}" fill="#fff"/>{"".join(drawn)}</svg>'
    ), tall


def _placed(passage: ShadedText) -> Iterator[Piece]:
    """Yield the tokens of a passage in lines of COLUMNS letters. A token moves to the next line rather than break."""
    column = line = 0
    for text, share in zip(passage.texts, np.nan_to_num(passage.shares), strict=True):
        for number, part in enumerate(text.replace("\r", "").expandtabs(4).split("\n")):
            if number:
                column, line = 0, line + 1
            if column and column + _width(part) > COLUMNS and _width(part.lstrip()) <= COLUMNS:
                column, line, part = 0, line + 1, part.lstrip()
            while part:
                fits = _that_fit(part, COLUMNS - column)
                if fits:
                    width = _width(part[:fits])
                    yield Piece(column, line, part[:fits], width, float(share))
                    column, part = column + width, part[fits:]
                if part:
                    column, line = 0, line + 1


def _width(text: str) -> int:
    """Return how many letters wide a text stands: ideographs count two, accents over another letter none."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _that_fit(text: str, room: int) -> int:
    """Return how many characters of a text are at most `room` letters wide."""
    return next((count - 1 for count in range(1, len(text) + 1) if _width(text[:count]) > room), len(text))


def _drawn(piece: Piece) -> str:
    x, y, width = MARGIN + piece.column * LETTER, MARGIN + piece.line * LINE, piece.width * LETTER
    shade = ""
    if piece.share:
        shade = (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 2}" fill="#2f7ed8" '
            f'fill-opacity="{STRONG * piece.share:.2f}"/>'
        )
    if not piece.text.strip():
        return shade
    return (
        f'{shade}<text x="{x:.1f}" y="{y + 15}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" '
        f'xml:space="preserve">{_xml(piece.text)}</text>'
    )


def _xml(text: str) -> str:
    """Return text as XML can hold it: escaped, and a mark in place of what XML forbids."""
    return html.escape(_NOT_XML.sub("\ufffd", text))
