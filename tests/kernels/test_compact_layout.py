"""Workspaces of compact training passes hold what launches put there, in few passes; less than the worst case."""

from __future__ import annotations

import pytest
import torch

from twell.kernels import training
from twell.kernels.backends import hopper, hopper_backward, hopper_compact
from twell.kernels.backends.hopper_compact import Room

D_MODEL, D_FF, ROWS = 2048, 5632, 16_384
SIDE = 144 * 128 * 256 * 4  # bytes of sums of dx, of which there are two; those of weights are half as many again
PANEL, CHUNK = 128 * 64 * 2, 3 * 64 * 64 * 2  # bytes
SHAPES = [
    (1, 256, 512),
    (131, 136, 1032),
    (300, 8, 8),
    (4097, 1024, 2816),
    (8000, D_MODEL, D_FF),
    (ROWS, D_MODEL, D_FF),
]
SHAPES += [(100_000, 512, 2048)]


def _ceil(many: int, of: int) -> int:
    return -(-many // of)


@pytest.mark.parametrize(("room", "small"), [(0.0, 0), (hopper_compact.ROOM, hopper_compact.SMALL), (100.0, 0)])
@pytest.mark.parametrize(("matrices", "kept"), [(0, 1), (0, 16), (0, 10_000), (1, 0), (2, 0)])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), SHAPES)
def test_passes_fit_the_arena(
    monkeypatch: pytest.MonkeyPatch, n: int, d_model: int, d_ff: int, matrices: int, kept: int, room: float, small: int
) -> None:
    monkeypatch.setattr(hopper_compact, "ROOM", room)
    monkeypatch.setattr(hopper_compact, "SMALL", small)
    what = Room.whole(n, d_ff, matrices) if matrices else Room(n * min(kept, d_ff))
    layout = hopper_compact.backward_layout(n, d_model, d_ff, what)
    arena, groups, rows, in_gradients, in_dx, at_once, panels_at, values = layout.sizes
    behind = 2 * matrices * n * d_ff - panels_at  # bytes of what is kept, behind its values
    blocks, panels = _ceil(n, 128), _ceil(d_ff, 64)
    assert len(layout.offsets) == 16 and layout.nbytes - layout.offsets[-1] >= arena
    assert at_once == (arena >= (2 if matrices else 3) * n * d_ff * 2) and (at_once or not matrices)
    assert values == what.values and (not panels_at or (panels_at >= 6 * values and behind >= 3 * SIDE))
    assert 1 <= _ceil(panels, groups) <= hopper_compact.PASSES and 1 <= _ceil(blocks, rows) <= hopper_compact.PASSES
    assert groups % 2 == 0 or groups == panels or groups == 1
    assert (0 if in_dx else 3 * SIDE) + groups * 2 * blocks * CHUNK <= arena
    assert 2 * SIDE + rows * 2 * panels * PANEL <= arena
    assert not in_gradients or d_model * d_ff * 2 >= SIDE
    assert not in_dx or n * d_model * 2 >= 3 * SIDE
    assert in_gradients or layout.offsets[-2] - layout.offsets[-3] >= 2 * SIDE
    if room == 100.0 and not panels_at and not matrices:  # all that there can be
        assert max(2 * panels * blocks * PANEL, 3 * SIDE) + panels * 2 * blocks * CHUNK <= arena


def test_a_block_takes_less_than_two_fifths_of_a_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """At nnz 17, of results, what is kept, a copy of the down weights and either workspace."""
    monkeypatch.setattr(hopper_compact, "ENABLED", True)
    capacity = training.capacity_for(17, D_FF)
    y, weight, kept = ROWS * D_MODEL * 2, D_FF * D_MODEL * 2, 6 * ROWS * capacity + 2 * ROWS // 128 * D_FF
    ahead = hopper_compact.forward_layout(ROWS, D_FF)
    back = hopper_backward.backward_layout(ROWS, D_MODEL, D_FF, Room(ROWS * capacity))
    assert (y + kept + weight + ahead.nbytes) / 2**30 < 0.32
    assert (2 * y + kept + 4 * weight + back.nbytes) / 2**30 < 0.39
    monkeypatch.setattr(hopper_compact, "ENABLED", False)
    worst = hopper_backward.backward_layout(ROWS, D_MODEL, D_FF, Room(ROWS * capacity))
    assert worst.nbytes > 10 * back.nbytes and len(worst.offsets) == 19 and len(worst.sizes) == 13


@pytest.mark.parametrize(
    ("n", "d_ff", "whole"),
    [(ROWS, D_FF, False), (131_072, 5632, False), (131_072, 6656, True), (65_536, 13_312, True), (8192, 16_384, False)],
)
def test_what_is_repeated_whole_was_run_whole(n: int, d_ff: int, whole: bool) -> None:
    """The order of rows and the unions of what was kept depend on how many rows a pass takes."""
    capacity = training.capacity_for(d_ff // 8, d_ff)
    back = hopper_backward.backward_layout(n, D_MODEL, d_ff, Room.of(n, d_ff, True, capacity))
    regions = hopper.regions(n, d_ff, torch.bfloat16, True)
    passes = hopper_compact.forward_layout(n, d_ff).offsets[len(regions.offsets) :]
    assert (len(back.sizes) == 13) == whole
    assert passes == (() if whole or n <= hopper_compact.FORWARD_ROWS else (hopper_compact.FORWARD_ROWS,))


def test_values_are_computed_at_once_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for capacity in (1, 16, 44, 176, 704, 1408):
        room = Room.of(ROWS, D_FF, True, capacity)
        arena, *_, at_once, _, _ = hopper_compact.backward_layout(ROWS, D_MODEL, D_FF, room).sizes
        found[capacity] = at_once
        assert not at_once or arena >= 3 * ROWS * D_FF * 2
    assert found == {1: 1, 16: 0, 44: 0, 176: 0, 704: 1, 1408: 1}
    monkeypatch.setattr(hopper_compact, "AT_ONCE", False)
    assert hopper_compact.backward_layout(ROWS, D_MODEL, D_FF, Room(ROWS * 8)).sizes[0] < 3 * ROWS * D_FF * 2


def test_a_call_that_is_told_nothing_has_room_for_g_and_h() -> None:
    """Less memory than dense autograd keeps and needs, and as many sparse values as are to be kept sparse."""
    room = Room.of(ROWS, D_FF, True, training._default_capacity(ROWS, D_FF))
    assert room == Room(ROWS * 944, 2, 704) and room.shape(ROWS, D_FF) == (2, ROWS, D_FF)
    arena, *_, at_once, panels_at, values = hopper_compact.backward_layout(ROWS, D_MODEL, D_FF, room).sizes
    assert at_once and panels_at == 6 * ROWS * 944 and values == ROWS * 944
    blocks, panels = ROWS // 128, D_FF // 64
    assert (
        4 * ROWS * D_FF - panels_at >= 0.7 * 2 * blocks * panels * PANEL and arena >= 0.7 * 2 * blocks * panels * CHUNK
    )
    y, weight = ROWS * D_MODEL * 2, D_FF * D_MODEL * 2
    whole = hopper_compact.backward_layout(ROWS, D_MODEL, D_FF, room).nbytes + 4 * ROWS * D_FF
    assert (2 * y + 5 * weight + whole) / 2**30 < 1.05  # dense autograd: 1.09 to 1.12


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("n", "d_ff"), [(n, d_ff) for n, _, d_ff in SHAPES] + [(5, 16), (5, 24), (7, 264)])
def test_values_lie_where_nothing_of_a_backward_pass_is_written(n: int, d_ff: int, gated: bool) -> None:
    """Behind them there is room for the second of two matrices."""
    room = Room.of(n, d_ff, gated, d_ff)
    assert room.matrices == (2 if gated else 1) and 6 * room.values <= 2 * n * d_ff
    assert room.values % (8 * n) == 0 and 0 <= room.whole_from <= room.values / n
    assert Room.whole(n, d_ff, room.matrices) == room, "what a backward pass makes of the shape of what is kept"
    for capacity in range(1, d_ff + 1):
        each = -(-capacity // 8) * 8
        less = Room.of(n, d_ff, gated, capacity)
        assert less == (room if 3 * each >= room.matrices * d_ff else Room(n * each))


def test_nothing_is_kept_whole_where_no_backward_pass_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Room.of(2**17, 2**14, True, 2**14) == Room(2**31)
    for switch in ("ENABLED", "AT_ONCE"):
        with monkeypatch.context() as patch:
            patch.setattr(hopper_compact, switch, False)
            assert Room.of(ROWS, D_FF, True, D_FF) == Room(ROWS * D_FF)
            assert training._default_capacity(ROWS, D_FF) == D_FF // 8


def test_sums_lie_apart_from_gradients_that_are_added_to() -> None:
    plain, adding = (
        hopper_compact.backward_layout(ROWS, D_MODEL, D_FF, Room(ROWS * 44), adds) for adds in (False, True)
    )
    assert plain.sizes[3] == 1 and adding.sizes[3] == 0
    assert adding.nbytes - plain.nbytes >= 2 * SIDE and adding.sizes[0] == plain.sizes[0]


def test_rows_of_a_forward_pass_follow_its_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_compact, "ENABLED", False)
    whole = hopper_compact.forward_layout(ROWS, D_FF)
    assert len(whole.offsets) == 13
    monkeypatch.setattr(hopper_compact, "ENABLED", True)
    some = hopper_compact.forward_layout(ROWS, D_FF)
    assert some.offsets[-1] == hopper_compact.FORWARD_ROWS and len(some.offsets) == 14
    assert some.offsets[-1] % hopper.WINDOW == 0 and whole.nbytes > 1.9 * some.nbytes
    assert len(hopper_compact.forward_layout(hopper_compact.FORWARD_ROWS, D_FF).offsets) == 13


def test_a_capacity_of_the_worst_cases_workspace_is_not_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_compact, "ENABLED", False)
    assert training.capacity_for(0, 5632) == 176


def test_calls_whose_arena_is_too_large_are_not_taken() -> None:
    assert hopper_compact.takes(ROWS, D_FF)
    assert not hopper_compact.takes(2**17, 2**14)
