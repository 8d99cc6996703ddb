"""The histogram of a neuron's values."""

from __future__ import annotations

import numpy as np

from twell.analysis.figures.neurons import value_distribution


def test_the_mean_and_the_largest_value_are_written_apart_however_near_they_are() -> None:
    notes = value_distribution(np.linspace(2.9, 3.0, 400), 2.95, 3.0).layout.annotations
    assert [note.text.split()[0] for note in notes] == ["mean", "largest"]
    assert abs(notes[0].yshift - notes[1].yshift) >= notes[0].font.size + 2
