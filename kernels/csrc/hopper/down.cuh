// The down product: y = h Wd^T + b over each block's union, 128 rows by 256 outputs to a task.
//
// The hidden state's panels are images of shared memory and come by plain bulk copies; the union's rows of Wd (by neuron)
// by 16-byte copies in runs of 512 bytes. The tasks of a block follow each other, so that panels and list stay in L2.
#pragma once

#include "hopper/gather.cuh"

namespace twell::hopper {

struct DownTask {
  int block, n0, size, steps;
  __device__ __forceinline__ DownTask(const Ffn& f, int t) {
    const int outs = (f.d_model + kTileN - 1) / kTileN;
    block = t / outs, n0 = t % outs * kTileN;
    size = abs(f.union_sizes[block]), steps = (size + kTileK - 1) / kTileK;
  }
};

template <typename T>
__device__ __forceinline__ void produce_down(const CUtensorMap& w_map, const Ffn& f, Shared& s, int total) {
  constexpr int kRows = kTileK / kProducerWarps;  // of a stage to a warp, a row of 512 bytes a copy
  const int thread = threadIdx.x - kConsumers, warp = thread / 32, lane = thread % 32;
  Ring ring;
  ring.phase = 1;
  Filler filler;
  for (int t = blockIdx.x; t < total; t += gridDim.x) {
    const DownTask task(f, t);
    const bool all = task.size == f.d_ff, inside = task.n0 + 8 * lane < f.d_model;
    const T* w = static_cast<const T*>(f.w_down) + (inside ? task.n0 + 8 * lane : 0);
    const uint16_t* list = f.unions + static_cast<int64_t>(task.block) * f.panels * kPanelColumns + warp * kRows + lane % kRows;
    const unsigned char* hidden =
        static_cast<const unsigned char*>(f.hidden) + static_cast<int64_t>(task.block) * f.panels * kPanelBytes;
    uint32_t ahead = task.steps > 0 ? list[0] : 0;
    for (int step = 0; step < task.steps; ++step, ring.next()) {
      const uint32_t neurons = ahead;
      if (step + 1 < task.steps) ahead = list[(step + 1) * kTileK];
      barrier_wait(&s.empty[ring.stage], ring.phase);
      if (thread == 0) {
        uint64_t* full = &s.full[ring.stage];
        barrier_expect(full, kABytes + (all ? kBBytes : 0));
        bulk_load(s.a[ring.stage], hidden + static_cast<int64_t>(step) * kPanelBytes, kPanelBytes, full);
        if (all)
          for (int q = 0; q < 4; ++q)
            tma_load_2d(s.b[ring.stage] + q * (kBBytes / 4), &w_map, full, task.n0 + 64 * q, step * kTileK);
      }
      if (!all) {
        const uint32_t to = smem_address(s.b[ring.stage]) + (lane >> 3) * (kBBytes / 4) + warp * kRows * 128;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const uint32_t neuron = __shfl_sync(~0u, neurons, i);
          async_copy_16(to + i * 128 + (((lane ^ i) & 7) << 4), w + neuron * static_cast<uint32_t>(f.d_model), inside);
        }
      }
      filler.commit(s, ring.stage);
    }
  }
  filler.arrive<0>(s);
}

template <typename T>
__device__ __forceinline__ void finish_down(float (&d)[128], const CUtensorMap& y_map, const Ffn& f, Shared& s,
                                            const DownTask& task, const Consumer& c) {
  const T* bias = static_cast<const T*>(f.b_down);
  const int m0 = task.block * kTileM;
  bool whole[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = m0 + c.row() + 8 * h;
    whole[h] = row >= f.rows || f.finite[row];
  }
  if (c.leads()) bulk_wait_read<0>();  // the task before has left the staging tile
  c.sync();
  unsigned char* row = s.staging + c.row() * 128 + (c.lane & 3) * 4;
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
    if (bias != nullptr) {
      const int column = task.n0 + 8 * j + 2 * (c.lane & 3);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = column + e < f.d_model ? static_cast<float>(bias[column + e]) : 0.f;
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t out = whole[h] ? round_pair<T>(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]) : 0x7fff7fffu;  // NaN
      *reinterpret_cast<uint32_t*>(row + (j / 8) * kPanelBytes + h * 8 * 128 + (((j & 7) ^ (c.lane >> 2)) << 4)) = out;
    }
  }
  fence_async_proxy();
  c.sync();
  if (c.leads() && m0 + c.group * 64 < f.rows) {
    for (int p = 0; p < kTileN / 64; ++p)
      if (task.n0 + 64 * p < f.d_model)
        tma_store_2d(&y_map, s.staging + p * kPanelBytes + c.group * (kPanelBytes / 2), task.n0 + 64 * p, m0 + c.group * 64);
    bulk_commit();
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    down(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map, const Ffn f) {
  extern __shared__ unsigned char raw[];
  Shared& s = aligned(raw);
  begin_ring(s);
  const int total = f.blocks * ((f.d_model + kTileN - 1) / kTileN);
  if (threadIdx.x >= kConsumers) {
    registers_down<kProducerRegisters>();
    produce_down<T>(w_map, f, s, total);
  } else {
    registers_up<kConsumerRegisters>();
    const Consumer c{static_cast<int>(threadIdx.x) / 128, static_cast<int>(threadIdx.x) / 32 % 4, static_cast<int>(threadIdx.x) % 32};
    Ring ring;
    float d[128];
    for (int t = blockIdx.x; t < total; t += gridDim.x) {
      const DownTask task(f, t);
      if (task.steps == 0) {
#pragma unroll
        for (float& value : d) value = 0.f;
      }
      multiply<T, kTileN, 1, 1>(d, s, ring, task.steps, c, [] {});
      finish_down<T>(d, y_map, f, s, task, c);
    }
    if (c.leads()) bulk_wait<0>();
  }
}

}  // namespace twell::hopper
