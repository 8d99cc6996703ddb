"""Tiles and unions against counts made from the gates themselves. Cost: 5 s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from support.captures import run_capture, run_plain, sequences_of

from twell.kernels.layout import Layout, TwELL, pack
from twell.kernels.stats import NeuronSums
from twell.workbench.capturing import layer_sums
from twell.workbench.run import writer
from twell.workbench.run.columns import NEURON_SUMS
from twell.workbench.text import batches


def unions_of(fired: np.ndarray, plain: np.ndarray, size: int) -> list[int]:
    """Return how many different neurons fire in each full block of one sequence's unflagged rows."""
    rows = fired[plain]
    return [int(rows[at : at + size].any(0).sum()) for at in range(0, len(rows) - size + 1, size)]


def histogram(values: list[int]) -> dict[int, int]:
    return {int(value): int(count) for value, count in zip(*np.unique(values, return_counts=True), strict=True)}


def test_each_sum_of_a_neuron_has_a_column() -> None:
    """Of its name and type, that adds up over parts as the sums of batches do; a part holds only neurons that fired."""
    rules = {torch.add: "sum", torch.maximum: "max", torch.minimum: "min"}
    assert [(column.name, f"torch.{column.type}", column.merge) for column in NEURON_SUMS[2:]] == [
        (item.name, str(item.metadata["dtype"]), rules.get(item.metadata["add"], "min")) for item in fields(NeuronSums)
    ]


def test_a_neuron_whose_values_round_to_zero_has_fired() -> None:
    neurons = NeuronSums.stack([NeuronSums.empty(3)])
    neurons.fires[0, 1:] = torch.tensor([1, 2])
    neurons.value_sum[0, 2] = 5
    ((name, columns),) = layer_sums.LayerSums(neurons, None, None).tables()
    assert (name, columns["neuron"].tolist(), columns["fires"].tolist()) == ("neurons", [1, 2], [1, 2])


def test_tiles_and_unions(tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 100)
    monkeypatch.setattr(batches, "WINDOW", 1)
    run = run_capture(tiny, tmp_path / "run", texts, torch.float64, seq_len=90, batch_tokens=200)
    assert len(run.parts("unions")) > 1
    gates = run_plain(tiny, sequences_of(run), torch.float64).gates
    tiles = run.frame("tiles").groupby(["layer", "tile", "occupancy"])[["pairs", "rows"]].sum()
    unions = run.frame("unions").groupby(["layer", "block", "neurons"])["blocks"].sum()
    flags = [group["flags"].to_numpy() == 0 for _, group in run.activity().groupby("sequence")]
    assert not any(rows[0] for rows in flags)  # the first row of each counts in nothing
    for layer in range(run.layers):
        fired = [sequence[layer] > 0 for sequence in gates]
        counted = np.concatenate([rows[unflagged] for rows, unflagged in zip(fired, flags, strict=True)])
        held = np.stack([counted[:, :256].sum(1), counted[:, 256:].sum(1)], 1)  # 264 neurons: two tiles
        ours = tiles.loc[(layer, 256)]
        assert ours["pairs"][ours["pairs"] > 0].to_dict() == histogram(held.ravel().tolist())
        assert ours["rows"][ours["rows"] > 0].to_dict() == histogram(held.max(1).tolist())
        for size in (16, 64):
            pairs = zip(fired, flags, strict=True)
            expected = histogram([union for rows, unflagged in pairs for union in unions_of(rows, unflagged, size)])
            assert expected and unions.loc[(layer, size)].to_dict() == expected
    assert 128 not in set(run.frame("unions")["block"])  # no sequence is that long


def test_probes_neurons_keep_tiles_but_no_unions(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    run = run_capture(tiny, tmp_path / "run", texts, probes="neurons")
    assert (run.has("neurons"), run.has("tiles"), run.has("unions")) == (True, True, False)


def worst_case(packed: TwELL) -> TwELL:
    """Return the same state as a kernel holds that never waits for the host: room for every tile, garbage elsewhere."""
    rows, tiles, _ = packed.words.shape
    over = packed.counts > packed.layout.slots
    spill = torch.full((rows * tiles, packed.layout.tile), torch.nan, dtype=packed.dtype)
    spill[over.flatten()] = packed.spill
    index = torch.where(over, torch.arange(rows * tiles).view(rows, tiles), -1).int()
    slot = torch.arange(packed.layout.slots)
    words = packed.words.clone()
    words[..., 1:][slot >= packed.counts[..., None]] = -1
    return TwELL(packed.layout, packed.d_ff, packed.dtype, words, packed.values, index, spill)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.08, 0.2, 1.0])
@pytest.mark.parametrize("form", [lambda packed: packed, worst_case])
def test_unions_of_every_fullness(
    share: float, form: Callable[[TwELL], TwELL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twell.kernels.layout.SLOTS_AT_ONCE", 5000)  # a few blocks at a time
    generator = torch.Generator().manual_seed(3)
    lengths, d_ff = [300, 5, 16, 143, 1], 600
    hidden = torch.rand(sum(lengths), d_ff, generator=generator, dtype=torch.float32) + 0.5
    uneven = torch.rand(d_ff, generator=generator) * 2 * share  # so that some tiles overflow and others do not
    fired = torch.rand(sum(lengths), d_ff, generator=generator) < uneven
    plain = np.random.default_rng(4).random(sum(lengths)) < 0.9
    sequence = np.repeat(np.arange(7, 7 + len(lengths)), lengths)
    members = [torch.from_numpy(block) for block in layer_sums.blocks_of(sequence, plain)]
    counts = layer_sums.union_counts(form(pack(hidden, fired, Layout(128, 8))), members)
    for place, size in enumerate(layer_sums.BLOCKS):
        unions: list[int] = []
        for one in np.unique(sequence):
            unions += unions_of(fired.numpy()[sequence == one], plain[sequence == one], size)
        expected = histogram(unions)
        assert {at: int(counts[place, at]) for at in counts[place].nonzero().flatten().tolist()} == expected
        assert expected
