"""On a GPU, the scan by tiles selects what the scan by rows does, to the bit: keys, counts and windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.gpu_checks import CUDA, make, poison, skip_without
from torch import Tensor

from twell.kernels.backends import cuda, hopper
from twell.kernels.backends.selection import BANDS, MOST_DRAW, Bounds, RowMetadata, Selection, values_of_top
from twell.kernels.backends.selection_native import select
from twell.kernels.layout import Layout, TwELL, pack

Select = Callable[[TwELL, RowMetadata, int, Bounds, Selection, bool], None]
LAYOUTS = [Layout(*cut) for cut in ((32, 2), (32, 16), (64, 4), (128, 8), (256, 2), (256, 8), (512, 16))]
DTYPES = [torch.bfloat16, torch.float16]
LENGTH = 19  # rows of a sequence


def made_rows(n: int, device: torch.device, seed: int = 0) -> RowMetadata:
    """Rows of which some are not counted, and more are not eligible."""
    generator = torch.Generator().manual_seed(seed)
    counted = torch.rand(n, generator=generator) < 0.9
    eligible = counted & (torch.rand(n, generator=generator) < 0.8)
    row = torch.arange(n, dtype=torch.int32)
    length = torch.minimum(torch.full_like(row, LENGTH), n - row // LENGTH * LENGTH)
    columns = (counted.byte(), eligible.byte(), row // LENGTH + 3, row % LENGTH, length)
    return RowMetadata(*(column.to(device) for column in columns))


def made_packed(n: int, d_ff: int, layout: Layout, dtype: torch.dtype, device: torch.device, share: float) -> TwELL:
    """Values over many doublings, many of them equal, of neurons that fire hardly to always; every seventh row is loud.

    share: of the neurons that fire in the mean; 1: all of them
    """
    generator = torch.Generator().manual_seed(n + d_ff)
    values = torch.exp2(torch.randn(n, d_ff, generator=generator) * 3).clamp(2.0**-14, 2.0**15)
    values = torch.where(torch.rand(n, d_ff, generator=generator) < 0.2, 0.75, values)
    density = torch.rand(d_ff, generator=generator) ** 4 * 5 * share
    loud = torch.where(torch.arange(n) % 7 == 3, 4.0, 1.0)[:, None]
    fired = (torch.rand(n, d_ff, generator=generator) < density * loud) | (share == 1)
    return pack((values * fired).to(device, dtype), fired.to(device), layout)


def selected(
    run: Select, packed: TwELL, rows: RowMetadata, bounds: Bounds, k: int, by_tiles: bool
) -> tuple[Tensor, ...]:
    """Select into memory that holds 7 where nothing has to be written; return keys, counts and those windows."""
    out = Selection.empty(1, packed.d_ff, k, packed.dtype, packed.device).of_layer(0)
    out.windows.fill_(7)
    run(packed, rows, 5, bounds, out, by_tiles)
    windows = torch.where((out.keys != 0)[..., None], out.windows.nan_to_num(-1), 0)
    return out.keys, out.fires, windows


def assert_scans_agree(run: Select, packed: TwELL, rows: RowMetadata, k: int) -> None:
    """Without bounds; with bounds of what that selected; and with some within which nothing is."""
    device, d_ff = packed.device, packed.d_ff
    generator = torch.Generator().manual_seed(k)
    bounds, names = Bounds.none(d_ff, device), ("keys", "fires", "windows")
    for turn in range(3):
        by_rows, by_tiles = (selected(run, packed, rows, bounds, k, tiles) for tiles in (False, True))
        for name, ours, theirs in zip(names, by_tiles, by_rows, strict=True):
            assert torch.equal(ours, theirs), (turn, name, (ours != theirs).nonzero()[:3].tolist())
        draw = (torch.rand(d_ff, BANDS, generator=generator) ** 3 * MOST_DRAW).int().to(device)
        draw[torch.rand(d_ff, BANDS, generator=generator).to(device) < 0.2] = -1
        bounds = Bounds(values_of_top(by_rows[0])[0, :, -1].contiguous(), draw)
        if turn == 1:
            bounds = Bounds(torch.full_like(bounds.value, torch.inf), torch.full_like(draw, -1))


@pytest.fixture
def gpu() -> torch.device:
    skip_without(cuda)
    poison()
    return CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.tile}-{layout.compression}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(gpu: torch.device, layout: Layout, dtype: torch.dtype) -> None:
    """Of 600 columns the last tile is a partial one, but for tiles of 512 the last but one."""
    for n in (1, 31, 777):
        assert_scans_agree(select, made_packed(n, 600, layout, dtype, gpu, 0.05), made_rows(n, gpu), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 1.0])
def test_from_no_firing_to_all(gpu: torch.device, share: float, k: int) -> None:
    for n in (300, 2000):
        packed, rows = made_packed(n, 520, Layout(), torch.bfloat16, gpu, share), made_rows(n, gpu)
        assert_scans_agree(select, packed, rows, k)
        _, fires, _ = selected(select, packed, rows, Bounds.none(520, gpu), k, True)
        assert int(fires.sum()) == int((packed.counts * (rows.counted[:, None] != 0)).sum())


@pytest.mark.gpu
def test_many_rows_of_few_neurons(gpu: torch.device) -> None:
    """All CTAs insert into the same lists, and all values are equal: the earliest rows win."""
    rows = made_rows(60_000, gpu)
    packed = made_packed(60_000, 40, Layout(), torch.bfloat16, gpu, 0.3)
    assert_scans_agree(select, packed, rows, 8)
    hidden = torch.full((60_000, 40), 0.5, dtype=torch.bfloat16, device=gpu)
    equal = pack(hidden, hidden > 0, Layout())
    assert_scans_agree(select, equal, rows, 8)
    keys, _, _ = selected(select, equal, rows, Bounds.none(40, gpu), 8, True)
    first = rows.eligible.nonzero().flatten()[:8]
    assert torch.equal(2**32 - 1 - (keys[0] & (2**32 - 1)), first.expand(40, 8))


@pytest.mark.gpu
def test_words_that_lie_anywhere(gpu: torch.device) -> None:
    """At addresses that are no multiples of 16 bytes the scan is by rows, whatever is asked for."""
    packed = made_packed(500, 600, Layout(), torch.bfloat16, gpu, 0.1)
    words = torch.cat([packed.words.new_zeros(1), packed.words.flatten()])[1:].view(packed.words.shape)
    assert words.data_ptr() % 16
    assert_scans_agree(select, replace(packed, words=words), made_rows(500, gpu), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 60, 700, 3000, 20_000])
@pytest.mark.parametrize("quiet", [-20, 3, 9])
def test_where_the_hopper_kernel_leaves_them(n: int, quiet: int) -> None:
    """In two arrays and in place, with tiles that are dense; a row that is not finite among them."""
    skip_without(hopper)
    poison()
    params = make(n, 64, 1032, quiet)
    params.x[n // 2, 3] = torch.inf
    _, stats = hopper.run(params)
    assert stats.packed is not None and stats.packed.stored()[2] is None
    assert_scans_agree(select, stats.packed, made_rows(n, CUDA), 8)
