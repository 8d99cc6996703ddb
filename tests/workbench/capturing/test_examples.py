"""Selecting and merging examples: any cut into batches, in any order, keeps the same as all firings looked at at once.

On a GPU the launches against torch, too. Cost: 3 s.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from twell.kernels.backends import hopper, selection_native
from twell.kernels.backends.selection import BINS, WINDOW, Bounds, RowMetadata, Selection, bin_begins, bin_of, select
from twell.kernels.layout import Layout, TwELL, pack
from twell.kernels.ops import gated_ffn
from twell.workbench.capturing.examples import KINDS, Examples, Kept
from twell.workbench.run.columns import VALUE_BINS

LAYER, D_FF, SEQUENCES, LENGTH = 1, 40, 24, 20
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def made_rows(generator: torch.Generator, sequences: int, length: int, device: str = "cpu") -> RowMetadata:
    """Rows of sequences of one length, of which some are not counted and more are not eligible."""
    n = sequences * length
    counted = torch.rand(n, generator=generator) < 0.9
    eligible = counted & (torch.rand(n, generator=generator) < 0.8)
    sequence = torch.arange(sequences).repeat_interleave(length).int() * 2  # from 0 on
    position, lengths = torch.arange(length).repeat(sequences).int(), torch.full((n,), length, dtype=torch.int32)
    columns = (counted.to(torch.uint8), eligible.to(torch.uint8), sequence, position, lengths)
    return RowMetadata(*(column.to(device) for column in columns))


def made_hidden(generator: torch.Generator, n: int, d_ff: int) -> Tensor:
    """Values over many doublings, a few of them often, of neurons that fire hardly to always."""
    values = torch.randn(n, d_ff, generator=generator).abs() * torch.exp2(torch.randn(n, d_ff, generator=generator) * 2)
    values = torch.where(torch.rand(n, d_ff, generator=generator) < 0.1, 0.75, values)
    return values * (torch.rand(n, d_ff, generator=generator) < torch.rand(d_ff, generator=generator))


def kept_of(hidden: Tensor, rows: RowMetadata, cuts: list[tuple[int, int]], k: int) -> Examples:
    """What is kept after batches of these rows, in this order."""
    examples = Examples(2, D_FF, k)
    for first, last in cuts:
        part = RowMetadata(*(getattr(rows, item.name)[first:last] for item in fields(RowMetadata)))
        selection = Selection.empty(2, D_FF, k, torch.float32, hidden.device)
        batch = hidden[first:last]
        packed, bounds = pack(batch, batch > 0, Layout(32, 2)), examples.bounds(LAYER, hidden.device)
        select(packed, part, LAYER, bounds, selection.of_layer(LAYER))
        examples.merge(selection, part)
    return examples


def columns_of(examples: Examples) -> dict[str, Any]:
    table = table_of(examples)
    columns = {name: table[name].to_numpy() for name in table.column_names if name != "window"}
    return columns | {"window": table["window"].combine_chunks().flatten().to_numpy(zero_copy_only=False)}


def table_of(examples: Examples) -> pa.Table:
    return pa.concat_tables(pa.table(make()) for make in examples.tables()())


@pytest.mark.parametrize("k", [1, 2, 5])
def test_batches_in_any_order_keep_the_same(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    rows, n = made_rows(generator, SEQUENCES, LENGTH), SEQUENCES * LENGTH
    hidden = made_hidden(generator, n, D_FF)
    whole = columns_of(kept_of(hidden, rows, [(0, n)], k))
    ends = [LENGTH * end for end in (0, 3, 4, 10, 16, SEQUENCES)]
    cuts = [(ends[at], ends[at + 1]) for at in torch.randperm(5, generator=generator).tolist()]
    one, other = kept_of(hidden, rows, cuts[:2], k), kept_of(hidden, rows, cuts[2:], k)
    one.restore(table_of(other), torch.device("cpu"))  # as of another rank
    for ours in (kept_of(hidden, rows, cuts, k), one):
        for name, column in columns_of(ours).items():
            np.testing.assert_array_equal(column, whole[name], err_msg=name)


def test_what_is_kept() -> None:
    """By sorting every eligible firing of each neuron in Python."""
    generator, k = torch.Generator().manual_seed(9), 4
    rows, n = made_rows(generator, SEQUENCES, LENGTH), SEQUENCES * LENGTH
    hidden = made_hidden(generator, n, D_FF)
    frame = columns_of(kept_of(hidden, rows, [(0, n)], k))
    windows = frame["window"].reshape(-1, WINDOW)
    padded = torch.nn.functional.pad(hidden.view(SEQUENCES, LENGTH, D_FF), (0, 0, 16, 16), value=torch.nan).numpy()
    for neuron in range(D_FF):
        row = np.flatnonzero((hidden[:, neuron] > 0).numpy() & (rows.eligible == 1).numpy())
        value = hidden[row, neuron].numpy()
        of_neuron = frame["neuron"] == neuron
        top = row[np.argsort(-value, kind="stable")[:k]]
        ours = of_neuron & (frame["kind"] == "top")
        assert ((frame["sequence"][ours] // 2) * LENGTH + frame["position"][ours]).tolist() == top.tolist()
        sample = of_neuron & (frame["kind"] == "sample")
        held = np.floor(np.log2(frame["value"][sample])).clip(-9, 6)
        bands, counts = np.unique(np.floor(np.log2(value)).clip(-9, 6), return_counts=True)
        assert len(held) == min(k, len(row))
        shares = [int((held == band).sum()) for band in bands]
        for share, count in zip(shares, counts, strict=True):  # as even as the bands allow
            assert share == count or share >= max(shares) - 1
        for index in np.flatnonzero(sample):
            place = frame["sequence"][index] // 2, frame["position"][index]
            np.testing.assert_array_equal(windows[index], padded[place[0], place[1] : place[1] + WINDOW, neuron])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_windows_of_every_kind_of_number_are_written_as_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    kept = Kept.none(2, 5, 3, dtype, torch.device("cpu"))
    kept.window[:] = torch.randn(kept.window.shape, generator=generator).to(dtype)
    kept.window[0, 0, 0, 0], kept.window[0, 0, 0, 1] = torch.nan, torch.inf
    kept.sequence[0, :, :2], kept.sequence[0, 3] = 7, -1
    columns = kept.table(0, "top")
    expected = kept.window[0, [0, 1, 2, 4], :2].float().numpy()
    np.testing.assert_array_equal(columns["window"].flatten().to_numpy(), expected.ravel())
    assert columns["neuron"].tolist() == [0, 0, 1, 1, 2, 2, 4, 4]
    assert set(columns["sequence"]) == {7}


def test_bins_begin_where_they_say() -> None:
    assert BINS == VALUE_BINS  # two constants, because the schema may not import the kernels
    begins = torch.tensor(bin_begins())
    assert bin_of(begins).tolist() == list(range(BINS))
    below = torch.nextafter(begins[1:], torch.zeros(()))
    assert bin_of(below).tolist() == list(range(BINS - 1))
    assert bin_of(torch.tensor([0.0, 1e-30, 3e38])).tolist() == [0, 0, BINS - 1]


def assert_selects_the_same(packed: TwELL, rows: RowMetadata, k: int, by_tiles: bool = False) -> None:
    """Native code and torch, without bounds and then with those of what was kept."""
    native = partial(selection_native.select, by_tiles=by_tiles)
    shape = (1, packed.d_ff, k, packed.dtype, packed.device)
    bounds = Bounds.none(packed.d_ff, packed.device)
    for _ in range(2):
        kept = []
        for run in (native, select):
            selection, examples = Selection.empty(*shape), Examples(1, packed.d_ff, k)
            run(packed, rows, 0, bounds, selection.of_layer(0))
            examples.merge(selection, rows)
            kept.append((selection.fires, examples))
        assert torch.equal(kept[0][0], kept[1][0])
        for kind in KINDS:
            for item in fields(Kept):
                ours, theirs = (getattr(examples._kept[kind], item.name) for _, examples in kept)
                there = kept[1][1]._kept[kind].sequence >= 0
                assert torch.equal(ours[there].nan_to_num(-1), theirs[there].nan_to_num(-1)), (kind, item.name)
        bounds = kept[1][1].bounds(0, packed.device)


ON_GPU = [pytest.param("cuda", dtype, marks=[pytest.mark.gpu, GPU]) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), *ON_GPU])
def test_native_code_selects_what_torch_does(device: str, dtype: torch.dtype, k: int) -> None:
    """Made tiles, of which some overflow; a partial last tile."""
    generator = torch.Generator().manual_seed(k)
    rows = made_rows(generator, 40, 50, device)
    hidden = (made_hidden(generator, 2000, 600) * (torch.rand(2000, 1, generator=generator) < 0.5)).to(device, dtype)
    hidden[:, 256:] *= torch.rand(2000, 344, generator=generator).to(device) < 0.1
    packed = pack(hidden, hidden > 0, Layout(256, 8))
    assert 0 < len(packed.spill) < 2 * 2000
    if not selection_native.takes(packed):
        pytest.skip("no compiler here")
    for by_tiles in (False, True) if device == "cuda" else (False,):
        assert_selects_the_same(packed, rows, k, by_tiles)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("by_tiles", [False, True])
@pytest.mark.parametrize("n", [60, 2000, 40_000])
def test_from_where_the_hopper_kernel_leaves_them(n: int, by_tiles: bool) -> None:
    if reason := hopper.refuses(torch.device("cuda"), torch.bfloat16, 256, 1024, n):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 256, generator=generator).to("cuda", torch.bfloat16)
    weights = [torch.randn(1024, 256, generator=generator).to("cuda", torch.bfloat16) / 16 for _ in range(2)]
    bias = (torch.randn(1024, generator=generator) - 1.5).to("cuda", torch.bfloat16)  # most neurons fire seldom
    down = torch.randn(256, 1024, generator=generator).to("cuda", torch.bfloat16) / 32
    _, stats = gated_ffn(x, *weights, down, b_gate=bias, kernel="hopper", probes="counts", want_packed=True)
    assert stats.packed is not None
    assert_selects_the_same(stats.packed, made_rows(generator, n // 20, 20, "cuda"), 8, by_tiles)
