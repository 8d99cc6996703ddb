// The gate product's epilogue: relu(z) of a tile in shared memory, and from there TwELL.
//
// Consumers round relu(z) into the staging tile and continue; packing warps turn it into words during the next main
// loop. After a CTA's last tile all warps pack. If the tile's 128 rows together fire nearly all of its neurons, and the
// block will run dense, they are written dense instead; where that hangs on other tiles, both dense and as words.
#pragma once

#include "hopper/gemm.cuh"
#include "hopper/many_rows/dense_tiles.cuh"

namespace twell::hopper {

constexpr int kPackWarps = kProducerWarps - 1, kPackers = kPackWarps * 32;
// Warps that pack a CTA's last tile, when consumers have nothing else to do.
constexpr int kLastPackWarps = kPackWarps + kConsumerWarps;
constexpr int kPackBarrier = 3;  // its number; the consumer warpgroups have two of their own
// Rows that a warp packs at a time, two lanes for each: three warps then divide 128 rows nearly equally.
constexpr int kPackRows = 16;

// What the packing warps share. For each row: its words, or before them the bits of what it fires, in words 8 to 15;
// and last how many are in use, which puts rows into different banks.
struct PackShared {
  uint32_t lines[kTileM][kWords + 1];
  // For the rows of each warp, a bit a neuron of the tile, and how many values: kFiredWords words. For a cut tile, of
  // both CTAs' warps.
  static constexpr int kFiredWords = kMaskWords + 1;
  uint32_t fired[kLastPackWarps][kFiredWords];
  // Completes when those of the other CTA have arrived; it is used once, as a cluster has one cut tile at most.
  uint64_t joined;
  uint64_t fired_ready;  // all of a CTA's last tile, where all warps pack
};

struct GateTasks {
  // This cluster takes one task in `clusters`, from `first` to `last`; none if last < first.
  int clusters, first, last, dense, total;
  PairTiles order;
  __device__ __forceinline__ explicit GateTasks(const Ffn& f)
      : clusters(gridDim.x / 2), first(blockIdx.x / 2), order(f, f.tiles) {
    const int planned = order.count(), left = planned % clusters;
    dense = 2 * left <= clusters ? planned - left : planned;
    total = dense + 2 * (planned - dense);
    last = first + (total - 1 - first + clusters) / clusters * clusters - clusters;
  }
};

// The rows of a CTA: 128, or 64 of a cut tile, from m0 on.
struct GateTask {
  int tile, m0, height;
  bool cut;
  __device__ __forceinline__ GateTask(const Ffn& f, const GateTasks& tasks, int t, int rank) {
    cut = t >= tasks.dense;
    const int late = cut ? t - tasks.dense : 0;
    const PairTiles::Place place = tasks.order[t - late + late / 2];
    tile = place.tile;
    m0 = (place.pair * 2 + (cut ? late % 2 : rank)) * kTileM + (cut ? rank * (kTileM / 2) : 0);
    height = cut ? kTileM / 2 : kTileM;
  }
  // Rows that exist; zero or less past the last.
  __device__ __forceinline__ int rows(const Ffn& f) const { return min(height, f.rows - m0); }
};

// The staging tile here: [128 rows][32 chunks of 16 bytes], with chunk c of row r at c ^ (r % 8), so that neither side
// has bank conflicts. Chunk c + 8 is 128 bytes further.
__device__ __forceinline__ unsigned char* staged_chunk(unsigned char* staging, int row, int chunk) {
  return staging + row * (kTileN * 2) + ((chunk ^ (row & 7)) << 4);
}

// Rounds the sums of kN columns into the staging tile, and marks rows that are not finite.
template <typename T, int kN>
__device__ __forceinline__ void stage_gate(float (&d)[128], Shared& s, const Ffn& f, const GateTask& task,
                                           const Consumer& c) {
  if (const T* bias = static_cast<const T*>(f.b_gate)) {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const int column = task.tile * kTileN + c.column0 + 8 * j + 2 * (c.lane & 3);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = column + e < f.d_ff ? static_cast<float>(bias[column + e]) : 0.f;
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
  }
  // The thread's two rows. Inf or NaN times 0 is NaN, and NaN persists.
  float broken[2] = {0.f, 0.f}, peak[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < kN / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) broken[h] = fmaf(d[4 * j + 2 * h + e], 0.f, broken[h]);
  // In a gated FFN of bfloat16, `up` checks the largest values before inf, which the type rounds to it.
  if (!kRelu2 && (std::is_same_v<T, __half> || f.w_up == nullptr)) {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) peak[h] = fmaxf(peak[h], fmaxf(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]));
  }
  const Corner corner(c.lane);
  const int row = c.row0 + c.warp * 16 + corner.row;
  uint32_t broken_squares[2] = {};  // likewise, of values that are rounded
#pragma unroll
  for (int j = 0; j < kN / 8; j += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = round_activated<T>(d[4 * j + 2 * i], d[4 * j + 2 * i + 1]);
      if constexpr (kRelu2) broken_squares[i % 2] = break_pair<T>(broken_squares[i % 2], pairs[i]);
    }
    store_matrices(staged_chunk(s.staging, row, c.column0 / 8 + j % 8 + corner.chunk) + j / 8 * 128, pairs[0], pairs[1],
                   pairs[2], pairs[3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (broken[h] != 0.f || !stays_finite<T>(peak[h]) || broken_squares[h] != 0) {
      const int at = task.m0 + c.row() + 8 * h;
      if (at < f.rows) atomicOr(f.row_sums + at, kNonfiniteGate);
    }
}

// A bit for each of 32 values that is not zero.
template <typename T>
__device__ __forceinline__ uint32_t fired_of_32(const uint4 (&chunks)[4]) {
  uint32_t of_16[2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pairs[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
    for (int p = 0; p < 4; ++p) of_16[i / 2] |= nonzero_halves<T>(pairs[p]) & 0x10001u << (8 * (i % 2) + 2 * p);
  }
#pragma unroll
  for (uint32_t& bits : of_16) bits |= bits >> 15;  // the odd columns' bits were 16 further
  return __byte_perm(of_16[0], of_16[1], 0x5410);
}

// A tile of a block: whether its rows are written dense; if not, whether they are both as words and dense; and how many
// values they fire.
struct TileFirings {
  bool dense, both;
  int values;
};

// Writes what each of the warp's rows of the tile fires, a bit a neuron, to its line and to f.masks. A lane takes half
// of a row's columns, without a branch. any: joins what the lane's rows fire, 32 neurons in a word. many: adds how many
// values they fire.
template <typename T, int kWarps>
__device__ __forceinline__ void find_row_firings(unsigned char* staging, PackShared& s, const Ffn& f,
                                                 const GateTask& task, int warp, int lane, int rows, uint32_t (&any)[4],
                                                 uint32_t& many) {
  const int half = lane / kPackRows, m0 = task.m0, tile = task.tile;
  uint32_t* masks = f.masks + (static_cast<int64_t>(m0) * f.tiles + tile) * kMaskWords + 4 * half;
#pragma unroll 1
  for (int row0 = kPackRows * warp; row0 < rows; row0 += kPackRows * kWarps) {
    const int row = row0 + lane % kPackRows;
    uint32_t mask[4] = {};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint4 chunks[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        chunks[i] =
            *reinterpret_cast<const uint4*>(staged_chunk(staging, row, 16 * half + 4 * (w % 2) + i) + w / 2 * 128);
      mask[w] = fired_of_32<T>(chunks);
      s.lines[row][kHead + 4 * half + w] = mask[w];
      if (row < rows) any[w] |= mask[w], many += __popc(mask[w]);
    }
    if (row < rows)
      *reinterpret_cast<uint4*>(masks + static_cast<int64_t>(row) * f.tiles * kMaskWords) =
          make_uint4(mask[0], mask[1], mask[2], mask[3]);
  }
}

// Writes what each row of the tile fires, a bit a neuron, to its line and to f.masks, and what all rows fire together
// to f.fired. By all packing warps.
template <typename T, int kWarps>
__device__ __forceinline__ TileFirings find_tile_firings(unsigned char* staging, PackShared& s, const Ffn& f,
                                                         const GateTask& task, int warp, int lane) {
  const int half = lane / kPackRows, m0 = task.m0, tile = task.tile, rows = task.rows(f);
  uint32_t any[4] = {}, many = 0;
  find_row_firings<T, kWarps>(staging, s, f, task, warp, lane, rows, any, many);
  uint32_t mine = __reduce_add_sync(~0u, many);  // stays so in lane kMaskWords
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const uint32_t together = __reduce_or_sync(~0u, half == w / 4 ? any[w % 4] : 0);
    if (lane == w) mine = together;
  }
  constexpr int kCutWarps = std::min(kWarps, kTileM / 2 / kPackRows);  // warps that have rows of a cut tile
  if (lane < PackShared::kFiredWords && (!task.cut || warp < kCutWarps)) s.fired[warp][lane] = mine;
  if (task.cut) {  // the two CTAs' rows are joined
    if (warp == 0 && lane == 0) barrier_expect(&s.joined, kCutWarps * sizeof(s.fired[0]));
    if (lane < PackShared::kFiredWords && warp < kCutWarps)
      send_remote(reinterpret_cast<int*>(s.fired[kCutWarps + warp] + lane), &s.joined, mine, cluster_rank() ^ 1);
    barrier_wait(&s.joined, 0);
  }
  if constexpr (kWarps == kPackWarps) {
    named_sync<kPackers>(kPackBarrier);
  } else {
    // No named barrier: racecheck loses track of warps that meet at one while other warps, here the producer's, wait
    // for the cluster.
    if (lane < PackShared::kFiredWords) barrier_arrive(&s.fired_ready);
    barrier_wait(&s.fired_ready, 0);
  }
  uint32_t all = 0;  // of what lies there until the next tile is staged
  if (lane < PackShared::kFiredWords)
    for (int other = 0; other < (task.cut ? 2 * kCutWarps : kWarps); ++other)
      all = lane < kMaskWords ? all | s.fired[other][lane] : all + s.fired[other][lane];
  if (warp == 0 && lane < kMaskWords && rows > 0)
    f.fired[(static_cast<int64_t>(m0 / kBlockRows) * f.tiles + tile) * kMaskWords + lane] = all;
  const int columns = min(kTile, f.d_ff - tile * kTile),
            united = __reduce_add_sync(~0u, lane < kMaskWords ? __popc(all) : 0);
  const int values = __shfl_sync(~0u, all, kMaskWords), tall = min(kBlockRows, f.rows - m0 / kBlockRows * kBlockRows);
  if (f.dense_tiles == nullptr) return {f.w_up != nullptr && nearly_all(united, columns), false, values};
  const bool nearly = nearly_all(united, columns), both = leaves_both(united, values, tall, columns);
  if (warp == 0 && lane == 0 && rows > 0 && (!task.cut || cluster_rank() == 0))
    DensePairs(f).fire(m0, nearly || both ? max(values, counted_as(united, tall, columns)) : values);
  const bool dense = nearly || (is_high_nnz(kHighNnzTile, values, tall, columns) && 5 * united >= 3 * columns);
  return {dense, both, values};
}

// Writes the words of half a row, ascending, from `to` on. mask: a bit for each of its 128 columns from column0 on,
// consumed; fires: how many are set.
__device__ __forceinline__ void pack_half_row(unsigned char* staging, uint32_t* to, int row, uint32_t column0,
                                              uint32_t (&mask)[4], uint32_t fires) {
  uint32_t left = mask[0], column = 0, value = 0;
  for (uint32_t base = column0, done = 0; done < fires;) {
    if (left == 0) {
      left = mask[1], mask[1] = mask[2], mask[2] = mask[3], base += 32;
      continue;
    }
    const uint32_t next = base + __ffs(left) - 1;
    left &= left - 1;
    const uint32_t loaded = *reinterpret_cast<const uint16_t*>(staged_chunk(staging, row, next / 8) + 2 * (next % 8));
    if (done++) *to++ = column | value << 16;  // one step late, so that the load does not delay it
    column = next, value = loaded;
  }
  if (fires) *to = column | value << 16;
}

// Writes the used words of 16 rows from row0 on, eight words of four rows at a time. at: the first row's tile among all
// rows' tiles. last: the last used word of the lane's row.
__device__ __forceinline__ void write_words(const PackShared& s, const Ffn& f, int row0, int rows, int64_t at,
                                            uint32_t last, int lane) {
  for (uint32_t first = 0; __any_sync(~0u, last >= first); first += kHead) {
#pragma unroll
    for (int i = 0; i < kPackRows / 4; ++i) {
      const int r = 4 * i + lane / 8, word = first + lane % 8;
      const int64_t tile_of_row = at + static_cast<int64_t>(r) * f.tiles;
      uint32_t* out = first == 0 ? f.heads + tile_of_row * kHead + word : f.tails + tile_of_row * kTail + word - kHead;
      if (row0 + r < rows && s.lines[row0 + r][kWords] >= first) *out = s.lines[row0 + r][word];
    }
  }
}

// Turns the warp's rows of the staging tile into words. One step for each slot, ascending, writes to the row's line;
// then the warp writes the used words, eight at a time. A row past its slots, or of a dense tile, is copied from the
// staging tile. Other words are undefined. Rows of a dense tile are counted after they are written.
template <typename T, int kWarps>
__device__ __forceinline__ void pack_tile(unsigned char* staging, PackShared& s, const Ffn& f, const GateTask& task,
                                          int warp, int lane) {
  const int half = lane / kPackRows, m0 = task.m0, tile = task.tile, rows = task.rows(f);
  const auto [dense, both, values] = find_tile_firings<T, kWarps>(staging, s, f, task, warp, lane);
  const int tall = min(kBlockRows, f.rows - m0 / kBlockRows * kBlockRows);
  // rows of the warp; those that fire less than a quarter of the block's mean, or nothing, where few would be one of
  // a handful
  int counted = 0, low_nnz = 0;
  const bool several = values >= 8 * tall;
#pragma unroll 1
  for (int row0 = kPackRows * warp; row0 < rows; row0 += kPackRows * kWarps) {
    const int row = row0 + lane % kPackRows;
    // The first row's tile among all rows' tiles; the next row's is `tiles` on.
    const int64_t at = static_cast<int64_t>(m0 + row0) * f.tiles + tile;
    uint32_t* line = s.lines[row];
    uint32_t mask[4], mine = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) mask[w] = line[kHead + 4 * half + w], mine += __popc(mask[w]);
    const uint32_t other = __shfl_xor_sync(~0u, mine, kPackRows), count = mine + other;
    const bool leaves = dense || count > kSlots;
    const bool counts = f.dense_tiles != nullptr && (dense || both) && half == 0 && row < rows;
    counted += __popc(__ballot_sync(~0u, counts));
    low_nnz +=
        __popc(__ballot_sync(~0u, counts && (several ? 4 * static_cast<int>(count) * tall < values : count == 0)));
    if (half == 0 && row < rows && count > 0) atomicAdd(f.row_sums + m0 + row, count);
    __syncwarp();  // slots are written where the bits are
    if (!leaves) pack_half_row(staging, line + 1 + (half ? other : 0), row, 128 * half, mask, mine);
    if ((leaves || both) && half == 0 && row < rows) {
      bulk_store(static_cast<T*>(f.spill) + (at + static_cast<int64_t>(row - row0) * f.tiles) * kTile,
                 staging + row * (kTile * 2), kTile * 2);
    }
    const uint32_t last = leaves ? 0 : count;  // the last used word
    if (half == 0) line[0] = dense ? count | kDenseTile : count, line[kWords] = last;
    __syncwarp();
    write_words(s, f, row0, rows, at, last, lane);
  }
  bulk_commit();
  if (counted > 0) {
    bulk_wait<0>();
    __syncwarp();
    if (lane == 0) DensePairs(f).add(f, m0 / kPairRows * f.tiles + tile, counted, low_nnz);
  } else {
    bulk_wait_read<0>();
  }
  __syncwarp();
}

}  // namespace twell::hopper
