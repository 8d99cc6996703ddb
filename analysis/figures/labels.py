"""Numbers, tokens and sentences as figures and pages show them.

Token text comes from a model's vocabulary and may be anything: a tag, marks that turn the writing direction. `visible`
makes every character seen; `plot_label` makes what is seen safe in plotly, which reads a few tags of its own.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable

SPACE = "\u202f"
_NAMED = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TINY = -4  # powers of ten below it are written as such
SMALL = 1e-5  # share, and distance from 1, of which three decimals of a percentage would show nothing
ROUNDING = 1e-12  # by which sums of shares miss 0 and 1


def visible(text: str) -> str:
    """Return a token's text with spaces, line ends and characters that draw nothing made visible."""
    if not text:
        return "⟨empty⟩"
    if text.isprintable() and not unicodedata.combining(text[0]):  # nearly all of a vocabulary, which a search reads
        return text.replace(" ", _NAMED[" "])
    return "".join(_NAMED.get(c) or _seen(c) for c in ("◌" + text if unicodedata.combining(text[0]) else text))


def running(text: str) -> str:
    """Return text around a token in one line: spaces stay, line ends and unseen characters are made visible."""
    return "".join(c if c == " " else _NAMED.get(c) or _seen(c) for c in text)


def _seen(char: str) -> str:
    return char if char.isprintable() else f"⟨U+{ord(char):04X}⟩"


def plot_label(text: str, width: int = 18) -> str:
    """Return a token as a plotly label, cut to `width` characters."""
    label = visible(text)
    label = label if len(label) <= width else label[: width - 1] + "…"
    return label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number to `digits` significant digits: 0.0123, 7.45, 1 048 576, 1.05 × 10⁻⁶; a dash for None or NaN."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    power = _power(value, digits)
    if power < TINY:
        return f"{number(value / 10.0**power, digits)}{SPACE}×{SPACE}10{str(power).translate(_RAISED)}"
    decimal_count = max(0, digits - 1 - power)
    return f"{value:,.{decimal_count}f}".replace(",", SPACE).replace("-", "−")


def _power(value: float, digits: int) -> int:
    """Return the power of ten of the first digit that is written: 1 for 9.97 to two digits, which is 10."""
    return int(f"{value:.{digits - 1}e}".partition("e")[2])


def aligned(values: Iterable[float], digits: int = 3) -> list[str]:
    """Return numbers with their signs, all with the decimals that the largest needs for `digits` significant digits:
    +12.1, −0.3."""
    all_values = list(values)
    largest = max((abs(value) for value in all_values if math.isfinite(value)), default=0.0)
    decimal_count = max(0, digits - 1 - _power(largest, digits)) if largest else 0
    return [f"{value:+,.{decimal_count}f}".replace(",", SPACE).replace("-", "−") for value in all_values]


def decimals(values: Iterable[float], digits: int = 3) -> int:
    """Return how many decimals a column of numbers is shown with: those that their median needs for `digits` digits."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value) and value)
    power = _power(sizes[len(sizes) // 2], digits) if sizes else 0
    return max(0, digits - 1 - power)


def typeset(text: str) -> str:
    """Return a sentence whose numbers are in plain characters (-0.27, 26,452, 95 %, 9.9e-05) with typographic signs and
    spaces."""
    text = re.sub(r"(?<![\w.-])(-?\d(?:\.\d+)?)e([+-]\d\d+)(?!\w)", _as_power, text)
    text = re.sub(r"(?<![\w.,-])-(?=\d)", "−", text)
    text = re.sub(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?!,?\d)", lambda match: match[0].replace(",", SPACE), text)
    text = re.sub(r"(?<=\d) (?=[mµ]s\b)", SPACE, text)  # a line does not end between a time and its unit
    return text.replace(" %", f"{SPACE}%")


def _as_power(match: re.Match[str]) -> str:
    return f"{match[1]}{SPACE}×{SPACE}10{str(int(match[2])).translate(_RAISED)}"


def in_table(value: float) -> str:
    """Return a number as exported tables show it: four digits, and from 10 000 on every one before the point."""
    return f"{value:.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:.4g}"


def times(ratio: float | None) -> str:
    """Return a ratio with its sign: 1.61 ×."""
    text = number(ratio)
    return text if text == "–" else f"{text}{SPACE}×"


def whole(value: float) -> str:
    """Return a count with every digit: 1 048 576."""
    return f"{round(value):,}".replace(",", SPACE)


def percent(share: float | None) -> str:
    """Return a share of 0 to 1 as a percentage; close to 0 % or 100 %, with enough digits to differ from it."""
    if share is None or not math.isfinite(share):
        return "–"
    distance = min(abs(share), abs(1 - share))
    if distance < ROUNDING:
        return f"{abs(share):.0%}".replace("%", SPACE + "%")
    decimal_count = 0 if distance >= 0.1 else 1 if distance >= 0.01 else 2 if distance >= 0.001 else 3
    if distance < SMALL:
        decimal_count = -2 - _power(distance, 1)
    return f"{share * 100:.{decimal_count}f}{SPACE}%".replace("-", "−")


def rare(share: float) -> str:
    """Return a small share per million (113 per million); from 1 % on, as a percentage."""
    return percent(share) if share >= 0.01 else f"{number(1e6 * share, 2)} per million"


def signed(value: float, digits: int = 3) -> str:
    """Return a number with its sign: +2.13, −0.4."""
    return ("+" if value > 0 else "") + number(value, digits)


def fixed(value: float) -> str:
    """Return a number with its sign and two decimals: +2.13, −0.40; a dash for NaN."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:+.2f}".replace("-", "−")
    return text if text.strip("+−0.") else "0.00"


def interval(low: float, high: float, form: Callable[[float], str], of: str = "") -> str:
    """Return an interval in brackets, after a space: ` (+0.31 to +0.52)`; nothing where one document tells none."""
    return f" ({of}{form(low)} to {form(high)})" if math.isfinite(low) else ""


def plural(count: float, noun: str, ending: str = "s") -> str:
    """Return a count and its noun: `3 sequences`, `1 sequence`, `2 batches`."""
    return f"{whole(count)} {noun}{'' if round(count) == 1 else ending}"


def number_range(low: int, high: int) -> str:
    """Return a range of whole numbers, both ends included: 4, 4–5."""
    return f"{low}" if low == high else f"{low}–{high}"
