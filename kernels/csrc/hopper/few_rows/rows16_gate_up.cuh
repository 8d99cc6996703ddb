// The gate and up products of up to 16 rows: a group of neurons for a CTA, whose warps divide k.
#pragma once

#include "hopper/few_rows/rows16_pairs.cuh"
#include "hopper/few_rows/rows16_scout.cuh"

namespace twell::hopper {

constexpr int kRows16Listers = 64;  // threads that list what fires: as many as the widest group has neurons
static_assert(kRows16Listers >= kGroupNeurons && kRows16Listers >= kWideGroup);

template <int kTiles, int kNeurons>  // of eight rows
struct Rows16Gate {
  // kPitch: floats of a neuron's sums, so that neurons lie banks apart.
  static constexpr int kRows = 8 * kTiles, kPitch = kRows + (kTiles % 2 ? 0 : 8);
  // The ring of a warp.
  static constexpr int kDepth = 2, kStageBytes = kRows16BoxBytes<kNeurons> + kRows * 128,
                       kRingBytes = kDepth * kStageBytes;
  static_assert(kNeurons * kPitch * 4 <= kRingBytes);
  struct Shared {
    float gates[kNeurons][kRows];
    uint64_t full[kRows16Warps][kDepth], begun, cleared, listed;
    uint32_t fires[2];                // a bit a neuron that any row fires
    uint32_t broken_gate, broken_up;  // a bit a row whose gate values, or whose hidden state, are not finite
    int counts[kRows];
    uint16_t list[kNeurons];  // the neurons that fire, ascending
    Rows16Pairs pairs;
    alignas(8) float nothing[kNeurons * kPitch];  // in a rehearsal, the sums: never written
    __device__ __forceinline__ uint64_t fired() const { return fires[0] | static_cast<uint64_t>(fires[1]) << 32; }
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
  __device__ __forceinline__ float (*sums() const)[Gate::kPitch] {
    return reinterpret_cast<float(*)[Gate::kPitch]>(ring);
  }

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

  // Requests the first stages of a product. Warps take boxes of k in turns, so that what is requested at a time lies
  // together in memory.
  __device__ __forceinline__ void request(const Ffn& f, const CUtensorMap& x_map, const CUtensorMap& map,
                                          const void* weights, const uint16_t* list, int first, int count) const {
    for (int i = 0; i < Gate::kDepth; ++i)
      if (const int box = warp + kRows16Warps * i; 64 * box < f.d_model)
        fetch(f, x_map, map, static_cast<const T*>(weights), list, first, count, (at + i) % Gate::kDepth, box);
  }

  // Writes the sums over this warp's share of k of 16 kM neurons and all rows, [neuron][row], to its ring, once the
  // first stages are requested. Values of neurons past the list are undefined, and so are their sums.
  template <int kM>
  __device__ __forceinline__ void product(const Ffn& f, const CUtensorMap& x_map, const CUtensorMap& map,
                                          const void* weights, const uint16_t* list, int first, int count) {
    const int boxes = (f.d_model + 63) / 64;
    float d[kM][kTiles][4] = {};
    for (int box = warp; box < boxes; box += kRows16Warps) {
      barrier_wait(&full[at], phase >> at & 1);
      if (list != nullptr) {
        if (box + kRows16Warps < boxes)
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
      if (const int next = box + Gate::kDepth * kRows16Warps; next < boxes)
        fetch(f, x_map, map, static_cast<const T*>(weights), list, first, count, at, next);
      at = (at + 1) % Gate::kDepth;
    }
    store<kM>(d);
  }
};

// Where the warps' sums lie: those of the first warp, and bytes from one warp's to the next one's.
struct Rows16Sums {
  const unsigned char* first;
  int apart;
};

// A neuron's sums over all of k, for as many rows as a Number holds, added in order of the warps.
template <typename Number, int kTiles, int kNeurons>
__device__ __forceinline__ Number rows16_sum(const Rows16Sums& sums, int neuron, int row) {
  using Gate = Rows16Gate<kTiles, kNeurons>;
  Number sum{};
#pragma unroll
  for (int w = 0; w < kRows16Warps; ++w) {
    const Number part =
        *reinterpret_cast<const Number*>(sums.first + w * sums.apart + (neuron * Gate::kPitch + row) * sizeof(float));
    if constexpr (sizeof(Number) == sizeof(float))
      sum += part;
    else
      sum.x += part.x, sum.y += part.y;
  }
  return sum;
}

// Writes the gate's values to `gates`, and marks which neurons fire, which rows are not finite, and how many neurons
// each row fires. rows: 0 in a rehearsal
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void finish_rows16_gate(typename Rows16Gate<kTiles, kNeurons>::Shared& s,
                                                   const Rows16Sums& sums, const Ffn& f, int rows, int first,
                                                   bool dense) {
  constexpr int kPairs = 4 * kTiles;  // pairs of rows; a thread's pair is always the same
  const int row = 2 * (threadIdx.x % kPairs), lane = threadIdx.x % 32;
  const T* bias = static_cast<const T*>(f.b_gate);
  int mine[2] = {0, 0};
  bool broken[2] = {false, false};
  // Whole warps leave this loop together.
  for (int neuron = threadIdx.x / kPairs; neuron < kNeurons; neuron += kRows16Threads / kPairs) {
    const bool real = first + neuron < f.d_ff;
    const float2 z = rows16_sum<float2, kTiles, kNeurons>(sums, neuron, row);
    const float b = bias != nullptr && real ? static_cast<float>(bias[first + neuron]) : 0.f,
                values[2] = {z.x + b, z.y + b};
    const uint32_t pair = round_activated<T>(values[0], values[1]);
    float gates[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float v = values[e];
      const bool counts = real && row + e < rows, fires = counts && v > 0.f && (pair >> 16 * e & 0xffffu) != 0;
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
    if (broken[e]) atomicOr(&s.broken_gate, 1u << (row + e));
  }
}

// Writes the hidden state of the list, padded with zeros to 16 neurons; or of the whole group; or, in a rehearsal,
// nothing.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void finish_rows16_up(typename Rows16Gate<kTiles, kNeurons>::Shared& s,
                                                 const Rows16Sums& sums, const Ffn& f, uint2* hidden, int first,
                                                 int count, bool rehearsal) {
  constexpr int kRows = 8 * kTiles;
  const bool all_weights = count > kRows16Gathered;
  const T* bias = static_cast<const T*>(f.b_up);
  int positive = 0;  // of this thread's row: how many have positive gate and up values
  const int places = all_weights ? kNeurons : (rehearsal ? 16 : (count + 15) / 16 * 16);
  for (int i = threadIdx.x; i < places * kRows; i += kRows16Threads) {
    const int row = i / 4 % kRows, place = i / (4 * kRows) * 4 + i % 4;
    const int column = all_weights ? place : place < count ? s.list[place] : kNeurons;
    const float g = column < kNeurons ? s.gates[column][row] : 0.f;
    float out = g;
    if ((g > 0.f || rehearsal) && f.w_up != nullptr) {
      const float up =
          up_activated(rows16_sum<float, kTiles, kNeurons>(sums, place, row) +
                       (bias != nullptr ? static_cast<float>(bias[rehearsal ? first : first + column]) : 0.f));
      if constexpr (kUpRelu) positive += up > 0.f && !rehearsal;
      out = g * up;
    }
    if (!stays_finite<T>(fabsf(out)) && !rehearsal) atomicOr(&s.broken_up, 1u << row);
    const uint32_t value = f.w_up == nullptr ? round_relu<T>(out, 0.f) : round_pair<T>(out, 0.f);
    const uint32_t low = value | __shfl_down_sync(~0u, value, 1) << 16, high = __shfl_down_sync(~0u, low, 2);
    if (i % 4 == 0 && !rehearsal) sm80::store_relaxed(hidden + i / 4, make_uint2(low, high));  // four lanes have a unit
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
  for (int row = 0; row < Rows16Gate<kTiles, kNeurons>::kRows; ++row)
    rows |= static_cast<uint32_t>(s.gates[neuron][row] > 0.f) << row;
  return rows;
}

// Lists the neurons that fire, by their number in the CTA, with their pairs if they are few. Unless in a rehearsal,
// says so to the scout, and hands on how many each row fires.
template <int kTiles, int kNeurons>
__device__ __forceinline__ void list_rows16(typename Rows16Gate<kTiles, kNeurons>::Shared& s,
                                            Rows16Group<kNeurons>& group, bool rehearsal) {
  const int thread = threadIdx.x;
  const uint64_t fires = s.fired();
  if (thread < kNeurons && fires >> thread & 1) {
    const int place = __popcll(fires & ((1ull << thread) - 1));
    s.list[place] = thread;
    if (__popcll(fires) <= kRows16Pairs) s.pairs.add(thread, place, rows_that_fire<kTiles, kNeurons>(s, thread));
  }
  if (rehearsal) return;
  if (thread < kRows16Listers) barrier_arrive(&s.listed);
  if (thread < 2 * kTiles) {
    barrier_wait(&s.cleared, 0);  // else the scout, if it is late, clears what has been handed on
    const int* c = s.counts + 4 * thread;
    sm80::store_relaxed(&group.counts[thread], c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24);
  }
}

// Computes the up product of the `count` neurons in `list`, or of the whole group; by a warp, for its share of k.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void rows16_up_product(Rows16Warp<T, kTiles, kNeurons>& mine, const Ffn& f,
                                                  const CUtensorMap& x_map, const CUtensorMap& up_map,
                                                  const uint16_t* list, int first, int count) {
  const bool all_weights = count > kRows16Gathered;
  const uint16_t* gathered = all_weights ? nullptr : list;
  mine.request(f, x_map, up_map, f.w_up, gathered, first, count);
  if (all_weights)
    mine.template product<kNeurons / 16>(f, x_map, up_map, f.w_up, gathered, first, count);
  else if (count <= 16)
    mine.template product<1>(f, x_map, up_map, f.w_up, gathered, first, count);
  else
    mine.template product<2>(f, x_map, up_map, f.w_up, gathered, first, count);
}

// What the warp does that does not multiply.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void scout_rows16(typename Rows16Gate<kTiles, kNeurons>::Shared& s, const Ffn& f,
                                             Rows16Group<kNeurons>& group, uint2* hidden, int first, int lane) {
  begin_rows16<T, kTiles>(&s.begun, &s.cleared, f, group, hidden, first, lane);
  barrier_wait(&s.listed, 0);
  const int count = __popcll(s.fired());
  hand_on(group, s.list, first, count, s.broken_gate, lane);
  prefetch_after_rows16_gate<T, kNeurons>(f, s.list, first, count, lane);
}

// With registers for three, a CTA leaves room for `rows16_down`.
template <typename T, int kTiles, int kNeurons>
__global__ void __launch_bounds__(kRows16Threads + 32, 3)
    rows16_gate_up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                   const __grid_constant__ CUtensorMap up_map, const Ffn f, bool dense) {
  using Gate = Rows16Gate<kTiles, kNeurons>;
  extern __shared__ unsigned char raw[];
  unsigned char* rings = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  typename Gate::Shared& s = *reinterpret_cast<typename Gate::Shared*>(rings + kRows16Warps * Gate::kRingBytes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, first = blockIdx.x * kNeurons;
  if (thread < kRows16Warps * Gate::kDepth) barrier_init(&s.full[0][thread], 1);
  if (thread < Gate::kRows) s.counts[thread] = 0;
  if (thread == 0) {
    barrier_init(&s.begun, 1), barrier_init(&s.cleared, 1), barrier_init(&s.listed, kRows16Listers);
    s.fires[0] = s.fires[1] = s.broken_gate = s.broken_up = 0, s.pairs.count = 0;
  }
  fence_barrier_init();
  __syncthreads();

  const Rows16Space<T, kNeurons> space(f);
  Rows16Group<kNeurons>& group = space.group[blockIdx.x];
  uint2* hidden = reinterpret_cast<uint2*>(space.hidden + static_cast<int64_t>(blockIdx.x) * kNeurons * Gate::kRows);
  if (warp == kRows16Warps) return scout_rows16<T, kTiles, kNeurons>(s, f, group, hidden, first, lane);
  Rows16Warp<T, kTiles, kNeurons> mine{rings + warp * Gate::kRingBytes, s.full[warp], warp, lane};
  wait_for_launches();
  if (thread == 0) barrier_arrive(&s.begun);
  mine.request(f, x_map, gate_map, nullptr, nullptr, first, kNeurons);
  // What follows the gate product runs once before, on nothing, while the first weights are on their way: its code
  // comes from far.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const bool rehearsal = pass == 0;
    const Rows16Sums sums =
        rehearsal ? Rows16Sums{reinterpret_cast<unsigned char*>(s.nothing), 0} : Rows16Sums{rings, Gate::kRingBytes};
    if (!rehearsal) mine.template product<kNeurons / 16>(f, x_map, gate_map, nullptr, nullptr, first, kNeurons);
    named_sync<kRows16Threads>(1);
    finish_rows16_gate<T, kTiles, kNeurons>(s, sums, f, rehearsal ? 0 : f.rows, first, dense);
    // threads have written and read the rings through the generic proxy; the copy engine writes there next
    fence_async_proxy();
    named_sync<kRows16Threads>(1);
    const int count = __popcll(s.fired());
    list_rows16<kTiles, kNeurons>(s, group, rehearsal);
    named_sync<kRows16Threads>(1);
    if (f.w_up != nullptr && (rehearsal || (count > 0 && count <= kRows16Pairs && s.pairs.count <= kRows16Pairs)))
      sum_pairs<T>(f, s.pairs, first, mine.sums(), warp, lane);
    else if (f.w_up != nullptr && count > 0)
      rows16_up_product(mine, f, x_map, up_map, s.list, first, count);
    named_sync<kRows16Threads>(1);
    finish_rows16_up<T, kTiles, kNeurons>(s, sums, f, hidden, first, count, rehearsal);
  }
  named_sync<kRows16Threads>(1);
  if (thread == 0) sm80::store_relaxed(&group.broken, s.broken_gate | s.broken_up);
}

}  // namespace twell::hopper
