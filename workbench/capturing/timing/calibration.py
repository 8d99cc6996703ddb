"""Decide which layers run dense as well in a batch, and when the whole model does.

The idea: sparse calls are all timed where they run, so only dense ones cost anything. Once WARM batches have run, every
layer is calibrated in one batch, and the whole model after it, whatever they take. Two more rounds of all layers follow
in the next batches, as far as ALLOWANCE goes: an advance on the share of the capture's time that calibrations may take.
Once that has grown past what they took, a layer is calibrated whenever its cost fits into it; layers take turns, and
after every MODEL_EVERY rounds the whole model is next.

A layer is expected to cost what the last one did. What was chosen counts as spent until its time is read, one batch
later.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Literal

Kind = Literal["layer", "model"]
ALLOWANCE = {"cpu": 4.0, "cuda": 2.0}  # seconds that the first rounds may take however short the capture
WARM = 1  # batches before the first calibration: kernels and memory are set up in them
ROUNDS = 3  # of all layers that the allowance pays for
MODEL_EVERY = 4  # rounds of the layers between two turns of the whole model


class Calibrations:
    """The calibrations of a capture, batch by batch; layers: those that are calibrated in this batch.

    spent: seconds that calibrations have taken, as far as they were read
    """

    def __init__(self, layers: int, every: int, share: float, device: str) -> None:
        """Begin the clock.

        layers: of the model; every: batches from one with calibrations to the next, 0 for none
        share: of the capture's time that they may take; from 1 on, every layer in each batch that is due
        device: its type
        """
        self.count, self.every, self.share = layers, every if layers else 0, share
        self.layers: frozenset[int] = frozenset()
        self.spent = 0.0
        self._allowance = ALLOWANCE.get(device, ALLOWANCE["cpu"])
        self._expected: deque[float] = deque()  # seconds chosen in each batch that is not booked yet
        self._cost: dict[Kind, float] = {"layer": 0.0, "model": 0.0}  # seconds of the last layer, and of the last model
        self._done = self._batches = self._largest = 0  # layers calibrated, batches begun, rows of any batch
        self._models = 0  # turns of the whole model
        self._due = False  # whether this batch may be calibrated
        self._began = time.perf_counter()

    @property
    def lacking(self) -> bool:
        """Return whether no layer has been calibrated yet, though they are to be."""
        return self.every > 0 and not self._done

    def begin_batch(self, number: int, rows: int, last_chance: bool = False) -> None:
        """Choose the layers that are calibrated in a batch of so many rows.

        last_chance: whether the capture ends with this batch, so that none is to come that could be warmer
        """
        self._largest = max(self._largest, rows)
        due = (self._batches >= WARM and not number % max(1, self.every)) or last_chance
        self._batches += 1
        self.layers = frozenset()
        self._expected.append(0.0)
        # the rest of a text is too small a batch: its times would stand for no other batch
        self._due = self.every > 0 and due and (2 * rows >= self._largest or last_chance)
        if not self._due:
            return
        many = self.count
        if not self.lacking and self.share < 1:
            cost = self._cost["layer"]  # 0 until the first one is read
            many = min(many, int(max(0.0, self._room()) / cost) if cost else 0, self._until_model())
        self.layers = frozenset((self._done + index) % self.count for index in range(many))
        self._done += many
        self._expected[-1] += many * self._cost["layer"]

    def model_is_due(self) -> bool:
        """Return whether the whole model is to be calibrated after this batch."""
        if not self._due or self._until_model() > 0 or (self._models and not self.affords(self._cost["model"])):
            return False
        self._models += 1
        self._expected[-1] += self._cost["model"]
        return True

    def _until_model(self) -> int:
        """Return how many layers are to be calibrated before the next turn of the whole model."""
        return max(0, self.count * (1 + MODEL_EVERY * self._models) - self._done)

    def affords(self, seconds: float) -> bool:
        """Return whether so many seconds may be taken now."""
        return self.share >= 1 or seconds <= self._room()

    def book(self, took: dict[Kind, tuple[int, float]]) -> None:
        """Book what the calibrations of the earliest batch not booked took: how many, and their seconds."""
        self._expected.popleft()
        for kind, (many, seconds) in took.items():
            self.spent += seconds
            self._cost[kind] = seconds / max(1, many)

    def _room(self) -> float:
        """Return the seconds that may be taken now."""
        earned = self.share * (time.perf_counter() - self._began)
        if self._done < ROUNDS * self.count:
            earned = max(earned, self._allowance)
        return earned - self.spent - sum(self._expected)
