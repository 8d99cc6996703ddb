"""Examples and fired against the gates themselves, whole and over a run that was killed. Cost: 6 s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.captures import run_capture, run_plain, sequences_of
from support.contexts import first_in_context

from twell.analysis.summaries.read import open_summaries
from twell.kernels.backends.selection import REACH
from twell.kernels.layout import Layout, entries, pack
from twell.workbench.capturing.firings import FiringCollector, parse_fired, uniform_draws
from twell.workbench.capturing.forward import Inputs
from twell.workbench.errors import UserError
from twell.workbench.run import writer
from twell.workbench.text import batches
from twell.workbench.text.sequences import Sequence

K = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_of_every_fullness(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = (torch.rand(40, 600, generator=generator) + 0.5).to(dtype)
    fired = torch.rand(40, 600, generator=generator) < torch.linspace(0, 0.6, 40)[:, None]
    packed = pack(hidden, fired, Layout(128, 8))
    assert 0 < len(packed.spill) < 40 * 5
    for rows in (None, torch.tensor([3, 39, 17])):
        chosen = fired if rows is None else fired[rows]
        row, neuron, value = entries(packed if rows is None else packed.take_rows(rows))
        expected = chosen.nonzero()
        assert torch.equal(torch.stack([row, neuron], 1), expected)
        whole = hidden if rows is None else hidden[rows]
        assert torch.equal(value, whole[expected[:, 0], expected[:, 1]])


def test_draws_are_even_and_depend_on_every_number() -> None:
    numbers = torch.arange(20000)
    for arguments in ((numbers, 5), (5, numbers), (numbers // 100, numbers % 100)):
        drawn = uniform_draws(*arguments)
        assert len(drawn.unique()) == 20000
        assert (drawn >= 0).all() and (drawn < 1).all()
        assert torch.histc(drawn.float(), 20, 0, 1).sub(1000).abs().max() < 150
    assert uniform_draws(torch.tensor([1]), 2) == uniform_draws(torch.tensor([1]), torch.tensor([2]))


def spread(band: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the indices of K firings: the least draw of each band, greater values first, then the second least, ..."""
    held: dict[float, int] = {}
    ranked = []
    for index in np.argsort(draws):
        ranked.append((held.get(band[index], 0), -band[index], index))
        held[band[index]] = ranked[-1][0] + 1
    return np.array([index for _, _, index in sorted(ranked)[:K]])


def expected_examples(run: Any, gates: list[list[np.ndarray]]) -> dict[tuple[int, int, str], list[tuple[int, int]]]:
    """Return (sequence, position) of what is to be kept, by layer, neuron and kind, in order."""
    fresh = first_in_context(run)
    flags = {sequence: group["flags"].to_numpy() for sequence, group in run.activity().groupby("sequence")}
    assert any((~fresh[sequence] & (flags[sequence] == 0)).any() for sequence in fresh)  # some contexts come twice
    kept: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for layer in range(run.layers):
        places, values = [], []
        for sequence, layers in enumerate(gates):
            rows = np.flatnonzero((flags[sequence] == 0) & fresh[sequence])
            places += [(sequence, int(row)) for row in rows]
            values.append(layers[layer][rows])
        gate = np.concatenate(values).astype(np.float32)
        for neuron in range(run.d_ff):
            fired = np.flatnonzero(gate[:, neuron] > 0)
            if len(fired):
                value = gate[fired, neuron]
                numbers = [torch.tensor([places[row][item] for row in fired]) for item in (0, 1)]
                band = np.clip(np.floor(np.log2(value)), -9, 6)
                chosen = (
                    np.argsort(-value, kind="stable")[:K],
                    spread(band, uniform_draws(*numbers, layer, neuron).numpy()),
                )
                for kind, best in zip(("top", "sample"), chosen, strict=True):
                    kept[layer, neuron, kind] = [places[row] for row in fired[best]]
    return kept


def test_examples(tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 60)
    monkeypatch.setattr(batches, "WINDOW", 1)
    run = run_capture(tiny, tmp_path / "run", texts, torch.float64, examples=K)
    assert len(run.parts("activity")) > 3
    assert len(run.parts("examples")) == 1  # each part's takes the place of the one before
    assert len(list((run.path / "examples").iterdir())) == 1
    gates = run_plain(tiny, sequences_of(run), torch.float64).gates
    frame = run.frame("examples")
    ours: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for row in frame.itertuples():
        ours.setdefault((row.layer, row.neuron, row.kind), []).append((row.sequence, row.position))
    assert ours == expected_examples(run, gates)
    for row in frame.sample(300, random_state=1).itertuples():
        gate = gates[row.sequence][row.layer][:, row.neuron]
        padded = np.concatenate([np.full(REACH, np.nan), np.maximum(gate, 0), np.full(REACH, np.nan)])
        np.testing.assert_allclose(row.window, padded[row.position : row.position + 2 * REACH + 1], rtol=1e-6)
        assert row.value == row.window[REACH]
    assert (frame[frame["kind"] == "sample"]["draw"] > 0).all()
    assert (frame[frame["kind"] == "top"]["draw"] == 0).all()


def test_values_by_bins(
    tiny: Path,
    tmp_path: Path,
    texts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every unflagged token, in contexts that come again too; parts add up to the neurons' firings."""
    monkeypatch.setattr(writer, "PART_TOKENS", 60)
    monkeypatch.setattr(batches, "WINDOW", 1)
    run = run_capture(tiny, tmp_path / "run", texts, torch.float64, examples=1)
    assert len(run.parts("value_bins")) > 1
    gates = run_plain(tiny, sequences_of(run), torch.float64).gates
    flags = [group["flags"].to_numpy() for _, group in run.activity().groupby("sequence")]
    bounds = np.array([0, *[2.0 ** (b // 2 - 9) * (1.5 if b % 2 else 1) for b in range(1, 32)], np.inf])
    ours = run.frame("value_bins").groupby(["layer", "neuron", "bin"])["fires"].sum()
    for layer in range(run.layers):
        gate = np.concatenate([one[layer][rows == 0] for one, rows in zip(gates, flags, strict=True)]).astype(
            np.float32
        )
        for neuron in range(0, run.d_ff, 7):
            values = gate[:, neuron][gate[:, neuron] > 0]
            counts = np.histogram(values, bounds)[0]
            expected = {b: count for b, count in enumerate(counts) if count}
            assert (ours.loc[layer, neuron].to_dict() if len(values) else {}) == expected
    fires = run.frame("neurons").groupby(["layer", "neuron"])["fires"].sum()
    assert ours.groupby(["layer", "neuron"]).sum().equals(fires)
    summary = open_summaries(run).frame("value_bins").set_index(["layer", "neuron", "bin"])["fires"]
    assert summary.equals(ours)


def test_fired(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    run = run_capture(tiny, tmp_path / "run", texts, torch.float64, fired="0,2:0.5", probes="counts")
    gates = run_plain(tiny, sequences_of(run), torch.float64).gates
    activity, frame = run.activity(), run.frame("fired")
    keys = [torch.from_numpy(activity[name].to_numpy().astype(np.int64)) for name in ("sequence", "position")]
    sampled = activity[(uniform_draws(*keys) < 0.5).numpy()]
    assert 0.3 * len(activity) < len(sampled) < 0.7 * len(activity)
    for layer in (0, 2):
        rows = frame[frame["layer"] == layer]
        assert rows["sequence"].tolist() == sampled["sequence"].tolist()
        assert rows["position"].tolist() == sampled["position"].tolist()
        for row in rows.itertuples():
            gate = gates[row.sequence][layer][row.position]
            np.testing.assert_array_equal(row.neuron, np.flatnonzero(gate > 0))
            np.testing.assert_allclose(row.value, gate[gate > 0], rtol=1e-3, atol=1e-7)
    assert set(frame["layer"]) == {0, 2}


def test_fired_of_a_wide_layer_and_of_large_values() -> None:
    """Numbers past 16 bits, and values past float16's greatest."""
    d_ff = 2**16 + 8
    hidden = torch.zeros(2, d_ff)
    hidden[0, [3, 65_535, 65_536, 65_543]] = torch.tensor([1.0, 65_504.0, 1e6, 3e38])
    sequence = Sequence(0, "text", 0, np.array([5, 6], dtype=np.int32))
    [batch] = batches.batches([sequence], 8, [])
    seen = FiringCollector(1, d_ff, 0, "all").collect_from(batch, Inputs.of(batch, torch.device("cpu")))
    assert seen is not None
    seen.on_packed(0, pack(hidden, hidden > 0, Layout()))
    with np.errstate(all="raise"):
        [table] = seen.commit()
    assert table["neuron"].to_pylist() == [[3, 65_535, 65_536, 65_543], []]
    assert table["value"].to_pylist() == [[1.0, 65_504.0, 65_504.0, 65_504.0], []]
    for wide, kind in ((d_ff, pa.uint32()), (65_535, pa.uint16())):
        assert writer.arrow_schema("fired", 1, wide).field("neuron").type == pa.list_(kind)


@pytest.mark.parametrize("text", ["", "9", "1-0", "2-1,0", "0-999999999999", "-1", "a", "0:0", "0:2", "0:x", "all:"])
def test_what_fired_does_not_understand(text: str) -> None:
    if text == "all:":
        assert parse_fired(text, 3) == (frozenset({0, 1, 2}), 1.0)
        return
    with pytest.raises(UserError, match=r"--fired as LAYERS"):
        parse_fired(text, 3)
