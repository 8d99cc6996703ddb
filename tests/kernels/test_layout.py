"""TwELL against its own description, read word by word in plain Python."""

from __future__ import annotations

import struct

import pytest
import torch

from twell.kernels.layout import Layout, TwELL, pack, unpack

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def sparse(rows: int, d_ff: int, share: float, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, d_ff, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, torch.rand(rows, d_ff, generator=generator) < share


def value_of(high: int, dtype: torch.dtype) -> float:
    """Sixteen bits as a number."""
    if dtype is torch.float16:
        return struct.unpack("<e", struct.pack("<H", high))[0]
    return struct.unpack("<f", struct.pack("<I", high << 16))[0]


def read(twell: TwELL) -> list[list[tuple[int, float]]]:
    """(column, value) of each row's fired neurons: slots where a tile fits, its spilled tile where not."""
    layout, rows = twell.layout, []
    for row, tiles in enumerate(twell.words.tolist()):
        entries = []
        for tile, (count, *slots) in enumerate(tiles):
            begin, kept = tile * layout.tile, []
            for at, word in enumerate(slots[:count]):
                low, high = word & 0xFFFF, (word >> 16) & 0xFFFF
                assert twell.values is None or high == 0
                value = value_of(high, twell.dtype) if twell.values is None else twell.values[row, tile, at].item()
                kept.append((begin + low, value))
            assert not any(slots[count:]), "slots past the count"
            spilled = int(twell.spill_index[row, tile])
            assert (spilled >= 0) == (count > layout.slots)
            if spilled >= 0:
                dense = twell.spill[spilled].tolist()
                full = [(begin + column, value) for column, value in enumerate(dense) if value]
                assert len(full) == count
                assert kept == full[: layout.slots], "the first entries stand in the slots"
                kept = full
            entries += kept
        rows.append(entries)
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "compression"), [(32, 16), (64, 2), (64, 8), (256, 4), (256, 8), (256, 16), (512, 8)])
def test_words_read_as_described(dtype: torch.dtype, tile: int, compression: int) -> None:
    layout = Layout(tile, compression)
    for d_ff in (8, tile - 8, tile, tile + 8, 3 * tile + 8):
        hidden, fired = sparse(3, d_ff, 1 / compression, dtype, seed=d_ff)
        expected = [[(c, hidden[r, c].item()) for c in range(d_ff) if fired[r, c]] for r in range(3)]
        packed = pack(torch.where(fired, hidden, torch.nan), fired, layout)
        assert packed.words.shape == (3, -(-d_ff // tile), tile // compression)
        assert read(packed) == expected
        assert torch.equal(unpack(packed), torch.where(fired, hidden, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 127, 129])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_unpack_gives_back_any_input(dtype: torch.dtype, rows: int, share: float) -> None:
    hidden, fired = sparse(rows, 520, share, dtype)
    packed = pack(hidden, fired, Layout())
    assert torch.equal(unpack(packed), torch.where(fired, hidden, 0))
    tiles = [fired[:, at : at + 256].sum(1) for at in range(0, 520, 256)]
    assert torch.equal(packed.counts, torch.stack(tiles, 1).int())


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_last_slot_is_used_before_a_tile_overflows(extra: int) -> None:
    layout = Layout(64, 8)
    fired = torch.zeros(2, 128, dtype=torch.bool)
    fired[1, 64 : 64 + layout.slots + extra] = True
    packed = pack(torch.ones(2, 128), fired, layout)
    assert packed.counts.tolist() == [[0, 0], [0, layout.slots + extra]]
    assert len(packed.spill) == (extra > 0)
    assert torch.equal(unpack(packed), fired.float())


def test_a_fired_zero_keeps_its_slot() -> None:
    hidden = torch.zeros(1, 64, dtype=torch.float16)
    fired = torch.zeros(1, 64, dtype=torch.bool)
    fired[0, [5, 40]] = True
    packed = pack(hidden, fired, Layout(64, 8))
    assert packed.words[0, 0].tolist() == [2, 5, 40, 0, 0, 0, 0, 0]


def test_signs_and_extremes_survive_in_sixteen_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        hidden = torch.tensor([[info.max, info.min, info.tiny, -info.tiny, -0.0, 1.0, -1.0, info.smallest_normal]])
        hidden = hidden.to(dtype)
        back = unpack(pack(hidden, torch.ones(1, 8, dtype=torch.bool), Layout(128, 8)))
        assert torch.equal(back.view(torch.int16), hidden.view(torch.int16))


def test_chunks_join_to_the_whole() -> None:
    for dtype in DTYPES:
        hidden, fired = sparse(40, 264, 0.3, dtype)
        layout = Layout(64, 4)
        whole = pack(hidden, fired, layout)
        assert len(whole.spill) > 0
        cuts = [slice(0, 7), slice(7, 7), slice(7, 30), slice(30, 40)]
        parts = [pack(hidden[cut], fired[cut], layout) for cut in cuts]
        joined = TwELL.cat(parts)
        assert torch.equal(joined.words, whole.words)
        assert torch.equal(joined.spill_index, whole.spill_index)
        assert torch.equal(joined.spill, whole.spill)
        assert torch.equal(unpack(joined), unpack(whole))
        for part, cut in zip(parts, cuts, strict=True):
            assert torch.equal(unpack(part), unpack(whole)[cut]), "joining changes no part"


def test_layout_refuses_what_it_does_not_support() -> None:
    with pytest.raises(ValueError, match=r"compression: expected one of \(2, 4, 8, 16\), got 3"):
        Layout(compression=3)
    with pytest.raises(ValueError, match=r"tile: expected one of .*, got 100"):
        Layout(tile=100)
    assert (Layout().slots, Layout().tiles(257), Layout(256, 16).slots) == (31, 2, 15)
