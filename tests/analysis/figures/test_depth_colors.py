"""Colors of layers by depth are told apart, by every kind of color vision, on a light page and on a dark one."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from twell.analysis.figures.table_plots.base import by_depth

# What is left of linear red, green and blue: all, and without one kind of cones (Machado, Oliveira and Fernandes 2009).
VISIONS = {
    "trichromat": np.eye(3),
    "protanope": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranope": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanope": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]  # of OKLab, Ottosson 2020
LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
DARK = 0.0068  # luminance of the dark page, #101418


def colors(layers: int) -> NDArray[np.float64]:
    """Return the colors of so many layers as linear red, green and blue."""
    drawn = [re.findall(r"\d+", color) for _, _, color in by_depth(pd.DataFrame({"layer": range(layers)}))]
    share = np.array(drawn, float) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("vision", VISIONS)
def test_no_two_of_a_few_layers_look_alike(vision: str) -> None:
    """0.02 in OKLab is about what is just seen side by side; lines lie apart, and are thin."""
    for layers in range(2, 9):
        seen = np.clip(colors(layers) @ np.transpose(VISIONS[vision]), 0, 1)
        places = np.cbrt(seen @ np.transpose(CONES)) @ np.transpose(LAB)
        assert min(np.linalg.norm(one - other) for one, other in combinations(places, 2)) > 0.35 / layers


def test_each_stands_out_on_both_pages() -> None:
    luminance = colors(8) @ [0.2126, 0.7152, 0.0722]
    assert (1.05 / (luminance + 0.05)).min() > 3
    assert ((luminance + 0.05) / (DARK + 0.05)).min() > 3
