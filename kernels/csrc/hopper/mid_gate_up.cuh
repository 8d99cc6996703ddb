// The gate and up products of a block of 128 rows and kN neurons to a CTA.
#pragma once

#include "hopper/mid.cuh"

namespace twell::hopper {

template <int kN>
struct __align__(16) MidShared {
  static constexpr int kWords = (kN + 31) / 32;
  uint64_t full[2][kMidStages], empty[2][kMidStages], gathered[kMidStages];  // of the gate's stages, of the up product's
  uint32_t fires[kWords], broken[kBlockRows / 32];   // a bit a neuron that any row fires; a bit a row that is not finite
  __align__(16) uint16_t list[kN];                   // the neurons that fire, ascending; then kN
  __align__(16) uint16_t gates[kBlockRows][kN + 8];  // the gate's values, then a column of zeros; banks apart
};

// Where the stages lie: a tile of the rows, and one of `width` neurons' weights.
template <int kN>
struct MidRing {
  static constexpr int kBegin = (sizeof(MidShared<kN>) + 1023) / 1024 * 1024, kBytes = 226 * 1024 - kBegin;
  static constexpr int stage(int width) { return kABytes + width * kTileK * 2; }
  static constexpr int stages(int width) { return kBytes / stage(width) < kMidStages ? kBytes / stage(width) : kMidStages; }
};

// Fills the stages by the copy engine, with the rows' tile and, if asked, with weights; by one thread. Each tile of neurons begins
// elsewhere in k, so that not all ask for the same at once.
__device__ __forceinline__ void load_mid(Stages& s, const CUtensorMap& x_map, const CUtensorMap& map, bool weights, int m0, int first, int steps) {
  for (int i = 0, step = blockIdx.x % steps; i < steps; ++i, s.next()) {
    uint64_t* full = &s.full[s.at];
    barrier_wait(&s.empty[s.at], s.phase);
    barrier_expect(full, weights ? s.bytes : kABytes);
    tma_load_2d(s.here(), &x_map, full, step * kTileK, m0);
    if (weights) tma_load_2d(s.here() + kABytes, &map, full, step * kTileK, first);
    step = step + 1 < steps ? step + 1 : 0;
  }
}

// Copies the neurons in the list out of `weights` into the stages, by all producers but the first warp, which is busy with the rows. What
// has landed is announced kLate stages later, so that nobody waits for it.
template <typename T, int kN, int kLate>
__device__ __forceinline__ void gather_mid(Stages& s, uint64_t* gathered, const T* weights, const uint16_t* list, int count, int first, int steps,
                                           int d_model) {
  constexpr int kApart = (kProducers - 32) / 8, kRounds = (kN + kApart - 1) / kApart;
  const int thread = threadIdx.x - kConsumers - 32, row = thread / 8, chunk = thread % 8;
  uint32_t offset[kRounds];
#pragma unroll
  for (int j = 0; j < kRounds; ++j)
    offset[j] = row + kApart * j < count ? static_cast<uint32_t>(first + list[row + kApart * j]) * d_model : 0;
  int late = 0;
  const auto announce = [&] {
    fence_async_proxy();  // copied through the generic proxy; the tensor cores read through the other
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(&gathered[late]);
    if (++late == s.count) late = 0;
  };
  for (int i = 0, step = blockIdx.x % steps; i < steps; ++i, s.next()) {
    barrier_wait(&s.empty[s.at], s.phase);
    const uint32_t to = smem_address(s.here()) + kABytes + chunk * 16;
    const int k = step * kTileK + 8 * chunk;
    const bool inside = k < d_model;
    const T* from = weights + (inside ? k : 0);
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      const int r = row + kApart * j;
      if (r >= count) break;
      async_copy_16((to + r * 128) ^ ((r & 7) << 4), from + offset[j], inside);
    }
    async_commit();
    if (i >= kLate) {
      async_wait_but<kLate>();
      announce();
    }
    step = step + 1 < steps ? step + 1 : 0;
  }
  async_wait();
  for (int i = max(steps - kLate, 0); i < steps; ++i) announce();
}

// The gate's epilogue: values into `gates`, what fired, what is not finite, and how many fired in each row.
template <typename T, int kN>
__device__ __forceinline__ void finish_mid_gate(float (&d)[kN / 2], MidShared<kN>& s, const Ffn& f, const Consumer& c, int first, int m0,
                                                uint8_t* counts) {
  constexpr int kWords = MidShared<kN>::kWords;
  const int quad = c.lane & 3;
  if (const T* bias = static_cast<const T*>(f.b_gate)) {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int neuron = first + 8 * j + 2 * quad + e;
        const float b = neuron < f.d_ff ? static_cast<float>(bias[neuron]) : 0.f;
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
  }
  uint32_t mine[2][kWords] = {};
  float broken[2] = {0.f, 0.f}, peak[2] = {0.f, 0.f};  // of the thread's two rows; inf or NaN times 0 is NaN, and stays
  const bool there[2] = {m0 + c.row() < f.rows, m0 + c.row() + 8 < f.rows};
  const int matrix = c.lane >> 3;
  uint16_t* to = &s.gates[c.group * 64 + c.warp * 16 + (matrix & 1) * 8 + (c.lane & 7)][8 * (matrix >> 1)];
#pragma unroll
  for (int j = 0; j < kN / 8; j += 2) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i & 1, at = j + i / 2;
      const float low = d[4 * at + 2 * h], high = d[4 * at + 2 * h + 1];
      broken[h] = fmaf(low, 0.f, fmaf(high, 0.f, broken[h])), peak[h] = fmaxf(peak[h], fmaxf(low, high));
      pair[i] = there[h] ? round_relu<T>(low, high) : 0;
      const uint32_t signs = (pair[i] + 0x7fff7fffu) & 0x80008000u;
      mine[h][at / 4] |= (signs >> 15 | signs >> 30) % 4 << 8 * (at % 4);
    }
    store_fragments<false>(to + 8 * j, pair[0], pair[1], pair[2], pair[3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.row() + 8 * h;
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {  // past the last neuron, NaN fires too
      const int left = f.d_ff - first - 32 * w;
      mine[h][w] &= (left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1) >> 2 * quad;
      count += __popc(mine[h][w]);
    }
    if (there[h] && (broken[h] != 0.f || !stays_finite<T>(peak[h]))) atomicOr(&s.broken[row / 32], 1u << (row & 31));
    count += __shfl_xor_sync(~0u, count, 1), count += __shfl_xor_sync(~0u, count, 2);
    if (quad == 0 && there[h]) counts[row] = count;
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t any = __reduce_or_sync(~0u, (mine[0][w] | mine[1][w]) << 2 * quad);
    if (c.lane == 0 && any) atomicOr(&s.fires[w], any);
  }
}

// The values, dense, to `spill`; by a warp, its own rows.
template <typename T, int kN>
__device__ __forceinline__ void spill_mid_gate(const MidShared<kN>& s, const Ffn& f, const Consumer& c, int first, int m0) {
  for (int i = c.lane; i < 16 * (kN / 8); i += 32) {
    const int row = c.group * 64 + c.warp * 16 + i / (kN / 8), chunk = i % (kN / 8), neuron = first + 8 * chunk, at = neuron % kTile / 8;
    if (m0 + row >= f.rows || neuron >= f.d_ff) continue;
    uint4* tile = static_cast<uint4*>(f.spill) + (static_cast<int64_t>(m0 + row) * f.tiles + neuron / kTile) * (kTile / 8);
    tile[at ^ ((m0 + row) & 7)] = *reinterpret_cast<const uint4*>(&s.gates[row][8 * chunk]);
  }
}

// Where the hidden state of the list's `place`-th neuron and row 8 * chunk begins, on its way out: by neuron, [kN][64 rows] to a warpgroup.
template <int kN>
__device__ __forceinline__ unsigned char* hidden_chunk(unsigned char* base, int place, int chunk) {
  return base + chunk / 8 * (kN * 128) + place * 128 + (((chunk ^ place) & 7) << 4);
}

// The hidden state of the neurons in the list, in a plain FFN the values. kWhole: of every neuron, in its place.
template <typename T, int kUp, bool kWhole, int kN>
__device__ __forceinline__ void finish_mid_up(float (&d)[kN / 2], MidShared<kN>& s, const Ffn& f, const Consumer& c, int first, int m0,
                                              unsigned char* base) {
  const auto columns_at = [&](int j, int (&column)[2]) {
    const int place = 8 * j + 2 * (c.lane & 3);
    const uint32_t pair = kWhole ? place | (place + 1) << 16 : *reinterpret_cast<const uint32_t*>(&s.list[place]);
    column[0] = pair & 0xffff, column[1] = pair >> 16;
  };
  if (const T* bias = static_cast<const T*>(f.b_up)) {
#pragma unroll
    for (int j = 0; j < kUp / 8; ++j) {
      int column[2];
      columns_at(j, column);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = column[e] < kN && first + column[e] < f.d_ff ? static_cast<float>(bias[first + column[e]]) : 0.f;
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
  }
  const bool gated = f.w_up != nullptr;
  const int matrix = c.lane >> 3;
  unsigned char* to = hidden_chunk<kN>(base, 8 * (matrix >> 1) + (c.lane & 7), 8 * c.group + 2 * c.warp + (matrix & 1));
  float peak[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < kUp / 8; j += 2) {
    uint32_t pair[4];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      int column[2];
      columns_at(j + g, column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint16_t* gates = s.gates[c.row() + 8 * h];
        const uint32_t values = kWhole ? *reinterpret_cast<const uint32_t*>(gates + column[0]) : gates[column[0]] | gates[column[1]] << 16;
        float out[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = half_of<T>(values, e);
          out[e] = !gated ? value : value > 0.f ? value * d[4 * (j + g) + 2 * h + e] : 0.f;
          peak[h] = max_nan(peak[h], fabsf(out[e]));
        }
        pair[2 * g + h] = round_pair<T>(out[0], out[1]);
      }
    }
    store_fragments<true>(to + 8 * j * 128, pair[0], pair[1], pair[2], pair[3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.row() + 8 * h;
    if (m0 + row < f.rows && !stays_finite<T>(peak[h])) atomicOr(&s.broken[row / 32], 1u << (row & 31));
  }
}

template <typename T, int kN>
__global__ void __launch_bounds__(kThreads, 1)
    mid_gate_up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                const __grid_constant__ CUtensorMap up_map, const Ffn f, bool dense) {
  using Space = MidShared<kN>;
  using Where = MidRing<kN>;
  extern __shared__ unsigned char raw[];
  unsigned char* base = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  Space& s = *reinterpret_cast<Space*>(base);
  const int thread = threadIdx.x, steps = (f.d_model + kTileK - 1) / kTileK;
  const int tile = blockIdx.x, block = blockIdx.y, first = tile * kN, m0 = block * kBlockRows;
  const bool consumes = thread < kConsumers;
  Stages ring{base + Where::kBegin, s.full[0], s.empty[0], Where::stages(kN), Where::stage(kN), !consumes};
  if (thread == 0) {
    for (int i = 0; i < kMidStages; ++i) {
      for (int j = 0; j < 2; ++j) barrier_init(&s.full[j][i], 1), barrier_init(&s.empty[j][i], kConsumerWarps);
      barrier_init(&s.gathered[i], kProducerWarps - 1);
    }
    fence_barrier_init();
    for (uint32_t& word : s.fires) word = 0;
    for (uint32_t& word : s.broken) word = 0;
  }
  if (thread < kBlockRows) s.gates[thread][kN] = 0;
  __syncthreads();
  let_next_launch();
  wait_for_launches();

  const MidMarks marks(f, block, gridDim.x);
  const Consumer c{thread / 128, thread / 32 % 4, thread % 32};
  const int a_at = c.group * (kABytes / 2);
  float d[kN / 2];
  if (consumes) {
    const auto loaded = [&](int stage, uint32_t phase) { barrier_wait(&s.full[0][stage], phase); };
    const auto release = [&](int stage) {
      if (c.lane == 0) barrier_arrive(&s.empty[0][stage]);
    };
    multiply<T, kN, kTileK / 16, 0>(d, ring, steps, a_at, kABytes, loaded, release);
    finish_mid_gate<T, kN>(d, s, f, c, first, m0, marks.counts + tile * kBlockRows);
    __syncwarp();
    if (dense) spill_mid_gate<T, kN>(s, f, c, first, m0);
  } else if (thread == kConsumers) {
    load_mid(ring, x_map, gate_map, true, m0, first, steps);
  }
  __syncthreads();
  int count = 0, before = 0;  // neurons that fire; of those, below this thread's
  bool mine = false;
#pragma unroll
  for (int w = 0; w < Space::kWords; ++w) {
    const uint32_t fires = s.fires[w];
    count += __popc(fires);
    before += w < thread / 32 ? __popc(fires) : w == thread / 32 ? __popc(fires & ((1u << (thread & 31)) - 1)) : 0;
    mine = mine || (w == thread / 32 && fires >> (thread & 31) & 1);
  }
  const int real = min(kN, f.d_ff - first);
  const bool all = 8 * count >= 5 * real;  // `down` takes neurons that follow each other at twice the rate
  if (all) count = real, before = thread, mine = thread < count;
  if (mine) s.list[before] = thread;
  if (thread >= count && thread < kN) s.list[thread] = kN;
  if (thread < kN / 16 && first / 16 + thread < f.panels * (kPanelColumns / 16)) {
    const int left = count - 16 * thread;
    marks.fired[first / 16 + thread] =
        all ? (left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1) : s.fires[thread / 2] >> 16 * (thread % 2) & 0xffff;
  }
  __syncwarp();  // racecheck does not see that threads of a parted warp wait for each other
  __syncthreads();

  // From a share of the tile on, weights come whole: by the copy engine that is less work than row by row.
  constexpr int kMost = 5 * kN / 16, kWidest = kMost > 32 ? 64 : kMost > 16 ? 32 : 16;
  const bool ups = f.w_up != nullptr && count > 0, whole = count > kMost || all;
  const int width = whole ? kN : count <= 16 ? 16 : count <= 32 ? 32 : 64;
  Stages again{ring.base, s.full[1], s.empty[1], Where::stages(width), Where::stage(width), !consumes};
  if (!consumes) {
    const T* up = static_cast<const T*>(f.w_up);
    if (ups && thread == kConsumers)
      load_mid(again, x_map, up_map, whole, m0, first, steps);
    else if (ups && !whole && thread >= kConsumers + 32)
      again.count > 5 ? gather_mid<T, kN, 4>(again, s.gathered, up, s.list, count, first, steps, f.d_model)
                      : gather_mid<T, kN, 2>(again, s.gathered, up, s.list, count, first, steps, f.d_model);
    return;
  }
  const auto fetch = [&](const void* weights) {  // those of the list, into the L2
    const int lines = (f.d_model * 2 + 127) / 128;
    for (int i = thread; i < count * lines; i += kConsumers)
      prefetch_line(static_cast<const T*>(weights) + static_cast<int64_t>(first + s.list[i / lines]) * f.d_model + i % lines * 64);
  };
  if (ups && !whole) fetch(f.w_up);
  if (!all) fetch(f.w_down);  // all of it at once would hold up what the copy engine reads
  const auto run = [&]<int kUp, bool kWhole>() {
    const auto loaded = [&](int stage, uint32_t phase) {
      barrier_wait(&s.full[1][stage], phase);
      if constexpr (!kWhole) barrier_wait(&s.gathered[stage], phase);
    };
    const auto release = [&](int stage) {
      if (c.lane == 0) barrier_arrive(&s.empty[1][stage]);
    };
    if (ups) multiply<T, kUp, kTileK / 16, 0>(d, again, steps, a_at, kABytes, loaded, release);
    named_sync<kConsumers>(3);  // the ring is read; the hidden state goes there
    finish_mid_up<T, kUp, kWhole, kN>(d, s, f, c, first, m0, ring.base);
  };
  if (whole)
    run.template operator()<kN, true>();
  else if (kWidest == 16 || width == 16)
    run.template operator()<16, false>();
  else if (kWidest == 32 || width == 32)
    run.template operator()<std::min(32, kWidest), false>();
  else
    run.template operator()<kWidest, false>();
  named_sync<kConsumers>(3);
  for (int i = thread; i < count * (kBlockRows / 8); i += kConsumers) {
    const int place = i / (kBlockRows / 8), chunk = i % (kBlockRows / 8), column = s.list[place];
    reinterpret_cast<uint4*>(hidden_of<T>(f, block, first + column))[chunk] =
        *reinterpret_cast<const uint4*>(hidden_chunk<kN>(ring.base, whole ? column : place, chunk));
  }
  if (thread < kBlockRows / 32) marks.broken[tile * (kBlockRows / 32) + thread] = s.broken[thread];
}

}  // namespace twell::hopper
