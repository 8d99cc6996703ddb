"""Small drawings for a row of a list, as images in HTML: bars by layer, a curve, values with intervals, dots.

Each is an `img` that holds its SVG, because pages keep no other SVG. It needs no script and follows the theme.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT, FOOT, HEAD = 220, 74, 13, 12  # pixels; the foot holds names, the head values
BLUE, GREY = "#2f7ed8", "#8b95a1"
STYLE = ":root{color-scheme:light dark} text{fill:light-dark(#56606c,#aeb7c2)}"
ROW = 15  # pixels of a line with an interval
LIMIT = 38  # pixels at the right of bars for the name of their bound
NAMES = 68  # pixels for the names of intervals


def bars(
    values: NDArray,
    names: Sequence[str],
    says: str,
    form: str = "{:.1f}",
    limit: float | None = None,
    limit_name: str = "",
) -> str:
    """Return bars, with the first, greatest and last of them named and a dotted line at `limit`.

    values [n]: from 0 up, NaN where there is none; names [n]; says: the drawing in words; form: of the greatest value
    """
    known = np.nan_to_num(np.asarray(values, float))
    top = max(float(known.max()), (limit or 0.0) * 1.15, 1e-12)
    step = (WIDTH if limit is None else WIDTH - LIMIT) / len(known)
    scale = (HEIGHT - FOOT - HEAD) / top
    greatest = int(known.argmax())
    parts = []
    for number, value in enumerate(known):
        tall = max(value * scale, 0.5)
        strong = "" if number == greatest else ' opacity=".55"'
        parts.append(
            f'<rect x="{number * step + step * 0.1:.1f}" y="{HEIGHT - FOOT - tall:.1f}" width="{step * 0.8:.1f}" '
            f'height="{tall:.1f}" fill="{BLUE}"{strong}/>'
        )
    parts += [_text(_within(step * (n + 0.5), 12), HEIGHT - 2, names[n]) for n in sorted({0, greatest, len(known) - 1})]
    parts.append(
        _text(
            _within(step * (greatest + 0.5), 22),
            HEIGHT - FOOT - known[greatest] * scale - 3,
            form.format(known[greatest]),
        )
    )
    if limit is not None:
        y = HEIGHT - FOOT - limit * scale
        ends = f'x1="0" x2="{WIDTH - LIMIT}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {ends} stroke="{GREY}" stroke-dasharray="2 2"/>')
        parts.append(_text(WIDTH, y + 3, limit_name, "end"))
    return _svg(parts, says)


def curve(x: NDArray, y: NDArray, names: tuple[str, str], says: str, form: str = "{:.0f}") -> str:
    """Return a curve from 0 up, its first and greatest values written, the ends of x named. x, y [n]: x ascending."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    across = (x - x[0]) / max(x[-1] - x[0], 1e-12) * (WIDTH - 6) + 3
    down = HEIGHT - FOOT - y / max(float(y.max()), 1e-12) * (HEIGHT - FOOT - HEAD)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True))
    parts = [f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.6"/>', _axis()]
    parts += [_text(3, HEIGHT - 2, names[0], "start"), _text(WIDTH - 3, HEIGHT - 2, names[1], "end")]
    for place in sorted({int(y.argmax()), len(y) - 1}):
        parts.append(_text(_within(across[place], 14), down[place] - 3, form.format(y[place])))
    return _svg(parts, says)


def intervals(
    rows: Sequence[tuple[str, float, float, float]], limit: float, limit_name: str, says: str, form: str = "{:.2f}"
) -> str:
    """Return a line a value, with its interval, beside a dotted line at `limit`.

    rows: (name, value, low, high), low and high NaN where there is no interval; at most eight are drawn
    """
    rows = rows[:8]
    ends = [limit, *(value for row in rows for value in row[1:] if not np.isnan(value))]
    low, high = min(ends), max(ends)
    room = WIDTH - NAMES - 44

    def across(value: float) -> float:
        return NAMES + 6 + (value - low) / max(high - low, 1e-12) * room

    tall = ROW * len(rows) + FOOT + 2
    parts = [
        f'<line x1="{across(limit):.1f}" x2="{across(limit):.1f}" y1="0" y2="{tall - FOOT}" stroke="{GREY}" '
        'stroke-dasharray="2 2"/>',
        _text(_within(across(limit), 2.8 * len(limit_name)), tall - 2, limit_name),
    ]
    for number, (name, value, below, above) in enumerate(rows):
        y = ROW * number + 9
        parts.append(_text(0, y + 3, name[:12], "start"))
        if not np.isnan(below + above):
            parts.append(
                f'<line x1="{across(below):.1f}" x2="{across(above):.1f}" y1="{y}" y2="{y}" stroke="{BLUE}" '
                'stroke-width="3" opacity=".5"/>'
            )
        parts.append(f'<circle cx="{across(value):.1f}" cy="{y}" r="3.2" fill="{BLUE}"/>')
        parts.append(_text(WIDTH, y + 3, form.format(value).replace("-", "−"), "end"))
    return _svg(parts, says, tall)


def dots(x: NDArray, y: NDArray, names: tuple[str, str], says: str) -> str:
    """Return a dot for each pair of x and y, neither axis from 0. names: of x, and of y. x, y [n]"""
    x, y = np.asarray(x, float), np.asarray(y, float)
    across = 6 + (x - x.min()) / max(float(np.ptp(x)), 1e-12) * (WIDTH - 12)
    down = HEIGHT - FOOT - 5 - (y - y.min()) / max(float(np.ptp(y)), 1e-12) * (HEIGHT - FOOT - HEAD - 8)
    parts = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{BLUE}"/>' for a, b in zip(across, down, strict=True)]
    parts += [_axis(), _text(WIDTH, HEIGHT - 2, f"{names[0]} →", "end"), _text(0, 9, f"↑ {names[1]}", "start")]
    return _svg(parts, says)


def _svg(parts: Sequence[str], says: str, tall: int = HEIGHT) -> str:
    image = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{tall}" viewBox="0 0 {WIDTH} {tall}" '
        f'font-size="10" font-family="sans-serif"><style>{STYLE}</style>{"".join(parts)}</svg>'
    )
    source = base64.b64encode(image.encode()).decode()
    says = html.escape(says, quote=True)
    return f'<img src="data:image/svg+xml;base64,{source}" width="{WIDTH}" height="{tall}" alt="{says}" title="{says}">'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _within(x: float, half: float) -> float:
    """Return x moved so that a text of twice `half` pixels stays in the drawing."""
    return min(max(x, half), WIDTH - half)


def _axis() -> str:
    y = HEIGHT - FOOT + 0.5
    return f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="{GREY}" opacity=".5"/>'
