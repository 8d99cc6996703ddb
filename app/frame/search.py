"""The search in the bar: a token, a neuron, a place or words of the text, and the page that each leads to.

A token is taken before words of the text; in quotation marks they are always words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from twell import analysis
from twell.analysis.neurons.by_neuron import last_neuron, parse_neuron
from twell.analysis.tokens.text_search import places_of
from twell.app.ui.formatting import visible
from twell.app.ui.query import fetch
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

NEURON = re.compile(r"\s*L\d+\s*[/ ,:]\s*N?\d+\s*", re.ASCII | re.IGNORECASE)
PLACE = re.compile(r"\s*(\d{1,9}):(\d{1,9})\s*", re.ASCII)  # sequence and position, as pages write places
QUOTED = re.compile(r'\s*["“](.+)["”]\s*')
LONGEST = 200  # characters that the field takes


@dataclass(frozen=True)
class Target:
    """A page that a search leads to, with the query parameters of its address; page "": nowhere, and `reason` why."""

    page: str
    parameters: dict[str, str] = field(default_factory=dict)
    reason: str = ""


def target(run: Run, text: str) -> Target:
    """Return where a search leads. text: what the user typed, not blank."""
    if (place := PLACE.fullmatch(text)) and run.has("activity") and int(place[1]) < run.manifest.sequences:
        return Target("text", {"sequence": place[1], "position": place[2]})
    if neuron := parse_neuron(text, run):
        return Target("neuron", {"neuron": f"L{neuron[0]}/N{neuron[1]}"})
    if NEURON.fullmatch(text):
        last = last_neuron(run)
        return Target("", reason=f"There is no neuron {text.strip()}: the names go from L0/N0 to {last}.")
    quoted = QUOTED.fullmatch(text)
    if not quoted and (token := token_called(run, text)) is not None:
        return Target("token", {"token": str(token)})
    return _in_text(run, quoted[1] if quoted else text)


def _in_text(run: Run, words: str) -> Target:
    """Return the first place of words in the text, and their list above it; else the tokens that contain them."""
    reason = f"Neither a token nor a passage of this run is “{words.strip()}”."
    try:
        places = fetch(run, places_of, words=words, limit=1)
        if len(places):
            first = places.iloc[0]
            place = {"sequence": str(first["sequence"]), "position": str(first["position"]), "to": str(first["last"])}
            return Target("text", {**place, "find": words.strip()})
    except Missing:
        reason = f"No token of this run is “{words.strip()}”, and it keeps no text to search in."
    needle = visible(words.strip()).lower()
    if any(needle in visible(name).lower() for name in _names(run)):
        return Target("tokens", {"view": "tokens", "find": words.strip(), "least": "1"})
    return Target("", reason=reason)


def token_called(run: Run, text: str) -> int | None:
    """Return the id of the token that is called `text`, with or without a space before it; None if there is none.

    Of several the most frequent is taken; capitals count for less than that.
    """
    names = _names(run)
    if visible(text) in names and text[:1] in " ␣":
        return names[visible(text)]
    spelled = {visible(text.strip()), visible(" " + text.strip())}
    lower = {one.lower() for one in spelled}
    exact = (token for name, token in names.items() if name in spelled)
    return next(exact, next((token for name, token in names.items() if name.lower() in lower), None))


def _names(run: Run) -> dict[str, int]:
    """Return the id of each token that occurs in the run by its name as pages show it, the most frequent first."""
    try:
        frame = fetch(run, analysis.by_token, min_count=1, spelled=True)
    except Missing:
        return {}
    frame = frame.sort_values("count", ascending=False)
    names: dict[str, int] = {}
    for text, token in zip(frame["text"].tolist(), frame["token_id"].tolist(), strict=True):
        names.setdefault(visible(str(text)), int(token))
    return names
