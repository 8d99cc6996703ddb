"""Numbers, tokens and sentences as pages show them: those of the figures (`analysis/figures/labels.py`), and HTML.

Token text comes from a model's vocabulary and may be anything: a tag, Markdown, a link. `token_html` makes what is seen
safe in HTML. Streamlit's labels read Markdown, so token text never goes into one.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from twell.analysis.activity.layers import dead_bound
from twell.analysis.figures.labels import (
    SPACE,
    aligned,
    decimals,
    fixed,
    interval,
    number,
    percent,
    plot_label,
    plural,
    rare,
    running,
    signed,
    times,
    typeset,
    visible,
    whole,
)
from twell.workbench.run.manifest import spelled

if TYPE_CHECKING:
    import pandas as pd

    from twell.workbench.run.store import Run

__all__ = [
    "BANDS",
    "SPACE",
    "aligned",
    "column_form",
    "dead_limit",
    "decimals",
    "fixed",
    "interval",
    "layer_width",
    "marked_up",
    "matching",
    "nats",
    "number",
    "pass_spread",
    "percent",
    "plot_label",
    "plural",
    "rare",
    "running",
    "seconds_ago",
    "signed",
    "times",
    "token_html",
    "typeset",
    "typeset_form",
    "visible",
    "whole",
    "with_intervals",
]

BANDS = " as bands, and none where a single document tells"  # behind "with 95 % intervals"


def dead_limit(run: Run, tokens: int) -> str:
    """Return how often a neuron fires at most that fired on none of a run's `tokens` counted tokens, after "it fires":
    in sequences and, as tokens of one sequence are alike, on tokens only if these were independent."""
    of_sequences = dead_bound(run.manifest.sequences)
    if not of_sequences < 1:
        return "at a rate on other text that so few sequences do not bound"
    return (
        f"in less than {percent(of_sequences)} of such sequences (95{SPACE}%), and on less than "
        f"{rare(dead_bound(tokens))} of tokens, were these independent"
    )


def layer_width(run: Run) -> str:
    """Return how many neurons a layer of a run has: `5 632`, or `104 to 176` where layers differ."""
    return spelled(run.manifest.widths, whole)


def with_intervals(ends: pd.Series, more: str = "") -> str:
    """Return the clause of a caption that tells of 95 % intervals; where there are none, it says so and why.

    ends: of the intervals, or errors; more: what is to be said of the intervals, behind "with 95 % intervals"
    """
    if ends.notna().any():
        return f"with 95 % intervals{more}"
    return "without intervals, which take several documents of like length"


def nats(value: float) -> str:
    """Return a loss with its unit, or a dash if there is none."""
    text = number(value)
    return text if text == "–" else f"{text} nats"


def matching(frame: pd.DataFrame, column: str, search: str) -> pd.DataFrame:
    """Return the rows whose text in `column`, as it is shown, contains `search`, whether in capitals or not."""
    if not search:
        return frame
    needle = visible(search).replace("◌", "").lower()
    texts = frame[column].tolist()  # a column of Arrow's gives one text at a time fifteen times slower
    return frame[[needle in visible(text).lower() for text in texts]]


def column_form(places: int, sign: str = "") -> str:
    """Return Streamlit's format of a column of numbers, with our space between thousands. Its minus sign is a hyphen:
    only a Styler could set another, which takes a second for five thousand rows.

    places: decimals; sign: "+" to show that of numbers above 0 too
    """
    return f"%{sign}'{SPACE},.{places}f"


def typeset_form(form: str) -> Callable[[float], str]:
    """Return a Styler's format of a column, for a short table: Python's `form`, with our signs and spaces."""
    return lambda value: typeset(form.format(value).replace("%", " %"))


def token_html(text: str) -> str:
    """Return a token as an inline HTML element, escaped."""
    return f'<bdi class="tw-token">{html.escape(visible(text))}</bdi>'


def marked_up(text: str) -> str:
    """Return text as HTML, escaped, with what stands in backquotes set as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(typeset(text)))


def escape_markdown(text: str) -> str:
    """Return text that a place which reads Markdown shows as it is."""
    return "".join("\\" + c if c in "\\`*_{}[]()#+-.!|<>~$:" else c for c in text)


def message_markdown(text: str) -> str:
    """Return an error's message as Markdown that shows it as it is, with what stands in backquotes set as code."""
    pieces = re.split("(`[^`]+`)", text)  # every second one stands in backquotes
    return "".join(piece if n % 2 else escape_markdown(typeset(piece)) for n, piece in enumerate(pieces))


def pass_spread(low: float, high: float, batches: int) -> str:
    """Return in words how sure the speedup of a whole pass is: its interval, or how to get one where it has none.

    low, high: its 95 % interval, NaN in too few batches; batches: that were timed both dense and sparse
    """
    count = plural(batches, "batch", "es")
    if low == low:
        return f"{times(low)} to {times(high)} with 95{SPACE}% confidence, {count}"
    return f"{count}, too few for an interval; a capture of more text times more of them"


def seconds_ago(seconds: float) -> str:
    """Return an age in words: `12 s ago`, `4 min ago`, `3 h ago`, `2 days ago`."""
    for unit, size in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            value = int(seconds // size)
            return f"{value} {unit}{'s' if unit == 'day' and value > 1 else ''} ago"
    return f"{int(seconds)} s ago"
