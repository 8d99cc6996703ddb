"""Figures that two rooms declare because neither may import the other: one that changes alone is seen."""

from __future__ import annotations

from twell.analysis import training as analysis_training
from twell.analysis.speed import tile_overflow
from twell.kernels import layout
from twell.kernels import training as training_kernels


def test_the_analysis_and_the_kernels_agree() -> None:
    assert analysis_training.SPARSE_SHARE == training_kernels.SPARSE_SHARE
    assert tile_overflow.COMPRESSIONS == layout.COMPRESSIONS
