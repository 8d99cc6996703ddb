"""Conditions of an ablation as they are spelled: KIND[:NUMBER][@LAYER], without a layer in all of them.

    parse(["weakest:0.5", "ffn@3"], layers=8)

It loads no torch, so that the command line refuses what it does not understand at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from twell.workbench.errors import UserError

NEURON = re.compile(r"L(\d+)/N(\d+)")
SPELLED = re.compile(r"(?P<kind>[a-z]+)(:(?P<given>[^@]*))?(@(?P<layer>\d+))?")
BY_COUNT = ("rarest", "busiest", "random")  # a share of the living neurons of each layer
BY_TOKEN = ("weakest", "scattered")  # a share of each token's firings
KINDS = ("ffn", "dead", *BY_COUNT, *BY_TOKEN, "smallest", "shares", "below", "neurons")
PLAIN_KINDS = ("ffn", "dead")  # kinds without a number
STUDY = (
    "ffn", "dead", "rarest:0.25,0.5,0.75", "busiest:0.01,0.05,0.25", "random:0.01,0.05,0.25,0.5,0.75",
    "weakest:0.25,0.5,0.75,0.9", "scattered:0.25,0.5,0.75", "smallest:0.25,0.5,0.75",
)  # fmt: skip
STUDY_WITHOUT_ZEROS = ("ffn", "smallest:0.25,0.4,0.5,0.6,0.75", "weakest:0.25,0.5,0.75", "scattered:0.1,0.25,0.5")


@dataclass(frozen=True)
class Condition:
    """One thing that is taken away.

    share: of neurons, firings or values; for `below` the value; layer: -1 for all; neurons: by layer, for a list;
    shares: of the values next to 0, one a layer
    """

    kind: str
    share: float | None = None
    layer: int = -1
    neurons: Mapping[int, tuple[int, ...]] = field(default_factory=dict, hash=False)
    shares: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The condition as it is spelled; a long list of neurons by their number and a digest, unlike another's."""
        number = "" if self.share is None else f":{self.share:g}"
        if self.kind == "shares":
            number = ":" + ",".join(f"{share:g}" for share in self.shares)
        if self.kind == "neurons":
            names = [f"L{layer}/N{neuron}" for layer, listed in self.neurons.items() for neuron in listed]
            number = ":" + (spelled := ",".join(names))
            if len(names) > 4:
                number = f":{len(names)} #{sha256(spelled.encode()).hexdigest()[:6]}"
        return self.kind + number + ("" if self.layer < 0 else f"@{self.layer}")


def parse(texts: Iterable[str], layers: int) -> list[Condition]:
    """Return the conditions that texts spell, each once. Raises UserError for one that is not understood."""
    conditions: list[Condition] = []
    for text in texts:
        for condition in _parsed(text, layers):
            if condition.name not in [one.name for one in conditions]:
                conditions.append(condition)
    return conditions


def _parsed(text: str, layers: int) -> list[Condition]:
    match = SPELLED.fullmatch(text.strip())
    kind, given = (match["kind"], match["given"]) if match else ("", None)
    if match is None or kind not in KINDS:
        raise UserError(f"Expected a condition such as weakest:0.5 or ffn@3 of {', '.join(KINDS)}, got {text!r}.")
    layer = int(match["layer"]) if match["layer"] else -1
    if layer >= layers:
        raise UserError(f"Expected a layer from 0 to {layers - 1}, got {layer} in {text!r}.")
    if kind == "neurons":
        return [Condition(kind, None, layer, named_neurons(given or "", layers))]
    if kind == "shares":
        return [Condition(kind, shares=_shares(given or "", layers, text))]
    if kind in PLAIN_KINDS:
        if given is not None:
            raise UserError(f"Expected {kind} without a number, got {text!r}: leave it out.")
        each = range(layers) if kind == "ffn" and layer < 0 else (layer,)
        return [Condition(kind, None, one) for one in each]
    return [Condition(kind, _number(kind, one, text), layer) for one in (given or "").split(",")]


def _number(kind: str, given: str, text: str) -> float:
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if kind == "below" and not 0 <= number < math.inf:
        raise UserError(f"Expected a value of at least 0 for below, as in below:0.02, got {text!r}.")
    if kind != "below" and number == 1:
        raise UserError(f"Expected a share below 1, got all of a layer in {text!r}: ffn@L takes a layer away.")
    if kind != "below" and not 0 < number < 1:
        raise UserError(f"Expected a share above 0 and below 1 for {kind}, as in {kind}:0.5, got {text!r}.")
    return number


def _shares(given: str, layers: int, text: str) -> tuple[float, ...]:
    """Return a share of the values of each layer, 0 where none goes."""
    try:
        shares = tuple(float(share) for share in given.split(","))
    except ValueError:
        shares = ()
    if len(shares) != layers or "@" in text or not all(0 <= share < 1 for share in shares) or not any(shares):
        raise UserError(
            f"Expected {layers} shares from 0 to below 1, one a layer and not all 0, as in shares:0.5,0.25,…, got "
            f"{text!r}."
        )
    return shares


def named_neurons(given: str, layers: int) -> dict[int, tuple[int, ...]]:
    """Return neurons by layer from L3/N17,L3/N42, or from a file with such names."""
    names = given
    if given and not NEURON.match(given):
        try:
            names = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UserError(f"Expected neurons as L3/N17,L3/N42 or a file of such names, got {given!r}.") from None
    by_layer: dict[int, set[int]] = {}
    for name in re.findall(r"[^\s,]+", names):
        match = NEURON.fullmatch(name)
        if match is None:
            raise UserError(f"Expected neurons named like L3/N17, got {name!r}.")
        if int(match[1]) >= layers:
            raise UserError(f"Expected a layer from 0 to {layers - 1}, got {name}.")
        by_layer.setdefault(int(match[1]), set()).add(int(match[2]))
    return {layer: tuple(sorted(neurons)) for layer, neurons in sorted(by_layer.items())}
