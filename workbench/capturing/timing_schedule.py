"""Decide what a capture times, and when, so that timings take no more than their share of its time.

The idea: a piece at a time, spread over the run. A piece is one layer, or the whole model. Layers are next one after
another, round after round, each at most once a batch. After the first of every MODEL_EVERY rounds the whole model is
next.

One rule bounds the cost: a piece is timed once the seconds that it will take fit into an allowance plus a share of the
time since the capture began. What is next waits until then, so a capture that ends early has the pieces that it came
to. A piece is expected to take what the last one of its kind took per row. Of the first layer nothing is known, and the
whole model is expected to take PASSES times what the capture itself takes for as many rows.

A piece is run once before it is timed where more rows run than ever before, because their kernels and memory are not
set up yet, and where it is shorter than SHORT, because caches and queues would then sway its time.
"""

from __future__ import annotations

import time
from typing import Literal

Kind = Literal["layer", "model"]
MODEL_EVERY = 2  # rounds of the layers between two turns of the whole model
PASSES = 3.0  # dense and sparse, over the capture's own pass: what the whole model is taken for before it was timed
SHORT = 0.02  # seconds


class TimingSchedule:
    """The pieces of a capture in turn, and the seconds spent on them (`spent`)."""

    def __init__(self, layers: int, every: int, share: float, allowance: float, last: int | None, power: bool) -> None:
        """Begin the clock.

        layers: how many can be timed; every: batches from one in which pieces may be timed to the next, 0 for none
        share: of the capture's time that pieces may take; from 1 on, all are timed
        allowance: seconds that they may take beside it, unless the run is resumed
        last: the layer that a resumed run timed last (-1: the whole model); None for a new run
        power: whether the device's power is to be measured once
        """
        self.layers, self.every, self.share = layers, every, share
        self.spent = 0.0  # seconds
        self.warms_up = False  # whether the layer that is being timed runs once before
        self.power_is_due = power
        self.timed_rows = 0  # the most rows that a layer was timed on
        self._allowance = allowance if last is None else 0.0
        self._next = 0 if last is None else last + 1  # a layer; `layers` stands for the whole model
        self._round = 1 if last == -1 else 0
        self._chosen: set[int] = set()  # layers, in this batch
        self._largest = 0  # rows of any batch
        self._seconds_per_row: dict[Kind, float] = {}  # of the last piece of each kind
        self._started, self._captured_rows = time.perf_counter(), 0

    def begin_batch(self, number: int, rows: int) -> bool:
        """Begin a batch; return whether pieces may be timed in it. rows: how many of it would be timed."""
        self._largest, self._chosen = max(self._largest, rows), set()
        # the rest of a text is too small a batch: its times would stand for no other batch
        return self.every > 0 and number % self.every == 0 and 2 * rows >= self._largest

    def end_batch(self, rows: int) -> None:
        """Count the rows that the capture itself ran, padding included."""
        self._captured_rows += rows

    def affords(self, kind: Kind, rows: int, more: float = 0.0) -> bool:
        """Return whether a piece of so many rows may be timed now, with `more` seconds beside it."""
        seconds = (1 + self.needs_warm_up(kind, rows)) * self._expected_seconds(kind, rows) + more
        return self.share >= 1 or self.spent + seconds <= self._allowance + self.share * self._passed()

    def needs_warm_up(self, kind: Kind, rows: int) -> bool:
        """Return whether a piece is to be run once before it is timed."""
        return rows > self.timed_rows or self._expected_seconds(kind, rows) < SHORT

    def choose_layer(self, layer: int, rows: int) -> bool:
        """Return whether a layer is timed in this batch; if it was next, the layer after it is next from now on."""
        if layer == self._next and self.affords("layer", rows):
            self._chosen.add(layer)
            self._next += 1
            self.warms_up = self.needs_warm_up("layer", rows)
            self._seconds_per_row["layer"] = 0.0
        return self.is_chosen(layer)

    def is_chosen(self, layer: int) -> bool:
        """Return whether a layer is timed in this batch."""
        return layer in self._chosen

    @property
    def model_is_next(self) -> bool:
        return self._next == self.layers

    @property
    def skips_model(self) -> bool:
        """Whether the whole model is not timed in this round."""
        return self._round % MODEL_EVERY != 0

    def affords_power(self, seconds: float) -> bool:
        """Return whether the power is still to be measured, and timings were allowed twice the seconds that takes."""
        return self.power_is_due and (self.share >= 1 or self.share * self._passed() >= 2 * seconds)

    def next_round(self) -> None:
        """Begin again with the first layer."""
        self._next, self._round = 0, self._round + 1

    def book_layer(self, seconds: float, timed: float, rows: int) -> None:
        """Book a layer's piece, or another phase of it: the seconds spent, and those of its timed operations."""
        self.spent += seconds
        self._seconds_per_row["layer"] += timed / rows
        self.timed_rows = max(self.timed_rows, rows)

    def book_model(self, seconds: float, timed: float, rows: int) -> None:
        """Book a piece of the whole model: the seconds spent, and those of its timed operations."""
        self.spent += seconds
        self._seconds_per_row["model"] = timed / rows

    def _passed(self) -> float:
        """Return the seconds since the capture began."""
        return time.perf_counter() - self._started

    def _expected_seconds(self, kind: Kind, rows: int) -> float:
        """Return the seconds that a piece of so many rows is expected to take."""
        if kind in self._seconds_per_row:
            return self._seconds_per_row[kind] * rows
        pace = (self._passed() - self.spent) / max(1, self._captured_rows)
        return PASSES * pace * rows if kind == "model" else 0.0
