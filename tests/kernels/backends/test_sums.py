"""Sums a neuron and a tile against plain Python loops, and merging in any order."""

from __future__ import annotations

import random
import re
from dataclasses import fields
from typing import Any

import pytest
import torch

from twell.kernels import build
from twell.kernels.backends.reference import MAX_ROWS, neuron_sums
from twell.kernels.layout import Layout, unpack
from twell.kernels.ops import gated_ffn, plain_ffn
from twell.kernels.stats import NO_TOKEN, VALUE_CAP, NeuronSums, Stats

pytestmark = pytest.mark.usefixtures("kernel")
D_MODEL, D_FF = 40, 136
FIELDS = tuple(item.name for item in fields(NeuronSums))


def loops(fired: Any, value: Any, rows: list[int], tokens: list[int], sequences: list[int]) -> dict[str, list[Any]]:
    """Sums by definition, one neuron and one row at a time."""
    sums: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for neuron in range(fired.shape[1]):
        at = [row for row in range(len(rows)) if rows[row] and fired[row, neuron]]
        sums["fires"].append(len(at))
        sums["value_sum"].append(sum(round(value[row, neuron] * 2**20) for row in at))
        sums["value_max"].append(max((value[row, neuron] for row in at), default=0.0))
        sums["token_min"].append(min((tokens[row] for row in at), default=2**31 - 1))
        sums["token_max"].append(max((tokens[row] for row in at), default=-1))
        sums["first_sequence"].append(min((sequences[row] for row in at), default=-1))
    return sums


def call(tensors: dict[str, Any], info: dict[str, torch.Tensor], dtype: torch.dtype, **options: Any):
    typed = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return gated_ffn(**typed, **info, probes="neurons", **options)[1]


@pytest.fixture
def case(make_ffn) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Ninety rows; the biases reach from neurons that never fire to ones that always do."""
    tensors = make_ffn(90, D_MODEL, D_FF, bias=0)
    tensors["b_gate"] = torch.linspace(-60, 60, D_FF, dtype=torch.float64).round() + 0.5
    rng = random.Random(1)
    info = {
        "rows": torch.tensor([rng.random() < 0.8 for _ in range(90)], dtype=torch.uint8) * 3,
        "tokens": torch.tensor([rng.choice([0, 7, 16_777_217, 16_777_216, NO_TOKEN]) for _ in range(90)]).int(),
        "sequences": torch.tensor([rng.choice([0, 1, 33_554_433, 33_554_432]) for _ in range(90)]).int(),
    }
    return tensors, info


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [None, 3.25])
def test_neuron_sums_match_loops(dtype, threshold, case, oracle) -> None:
    tensors, info = case
    if dtype.itemsize == 2:  # halves are exact up to 128 in bfloat16, so the hidden values must be small too
        tensors["w_up"], tensors["b_up"] = torch.zeros(D_FF, D_MODEL), torch.ones(D_FF)
    expected = oracle(tensors, threshold=threshold)
    stats = call(tensors, info, dtype, threshold=threshold)
    expected_sums = loops(expected.fired, expected.value, *(info[name].tolist() for name in info))
    assert min(expected_sums["fires"]) == 0
    for name in FIELDS:
        assert getattr(stats.neurons, name).tolist() == expected_sums[name], name
    assert stats.nnz.tolist() == expected.nnz.tolist(), "rows leaves a row's own count alone"


def test_all_kernels_declare_the_same_sums() -> None:
    """`NeuronSums` against the list in C++: names in order, types, the sum of no rows, and how two become one."""
    header = (build.CSRC / "common/probes.h").read_text(encoding="utf-8")
    lines = re.findall(r"^  SUM\((\w+), ([\w ]+), (-?\w+), (\w+), \w+\)", header, re.MULTILINE)
    dtypes = {"unsigned long long": "int64", "float": "float32", "int32_t": "int32", "uint32_t": "int32"}
    values = {"INT32_MAX": NO_TOKEN, "UINT32_MAX": -1}
    rules = {torch.add: "add", torch.maximum: "greatest", torch.minimum: "least"}
    assert [
        (name, f"torch.{dtypes[kind]}", int(values.get(empty, empty)), combine) for name, kind, empty, combine in lines
    ] == [
        (item.name, str(item.metadata["dtype"]), item.metadata["empty"], rules.get(item.metadata["add"], "least"))
        for item in fields(NeuronSums)
    ]


def test_parts_merge_to_the_same_bits_in_any_order(case) -> None:
    info = case[1]
    generator = torch.Generator().manual_seed(0)
    fired = (torch.rand(90, D_FF, generator=generator) < torch.linspace(0, 0.2, D_FF)).float()
    value = torch.rand(90, D_FF, generator=generator).exp() * 1e3  # 31 bits of steps: float32 sums would round them
    tokens, sequences = info["tokens"], info["sequences"]
    whole = neuron_sums(fired, value, tokens, sequences)
    expected = loops(fired.numpy(), value.double().numpy(), [1] * 90, tokens.tolist(), sequences.tolist())
    orders = set()
    for seed in range(5):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(91), 6))
        pieces = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, 90], strict=True)]
        rng.shuffle(pieces)
        orders.add(tuple(piece.start for piece in pieces))
        total = NeuronSums.empty(D_FF)
        for at in pieces:
            total.merge(neuron_sums(fired[at], value[at], tokens[at], sequences[at]))
        for name in FIELDS:
            assert torch.equal(getattr(total, name), getattr(whole, name)), name
            assert getattr(total, name).dtype == getattr(NeuronSums.empty(1), name).dtype
            assert getattr(total, name).tolist() == expected[name], name
    assert len(orders) == 5


def test_values_round_to_even_steps_and_are_capped() -> None:
    eye, numbers = torch.eye(8), torch.zeros(8, dtype=torch.int32)
    step = 2.0**-20
    for value, steps in ((0.5 * step, 0), (1.5 * step, 2), (0.7 * step, 1), (2.0**20, 2**40), (3e38, 2**40)):
        x = torch.full((8, 8), -1.0)
        x[:, 0] = value
        stats = plain_ffn(x, eye, eye, probes="neurons", tokens=numbers, sequences=numbers)[1]
        assert stats.neurons.fires.tolist() == [8] + [0] * 7
        assert stats.neurons.value_sum.tolist() == [8 * steps] + [0] * 7
        assert stats.neurons.value_max[0] == torch.tensor(value)


@pytest.mark.parametrize("options", [{}, {"activation": "silu", "threshold": 1.0}])
def test_sixteen_bit_values_are_those_twell_holds(options) -> None:
    numbers = torch.zeros(1, dtype=torch.int32)
    x, weight = torch.ones(1, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    weight[0, :2] = torch.tensor([256.0, 1.0])  # 257 in float32, 256 in bfloat16
    stats = plain_ffn(x, weight, weight, probes="neurons", tokens=numbers, sequences=numbers, **options)[1]
    assert stats.neurons.value_sum[0] == 256 * 2**20
    assert stats.neurons.value_max[0] == 256


def test_up_multiplies_the_value_that_twell_holds() -> None:
    x, gate = torch.ones(1, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    up, down = torch.zeros_like(gate), torch.zeros_like(gate)
    gate[0, :2], up[0, 0], down[0, 0] = torch.tensor([256.0, 1.0]), 3.0, 1.0
    assert gated_ffn(x, gate, up, down)[0][0, 0] == 256 * 3, "257 * 3 would come out as 772"


def test_the_most_rows_at_once_still_sum_exactly() -> None:
    fired = torch.zeros(MAX_ROWS, 3)
    fired[:, 0] = 1.0
    fired[8190, 1] = 1.0
    value = torch.full((MAX_ROWS, 3), VALUE_CAP)
    value[0, 0] = 2.0**-20
    numbers = torch.arange(MAX_ROWS, dtype=torch.int32)
    sums = neuron_sums(fired, value, numbers, numbers)
    assert sums.value_sum.tolist() == [2**40 * (MAX_ROWS - 1) + 1, 2**40, 0]
    assert sums.token_min.tolist() == [0, 8190, NO_TOKEN]
    assert sums.token_max.tolist() == [MAX_ROWS - 1, 8190, -1]
    assert sums.first_sequence.tolist() == [0, 8190, -1]


@pytest.mark.parametrize("layout", [Layout(32, 8), Layout(64, 16), Layout(128, 2), Layout()])
def test_tile_histograms_match_loops(layout, case, oracle) -> None:
    tensors, info = case
    fired, rows = oracle(tensors).fired, info["rows"].tolist()
    pairs, fullest = [0] * (layout.tile + 1), [0] * (layout.tile + 1)
    for row in range(90):
        counts = [int(fired[row, at : at + layout.tile].sum()) for at in range(0, D_FF, layout.tile)]
        if rows[row]:
            fullest[max(counts)] += 1
            for count in counts:
                pairs[count] += 1
    stats = call(tensors, info, torch.float32, layout=layout)
    assert stats.tiles.pairs.tolist() == pairs
    assert stats.tiles.rows.tolist() == fullest
    stats.tiles.merge(call(tensors, info, torch.float32, layout=layout).tiles)
    assert stats.tiles.pairs.tolist() == [2 * count for count in pairs]
    assert stats.tiles.rows.tolist() == [2 * count for count in fullest]


def test_histograms_of_two_layouts_do_not_merge(case) -> None:
    tensors, info = case
    first, second = (call(tensors, info, torch.float32, layout=Layout(64, c)).tiles for c in (4, 8))
    with pytest.raises(ValueError, match=r"layout: expected Layout\(tile=64, compression=4\), got"):
        first.merge(second)


def test_no_rows_count_nothing(case) -> None:
    tensors, info = case
    none = {name: tensor[:0] for name, tensor in info.items()}
    stats = call({**tensors, "x": tensors["x"][:0]}, none, torch.float32, layout=Layout())
    masked = call(tensors, {**info, "rows": torch.zeros_like(info["rows"])}, torch.float32, layout=Layout())
    empty = NeuronSums.empty(D_FF)
    for sums in (stats.neurons, masked.neurons):
        for name in FIELDS:
            assert torch.equal(getattr(sums, name), getattr(empty, name)), name
    assert not stats.tiles.pairs.any()
    assert not masked.tiles.rows.any()


def test_calls_join_to_the_whole_and_rows_are_taken_in_any_order(case) -> None:
    """Generation joins the calls of its passes and puts the rows in the order of the text; sums know no order."""
    tensors, info = case
    options: dict[str, Any] = {"layout": Layout(32, 4), "want_packed": True, "up_relu": True}
    whole = call(tensors, info, torch.float32, **options)
    parts = []
    for rows in (slice(0, 50), slice(50, 90)):
        each = {name: values[rows] for name, values in info.items()}
        parts.append(call({**tensors, "x": tensors["x"][rows]}, each, torch.float32, **options))
    joined = Stats.cat(parts)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:70]
    taken = joined.take_rows(order)
    for name in ("nnz", "finite", "nnz_used"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
        assert torch.equal(getattr(taken, name), getattr(whole, name)[order]), name
    assert torch.equal(unpack(joined.packed), unpack(whole.packed))
    assert torch.equal(unpack(taken.packed), unpack(whole.packed)[order])
    assert all(map(torch.equal, taken.neurons.tensors(), whole.neurons.tensors()))
    assert all(map(torch.equal, (taken.tiles.pairs, taken.tiles.rows), (whole.tiles.pairs, whole.tiles.rows)))
    bare = gated_ffn(**tensors)[1].take_rows(order)
    assert torch.equal(bare.nnz, whole.nnz[order])
    assert (bare.nnz_used, bare.tiles, bare.neurons, bare.packed) == (None, None, None, None)
