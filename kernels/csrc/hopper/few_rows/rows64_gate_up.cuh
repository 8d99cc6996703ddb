// The gate and up products of 17 to 64 rows: 48 neurons for a CTA, and the rows as the 64 to 256 rows of the products.
#pragma once

#include "hopper/few_rows/rows64_load.cuh"

namespace twell::hopper {

// Adds the warpgroups' sums of D[64 x kN], in order; only the warpgroup of the first tile has the result.
template <int kN, int kTiles>
__device__ __forceinline__ void add_up(float (&d)[kGroupNeurons / 2], Rows64Shared<kTiles>& s, int tile) {
  const int thread = threadIdx.x % 128;
  if (tile > 0)
#pragma unroll
    for (int i = 0; i < kN / 8; ++i)
      s.sums[tile - 1][i][thread] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
  named_sync<rows64_consumers(kTiles)>(1);
  if (tile == 0)
#pragma unroll 1
    for (int t = 0; t < kTiles - 1; ++t)
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        const float4 v = s.sums[t][i][thread];
        d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
      }
}

// A bit for each of a CTA's neurons that exists.
__device__ __forceinline__ uint64_t real_neurons(const Ffn& f, int first) {
  return first + kGroupNeurons <= f.d_ff ? (1ull << kGroupNeurons) - 1 : (1ull << max(f.d_ff - first, 0)) - 1;
}

// Adds the gate's bias to a thread's sums.
template <typename T>
__device__ __forceinline__ void add_gate_bias(float (&d)[kGroupNeurons / 2], const Ffn& f, int first, int quad) {
  if (const T* bias = static_cast<const T*>(f.b_gate)) {
#pragma unroll
    for (int j = 0; j < kGroupNeurons / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int neuron = first + 8 * j + 2 * quad + e;
        const float b = neuron < f.d_ff ? static_cast<float>(bias[neuron]) : 0.f;
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
  }
}

// Writes two neighbouring neurons' values to `spill`, whose 16-byte chunks are swizzled by row.
__device__ __forceinline__ void spill_pair(const Ffn& f, int row, int neuron, uint32_t pair) {
  const int at = neuron % kTile;
  const int64_t tile = static_cast<int64_t>(row) * f.tiles + neuron / kTile;
  reinterpret_cast<uint32_t*>(f.spill)[(tile * kTile + ((at / 8) ^ (row & 7)) * 8 + at % 8) / 2] = pair;
}

// Writes the gate's values to `gates`, and marks which neurons fire, which rows are not finite, and how many neurons
// each row fires.
template <typename T, int kTiles>
__device__ __forceinline__ void finish_rows64_gate(float (&d)[kGroupNeurons / 2], Rows64Shared<kTiles>& s, const Ffn& f,
                                                   const Rows64Marks& marks, const Consumer& c, int first, bool dense) {
  const int quad = c.lane & 3;
  const uint64_t real = real_neurons(f, first);  // past the last neuron, NaN fires too
  add_gate_bias<T>(d, f, first, quad);
  uint32_t mask[2] = {0, 0};  // over both rows
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.row() + 8 * h;
    if (row >= f.rows) {
      if (row < (f.rows + 7) / 8 * 8)
#pragma unroll
        for (int j = 0; j < kGroupNeurons / 8; ++j)
          *reinterpret_cast<uint2*>(&s.gates[row][8 * j + 2 * quad]) = make_uint2(0, 0);
      continue;
    }
    float broken = 0.f, peak = 0.f;  // inf or NaN times 0 is NaN, and NaN persists
    uint32_t mine[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kGroupNeurons / 8; ++j) {
      const float low = d[4 * j + 2 * h], high = d[4 * j + 2 * h + 1];
      broken = fmaf(low, 0.f, fmaf(high, 0.f, broken)), peak = fmaxf(peak, fmaxf(low, high));
      const uint32_t pair = round_activated<T>(low, high), signs = (pair + 0x7fff7fffu) & 0x80008000u;
      mine[j / 4] |= (signs >> 15 | signs >> 30) % 4 << 8 * (j % 4);
      const bool rounds = f.w_up == nullptr;  // the value is the hidden state
      const uint32_t left = rounds ? pair & 0xffff : pair & 0xffff ? __float_as_uint(gate_factor<T>(low, pair, 0)) : 0;
      const uint32_t right = rounds ? pair >> 16 : pair >> 16 ? __float_as_uint(gate_factor<T>(high, pair, 1)) : 0;
      *reinterpret_cast<uint2*>(&s.gates[row][8 * j + 2 * quad]) = make_uint2(left, right);
      const int neuron = first + 8 * j + 2 * quad;
      if (dense && neuron < f.d_ff) spill_pair(f, row, neuron, pair);
    }
#pragma unroll
    for (int w = 0; w < 2; ++w) mine[w] &= static_cast<uint32_t>(real >> 32 * w) >> 2 * quad;
    if (broken != 0.f || !stays_finite<T>(activated(peak))) atomicOr(&s.broken[row / 32], 1u << (row & 31));
    int count = __popc(mine[0]) + __popc(mine[1]);
    count += __shfl_xor_sync(0xfu << (c.lane & 28), count, 1),
        count += __shfl_xor_sync(0xfu << (c.lane & 28), count, 2);
    if (quad == 0 && first < f.d_ff) marks.counts[blockIdx.x * f.rows + row] = count;
    mask[0] |= mine[0], mask[1] |= mine[1];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t any = __reduce_or_sync(~0u, mask[i] << 2 * quad);
    if (c.lane == 0 && any) atomicOr(&s.fires[i], any);
  }
}

// Writes the hidden state in place of the gate's values, and marks rows that are not finite.
template <typename T, int kN, int kTiles>
__device__ __forceinline__ void finish_rows64_up(const float (&d)[kGroupNeurons / 2], Rows64Shared<kTiles>& s,
                                                 const Ffn& f, const Consumer& c, int first, int count) {
  const T* bias = static_cast<const T*>(f.b_up);
  bool fine[2] = {true, true};
  int positive[2] = {0, 0};  // of the thread's two rows: how many have positive gate and up values
#pragma unroll
  for (int j = 0; j < kN / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int place = 8 * j + 2 * (c.lane & 3) + e;
      if (place >= count) continue;
      const int column = s.list[place];
      const float b = bias != nullptr ? static_cast<float>(bias[first + column]) : 0.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (c.row() + 8 * h >= f.rows) continue;
        uint32_t& value = s.gates[c.row() + 8 * h][column];
        const float g = __uint_as_float(value), up = up_activated(d[4 * j + 2 * h + e] + b),
                    out = g > 0.f ? g * up : 0.f;
        if constexpr (kUpRelu) positive[h] += g > 0.f && up > 0.f;
        fine[h] = fine[h] && stays_finite<T>(fabsf(out));
        value = round_pair<T>(out, 0.f);
      }
    }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (!fine[h]) atomicOr(&s.broken[(c.row() + 8 * h) / 32], 1u << ((c.row() + 8 * h) & 31));
  if constexpr (kUpRelu)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = c.row() + 8 * h;
      __syncwarp();
      add_used(positive[h], f.nnz_used != nullptr && row < f.rows ? f.nnz_used + row : nullptr, c.lane);
    }
}

// Sums D[64 x kN] over all of k, into the first tile's warpgroup: each warpgroup takes its tile of every stage.
// gathered(stage, phase) waits for what threads copy.
template <typename T, int kN, int kTiles, typename Gathered>
__device__ __forceinline__ void multiply_rows64(float (&d)[kGroupNeurons / 2], Stages ring, Rows64Shared<kTiles>& s,
                                                const Rows64Shape& shape, int stages, int tile, int lane,
                                                Gathered gathered) {
  const int a_at = kTiles * kRows64WeightBytes + tile * shape.row_bytes(), b_at = tile * kRows64WeightBytes;
  const auto ready = [&](int stage, uint32_t phase) {
    barrier_wait(&ring.full[stage], phase);
    gathered(stage, phase);
  };
  multiply<T, kN, kTileK / 16, 0>(d, ring, stages, a_at, b_at, ready, lane == 0,
                                  [&](int stage) { barrier_arrive(&ring.empty[stage]); });
  add_up<kN, kTiles>(d, s, tile);
}

// Fetches what the up product of the `count` listed neurons needs, once they are listed: the ring's stages and, before
// them, their weights into the L2, with those of `rows64_down`. By the producers.
template <typename T, int kTiles>
__device__ __forceinline__ void produce_rows64_up(unsigned char* base, Rows64Shared<kTiles>& s,
                                                  const CUtensorMap& x_map, const CUtensorMap& up_map, const Ffn& f,
                                                  const Rows64Shape& shape, int first, int count, bool has_up,
                                                  bool all_weights, int producer) {
  const T* down = static_cast<const T*>(f.w_down);
  barrier_wait(&s.listed, 0);
  if (!all_weights && producer < count) {  // into the L2, for the next launch
    const int64_t at = static_cast<int64_t>(first + s.list[producer]) * f.d_model;
    if (has_up) prefetch_bulk(static_cast<const T*>(f.w_up) + at, f.d_model * 2);
    prefetch_bulk(down + at, f.d_model * 2);
  }
  if (!has_up) return;
  Stages ring = rows64_ring(base, s, shape, 1, false, 0);
  if (producer == 0)
    load_rows64<kTiles>(ring, x_map, up_map, all_weights, first, shape, f.d_model, shape.stages);
  else if (producer >= 32 && !all_weights)
    gather_rows64<T, kTiles>(ring, s.gathered, static_cast<const T*>(f.w_up), s.list, count, first, f.d_model,
                             shape.stages);
}

// Computes the up product of the `count` listed neurons, and their hidden state. By the consumers.
template <typename T, int kTiles>
__device__ __forceinline__ void consume_rows64_up(float (&d)[kGroupNeurons / 2], const Stages& ring,
                                                  Rows64Shared<kTiles>& s, const Ffn& f, const Rows64Shape& shape,
                                                  int stages, int tile, const Consumer& c, int first, int count,
                                                  bool all_weights) {
  const auto gathered = [&](int stage, uint32_t phase) {
    if (all_weights) return;
    barrier_wait(&s.gathered[stage], phase);
    fence_async_proxy();  // threads have copied through the generic proxy
  };
#pragma unroll
  for (float& sum : d) sum = 0.f;
  const auto run = [&]<int kN>() {
    multiply_rows64<T, kN, kTiles>(d, ring, s, shape, stages, tile, c.lane, gathered);
    if (tile == 0) finish_rows64_up<T, kN, kTiles>(d, s, f, c, first, count);
  };
  if (count <= 16)
    run.template operator()<16>();
  else if (count <= 32)
    run.template operator()<32>();
  else
    run.template operator()<48>();
}

// Writes the hidden state of the `count` listed neurons, eight rows for a thread, and which rows are not finite. By the
// consumers.
template <int kTiles>
__device__ __forceinline__ void store_rows64_hidden(const Rows64Shared<kTiles>& s, const Ffn& f, int first, int count,
                                                    int thread) {
  const int eights = (f.rows + 7) / 8;
  for (int i = thread; i < count * eights; i += rows64_consumers(kTiles)) {
    const int column = s.list[i / eights], row = i % eights * 8;
    uint32_t h[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = s.gates[row + 2 * e][column] | s.gates[row + 2 * e + 1][column] << 16;
    reinterpret_cast<uint4*>(f.hidden)[(static_cast<int64_t>(first + column) * kRows64Max + row) / 8] =
        make_uint4(h[0], h[1], h[2], h[3]);
  }
  if (thread < kRows64Words && first < f.d_ff)
    Rows64Marks(f).broken[blockIdx.x * kRows64Words + thread] = s.broken[thread];
}

template <typename T, int kTiles>
__global__ void __launch_bounds__(rows64_consumers(kTiles) + kRows64Producers, 1)
    rows64_gate_up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                   const __grid_constant__ CUtensorMap up_map, const Ffn f, const Rows64Shape shape) {
  constexpr int kRows64Consumers = rows64_consumers(kTiles);
  extern __shared__ __align__(1024) unsigned char raw[];
  unsigned char* base = in_register(raw);
  Rows64Shared<kTiles>& s = *reinterpret_cast<Rows64Shared<kTiles>*>(base);
  const int thread = threadIdx.x, group = uniform(thread / 128), first = blockIdx.x * kGroupNeurons;
  const int stages = rows64_stages<kTiles>(f.d_model), begin = rows64_begin(stages, shape.stages);
  const bool consumes = group < kTiles;
  if (thread == 0) begin_rows64(s, shape.stages, begin);
  if (thread == 32) prefetch_map(&x_map), prefetch_map(&gate_map), prefetch_map(&up_map);
  __syncthreads();
  let_next_launch();
  wait_for_launches();

  const int tile = group;  // of a consumer
  const Consumer c{0, thread / 32 % 4, thread % 32};
  float d[kGroupNeurons / 2] = {};
  const auto ring_of = [&](int product) { return rows64_ring(base, s, shape, product, consumes, begin); };
  if (consumes) {
    multiply_rows64<T, kGroupNeurons, kTiles>(d, ring_of(0), s, shape, stages, tile, c.lane, [](int, uint32_t) {});
    if (tile == 0) finish_rows64_gate<T, kTiles>(d, s, f, Rows64Marks(f), c, first, shape.dense);
  } else if (thread == kRows64Consumers) {
    Stages ring = ring_of(0);
    load_rows64<kTiles>(ring, x_map, gate_map, true, first, shape, f.d_model, 0);
  }
  __syncwarp();
  __syncthreads();
  uint64_t fires = s.fires[0] | static_cast<uint64_t>(s.fires[1]) << 32;
  const bool all_weights = __popcll(fires) > kRows64Gathered;
  if (all_weights) fires = real_neurons(f, first);  // neurons that do not fire give zeros
  const int count = __popcll(fires);
  if (thread < kRows64Listers) {
    if (thread < kGroupNeurons && fires >> thread & 1) s.list[__popcll(fires & ((1ull << thread) - 1))] = thread;
    barrier_arrive(&s.listed);  // the consumers meet before they read it
  }
  if (thread == 0 && first < f.d_ff) Rows64Marks(f).fired[blockIdx.x] = fires;

  const bool has_up = f.w_up != nullptr && count > 0;
  if (!consumes) {
    produce_rows64_up<T, kTiles>(base, s, x_map, up_map, f, shape, first, count, has_up, all_weights,
                                 thread - kRows64Consumers);
  } else {
    if (has_up) consume_rows64_up<T, kTiles>(d, ring_of(1), s, f, shape, stages, tile, c, first, count, all_weights);
    named_sync<rows64_consumers(kTiles)>(1);
    store_rows64_hidden(s, f, first, count, thread);
  }
}

}  // namespace twell::hopper
