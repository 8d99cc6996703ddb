// What a consumer warpgroup of `tiled_gate_up` does before and after its products: it begins the sums, writes the
// gate's values, marks what fired, and writes the hidden state.
#pragma once

#include "common/bits.cuh"
#include "hopper/mid_rows/load.cuh"

namespace twell::hopper {

// Address in a panel of the 16 x 16 sums from column 8 * j on that a warp moves by load_matrices or store_matrices,
// transposed.
struct PanelCorner {
  int neuron, chunk;
  __device__ __forceinline__ explicit PanelCorner(const Consumer& c)
      : neuron((c.lane >> 4) * 8 + (c.lane & 7)), chunk(2 * c.warp + (c.lane >> 3 & 1)) {}
  __device__ __forceinline__ unsigned char* operator()(unsigned char* panel, int j) const {
    return panel_chunk(panel, neuron, chunk) + j * 1024;
  }
};

// Begins the sums of a warpgroup's rows with the bias of the neuron column(place), and with zeros without a bias and
// past the last row. By the consumers, through `biases`: reading them where they are needed would be a quarter of the
// kernel's code.
template <typename T, int kUse, int kN, int kPieces, int kSize, typename Column>
__device__ __forceinline__ void begin_sums(float (&d)[kPieces][kSize], float (&biases)[kN], const void* bias, int d_ff,
                                           int rows_left, Column column) {
  if (threadIdx.x < kUse) {
    const int neuron = column(threadIdx.x);
    biases[threadIdx.x] =
        bias != nullptr && neuron < d_ff ? static_cast<float>(static_cast<const T*>(bias)[neuron]) : 0.f;
  }
  named_sync<kConsumers>(3);
#pragma unroll
  for (int j = 0; j < kUse / 8; ++j) {
    const float2 b = *reinterpret_cast<const float2*>(&biases[8 * j + 2 * (threadIdx.x & 3)]);
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool there = 64 * p + 8 * h < rows_left;
        d[p][4 * j + 2 * h] = there ? b.x : 0.f, d[p][4 * j + 2 * h + 1] = there ? b.y : 0.f;
      }
  }
}

// The top bit of each half that is not zero; none is negative.
__device__ __forceinline__ uint32_t not_zero(uint32_t pair) { return (pair + 0x7fff7fffu) & 0x80008000u; }

// All bits of each half whose top bit is set.
__device__ __forceinline__ uint32_t whole_halves(uint32_t tops) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(out) : "r"(tops));
  return out;
}

// For each half, the greater magnitude; NaN if either is NaN, of any sign.
template <typename T>
__device__ __forceinline__ uint32_t greatest(uint32_t a, uint32_t b) {
  uint32_t out;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

template <typename T>
__device__ __forceinline__ bool finite_half(uint32_t pair, int which) {
  return fabsf(half_of<T>(pair, which)) < INFINITY;
}

// What a thread knows of the gate's values of its two rows.
template <int kN>
struct GateMarks {
  // what fires: bit i of the low half is neuron 8 i + 2 * quad of 128, of the high half the next one
  uint32_t fires[2][(kN + 127) / 128];
  bool broken[2];  // not all are finite
};

// Writes the gate's values of 64 rows to a panel. plain: no up product follows; else a value that becomes infinite only
// by rounding is left to it. Code that is not in the instruction cache takes longer to load than to run, so it is
// short.
template <typename T, int kN>
__device__ __forceinline__ GateMarks<kN> stage_tiled_gate(float (&d)[kN / 2], bool plain, const Consumer& c,
                                                          unsigned char* panel) {
  GateMarks<kN> marks{};
  float broken[2] = {0.f, 0.f};  // inf or NaN times 0 is NaN, and NaN persists
  uint32_t rounded[2] = {0, 0};  // likewise, of values that are rounded
  const PanelCorner corner(c);
#pragma unroll
  for (int j = 0; j < kN / 8; j += 2) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i & 1, at = j + i / 2;
      const float low = d[4 * at + 2 * h], high = d[4 * at + 2 * h + 1];
      broken[h] = fmaf(low, 0.f, fmaf(high, 0.f, broken[h]));
      pair[i] = round_activated<T>(low, high);
      marks.fires[h][at / 16] |= not_zero(pair[i]) >> (15 - at % 16) & 0x10001u << at % 16;
      if (plain) rounded[h] = break_pair<T>(rounded[h], pair[i]);
    }
    store_matrices<true>(corner(panel, j), pair[0], pair[1], pair[2], pair[3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) marks.broken[h] = broken[h] != 0.f || rounded[h] != 0;
  return marks;
}

// Marks in `s`, which has `broken` and mark(), what fires and which rows are not finite; counts what each row fires.
template <int kN, typename Marked>
__device__ __forceinline__ void mark_tiled_gate(const GateMarks<kN>& marks, Marked& s, const Ffn& f, const Consumer& c,
                                                int first, int rows, uint16_t* counts) {
  const int quad = c.lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.row() + 8 * h;
    int count = 0;  // past the last neuron, NaN fires too, but the count of such a row is not used
#pragma unroll
    for (const uint32_t word : marks.fires[h]) count += __popc(word);
    if (row < rows && marks.broken[h]) atomicOr(&s.broken[row / 32], 1u << (row & 31));
    count += __shfl_xor_sync(~0u, count, 1), count += __shfl_xor_sync(~0u, count, 2);
    if (quad == 0 && row < rows) counts[row % kBlockRows] = count;
  }
  uint32_t fires = 0;  // of these rows, in the w-th lane of the w-th 32 neurons
#pragma unroll
  for (int w = 0; w < (kN + 31) / 32; ++w) {
    const uint32_t both = marks.fires[0][w / 4] | marks.fires[1][w / 4], low = both >> 4 * (w % 4) & 15,
                   high = both >> (16 + 4 * (w % 4)) & 15;
    // a neuron's bit to its place of 32
    const uint32_t spread = (low * 0x204081u & 0x1010101u) | (high * 0x408102u & 0x2020202u);
    const uint32_t any = __reduce_or_sync(~0u, spread << 2 * quad);
    fires = c.lane == w ? any : fires;
  }
  const int left = f.d_ff - first - 32 * c.lane;
  s.mark(c, left >= 32 ? fires : left <= 0 ? 0u : fires & ((1u << left) - 1));
}

// Writes the values of 64 rows, dense, to `spill`; each warp writes its own, through rows of kN + 8 at `rows`. m0,
// left: of the tile.
template <typename T, int kN>
__device__ __forceinline__ void spill_tiled_gate(unsigned char* panel, uint16_t* rows, const Ffn& f, const Consumer& c,
                                                 int first, int m0, int left) {
  const PanelCorner from(c);
  const Corner to(c.lane);
  const int top = c.group * 64 + c.warp * 16;
  rows += top * (kN + 8), m0 += top, left -= top;
  __syncwarp();
#pragma unroll 1
  for (int j = 0; j < kN / 8; j += 2) {
    uint32_t pair[4];
    sm80::load_matrices<true>(pair, smem_address(from(panel, j)));
    store_matrices(rows + to.row * (kN + 8) + 8 * (j + to.chunk), pair[0], pair[1], pair[2], pair[3]);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = c.lane; i < 16 * (kN / 8); i += 32) {
    const int row = i / (kN / 8), chunk = i % (kN / 8), neuron = first + 8 * chunk, at = neuron % kTile / 8;
    if (row >= left || neuron >= f.d_ff) continue;
    uint4* tile =
        static_cast<uint4*>(f.spill) + (static_cast<int64_t>(m0 + row) * f.tiles + neuron / kTile) * (kTile / 8);
    tile[at ^ ((m0 + row) & 7)] = *reinterpret_cast<const uint4*>(rows + row * (kN + 8) + 8 * chunk);
  }
}

// Whether `down` is to take all neurons of a tile of which the product is made whole and a block fires `fired`: an
// eighth that does not fire, whose hidden state is 0, costs no more than copying the others one by one.
__device__ __forceinline__ bool takes_all(int fired, int real) { return 8 * fired >= 7 * real; }

// Lists what fired, marks it for `down` and for the other CTA of the pair, and moves the values of few neurons to
// panels of their own; by the consumers. first: of the tile.
template <int kN, int kRows>
__device__ __forceinline__ void list_fired(TiledShared<kN, kRows>& s, const Ffn& f, int first, unsigned char* base) {
  using Space = TiledShared<kN, kRows>;
  using Where = TiledRing<kN, kRows>;
  const int thread = threadIdx.x, real = min(kN, f.d_ff - first), block0 = blockIdx.y * Space::kBlocks;
  int count = 0, before = 0;  // neurons that fire; those of them below this thread's
  bool mine = false;
#pragma unroll
  for (int w = 0; w < Space::kWords; ++w) {
    uint32_t fires = 0;
#pragma unroll
    for (int b = 0; b < Space::kBlocks; ++b) fires |= s.fires[b][w];
    count += __popc(fires);
    before += w < thread / 32 ? __popc(fires) : w == thread / 32 ? __popc(fires & ((1u << (thread & 31)) - 1)) : 0;
    mine = mine || (w == thread / 32 && fires >> (thread & 31) & 1);
  }
  if (mine) s.list[before] = thread;
  const int own = count == 0 ? 0 : count > Space::kMost || count == real ? kN : Space::width_of(count);
  const bool meet = f.w_up != nullptr;
  if (thread == 0 && meet) send_remote(&s.other, &s.decided, own, cluster_rank() ^ 1);
  const int b = thread / 32, group = thread % 32;  // of 16 neurons
  if (b < Space::kBlocks && block0 + b < f.blocks && group < kN / 16 &&
      first / 16 + group < f.panels * (kPanelColumns / 16)) {
    int fired = 0;  // of this block
#pragma unroll
    for (int w = 0; w < Space::kWords; ++w) fired += __popc(s.fires[b][w]);
    const uint32_t word =
        own == kN && takes_all(fired, real) ? first_bits(real - 32 * (group / 2)) : s.fires[b][group / 2];
    TiledMarks(f, block0 + b, tile_columns()).fired[first / 16 + group] = word >> 16 * (group % 2) & 0xffff;
  }
  if (meet) barrier_wait(&s.decided, 0);
  const int width = meet ? max(own, s.other) : own;  // both rings of a pair have the same width
  if (thread == 0) s.count = count, s.width = width;
  if (width == kN) return;
  __syncwarp();  // racecheck does not see that threads of a diverged warp wait for each other
  named_sync<kConsumers>(3);
  constexpr int kChunks = kRows / 8;
#pragma unroll 1
  for (int i = thread; i < width * kChunks; i += kConsumers) {
    const int place = i / kChunks, chunk = i % kChunks;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (place < count)
      values = *reinterpret_cast<const uint4*>(
          panel_chunk(base + Where::kHeld + chunk / 8 * Where::kPanel, s.list[place], chunk));
    *reinterpret_cast<uint4*>(panel_chunk(base + chunk / 8 * (width * 128), place, chunk)) = values;
  }
}

// Writes the hidden state of 64 rows, in place of the gate's values, for the neurons in the list or all of the tile.
// used: of the tile's first row, as in Ffn.
template <typename T, int kUp, int kN, int kRows>
__device__ __forceinline__ void finish_tiled_up(float (&d)[kN / 2], TiledShared<kN, kRows>& s, const Consumer& c,
                                                int rows, unsigned char* panel, int* used) {
  const PanelCorner corner(c);
  uint32_t peak[2] = {0, 0};  // of the thread's two rows
  int positive[2] = {0, 0};   // likewise: how many have positive gate and up values
  uint32_t next[4];
  sm80::load_matrices<true>(next, smem_address(corner(panel, 0)));
#pragma unroll
  for (int j = 0; j < kUp / 8; j += 2) {
    uint32_t pair[4] = {next[0], next[1], next[2], next[3]};
    if (j + 2 < kUp / 8) sm80::load_matrices<true>(next, smem_address(corner(panel, j + 2)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float up[2] = {up_activated(d[4 * j + 2 * i]), up_activated(d[4 * j + 2 * i + 1])};
      const uint32_t h = round_pair<T>(half_of<T>(pair[i], 0) * up[0], half_of<T>(pair[i], 1) * up[1]),
                     fired = not_zero(pair[i]);
      if constexpr (kUpRelu) positive[i % 2] += ((fired & 0x8000u) && up[0] > 0.f) + (fired >> 31 && up[1] > 0.f);
      pair[i] = h & whole_halves(fired);  // 0 times inf is 0 here: the neuron does not fire
      peak[i % 2] = greatest<T>(peak[i % 2], pair[i]);
    }
    store_matrices<true>(corner(panel, j), pair[0], pair[1], pair[2], pair[3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.row() + 8 * h;
    if (row < rows && !(finite_half<T>(peak[h], 0) && finite_half<T>(peak[h], 1)))
      atomicOr(&s.broken[row / 32], 1u << (row & 31));
    if constexpr (kUpRelu) add_used(positive[h], used != nullptr && row < rows ? used + row : nullptr, c.lane);
  }
}

}  // namespace twell::hopper
