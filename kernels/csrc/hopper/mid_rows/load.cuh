// The shared memory of the CTAs of `tiled_gate_up`, its layout, and the producers that fill it.
#pragma once

#include <algorithm>

#include "hopper/mid_rows/tiles.cuh"

namespace twell::hopper {

template <int kN, int kRows>
struct __align__(16) TiledShared {
  static constexpr int kWords = (kN + 31) / 32, kBlocks = kRows / kBlockRows;
  // The share of a tile's neurons from which weights are fetched whole, which is less work for the copy engine than row
  // by row. It grows with the rows. In large tiles the up product is of 64 neurons where there are more than 48.
  static constexpr int kMost = kN == 48 ? 16 : std::min((4 + kBlocks) * kN / 16, (kRows * kN) < 128 * 224 ? 48 : 64);
  // Width of the up product of this many gathered neurons.
  __host__ __device__ static constexpr int width_of(int count) {
    return count <= 16 ? 16 : count <= 32 ? 32 : count <= 48 ? 48 : 64;
  }
  static constexpr int kWidest = width_of(kMost);
  // of the gate's stages, of the up product's
  uint64_t full[2][kTiledStages], empty[2][kTiledStages], gathered[kTiledStages];
  // by the other CTA of the pair: its width is decided, its ring is ready, its values have left
  uint64_t decided, ready, left;
  uint64_t sure;          // by both CTAs: the gate's ring is read, and votes are in
  int votes[kTiledPair];  // each CTA's vote: whether all neurons are surely needed
  // a bit a neuron that any row of a block fires; a bit a row that is not finite
  uint32_t fires[kBlocks][kWords], broken[kRows / 32];
  int count, width;                 // neurons that fire; neurons whose up product is computed
  int other;                        // the width that the other CTA of the pair needs
  __align__(16) uint16_t list[kN];  // the neurons that fire, ascending
  __align__(16) float biases[kN];   // biases of a product's neurons

  // Adds what a warp's rows fire: a word of 32 neurons a lane.
  __device__ __forceinline__ void mark(const Consumer& c, uint32_t word) {
    if (c.lane < kWords && word != 0) atomicOr(&fires[c.group * 64 / kBlockRows][c.lane], word);
  }
};

// Calls run<width>(), for a product of gathered neurons.
template <typename Space, typename Run>
__device__ __forceinline__ void by_width(int width, Run run) {
  if (Space::kWidest == 16 || width == 16)
    run.template operator()<16>();
  else if (Space::kWidest <= 32 || width == 32)
    run.template operator()<std::min(32, Space::kWidest)>();
  else if (Space::kWidest <= 48 || width == 48)
    run.template operator()<std::min(48, Space::kWidest)>();
  else
    run.template operator()<Space::kWidest>();
}

// Panels are [neurons][64 rows], 128-byte swizzled as by the copy engine; one for each 64 rows of the tile, in order.
// First the ring of the gate product has all the memory. Then the gate's values are at its end, in panels of the whole
// tile. If few neurons fire, the values move to the beginning, in panels of their own, before the up product's ring.
// Otherwise that ring is before them, or, if it would have too few stages, has all the memory again: the values are
// sent to `hidden` and come back as its last stages.
template <int kN, int kRows>
struct TiledRing {
  static constexpr int kBegin = (sizeof(TiledShared<kN, kRows>) + 1023) / 1024 * 1024, kBytes = 227 * 1024 - kBegin;
  static constexpr int kPanel = kN * 128, kHeld = kBytes - kRows / 64 * kPanel, kEnoughStages = 4;
  static constexpr int stage(int width) { return (kRows + width) * kTileK * 2; }
  static constexpr bool kLeaves = kHeld / stage(kN) < kEnoughStages;
  static constexpr int kClear = kHeld / stage(kN);  // stages before the gate's values
  static constexpr int kFurther = kLeaves ? 2 : 0;  // stages in which they come back
  // The up product's ring: where it begins, and how many stages it has.
  static constexpr int begin(int width) { return width == kN ? 0 : width * kRows * 2; }
  static constexpr int stages(int width) {
    const int most = ((width == kN && !kLeaves ? kHeld : kBytes) - begin(width)) / stage(width);
    return most < kTiledStages ? most : kTiledStages;
  }
  // most stages of the up product that may be requested before what fired is listed
  static constexpr int kEarly = std::min(kClear, stages(kN));
  static constexpr int kGateStages = std::min(kTiledStages, kBytes / stage(kN));
  static constexpr int kProducerRegisters = kRows == kBlockRows ? 72 : 40,
                       kConsumerRegisters = 252 - kProducerRegisters / 2;
  // of a gathered stage, as below
  static constexpr int kWidest = TiledShared<kN, kRows>::kWidest, kLate = stages(kWidest) > 5 ? 4 : 2;
  // else a warp would meet a stage that is two rounds behind
  static_assert(kGateStages >= kProducerWarps && stages(kN) >= kProducerWarps);
  // else threads that gather would wait for a stage that waits for one not yet announced
  static_assert(stages(kWidest) >= kLate + 2);
};

// Address of 8 rows of a neuron in a panel.
__device__ __forceinline__ unsigned char* panel_chunk(unsigned char* panel, int neuron, int chunk) {
  return panel + neuron * 128 + (((chunk ^ neuron) & 7) << 4);
}

// What the copy engine fetches of a tile for each stage: its rows that exist, of which this CTA requests one half
// (`half` rows if all exist) for both CTAs of the pair; and this many bytes of weights, `weights_at` bytes further.
struct TiledLoad {
  const CUtensorMap &x, &weights;
  int x_bytes, weight_bytes, first, weights_at, half;

  // Fetches the step-th 64 of k into the current stage of `s`.
  __device__ __forceinline__ void request(const Stages& s, int step) const {
    uint64_t* full = &s.full[s.at];
    const int row = cluster_rank() * half, at = row * (kTileK * 2);
    barrier_expect(full, x_bytes + weight_bytes);
    if (at < x_bytes)
      tma_load_2d_multicast(s.here() + at, &x, full, step * kTileK, blockIdx.y * (kTiledPair * half) + row,
                            (1 << kTiledPair) - 1);
    if (weight_bytes > 0) tma_load_2d(s.here() + weights_at, &weights, full, step * kTileK, first);
  }
};

// Where in k a tile of neurons begins: the CTAs of a pair at one place, other pairs elsewhere, so that they do not all
// request the same data at once.
__device__ __forceinline__ int first_step(int steps) { return blockIdx.z % steps; }
__device__ __forceinline__ int wrapped(int step, int steps) { return step < steps ? step : step - steps; }

// Fills the stages from one to another by the copy engine; `turns` warps take them in turns, this one from the
// `turn`-th on; by one thread. It takes about 100 cycles for a copy and 300 for the code around it, and steps take 250
// to 1 000. before(i) runs before the i-th stage.
template <typename Before>
__device__ __forceinline__ void load_tiled(Stages& s, const TiledLoad& load, int steps, int from, int to, int turn,
                                           int turns, Before before) {
#pragma unroll 1
  for (int i = from, step = wrapped(first_step(steps) + from, steps); i < to; ++i, s.next()) {
    if (i % turns == turn) {
      before(i);
      barrier_wait(&s.empty[s.at], s.phase);
      load.request(s, step);
    }
    step = wrapped(step + 1, steps);
  }
}

// Writes zeros to each stage of the gate's, from one row of the tile's to another: after its last rows, or after its
// last neurons, which follow the rows. Copies past the end of a matrix would write them too, but take longer than whole
// ones. By the consumers.
template <int kN, int kRows>
__device__ __forceinline__ void clear_rest(unsigned char* base, int from, int to) {
  using Where = TiledRing<kN, kRows>;
  const int chunks = (to - from) * 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < Where::kGateStages * chunks; i += kConsumers)
    *reinterpret_cast<uint4*>(base + i / chunks * Where::stage(kN) + from * kTileK * 2 + i % chunks * 16) =
        make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  named_sync<kConsumers>(3);
}

// Stages of a ring of `count` that the threads of a warp fill by their own copies, announced on `barriers` kLate stages
// later, so that no thread waits for copies in flight. These copies go through the generic proxy, and the tensor cores
// read through the async proxy; the threads that copied make the fence, once, here. Consumers free a stage once they
// have the next, so the ring needs kLate + 2 stages or more.
template <int kLate>
struct Announcer {
  uint64_t* barriers;
  int count, at = 0, behind = 0;

  // Copies since the last call are one stage.
  __device__ __forceinline__ void requested() {
    async_commit();
    if (behind < kLate) {
      ++behind;
    } else {
      async_wait_but<kLate>();
      announce();
    }
  }
  __device__ __forceinline__ void rest() {
    async_wait();
#pragma unroll 1
    for (; behind > 0; --behind) announce();
  }

 private:
  __device__ __forceinline__ void announce() {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers[at]);
    if (++at == count) at = 0;
  }
};

// Copies the listed neurons from `weights` into the stages, by all producers but the first warp, which fetches the rows
// alone: if it also copied, the others would take longer.
template <typename T, int kMost, int kLate>
__device__ __forceinline__ void gather_tiled(Stages& s, uint64_t* gathered, const T* weights, const uint16_t* list,
                                             int count, int first, int steps, int d_model, int row_bytes) {
  constexpr int kApart = (kProducers - 32) / 8, kRounds = (kMost + kApart - 1) / kApart;
  static_assert(kApart % 4 == 0);  // a thread's rows have the same swizzle except for 64 bytes
  const int thread = threadIdx.x - kConsumers - 32, row = thread / 8, chunk = thread % 8;
  uint32_t offset[kRounds];  // of a thread's rows, in 16 bytes
#pragma unroll
  for (int j = 0; j < kRounds; ++j)
    offset[j] = row + kApart * j < count ? static_cast<uint32_t>(first + list[row + kApart * j]) * (d_model / 8) : 0;
  const uint32_t place = row_bytes + row * 128 + ((chunk ^ row & 7) << 4);
  Announcer<kLate> announcer{gathered, s.count};
#pragma unroll 1
  for (int i = 0, step = first_step(steps); i < steps; ++i, s.next()) {
    barrier_wait(&s.empty[s.at], s.phase);
    const uint32_t to = smem_address(s.here()) + place;
    const int k = step * kTileK + 8 * chunk;
    const bool inside = k < d_model;
    const uint4* from = reinterpret_cast<const uint4*>(weights + (inside ? k : 0));
    // else the compiler computes each row's address in advance, and there are no registers to keep them in
    asm("" : "+l"(from));
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      if (row + kApart * j >= count) break;
      async_copy_16((to ^ kApart * j % 8 << 4) + kApart * j * 128, from + offset[j], inside);
    }
    announcer.requested();
    step = wrapped(step + 1, steps);
  }
  announcer.rest();
}

// Whether a warp's sums alone show that more neurons fire than are gathered, so that weights are fetched whole. It
// looks at every other neuron, and at values that no type rounds to zero. If few of the first neurons fire, it looks no
// further, since others wait.
template <int kN, int kMost, int kPieces, int kSize>
__device__ __forceinline__ bool surely_all(const float (&d)[kPieces][kSize]) {
  const auto fire = [&](int j) { return fmaxf(d[0][4 * j], d[0][4 * j + 2]) >= 0x1p-14f; };
  if (__popc(__ballot_sync(~0u, fire(0))) < 16) return false;
  uint32_t fires = 0;  // bit j: neuron 8 j + 2 * quad
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) fires |= fire(j) ? 1u << j : 0;
#pragma unroll
  for (int apart = 4; apart < 32; apart *= 2) fires |= __shfl_xor_sync(~0u, fires, apart);
  int count = __popc(fires);
  count += __shfl_xor_sync(~0u, count, 1), count += __shfl_xor_sync(~0u, count, 2);
  return count > kMost;
}

// The gate's values leave for `hidden`; the up product's tiles are fetched, except for the first `begun`, which have
// been requested; and then the values again, each warpgroup's in a stage of its own.
template <int kN, int kRows>
__device__ __forceinline__ void load_all_weights(Stages& s, TiledShared<kN, kRows>& shared, const TiledLoad& load,
                                                 const CUtensorMap& h_map, int steps, int begun, int turn) {
  using Where = TiledRing<kN, kRows>;
  constexpr int kPanels = kRows / 64, kOwn = kPanels / 2;
  const int block0 = blockIdx.y * (kRows / kBlockRows), first = tile_column() * kN;
  const bool moves = Where::kLeaves && turn == kProducerWarps - 1;  // one thread moves all of the values
  if (moves) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      tma_store_3d(&h_map, s.base + Where::kHeld + p * Where::kPanel, 64 * (p % 2), first, block0 + p / 2);
    bulk_commit();
    bulk_wait_read<0>();
    // what is requested goes to both CTAs
    for (int cta = 0; cta < kTiledPair; ++cta) barrier_arrive_remote(&shared.left, cta);
  }
  load_tiled(s, load, steps, begun, steps, turn, kProducerWarps, [&](int i) {
    if (Where::kLeaves && i >= Where::kClear) barrier_wait(&shared.left, 0);
  });
  if (moves) {
    barrier_wait(&shared.left, 0);
    bulk_wait<0>();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      uint64_t* full = &s.full[s.at];
      if (p % kOwn == 0) {
        barrier_wait(&s.empty[s.at], s.phase);
        barrier_expect(full, kOwn * Where::kPanel);
      }
      tma_load_3d(s.here() + p % kOwn * Where::kPanel, &h_map, full, 64 * (p % 2), first, block0 + p / 2);
      if (p % kOwn == kOwn - 1) s.next();
    }
  }
}

}  // namespace twell::hopper
