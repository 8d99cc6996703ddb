"""Tables and figures as Markdown, for the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table of a head and rows of cells."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def number(value: float, digits: int = 2) -> str:
    """Return the value with so many digits after the point, or a dash where it was not measured."""
    return "–" if pd.isna(value) else f"{value:,.{digits}f}"


def percent(value: float, digits: int = 0, sign: str = "") -> str:
    """Return a share in percent; sign: "+" shows the sign of positive ones too."""
    return f"{round(100 * value, digits) + 0.0:{sign}.{digits}f} %"
