"""The faults that `kernel_mutants.py` puts into Hopper kernels: what stands there, and what instead."""

from __future__ import annotations

from typing import NamedTuple

BACKWARD, FEW_ROWS, MID_ROWS, MANY_ROWS = (
    f"hopper/{folder}/" for folder in ("backward", "few_rows", "mid_rows", "many_rows")
)


class Mutant(NamedTuple):
    """A fault. path: under csrc/; line: an expression or statement that stands there once; fault: the expression in its
    place, or None for a statement that is left out"""

    path: str
    line: str
    fault: str | None


def _of(file: str, *faults: tuple[str, str | None], folder: str = BACKWARD) -> list[Mutant]:
    return [Mutant(folder + file, line, fault) for line, fault in faults]


MUTANTS = [
    *_of(
        "keep.cuh",
        ("before[neuron >> 5] + __popc(bits[neuron >> 5] & ((1u << (neuron & 31)) - 1))", "before[neuron >> 5]"),
        ("(((column >> 3) ^ (row & 7)) << 3)", "((column >> 3) << 3)"),
        ("slot + 1", "slot"),
        ("others += cta == rank ? all : 0;", None),
        ("first + sum <= k.capacity", "first + sum < k.capacity"),
        ("fired += f.nnz[row]", "fired += 2 * f.nnz[row]"),
        ("atomicMax(k.used, k.capacity + 1)", "atomicMax(k.used, k.capacity)"),
        ("*listed > kListed", "*listed > 2 * kListed"),
        (
            "counts_here && column < (size + kPanelColumns - 1) / kPanelColumns * kPanelColumns",
            "column < (size + kPanelColumns - 1) / kPanelColumns * kPanelColumns",
        ),
    ),
    *_of("keep.cu", ("(used + 7) / 8", "used / 8")),
    *_of(
        "keep.cuh",
        ("sum + upto - all + others", "sum + upto - all"),
        (
            "(in_union / kPanelColumns % 4) << 13 | in_block << 6 | in_union % kPanelColumns",
            "(in_union / kPanelColumns % 4) << 13 | in_block << 6 | in_union % 32",
        ),
    ),
    *_of(
        "dh.cuh",
        ("position >> 6 & 127", "position >> 6 & 63"),
        ("((position >> 13) - task.panel) & 3", "(position >> 13) & 3"),
        ("b.kept.order[position]", "min(position, b.rows - 1)"),
        ("counts ? l1_scale : 0.f", "l1_scale"),
        ("mine + kHeld * kConsumers", "mine + (kHeld + 1) * kConsumers"),
        ("half * kListNeurons * kChunk", "0"),
        ("values.put(b, s, task, 1);", None),
        ("i < task.panels * (kPanelBytes / 16)", "i < (task.panels - 1) * (kPanelBytes / 16)"),
    ),
    *_of(
        "../activation.cuh",
        ("times_sign(l1, h)", "l1"),
        ("fmaxf(a, 0x1p-126f)", "a"),
        ("slope *= 2.f * root(g);", None),
        ("dh * slope", "dh * h"),
    ),
    *_of(
        "token_lists.cuh",
        ("other < neuron", "other <= neuron"),
        ("ranks[rank] / kListNeurons * 4 + row / 32", "ranks[rank] / kListNeurons * 4 + row / 64"),
        ("total + upto - mine", "upto - mine"),
        ("i < warp ? sums[i] : 0", "i <= warp ? sums[i] : 0"),
        ("(((column >> 3) ^ (neuron & 7)) << 3)", "((column >> 3) << 3)"),
        ("static_cast<int64_t>(chunks) * kUnits", "static_cast<int64_t>(chunks - 1) * kUnits"),
        ("8 * consecutive", "8"),
        ("*b.task_count = 0;", None),
    ),
    *_of(
        "gathered_product.cuh",
        ("piece.final - piece.owner", "max(piece.final - piece.owner - 1, 0)"),
        ("if (memory.last) *arrived = 0;", None),
        ("__ldcg(part + i * kConsumers)", "__ldcg(part)"),
        ("((lane ^ r) & 7)", "(lane & 7)"),
        ("job.row(piece.item, step + 1, place)", "job.row(piece.item, step, place)"),
        ("min(kColumns, left)", "kColumns"),
    ),
    *_of(
        "dx.cuh",
        ("step < half ? step : step - half", "step < half ? step : 0"),
        ("step < steps / 2 ? b.w_up : b.w_gate", "step < steps / 2 ? b.w_gate : b.w_up"),
        ("row >= b.rows || b.finite[row]", "true"),
    ),
    *_of(
        "weights.cuh",
        ("is_light(column) ? 2 * kListNeurons * kChunk : 0", "0"),
        ("is_light(column) ? b.dy : b.x", "b.x"),
        ("b.neuron_at[rank]", "rank"),
        ("c.group == 0 ? b.d_up : b.d_gate", "c.group == 0 ? b.d_gate : b.d_up"),
        ("light ? b.adds_down : b.adds", "b.adds"),
    ),
    *_of(
        "bias_sums.cuh",
        ("which == 0 ? b.d_b_up : b.d_b_gate", "which == 0 ? b.d_b_gate : b.d_b_up"),
        ("steps * rank / kSumCtas", "max(steps * rank / kSumCtas - 1, 0)"),
        ("m.finite != nullptr && !m.finite[row]", "false"),
        ("__shfl_xor_sync(~0u, sum[i], 16)", "0.f"),
    ),
    *_of(
        "compact/lists.cuh",
        ("(starts[group] + token / kChunk) * kChunkValues", "starts[group] * kChunkValues"),
        ("b.panel_starts[block] = sum + upto - mine", "b.panel_starts[block] = upto - mine"),
        ("starts[group] = sum + upto - mine", "starts[group] = upto - mine"),
    ),
    *_of(
        "compact/jobs.cuh",
        ("row < b.rows && b.finite[row] ? row : -1", "row < b.rows ? row : -1"),
        ("which * (b.panel_starts[block + 1] - start)", "which"),
        ("z[4 * j + 3] += high", "z[4 * j + 3] += 0.f"),
    ),
    *_of(
        "compact/dense.cuh",
        ("l1_scale[i % 2]", "l1_scale[0]"),
        ("if (!there[i % 2]) gate[i] = other[i] = hidden[i] = 0;", None),
        ("((chunk ^ (c.lane & 7)) << 4)", "(chunk << 4)"),
        ("half_of<T>(gate[i], 1) * u[2 * i + 1]", "half_of<T>(gate[i], 1)"),
    ),
    *_of(
        "compact/at_once.cuh",
        ("l1_scale[i % 2]", "l1_scale[0]"),
        ("(kPanel + 2) * kBox", "kPanel * kBox"),
        ("n0 + rank * (kTileN / 2)", "n0"),
        ("product == 2 ? b.adds_down : b.adds", "b.adds"),
        ("__syncthreads_and(finite)", "__syncthreads_and(true)"),
        (
            "product == 0 ? b.d_up : product == 1 ? b.d_gate : b.d_down",
            "product == 0 ? b.d_gate : product == 1 ? b.d_up : b.d_down",
        ),
        ("maps.b[product + part]", "maps.b[product]"),
    ),
    *_of(
        "epilogues.cuh",
        ("broken[h] != 0.f || rounded[h] != 0", "broken[h] != 0.f"),
        ("15 - at % 16", "14 - at % 16"),
        ("c.lane == w ? any : fires", "any"),
        ("count += __shfl_xor_sync(~0u, count, 2)", "count += 0"),
        ("own == kN && takes_all(fired, real)", "takes_all(fired, real)"),
        ("first_bits(real - 32 * (group / 2))", "~0u"),
        ("h & whole_halves(fired)", "h"),
        folder=MID_ROWS,
    ),
    *_of(
        "persistent_gate.cuh",
        ("order[task].tile", "order[task].tile / 2 * 2"),
        ("all |= of_warp[word]", "all = of_warp[word]"),
        ("marks.broken[quarter] = 0;", None),
        ("first / 32 + word < words", "true"),
        ("neuron < d_ff ? static_cast<float>(biases[neuron]) : 0.f", "static_cast<float>(biases[0])"),
        ("tma_store_3d(&h_map, panel, 64 * c.group, first, block)", "tma_store_3d(&h_map, panel, 0, first, block)"),
        folder=MID_ROWS,
    ),
    *_of(
        "persistent_down.cuh",
        ("if (thread < kRowWords) block.nonfinite[thread] = 0;", None),
        ("word % kRowWords", "0"),
        ("(low + row) / 32", "row / 32"),
        ("task.out == 0", "task.out == 1"),
        ("first + i % 8 * 8", "first"),
        ("static_cast<float>(bias[out])", "0.f"),
        folder=MID_ROWS,
    ),
    *_of(
        "compact/keep_whole.cuh",
        ("*k.used == kKeptWhole", "false"),
        ("fired += f.nnz[row]", "fired += 2 * f.nnz[row]"),
        (
            "*keeping.fired > static_cast<int64_t>(k.whole_from) * f.rows",
            "*keeping.fired >= static_cast<int64_t>(k.whole_from) * f.rows",
        ),
        ("(((neuron >> 3) ^ in_block) & 7) * 16", "((neuron >> 3) & 7) * 16"),
        ("in_union >> e & 1", "true"),
        ("lane ^ (row & 7)", "lane"),
        ("word > kSlots", "false"),
        (
            "lane < kHead ? f.heads[at * kHead + lane] : f.tails[at * kTail + lane - kHead]",
            "f.heads[at * kHead + lane % 8]",
        ),
        ("lane > 0 && lane <= word", "lane > 0 && lane < word"),
        ("line[lane] = uint4{};", None),
        ("(reinterpret_cast<uintptr_t>(keeping.values) + 15) / 16 * 16", "reinterpret_cast<uintptr_t>(keeping.values)"),
        ("kPlain ? first : first + matrix", "first"),
        ("counts_here ? sum_of_sizes<T>(hidden[i]) : 0.f", "sum_of_sizes<T>(hidden[i])"),
        ("keeping.f.union_sizes[keeping.block] < 0", "all"),
    ),
    *_of(
        "compact/at_once.cuh",
        ("b.plain || c.warp % 2 == 0", "true"),
        ("Tiles::kOfNeurons && kept_hidden && product == 2", "false"),
        ("*b.kept.used == kKeptWhole ? kFromKept : kAtOnce", "kAtOnce"),
    ),
    *_of("compact/lists.cuh", ("max(panels, sums) <= b.panel_bytes", "true")),
    *_of(
        "rows16_pairs.cuh",
        ("rows != 0 && at < kRows16Pairs", "rows != 0 && at < kRows16Pairs - 1"),
        ("there ? at + i : at", "at"),
        ("first + pair.neuron", "pair.neuron"),
        ("min(from + each, f.d_model)", "from + min(each, 256)"),
        ("lane == i ? sum[i] : mine", "lane == 0 ? sum[0] : mine"),
        folder=FEW_ROWS,
    ),
    *_of(
        "rows16_gate_up.cuh",
        ("s.pairs.count <= kRows16Pairs", "s.pairs.count <= kRows16Pairs + 1"),
        ("static_cast<uint32_t>(s.gates[neuron][row] > 0.f)", "static_cast<uint32_t>(s.gates[neuron][row] > 1.f)"),
        ("rehearsal ? 0 : f.rows", "f.rows"),
        ("i % 4 == 0 && !rehearsal", "i % 4 == 0"),
        ("s.broken_gate | s.broken_up", "s.broken_gate"),
        folder=FEW_ROWS,
    ),
    *_of("rows16.cuh", ("unit.y != kUnwritten", "true"), folder=FEW_ROWS),
    *_of(
        "rows16_scout.cuh",
        ("hidden + (i - kUnits)", "reinterpret_cast<uint2*>(&group)"),
        ("place < count && !all_weights", "place < count"),
        ("broken << kBrokenGate", "0u"),
        folder=FEW_ROWS,
    ),
    *_of(
        "rows16_down.cuh",
        ("count[i] != kUnwritten && written", "written"),
        ("read_list(i, step + 1) && written", "read_list(i, step) && written"),
        (
            "hidden(b[i], base + i * kRows16Slots, step, (list[i].x & 0xffffu) > 0) && written",
            "(hidden(b[i], base + i * kRows16Slots, step, (list[i].x & 0xffffu) > 0), written)",
        ),
        ("count[i] >> kBrokenGate", "0u"),
        ("nan[n] != 0", "false"),
        ("s.broken >> row & 1 ? NAN : 0.f", "0.f"),
        ("broken |= marks[j]", "broken |= 0u"),
        folder=FEW_ROWS,
    ),
    *_of(
        "../gemm.cuh",
        ("before + at % group", "before"),
        ("min(together, pairs - before)", "together"),
        ("(f.blocks + 1) / 2", "f.blocks / 2"),
        folder=MANY_ROWS,
    ),
    *_of(
        "down.cuh",
        ("task.is_whole() ? turned : 0", "turned"),
        ("(half + n) * (kTileK * 2)", "n * (kTileK * 2)"),
        ("task.n0 + half + n", "task.n0 + n"),
        folder=MANY_ROWS,
    ),
    *_of(
        "down_schedule.cuh",
        ("share * kDownCluster + blockIdx.x % kDownCluster", "share * kDownCluster"),
        ("block * kDownCluster + static_cast<int>(blockIdx.x % kDownCluster)", "block * kDownCluster"),
        folder=MANY_ROWS,
    ),
    *_of("rows64_load.cuh", ("(blockIdx.x + stages - kept) % stages", "blockIdx.x % stages"), folder=FEW_ROWS),
    *_of("rows64_down.cuh", ("8 * j / kShare", "0"), folder=FEW_ROWS),
    *_of(
        "down_load.cuh",
        ("out0 + line_offset + 64 * i < d_model", "out0 + line_offset + 64 * (i + 1) < d_model"),
        ("output(kOut / 64 * 64) < d_model", "output(kOut / 64 * 64) + 32 < d_model"),
        folder=MID_ROWS,
    ),
    *_of(
        "dense_tiles.cuh",
        ("50 * united >= 33 * neurons", "10 * united >= 9 * neurons"),
        ("!is_high_nnz(kLowNnzTile, fired, rows, neurons)", "true"),
        ("100 * united - 58 * neurons", "kNearlyAll * neurons"),
        ("rows_of(__ldcg(rows_ + tile)) == min(kPairRows, f.rows - tile / f.tiles * kPairRows)", "false"),
        ("word | kTaken | kLeft", "word | kTaken"),
        ("DensePairs(f).mostly_dense(f, window, min(kWindow, f.rows - window * kWindow))", "true"),
        folder=MANY_ROWS,
    ),
    *_of(
        "gate_epilogue.cuh",
        ("(dense || both) && half == 0", "dense && half == 0"),
        ("(leaves || both) && half == 0", "leaves && half == 0"),
        (
            "several ? 4 * static_cast<int>(count) * tall < values : count == 0",
            "4 * static_cast<int>(count) * tall < values",
        ),
        folder=MANY_ROWS,
    ),
    *_of(
        "gate.cuh",
        ("barrier_wait(&s.drained, drained);", None),
        folder=MANY_ROWS,
    ),
    *_of(
        "plan.cuh",
        ("DensePairs(f).leave(work.m0 / kPairRows * f.tiles + thread)", "true"),
        ("sum < kNonfiniteUp", "sum < kNonfiniteGate"),
        folder=MANY_ROWS,
    ),
]
