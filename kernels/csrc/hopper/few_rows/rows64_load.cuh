// The shared memory of a CTA of `rows64_gate_up`, and the producers that fill its ring of stages.
#pragma once

#include "hopper/few_rows/rows64.cuh"

namespace twell::hopper {

constexpr int rows64_consumers(int tiles) { return 128 * tiles; }  // one warpgroup for each tile of a stage
constexpr int kRows64Listers = (kGroupNeurons + 31) / 32 * 32;     // threads that list what fires: whole warps
constexpr int kRows64Gatherers = kRows64Producers - 32;            // threads that copy weights of what fires

template <int kTiles>
struct __align__(16) Rows64Shared {
  // The gate product's stages, then the up product's.
  uint64_t full[2][kRows64Stages], empty[2][kRows64Stages], gathered[kRows64Stages];
  uint64_t listed;
  // [rows][neurons]: in a gated FFN float32 values, then the hidden state in 16 bits. Rows are in different banks.
  uint32_t gates[kRows64Max][kGroupNeurons + 8];
  uint32_t fires[2], broken[kRows64Words];          // a bit a neuron that any row fires; a bit a row that is not finite
  uint16_t list[kGroupNeurons];                     // the neurons that fire, ascending
  float4 sums[kTiles - 1][kGroupNeurons / 8][128];  // sums of the warpgroups of all tiles but the first
};

// How many stages take all of k.
template <int kTiles>
__device__ __forceinline__ int rows64_stages(int d_model) {
  return (d_model + kTiles * kTileK - 1) / (kTiles * kTileK);
}

// Calls at(i, tile) for the i-th stage, which begins with that tile of k, once the stage is free. CTAs begin at
// different k, so that they do not all request the same data at once; the up product with the last `kept` stages of the
// gate's.
template <int kTiles, typename At>
__device__ __forceinline__ void each_stage(Stages& s, int d_model, int kept, At at) {
  const int stages = rows64_stages<kTiles>(d_model);
  int tile = (blockIdx.x + stages - kept) % stages * kTiles;
  for (int i = 0; i < stages; ++i, s.next()) {
    barrier_wait(&s.empty[s.at], s.phase);
    at(i, tile);
    tile = tile + kTiles < stages * kTiles ? tile + kTiles : 0;
  }
}

// Fills the stages by the copy engine with the rows, which the first `kept` stages have, and, if `all_weights`, with
// the weights. By one thread.
template <int kTiles>
__device__ __forceinline__ void load_rows64(Stages& s, const CUtensorMap& x_map, const CUtensorMap& map,
                                            bool all_weights, int first, const Rows64Shape& shape, int d_model,
                                            int kept) {
  const int step = shape.even ? kTiles : 1;
  each_stage<kTiles>(s, d_model, kept, [&](int stage, int tile) {
    uint64_t* full = &s.full[s.at];
    const bool rows = stage >= kept;
    barrier_expect(full, kTiles * ((rows ? shape.row_bytes() : 0) + (all_weights ? kRows64WeightBytes : 0)));
    for (int i = 0; i < kTiles; i += step) {
      const int x = shape.even ? 0 : (tile + i) * kTileK, z = shape.even ? tile + i : 0;
      if (rows) tma_load_3d(s.here() + kTiles * kRows64WeightBytes + i * shape.row_bytes(), &x_map, full, x, 0, z);
      if (all_weights) tma_load_3d(s.here() + i * kRows64WeightBytes, &map, full, x, first, z);
    }
  });
}

// Fills them with the weights of the listed neurons, by all producers but the first warp, which fetches the rows.
template <typename T, int kTiles>
__device__ __forceinline__ void gather_rows64(Stages& s, uint64_t* gathered, const T* weights, const uint16_t* list,
                                              int count, int first, int d_model, int kept) {
  constexpr int kApart = kRows64Gatherers / 8, kRounds = (kRows64Gathered + kApart - 1) / kApart;
  const int thread = threadIdx.x % kRows64Producers - 32, row = thread / 8, chunk = thread % 8;
  uint32_t offset[kRounds];
#pragma unroll
  for (int j = 0; j < kRounds; ++j)
    offset[j] = row + kApart * j < count ? static_cast<uint32_t>(first + list[row + kApart * j]) * d_model : 0;
  each_stage<kTiles>(s, d_model, kept, [&](int, int tile) {
    const uint32_t to = smem_address(s.here()) + chunk * 16;
#pragma unroll 1
    for (int i = 0; i < kTiles; ++i) {
      const int k = (tile + i) * kTileK + 8 * chunk;
      const bool inside = k < d_model;
#pragma unroll
      for (int j = 0; j < kRounds; ++j) {
        const int r = row + kApart * j;
        if (r >= count) break;
        async_copy_16((to + i * kRows64WeightBytes + r * 128) ^ ((r & 7) << 4), weights + offset[j] + (inside ? k : 0),
                      inside);
      }
    }
    async_arrive(&gathered[s.at]);  // who waited to announce several stages at once would have fewer in flight
  });
}

// Where the gate's product begins in a ring of `stages`, of which it takes `all`: so that it ends with the last one,
// and the up product, which begins with the first, finds the rows of the stages there.
__device__ __forceinline__ int rows64_begin(int all, int stages) { return (stages - all % stages) % stages; }

// Prepares the barriers of `stages` stages, for the gate's product and the up product, and clears what consumers mark.
// By one thread. begin: the gate's first stage; those before it are as after a round
template <int kTiles>
__device__ __forceinline__ void begin_rows64(Rows64Shared<kTiles>& s, int stages, int begin) {
  constexpr int kFreed = rows64_consumers(kTiles) / 32;
  for (int i = 0; i < stages; ++i) {
    for (int j = 0; j < 2; ++j) barrier_init(&s.full[j][i], 1), barrier_init(&s.empty[j][i], kFreed);
    if (i < begin) barrier_arrive(&s.full[0][i]), barrier_arrive_for(&s.empty[0][i], kFreed);
    barrier_init(&s.gathered[i], kRows64Gatherers);
  }
  barrier_init(&s.listed, kRows64Listers);
  fence_barrier_init();
  s.fires[0] = s.fires[1] = 0;
  for (uint32_t& word : s.broken) word = 0;
}

// Returns the ring of a product (0: the gate's, 1: up) at its start. The rings share memory and have different
// barriers.
template <int kTiles>
__device__ __forceinline__ Stages rows64_ring(unsigned char* base, Rows64Shared<kTiles>& s, const Rows64Shape& shape,
                                              int product, bool consumes, int begin) {
  const int bytes = kTiles * (kRows64WeightBytes + shape.row_bytes()), at = product == 0 ? begin : 0;
  base += (sizeof(s) + 1023) / 1024 * 1024;
  return Stages{base, s.full[product], s.empty[product], shape.stages, bytes, !consumes, at};
}

}  // namespace twell::hopper
