// The gate and up products of up to 16 rows: a group of neurons for a CTA, whose warps divide k.
#pragma once

#include "hopper/few_rows/rows16_pairs.cuh"

namespace twell::hopper {

template <int kTiles, int kNeurons>  // of eight rows
struct Rows16Gate {
  // kPitch: floats of a neuron's sums, so that neurons lie banks apart.
  static constexpr int kRows = 8 * kTiles, kPitch = kRows + (kTiles % 2 ? 0 : 8);
  // The ring of a warp.
  static constexpr int kDepth = 2, kStageBytes = kRows16BoxBytes<kNeurons> + kRows * 128, kRingBytes = kDepth * kStageBytes;
  static_assert(kNeurons * kPitch * 4 <= kRingBytes);
  struct Shared {
    float gates[kNeurons][kRows];
    uint64_t full[kRows16Warps][kDepth], begun;
    uint32_t fires[2], broken;  // a bit a neuron that any row fires; a bit a row that is not finite
    int counts[kRows];
    uint16_t list[kNeurons];  // the neurons that fire, ascending
    Rows16Pairs pairs;
  };
  static constexpr int kBytes = kRows16Warps * kRingBytes + sizeof(Shared) + 1024;  // the start is aligned by hand
};

// One of the warps that multiply, its ring, and its position in it. The ring also stores the warp's sums after a
// product.
template <typename T, int kTiles, int kNeurons>
struct Rows16Warp {
  using Gate = Rows16Gate<kTiles, kNeurons>;
  unsigned char* ring;
  uint64_t* full;
  int warp, lane, at = 0;
  uint32_t phase = 0;  // a bit a stage

  // Fetches 64 of k of all rows, and of a group's neurons from `first` on or of the `count` neurons in `list`.
  __device__ __forceinline__ void fetch(const Ffn& f, const CUtensorMap& x_map, const CUtensorMap& map,
                                        const T* weights, const uint16_t* list, int first, int count, int stage,
                                        int box) const {
    unsigned char* to = ring + stage * Gate::kStageBytes;
    if (lane == 0) {
      barrier_expect(&full[stage], Gate::kRows * 128 + (list == nullptr ? kRows16BoxBytes<kNeurons> : 0));
      if (list == nullptr) tma_load_2d(to, &map, &full[stage], 64 * box, first);
      tma_load_2d(to + kRows16BoxBytes<kNeurons>, &x_map, &full[stage], 64 * box, 0);
    }
    if (list == nullptr) return;
    const int chunk = lane % 8, k = 64 * box + 8 * chunk;
    const bool inside = k < f.d_model;
    for (int r = lane / 8; r < count; r += 4)
      async_copy_16(
          smem_address(to) + r * 128 + ((chunk ^ (r & 7)) << 4),
          weights + static_cast<uint32_t>(first + list[r]) * static_cast<uint32_t>(f.d_model) + (inside ? k : 0),
          inside);
    async_commit();
  }

  // The warp's sums after a product: [neurons][kPitch].
  __device__ __forceinline__ float (*sums() const)[Gate::kPitch] { return reinterpret_cast<float(*)[Gate::kPitch]>(ring); }

  // Writes the sums of 16 kM neurons to the warp's ring.
  template <int kM>
  __device__ __forceinline__ void store(const float (&d)[kM][kTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<float2*>(&sums()[16 * m + 8 * h + lane / 4][8 * n + 2 * (lane % 4)]) =
              make_float2(d[m][n][2 * h], d[m][n][2 * h + 1]);
  }

  // Writes the sums over this warp's share of k of 16 kM neurons and all rows, [neuron][row], to its ring. Values of
  // neurons past the list are undefined, and so are their sums.
  template <int kM>
  __device__ __forceinline__ void product(const Ffn& f, const CUtensorMap& x_map, const CUtensorMap& map,
                                          const void* weights, const uint16_t* list, int first, int count) {
    const int boxes = (f.d_model + 63) / 64, each = (boxes + kRows16Warps - 1) / kRows16Warps, from = warp * each;
    const int to = min(from + each, boxes);
    const auto get = [&](int stage, int box) {
      fetch(f, x_map, map, static_cast<const T*>(weights), list, first, count, stage, box);
    };
    for (int i = 0; i < Gate::kDepth; ++i)
      if (from + i < to) get((at + i) % Gate::kDepth, from + i);
    float d[kM][kTiles][4] = {};
    for (int box = from; box < to; ++box) {
      barrier_wait(&full[at], phase >> at & 1);
      if (list != nullptr) {
        if (box + 1 < to)
          async_wait_but<Gate::kDepth - 1>();
        else
          async_wait();
        __syncwarp();
      }
      const uint32_t a_at = smem_address(ring + at * Gate::kStageBytes), b_at = a_at + kRows16BoxBytes<kNeurons>;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 32 of k
        uint32_t b[kTiles][4];
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          sm80::load_matrices<false>(b[n],
                                     b_at + (8 * n + lane % 8) * 128 + (((4 * half + lane / 8) ^ (lane & 7)) << 4));
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            uint32_t a[4];
            sm80::load_matrices<false>(
                a, a_at + (16 * m + lane % 16) * 128 + (((4 * half + 2 * k + lane / 16) ^ (lane & 7)) << 4));
#pragma unroll
            for (int n = 0; n < kTiles; ++n) sm80::mma_16x8x16<T>(d[m][n], a, b[n][2 * k], b[n][2 * k + 1]);
          }
      }
      __syncwarp();
      phase ^= 1u << at;
      if (box + Gate::kDepth < to) get(at, box + Gate::kDepth);
      at = (at + 1) % Gate::kDepth;
    }
    store<kM>(d);
  }
};

// A neuron's sums over all of k, for as many rows as a Number holds, added in order of the warps.
template <typename Number, int kTiles, int kNeurons>
__device__ __forceinline__ Number rows16_sum(const unsigned char* rings, int neuron, int row) {
  using Gate = Rows16Gate<kTiles, kNeurons>;
  Number sum{};
#pragma unroll
  for (int w = 0; w < kRows16Warps; ++w) {
    const Number part =
        *reinterpret_cast<const Number*>(rings + w * Gate::kRingBytes + (neuron * Gate::kPitch + row) * sizeof(float));
    if constexpr (sizeof(Number) == sizeof(float))
      sum += part;
    else
      sum.x += part.x, sum.y += part.y;
  }
  return sum;
}

// Writes the gate's values to `gates`, and marks which neurons fire, which rows are not finite, and how many neurons
// each row fires.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void finish_rows16_gate(typename Rows16Gate<kTiles, kNeurons>::Shared& s, const unsigned char* rings,
                                                   const Ffn& f, int first, bool dense) {
  constexpr int kPairs = 4 * kTiles;  // pairs of rows; a thread's pair is always the same
  const int row = 2 * (threadIdx.x % kPairs), lane = threadIdx.x % 32;
  const T* bias = static_cast<const T*>(f.b_gate);
  int mine[2] = {0, 0};
  bool broken[2] = {false, false};
  // Whole warps leave this loop together.
  for (int neuron = threadIdx.x / kPairs; neuron < kNeurons; neuron += kRows16Threads / kPairs) {
    const bool real = first + neuron < f.d_ff;
    const float2 z = rows16_sum<float2, kTiles, kNeurons>(rings, neuron, row);
    const float b = bias != nullptr && real ? static_cast<float>(bias[first + neuron]) : 0.f,
                values[2] = {z.x + b, z.y + b};
    const uint32_t pair = round_activated<T>(values[0], values[1]);
    float gates[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float v = values[e];
      const bool counts = real && row + e < f.rows, fires = counts && v > 0.f && (pair >> 16 * e & 0xffffu) != 0;
      gates[e] = fires ? gate_factor<T>(v, pair, e) : 0.f, mine[e] += fires;
      broken[e] = broken[e] || (counts && !(fabsf(v) < INFINITY && stays_finite<T>(activated(v))));
      if (dense && counts) {
        const int at = (first + neuron) % kTile;
        static_cast<uint16_t*>(f.spill)[(static_cast<int64_t>(row + e) * f.tiles + (first + neuron) / kTile) * kTile +
                                        ((at / 8) ^ (row + e & 7)) * 8 + at % 8] = pair >> 16 * e;
      }
    }
    *reinterpret_cast<float2*>(&s.gates[neuron][row]) = make_float2(gates[0], gates[1]);
    const uint32_t any = __ballot_sync(~0u, gates[0] > 0.f || gates[1] > 0.f);
    if (lane % kPairs == 0 && (any >> lane & ((1u << kPairs) - 1))) atomicOr(&s.fires[neuron / 32], 1u << neuron % 32);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (mine[e]) atomicAdd(&s.counts[row + e], mine[e]);
    if (broken[e]) atomicOr(&s.broken, 1u << (row + e));
  }
}

// Writes the hidden state of the list, padded with zeros to 16 neurons; or of the whole group.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void finish_rows16_up(typename Rows16Gate<kTiles, kNeurons>::Shared& s, const unsigned char* rings,
                                                 const Ffn& f, uint16_t* hidden, int first, int count,
                                                 bool all_weights) {
  constexpr int kRows = 8 * kTiles;
  const T* bias = static_cast<const T*>(f.b_up);
  int positive = 0;  // of this thread's row: how many have positive gate and up values
  for (int i = threadIdx.x; i < (all_weights ? kNeurons : (count + 15) / 16 * 16) * kRows; i += kRows16Threads) {
    const int row = i / 4 % kRows, place = i / (4 * kRows) * 4 + i % 4;
    const int column = all_weights ? place : place < count ? s.list[place] : kNeurons;
    const float g = column < kNeurons ? s.gates[column][row] : 0.f;
    float out = g;
    if (g > 0.f && f.w_up != nullptr) {
      const float up = up_activated(rows16_sum<float, kTiles, kNeurons>(rings, place, row) +
                                    (bias != nullptr ? static_cast<float>(bias[first + column]) : 0.f));
      if constexpr (kUpRelu) positive += up > 0.f;
      out = g * up;
    }
    if (!stays_finite<T>(fabsf(out))) atomicOr(&s.broken, 1u << row);
    hidden[i] = f.w_up == nullptr ? round_relu<T>(out, 0.f) : round_pair<T>(out, 0.f);
  }
  if constexpr (kUpRelu) {  // a thread's row stays the same, and four neighbouring lanes share it
    __syncwarp();
    const int row = threadIdx.x / 4 % kRows;
    add_used(positive, f.nnz_used != nullptr && row < f.rows ? f.nnz_used + row : nullptr, threadIdx.x % 32);
  }
}

// A bit a row that fires a neuron.
template <int kTiles, int kNeurons>
__device__ __forceinline__ uint32_t rows_that_fire(const typename Rows16Gate<kTiles, kNeurons>::Shared& s, int neuron) {
  uint32_t rows = 0;
#pragma unroll
  for (int row = 0; row < Rows16Gate<kTiles, kNeurons>::kRows; ++row) rows |= static_cast<uint32_t>(s.gates[neuron][row] > 0.f) << row;
  return rows;
}

// Lists the `count` neurons whose bits are set in `fires`: in shared memory by their number in the CTA, with their pairs if
// they are few, and in `group` by their number in the FFN, with zeros after them. Copies to `group` how many each row fires.
template <int kTiles, int kNeurons>
__device__ __forceinline__ void list_rows16(typename Rows16Gate<kTiles, kNeurons>::Shared& s, Rows16Group<kNeurons>& group, uint64_t fires,
                                            int count, int first) {
  const int thread = threadIdx.x;
  if (thread < kNeurons) {
    const int place = __popcll(fires & ((1ull << thread) - 1));
    if (fires >> thread & 1) {
      s.list[place] = thread, group.list[place] = first + thread;
      if (count <= kRows16Pairs) s.pairs.add(thread, place, rows_that_fire<kTiles, kNeurons>(s, thread));
    }
    if (thread >= count) group.list[thread] = 0;
  }
  if (thread < Rows16Gate<kTiles, kNeurons>::kRows) group.counts[thread] = s.counts[thread];
}

// Computes the up product of the `count` neurons in `list`, or of the whole group; by a warp, for its share of k.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void rows16_up_product(Rows16Warp<T, kTiles, kNeurons>& mine, const Ffn& f, const CUtensorMap& x_map,
                                                  const CUtensorMap& up_map, const uint16_t* list, int first, int count,
                                                  bool all_weights) {
  if (all_weights)
    mine.template product<kNeurons / 16>(f, x_map, up_map, nullptr, nullptr, first, kNeurons);
  else if (count <= 16)
    mine.template product<1>(f, x_map, up_map, f.w_up, list, first, count);
  else
    mine.template product<2>(f, x_map, up_map, f.w_up, list, first, count);
}

// Prefetches into the L2, by a warp, the down weights of the `count` neurons in `list`, and the gate weights of the group
// that its multiprocessor takes next.
template <typename T, int kNeurons>
__device__ __forceinline__ void prefetch_after_rows16_gate(const Ffn& f, const uint16_t* list, int first, int count,
                                                           bool all_weights, int lane) {
  const auto prefetch = [&](const void* weights, int neuron) {
    prefetch_bulk(static_cast<const T*>(weights) + static_cast<int64_t>(neuron) * f.d_model, f.d_model * 2);
  };
  if (!(all_weights && f.leaves_dense))
    for (int i = lane; i < count; i += 32) prefetch(f.w_down, first + list[i]);
  const int next = first + f.next_group * kNeurons;
  if (f.next_group > 0)
    for (int neuron = next + lane; neuron < min(next + kNeurons, f.d_ff); neuron += 32) prefetch(f.w_gate, neuron);
}

template <typename T, int kTiles, int kNeurons>
__global__ void __launch_bounds__(kRows16Threads + 32)
    rows16_gate_up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                   const __grid_constant__ CUtensorMap up_map, const Ffn f, bool dense) {
  using Gate = Rows16Gate<kTiles, kNeurons>;
  extern __shared__ unsigned char raw[];
  unsigned char* rings = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  typename Gate::Shared& s = *reinterpret_cast<typename Gate::Shared*>(rings + kRows16Warps * Gate::kRingBytes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, first = blockIdx.x * kNeurons;
  const bool scout = warp == kRows16Warps;  // a warp that prefetches what comes next into the L2
  if (thread < kRows16Warps * Gate::kDepth) barrier_init(&s.full[0][thread], 1);
  if (thread < Gate::kRows) s.counts[thread] = 0;
  if (thread == 0) barrier_init(&s.begun, 1), s.fires[0] = s.fires[1] = s.broken = 0, s.pairs.count = 0;
  fence_barrier_init();
  __syncthreads();
  let_next_launch();

  const Rows16Space<T, kNeurons> space(f);
  Rows16Group<kNeurons>& group = space.group[blockIdx.x];
  Rows16Warp<T, kTiles, kNeurons> mine{rings + warp * Gate::kRingBytes, s.full[warp], warp, lane};
  if (scout) {  // until the launches before have ended; a hint, whatever they may still write
    for (int row = first; row < min(first + kNeurons, f.d_ff) && !barrier_ready(&s.begun, 0); ++row)
      if (lane == 0)
        prefetch_bulk(static_cast<const T*>(f.w_gate) + static_cast<int64_t>(row) * f.d_model, f.d_model * 2);
  } else {
    wait_for_launches();
    if (thread == 0) barrier_arrive(&s.begun);
    mine.template product<kNeurons / 16>(f, x_map, gate_map, nullptr, nullptr, first, kNeurons);
  }
  __syncthreads();
  if (!scout) finish_rows16_gate<T, kTiles, kNeurons>(s, rings, f, first, dense);
  // threads have written and read the rings through the generic proxy; the copy engine writes there next
  fence_async_proxy();
  __syncthreads();
  const uint64_t fires = s.fires[0] | static_cast<uint64_t>(s.fires[1]) << 32;
  const int count = __popcll(fires);
  const bool all_weights = count > kRows16Gathered;
  list_rows16<kTiles, kNeurons>(s, group, fires, count, first);
  __syncthreads();
  if (scout) {
    prefetch_after_rows16_gate<T, kNeurons>(f, s.list, first, count, all_weights, lane);
  } else if (f.w_up != nullptr && count > 0 && count <= kRows16Pairs && s.pairs.count <= kRows16Pairs) {
    sum_pairs<T>(f, s.pairs, first, mine.sums(), warp, lane);
  } else if (f.w_up != nullptr && count > 0) {
    rows16_up_product(mine, f, x_map, up_map, s.list, first, count, all_weights);
  }
  __syncthreads();
  uint16_t* hidden =
      reinterpret_cast<uint16_t*>(space.hidden) + static_cast<int64_t>(blockIdx.x) * kNeurons * Gate::kRows;
  if (!scout) finish_rows16_up<T, kTiles, kNeurons>(s, rings, f, hidden, first, count, all_weights);
  __syncthreads();
  if (thread == 0) group.broken = s.broken, group.count = all_weights ? kNeurons : count;
}

}  // namespace twell::hopper
