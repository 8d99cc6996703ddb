"""The tables of one capture against each other, on each device: sums, unions and examples against all firings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.captures import save_model
from support.contexts import first_in_context

from twell.kernels.backends import union_counts
from twell.kernels.layout import Layout, pack
from twell.kernels.stats import FIXED_POINT
from twell.workbench.capturing.command import record
from twell.workbench.capturing.layer_sums import BLOCKS, blocks_of, scattered_counts
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.power import Gauge
from twell.workbench.run.schema import VALUE_SCALE
from twell.workbench.run.store import Run
from twell.workbench.text.sources import TextSource

K = 2
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
)


@pytest.fixture(scope="module", params=["cpu", GPU])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Capture two layers, in one of which tiles overflow; with padding, and sequences long enough for blocks of 64."""
    folder = tmp_path_factory.mktemp("agree")
    model = save_model(folder / "model", num_hidden_layers=2, intermediate_size=768, mlp_bias=True)
    words = ["the", "ferry", "waits", "for", "nobody", "where", "a", "river", "bends", "and", "gulls", "couldn't"]
    drawn = np.random.default_rng(4)
    texts = [" ".join(drawn.choice(words, size)) for size in (3, 40, 200, 7, 90)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    names = tuple(str(folder / f"{number}.txt") for number in range(len(texts)))
    dtype = torch.float32 if request.param == "cpu" else torch.bfloat16
    loaded = load(str(model), device=request.param, dtype=dtype)
    options = CaptureOptions(
        model=str(model),
        text=names,
        out=folder / "run",
        seq_len=100,
        batch_tokens=300,
        timings=4,
        timings_share=1.0,
        examples=K,
        fired="all",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twell.workbench.power.WINDOW", 0.5)
        return record(loaded, options, [TextSource(name) for name in names])


@pytest.fixture(scope="module")
def fired(run: Run) -> pd.DataFrame:
    """Return a row for each firing of an unflagged token."""
    rows = run.frame("fired").merge(run.activity()[["sequence", "position", "flags", "token_id"]])
    return (
        rows[rows["flags"] == 0]
        .explode(["neuron", "value"])
        .dropna(subset="neuron")
        .astype({"neuron": int, "value": float})
    )


def test_counts(run: Run) -> None:
    activity = run.activity().set_index(["sequence", "position"])
    rows = run.frame("fired")
    assert len(rows) == 2 * len(activity)
    for layer in range(2):
        held = rows[rows["layer"] == layer].set_index(["sequence", "position"])
        pd.testing.assert_series_equal(
            held["neuron"].map(len), activity[f"nnz_{layer:02}"].astype(int), check_names=False
        )


def test_firings_are_in_the_order_of_the_text_and_of_layers(run: Run) -> None:
    keys = run.frame("fired", ["sequence", "position", "layer"])
    pd.testing.assert_frame_equal(keys, keys.sort_values([*keys], ignore_index=True))


def test_neurons(run: Run, fired: pd.DataFrame) -> None:
    ours = (
        run.frame("neurons")
        .groupby(["layer", "neuron"])[["fires", "token_min", "token_max"]]
        .agg({"fires": "sum", "token_min": "min", "token_max": "max"})
    )
    theirs = fired.groupby(["layer", "neuron"])["token_id"].agg(["count", "min", "max"])
    np.testing.assert_array_equal(ours.index.to_frame(), theirs.index.to_frame())
    np.testing.assert_array_equal(ours, theirs)


def test_value_bins(run: Run, fired: pd.DataFrame) -> None:
    """By the values in float16 that `fired` has, of which a few are rounded over a bound."""
    ours = run.frame("value_bins").groupby(["layer", "neuron", "bin"])["fires"].sum()
    assert ours.groupby(["layer", "neuron"]).sum().to_dict() == fired.groupby(["layer", "neuron"]).size().to_dict()
    bounds = np.array([2.0 ** (b // 2 - 9) * (1.5 if b % 2 else 1) for b in range(1, 32)])
    theirs = fired.assign(bin=np.digitize(fired["value"], bounds)).groupby(["layer", "neuron", "bin"]).size()
    assert ours.sub(theirs, fill_value=0).abs().sum() < 2e-3 * len(fired)


def test_unions(run: Run, fired: pd.DataFrame) -> None:
    ours = run.frame("unions").groupby(["layer", "block", "neurons"])["blocks"].sum()
    unflagged = run.activity().query("flags == 0")[["sequence", "position"]]
    unflagged["place"] = unflagged.groupby("sequence").cumcount()
    unflagged["length"] = unflagged.groupby("sequence")["place"].transform("size")
    placed = fired.merge(unflagged)
    for layer in range(2):
        for size in BLOCKS[:2]:
            rows = placed[(placed["layer"] == layer) & (placed["place"] < placed["length"] // size * size)]
            sizes = rows.groupby(["sequence", rows["place"] // size])["neuron"].nunique()
            assert ours.loc[(layer, size)].to_dict() == sizes.value_counts().to_dict()


def test_examples(run: Run, fired: pd.DataFrame) -> None:
    frame = run.frame("examples")
    assert set(frame["kind"]) == {"top", "sample"}
    joined = frame.merge(fired, on=["layer", "neuron", "sequence", "position"], suffixes=("", "_fired"))
    assert len(joined) == len(frame)
    np.testing.assert_allclose(joined["value"], joined["value_fired"], rtol=2e-3)
    fresh = np.concatenate(list(first_in_context(run).values()))
    places = run.activity()[["sequence", "position"]].assign(fresh=fresh)
    assert 0 < (~fresh).sum() < len(fresh) / 2
    fired = fired.merge(places[places["fresh"]])
    most = frame[frame["kind"] == "top"].groupby(["layer", "neuron"])["value"].agg(lambda values: sorted(values)[::-1])
    expected = fired.groupby(["layer", "neuron"])["value"].agg(lambda values: sorted(values)[::-1][:K])
    assert most.index.equals(expected.index)
    for ours, theirs in zip(most, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3)
    assert (frame.groupby(["layer", "neuron", "kind"]).size() <= K).all()
    middle = np.stack(frame["window"].to_list())[:, 16]
    np.testing.assert_array_equal(middle, frame["value"].to_numpy(np.float32))


def test_timings(run: Run) -> None:
    frame = run.frame("timings")
    assert (frame["microseconds"] > 0).all()
    whole = frame[frame["layer"] == -1]
    assert run.manifest.device.startswith("NVIDIA") == bool(whole["watts"].gt(0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unions_on_a_gpu(dtype: torch.dtype) -> None:
    """The launches against torch, on made tiles of which some overflow; a partial last tile."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(700, 1000, generator=generator) * (torch.rand(700, 1, generator=generator) < 0.5)
    hidden = torch.where(
        torch.rand(700, 1000, generator=generator) < torch.rand(1000, generator=generator) ** 4, hidden, 0
    )
    hidden = hidden.to("cuda", dtype)
    packed = pack(hidden, hidden != 0, Layout(256, 8))
    assert 0 < len(packed.spill) < 4 * 700  # some of four tiles a row
    plain = np.random.default_rng(1).random(700) < 0.9
    members = blocks_of(np.repeat(np.arange(3), (50, 400, 250)), plain)
    on_device = [torch.from_numpy(block).to("cuda") for block in members]
    assert union_counts.takes(packed)
    assert torch.equal(union_counts.counts(packed, on_device), scattered_counts(packed, on_device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.workbench.power.WINDOW", 0.5)
    gauge = Gauge(torch.device("cuda", 0))
    assert gauge.reads
    x = torch.randn(4096, 4096, device="cuda")
    clock, watts = gauge.window(lambda: x @ x)
    assert clock is not None and watts is not None
    assert 200 < clock < 5000
    assert 30 < watts < 2000


def test_kernels_and_schema_have_one_fixed_point() -> None:
    """Two constants, because the schema may not import torch, and the kernels not the workbench."""
    assert FIXED_POINT == VALUE_SCALE
