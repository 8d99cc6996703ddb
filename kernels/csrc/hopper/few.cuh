// Up to 16 rows: bound by reading the gate's weights once, so no tiles, no plan, and no tensor copies.
//
// A CTA owns 16 neurons. Its warps share out d_model, stream the neurons' gate rows through mma.sync, and add up in one order; for
// the neurons that any row fires they take the up product the same way at once. `few_down` then goes over the union with a
// CTA for each 16 outputs of 8 rows, in a fixed tree. The values also lie dense in `spill`, which `few_pack` turns into words.
#pragma once

#include "hopper/plan.cuh"

namespace twell::hopper {

constexpr int kFewNeurons = 16, kFewWarps = 8, kFewThreads = kFewWarps * 32;
constexpr int kDownRows = 8, kDownOutputs = 16;

template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The products of 16 neurons with up to 16 rows, one a thread: neuron first + thread / 16, row thread % 16. Neurons outside
// `wanted` are not read, and give anything.
template <typename T>
__device__ __forceinline__ float few_products(const Ffn& f, const void* weights, int first, uint32_t wanted,
                                              float (&part)[kFewWarps][kFewNeurons][kFewRows + 1]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4;
  const uint4 none = make_uint4(0, 0, 0, 0);
  // A step is 32 of d_model: lane % 4 holds eight that follow each other, which stand for k of 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of two
  // products. The order of k is the same on both sides, so it does not matter.
  const auto read = [&](const void* matrix, int row, bool there, int k) {
    return there && k < f.d_model
               ? __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(matrix) + static_cast<int64_t>(row) * f.d_model + k))
               : none;
  };
  float d[2][4] = {};
  const bool low = wanted >> group & 1, high = wanted >> (group + 8) & 1, second = f.rows > 8;
#pragma unroll 4
  for (int k0 = 32 * warp; k0 < f.d_model; k0 += 32 * kFewWarps) {
    const int k = k0 + 8 * (lane & 3);
    const uint4 a = read(weights, first + group, low, k), b = read(weights, first + group + 8, high, k);
    const uint4 x0 = read(f.x, group, group < f.rows, k);
    mma_16x8x16<T>(d[0], a.x, b.x, a.y, b.y, x0.x, x0.y);
    mma_16x8x16<T>(d[0], a.z, b.z, a.w, b.w, x0.z, x0.w);
    if (second) {
      const uint4 x1 = read(f.x, group + 8, group + 8 < f.rows, k);
      mma_16x8x16<T>(d[1], a.x, b.x, a.y, b.y, x1.x, x1.y);
      mma_16x8x16<T>(d[1], a.z, b.z, a.w, b.w, x1.z, x1.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    part[warp][group + (i & 2) * 4][i / 4 * 8 + 2 * (lane & 3) + (i & 1)] = d[i / 4][i & 3];
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kFewWarps; ++w) sum += part[w][threadIdx.x / kFewRows][threadIdx.x % kFewRows];
  __syncthreads();
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kFewThreads) few_gate_up(const Ffn f) {
  __shared__ float part[kFewWarps][kFewNeurons][kFewRows + 1];
  __shared__ uint32_t fires, broken;  // a bit a neuron that any row fires; a bit a row that is not finite
  const int first = blockIdx.x * kFewNeurons, mine = threadIdx.x / kFewRows, row = threadIdx.x % kFewRows;
  const int neuron = first + mine;
  const bool there = neuron < f.d_ff && row < f.rows;
  if (threadIdx.x == 0) fires = broken = 0;

  float z = few_products<T>(f, f.w_gate, first, (1u << min(kFewNeurons, f.d_ff - first)) - 1, part);
  if (f.b_gate != nullptr && there) z += static_cast<float>(static_cast<const T*>(f.b_gate)[neuron]);
  const uint32_t value = round_relu<T>(z, 0.f) & 0xffffu;
  if (there) {
    if (!(fabsf(z) <= 0x1.fffffep127f) || !stays_finite<T>(fmaxf(z, 0.f))) atomicOr(&broken, 1u << row);
    const int chunk = neuron % kTile / 8;
    uint16_t* dense = static_cast<uint16_t*>(f.spill) + (static_cast<int64_t>(row) * f.tiles + neuron / kTile) * kTile;
    dense[(chunk ^ (row & 7)) * 8 + neuron % 8] = value;
    if (z > 0.f && value) atomicOr(&fires, 1u << mine);
  }
  __syncthreads();
  uint16_t* masks = f.unions;  // here: [2, CTAs], neurons that fired, and rows that are not finite
  if (threadIdx.x == 0) masks[blockIdx.x] = fires;
  if (fires == 0) {
    if (threadIdx.x == 0) masks[gridDim.x + blockIdx.x] = broken;
    return;
  }

  const float g = half_of<T>(value, 0);
  float h = g;
  if (f.w_up != nullptr) {
    float u = few_products<T>(f, f.w_up, first, fires, part);
    if (f.b_up != nullptr && there) u += static_cast<float>(static_cast<const T*>(f.b_up)[neuron]);
    h = g > 0.f ? g * u : 0.f;
  }
  if (there && !stays_finite<T>(fabsf(h))) atomicOr(&broken, 1u << row);
  // here: [d_ff, 16], the neurons of the union alone; rows past the last are 0
  if (fires >> mine & 1)
    static_cast<uint16_t*>(f.hidden)[static_cast<int64_t>(neuron) * kFewRows + row] = there ? round_pair<T>(h, 0.f) : 0;
  __syncthreads();
  if (threadIdx.x == 0) masks[gridDim.x + blockIdx.x] = broken;
}

// Adds lanes' values over the 16 lanes of equal lane % 2, each of which keeps kLeft of them.
template <int kLeft>
__device__ __forceinline__ void scatter_sum(float (&v)[64], int lane, int bit) {
  const bool upper = lane & bit;
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const float other = __shfl_xor_sync(~0u, upper ? v[i] : v[i + kLeft], bit);
    v[i] = (upper ? v[i + kLeft] : v[i]) + other;
  }
}

template <typename T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) few_down(const Ffn f) {
  __shared__ float part[kWarps][32][4];
  __shared__ uint32_t broken;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int out0 = blockIdx.x * kDownOutputs + 8 * (lane & 1), row0 = blockIdx.y * kDownRows;
  const int groups = (f.d_ff + kFewNeurons - 1) / kFewNeurons;
  const uint16_t* masks = f.unions;
  if (threadIdx.x == 0) broken = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < groups; i += kWarps * 32)
    if (const uint32_t rows = masks[groups + i]) atomicOr(&broken, rows);
  float v[64] = {};  // [8 rows][8 outputs]
  for (int base = warp * 32; base < groups; base += kWarps * 32) {
    const uint32_t mask = base + lane < groups ? masks[base + lane] : 0;
    uint32_t busy = __ballot_sync(~0u, mask != 0);
    while (busy) {
      constexpr int kAhead = 4;
      uint4 w[kAhead], h[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i, busy &= busy - 1) {  // a group of 16 neurons each, a neuron to two lanes
        const int from = busy ? __ffs(busy) - 1 : 0, neuron = (base + from) * kFewNeurons + lane / 2;
        const bool on = busy && (__shfl_sync(~0u, mask, from) >> (lane / 2) & 1);
        w[i] = h[i] = make_uint4(0, 0, 0, 0);
        if (on) {
          h[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(f.hidden) + static_cast<int64_t>(neuron) * kFewRows + row0);
          if (out0 < f.d_model)
            w[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(f.w_down) + static_cast<int64_t>(neuron) * f.d_model + out0));
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const uint32_t ws[4] = {w[i].x, w[i].y, w[i].z, w[i].w}, hs[4] = {h[i].x, h[i].y, h[i].z, h[i].w};
#pragma unroll
        for (int r = 0; r < 8; ++r)
#pragma unroll
          for (int o = 0; o < 8; ++o)
            v[8 * r + o] = fmaf(half_of<T>(hs[r / 2], r & 1), half_of<T>(ws[o / 2], o & 1), v[8 * r + o]);
      }
    }
  }
  scatter_sum<32>(v, lane, 2), scatter_sum<16>(v, lane, 4), scatter_sum<8>(v, lane, 8), scatter_sum<4>(v, lane, 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) part[warp][lane][i] = v[i];
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x < kDownRows && row0 + threadIdx.x < f.rows)
    f.finite[row0 + threadIdx.x] = !(broken >> (row0 + threadIdx.x) & 1);
  if (threadIdx.x < 128) {
    const int from = threadIdx.x / 4, i = threadIdx.x % 4;  // whose value of its four
    const int at = (from >> 1 & 1) * 32 + (from >> 2 & 1) * 16 + (from >> 3 & 1) * 8 + (from >> 4 & 1) * 4 + i;
    const int row = row0 + at / 8, out = blockIdx.x * kDownOutputs + 8 * (from & 1) + at % 8;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += part[w][from][i];
    if (row < f.rows && out < f.d_model) {
      if (f.b_down != nullptr) sum += static_cast<float>(static_cast<const T*>(f.b_down)[out]);
      static_cast<uint16_t*>(f.y)[static_cast<int64_t>(row) * f.d_model + out] = broken >> row & 1 ? 0x7fff : round_pair<T>(sum, 0.f);
    }
  }
}

// Words from the dense values in `spill`: a warp a tile of a row, a lane eight columns.
template <typename T>
__global__ void __launch_bounds__(32) few_pack(const Ffn f) {
  const int tile = blockIdx.x, row = blockIdx.y, lane = threadIdx.x;
  const int64_t at = static_cast<int64_t>(row) * f.tiles + tile;
  const bool there = tile * kTile + 8 * lane < f.d_ff;
  uint4* chunk = static_cast<uint4*>(f.spill) + at * (kTile / 8) + (lane ^ (row & 7));
  if (!there) *chunk = make_uint4(0, 0, 0, 0);
  const uint4 v = *chunk;
  const uint32_t mask = positive(v), pair[4] = {v.x, v.y, v.z, v.w};
  int upto = __popc(mask);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  int slot = upto - __popc(mask) + 1;
  if (lane == 31) f.heads[at * kHead] = upto;
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (mask >> e & 1) {
      const uint32_t word = (8 * lane + e) | (pair[e / 2] >> (16 * (e & 1)) & 0xffffu) << 16;
      if (slot <= kSlots) (slot < kHead ? f.heads + at * kHead : f.tails + at * kTail - kHead)[slot] = word;
      ++slot;
    }
}

}  // namespace twell::hopper
