"""Conditions of an ablation as actions on each layer's hidden values.

Ranks are within a layer, by the firings that the run counted; neurons that never fired are dead, the others living.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twell.workbench.ablations.actions import Action, Scatter, Shrink, Silence, Strongest
from twell.workbench.ablations.spelled import BY_TOKEN, Condition
from twell.workbench.errors import UserError


class TakesNothing(UserError):
    """A condition takes nothing away. why: a clause on the neurons that it asks for, of which there are none"""

    def __init__(self, condition: Condition, why: str) -> None:
        super().__init__(f"Expected neurons to take away for {condition.name}, there are none {why}: leave it out.")
        self.why = why


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


@dataclass(frozen=True)
class Facts:
    """The numbers by which conditions become interventions.

    widths: how many neurons each layer has; d_ff: the greatest
    fires: int64 [layers, d_ff], firings of each neuron in the run, None where it counted none; quantiles: the values
    |hidden| in each layer that are not 0, ascending, evenly spaced [layers, n]; threshold: firing is |hidden| > it
    """

    widths: Sequence[int]
    d_ff: int
    fires: NDArray | None
    quantiles: NDArray | None = None
    threshold: float = 0.0


def intervention_of(condition: Condition, facts: Facts, seed: int = 0) -> Intervention:
    """Return a condition as actions. Raises TakesNothing, and UserError for one that takes all of a layer."""
    layers = [condition.layer] if condition.layer >= 0 else list(range(len(facts.widths)))
    kind, share = condition.kind, condition.share or 0.0
    actions: dict[int, Action] = {}
    if kind == "ffn":
        silenced = sum(facts.widths[layer] for layer in layers)
        return Intervention(condition, {layer: Silence(None) for layer in layers}, silenced)
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
        if len(chosen) == facts.widths[layer] and kind == "dead":
            raise TakesNothing(condition, f"that fire beside them in layer {layer}")
        if len(chosen) == facts.widths[layer]:
            raise UserError(f"Expected some neurons left in layer {layer}, got all of it: ffn@{layer} takes it away.")
        if len(chosen):
            actions[layer] = Silence(_keep(chosen, facts.d_ff))
            silenced += len(chosen)
    if not actions:
        whys = {"dead": "that are dead", "neurons": "named in it"}
        none_fires = facts.fires is not None and not facts.fires[layers].any()
        raise TakesNothing(condition, whys.get(kind, "that fire" if none_fires else "in so small a share"))
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
        if len(listed) and listed[-1] >= facts.widths[layer]:
            raise UserError(f"Expected neurons from 0 to {facts.widths[layer] - 1}, got L{layer}/N{listed[-1]}.")
        return listed
    if facts.fires is None:
        raise UserError(
            f"Expected a run that counted firings by neuron for {condition.name}, got none: capture with --probes all."
        )
    fires = facts.fires[layer]
    if condition.kind == "dead":
        return np.flatnonzero(fires[: facts.widths[layer]] == 0)
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
