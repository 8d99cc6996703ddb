"""Conditions of an ablation: what is taken away, as text and as actions on each layer's hidden values.

A condition is spelled KIND[:NUMBER][@LAYER]; without a layer it holds in all of them. Ranks are within a layer, by the
firings that the run counted; neurons that never fired are dead, the others living.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twell.workbench.ablations.actions import Action, Scatter, Shrink, Silence, Strongest
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
        """The condition as it is spelled; a list of neurons by their number."""
        number = "" if self.share is None else f":{self.share:g}"
        if self.kind == "shares":
            number = ":" + ",".join(f"{share:g}" for share in self.shares)
        if self.kind == "neurons":
            names = [f"L{layer}/N{neuron}" for layer, listed in self.neurons.items() for neuron in listed]
            number = ":" + (",".join(names) if len(names) <= 4 else f"{len(names)} listed")
        return self.kind + number + ("" if self.layer < 0 else f"@{self.layer}")


@dataclass(frozen=True)
class Intervention:
    """A condition as actions by layer; silenced: how many neurons it silences, None where it depends on the token."""

    condition: Condition
    actions: Mapping[int, Action]
    silenced: int | None

    @property
    def first(self) -> int:
        """The first layer that it changes; all before it are as they were."""
        return min(self.actions)


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
    for name in re.split(r"[\s,]+", names.strip()):
        match = NEURON.fullmatch(name)
        if match is None:
            raise UserError(f"Expected neurons named like L3/N17, got {name!r}.")
        if int(match[1]) >= layers:
            raise UserError(f"Expected a layer from 0 to {layers - 1}, got {name}.")
        by_layer.setdefault(int(match[1]), set()).add(int(match[2]))
    return {layer: tuple(sorted(neurons)) for layer, neurons in sorted(by_layer.items())}


@dataclass(frozen=True)
class Facts:
    """The numbers by which conditions become interventions.

    fires: int64 [layers, d_ff], firings of each neuron in the run, None where it counted none; quantiles: the values
    |hidden| in each layer that are not 0, ascending, evenly spaced [layers, n]; threshold: firing is |hidden| > it
    """

    layers: int
    d_ff: int
    fires: NDArray | None
    quantiles: NDArray | None = None
    threshold: float = 0.0


def intervention_of(condition: Condition, facts: Facts, seed: int = 0) -> Intervention:
    """Return a condition as actions. Raises UserError for one that would take nothing away, or all of a layer."""
    layers = [condition.layer] if condition.layer >= 0 else list(range(facts.layers))
    kind, share = condition.kind, condition.share or 0.0
    actions: dict[int, Action] = {}
    if kind == "ffn":
        return Intervention(condition, {layer: Silence(None) for layer in layers}, facts.d_ff * len(layers))
    if kind == "shares":
        actions |= {at: Shrink(smallest(facts, at, one)) for at, one in enumerate(condition.shares) if one}
        return Intervention(condition, actions, None)
    if kind in BY_TOKEN or kind in ("smallest", "below"):
        for layer in layers:
            if kind == "weakest":
                actions[layer] = Strongest(1 - share, facts.threshold)
            elif kind == "scattered":
                actions[layer] = Scatter(share, seed * 1009 + layer)
            else:
                actions[layer] = Shrink(share if kind == "below" else smallest(facts, layer, share))
        return Intervention(condition, actions, None)
    silenced = 0
    for layer in layers:
        chosen = _chosen(condition, facts, layer, seed)
        if len(chosen) == facts.d_ff:
            raise UserError(f"Expected some neurons left in layer {layer}, got all of it: ffn@{layer} takes it away.")
        if len(chosen):
            actions[layer] = Silence(_keep(chosen, facts.d_ff))
            silenced += len(chosen)
    if not actions:
        of = "that are dead" if kind == "dead" else "in so small a share"
        raise UserError(f"Expected neurons to take away for {condition.name}, there are none {of}: leave it out.")
    return Intervention(condition, actions, silenced)


def smallest(facts: Facts, layer: int, share: float) -> float:
    """Return the value up to which a share of the layer's values |hidden| that are not 0 lies."""
    if facts.quantiles is None:
        raise UserError("Expected values of hidden neurons to take quantiles of, got none.")
    values = facts.quantiles[layer]
    return float(values[min(len(values) - 1, round(share * (len(values) - 1)))])


def _chosen(condition: Condition, facts: Facts, layer: int, seed: int) -> NDArray:
    """Return the neurons of a layer that a condition silences."""
    if condition.kind == "neurons":
        listed = np.array(condition.neurons.get(layer, ()), dtype=int)
        if len(listed) and listed[-1] >= facts.d_ff:
            raise UserError(f"Expected neurons from 0 to {facts.d_ff - 1}, got L{layer}/N{listed[-1]}.")
        return listed
    if facts.fires is None:
        raise UserError(
            f"Expected a run that counted firings by neuron for {condition.name}, got none: capture with --probes all."
        )
    fires = facts.fires[layer]
    if condition.kind == "dead":
        return np.flatnonzero(fires == 0)
    order = np.argsort(fires, kind="stable")
    living = order[fires[order] > 0]
    count = round((condition.share or 0) * len(living))
    if condition.kind == "random":
        return np.sort(np.random.default_rng([seed, layer]).choice(living, count, replace=False))
    return living[:count] if condition.kind == "rarest" else living[len(living) - count :]


def _keep(chosen: Sequence[int] | NDArray, d_ff: int) -> NDArray:
    keep = np.ones(d_ff, dtype=bool)
    keep[chosen] = False
    return keep
