"""Neurons against pandas on the parts as written."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from twell.analysis import by_neuron
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run


def test_by_neuron(run: Run, rows: pd.DataFrame) -> None:
    table = by_neuron(run).set_index(["layer", "neuron"])
    parts = run.frame("neurons").groupby(["layer", "neuron"])
    assert len(run.parts("neurons")) > 1
    assert len(table) == run.layers * run.d_ff
    tokens = int((rows["flags"] == 0).sum())
    assert (table["tokens"] == tokens).all()
    assert table["label"].iloc[0] == "L0/N0"
    assert table.loc[(2, 17), "label"] == "L2/N17"
    fired = table.loc[parts.size().index]
    assert list(fired["fires"]) == list(parts["fires"].sum())
    np.testing.assert_allclose(fired["density"], parts["fires"].sum() / tokens, rtol=1e-12)
    value = parts["value_sum"].sum() / 2**20 / parts["fires"].sum()
    np.testing.assert_allclose(fired["value_mean"], value, rtol=1e-9)
    np.testing.assert_array_equal(fired["value_max"], parts["value_max"].max())
    assert list(fired["first_sequence"]) == list(parts["first_sequence"].min())
    one = parts["token_min"].min() == parts["token_max"].max()
    assert list(fired["one_token"]) == list(one)
    text = run.vocab["text"]
    expected = [text[token] if same else "" for same, token in zip(one, parts["token_min"].min(), strict=True)]
    assert list(fired["token_text"]) == expected
    assert one.any()


def test_neurons_that_never_fired(run: Run) -> None:
    table = by_neuron(run)
    never = table[table["fires"] == 0]
    written = run.frame("neurons").groupby(["layer", "neuron"]).ngroups
    assert len(never) == run.layers * run.d_ff - written > 0
    assert (never["first_sequence"] == -1).all()
    assert never[["value_mean", "value_max"]].isna().all(axis=None)
    assert not never["one_token"].any()


def test_fires_add_up_to_the_counts(run: Run, rows: pd.DataFrame) -> None:
    fires = by_neuron(run).groupby("layer")["fires"].sum()
    assert list(fires) == list(rows.loc[rows["flags"] == 0, list(range(run.layers))].sum())


def test_one_layer_alone(run: Run) -> None:
    every = by_neuron(run)
    for layer in (0, 1, 3):
        here = every[every["layer"] == layer].reset_index(drop=True)
        pd.testing.assert_frame_equal(by_neuron(run, layer=layer), here)


def test_a_neuron_that_fired_once_answers_to_one_token(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "once", sequences=3, length=6, parts=1, tiles=False, timings=0)
    rows = run.frame("neurons").set_index(["layer", "neuron"])
    once = rows[(rows["fires"] == 1) & (rows["token_min"] == rows["token_max"])]
    assert len(once)
    assert by_neuron(run).set_index(["layer", "neuron"]).loc[once.index, "one_token"].all()


def test_impossible_layer(run: Run) -> None:
    with pytest.raises(UserError, match="from 0 to 3, got 4"):
        by_neuron(run, layer=4)


def test_without_neuron_sums(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="--probes counts"):
        by_neuron(made.make(tmp_path / "counts", neurons=False, sequences=10, parts=1))
