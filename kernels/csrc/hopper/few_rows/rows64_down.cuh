// The down product of 17 to 64 rows, y = h Wd^T + b over the union: a cluster of three or six CTAs for 64 outputs,
// which share out the union.
#pragma once

#include "hopper/few_rows/rows64.cuh"
#include "hopper/output.cuh"

namespace twell::hopper {

// kDownSide: bytes of 64 neurons of 64 outputs, or of 64 rows.
constexpr int kDownConsumers = 256, kDownProducers = 256, kDownSide = kTileK * 64 * 2;

constexpr int kDownHalves = 2;  // warpgroups that divide a stage's 64 of k
constexpr int kDownStageBytes = 2 * kDownSide;

// Besides the ring: what the CTAs of a cluster send each other; a CTA's share of the union; the bits of what fires, and
// how many fire before each group.
template <int kSplits>
struct DownSpace {
  // outputs that a CTA adds; the last CTAs have the remaining ones, or none
  static constexpr int kShare = (kDownOutputs / 8 + kSplits - 1) / kSplits * 8, kParts = kSplits * kDownHalves;
  using Parts = float (*)[kRows64Max][kShare];  // [kParts]: what warpgroups send of this CTA's outputs
  int parts, list, fired, before, bytes;
  constexpr explicit DownSpace(int d_ff) {
    const int groups = (d_ff + kGroupNeurons - 1) / kGroupNeurons;
    parts = 0, list = kParts * kRows64Max * kShare * 4;
    fired = list + ((d_ff / kSplits + 16) * 2 + 15) / 16 * 16, before = fired + groups * 8, bytes = before + groups * 2;
  }
};

// Copies the bits of what fires, and how many neurons fire before each group, to shared memory; by 128 threads. `sums`
// gets how many each warp found. The other threads make one __syncthreads meanwhile.
__device__ __forceinline__ void scan_union(const Rows64Marks& marks, uint64_t* fired, uint16_t* before, int (&sums)[4],
                                           int thread) {
  const int lane = thread % 32, warp = thread / 32, each = (marks.groups + 127) / 128;
  const int from = min(thread * each, marks.groups), to = min(from + each, marks.groups);
  int mine = 0;
  for (int g = from; g < to; ++g) {
    const uint64_t mask = fired[g] = marks.fired[g];
    mine += __popcll(mask);
  }
  int at = sum_upto(mine, lane);
  if (lane == 31) sums[warp] = at;
  __syncthreads();
  at -= mine;
#pragma unroll
  for (int w = 0; w < 3; ++w) at += w < warp ? sums[w] : 0;
  for (int g = from; g < to; ++g) before[g] = at, at += __popcll(fired[g]);
}

// Lists this CTA's share of the union, `size` neurons from the low-th on; a thread takes 16 neurons at a time.
__device__ __forceinline__ void list_share64(uint16_t* list, const uint64_t* fired, const uint16_t* before, int groups,
                                             int low, int size) {
  for (int i = threadIdx.x; i < 3 * groups; i += kDownConsumers + kDownProducers) {  // 16 neurons
    const uint64_t mask = fired[i / 3];
    const int first = i % 3 * 16;
    list_sixteen(list, size, before[i / 3] + __popcll(mask & ((1ull << first) - 1)) - low, mask >> first & 0xffffu,
                 i * 16);
  }
}

// Fills the ring with the listed neurons' weights and hidden state: by the copy engine where 64 neurons are
// consecutive, else by the producers' own copies.
template <typename T>
__device__ __forceinline__ void produce_rows64_down(Stages& ring, const CUtensorMap& w_map, const CUtensorMap& h_map,
                                                    const Ffn& f, const uint16_t* list, int size, int out0) {
  const int thread = threadIdx.x - kDownConsumers, chunk = thread % 8, out = out0 + 8 * chunk;
  const bool inside = out < f.d_model;
  const T *w = static_cast<const T*>(f.w_down) + (inside ? out : 0), *h = static_cast<const T*>(f.hidden) + 8 * chunk;
  const uint32_t place = thread / 8 * 128 + ((chunk ^ (thread / 8 & 7)) << 4);
  for (int k0 = 0; k0 < size; k0 += kTileK, ring.next()) {
    const bool run = is_run(list, k0, size);
    barrier_wait(&ring.empty[ring.at], ring.phase);
    if (thread == 0) {
      barrier_expect(&ring.full[ring.at], run ? kDownStageBytes : 0);
      if (run) {
        tma_load_2d(ring.here(), &w_map, &ring.full[ring.at], out0, list[k0]);
        tma_load_2d(ring.here() + kDownSide, &h_map, &ring.full[ring.at], 0, list[k0]);
      }
    }
    if (run) {
      arrive_as_warp(&ring.full[ring.at], 32);
      continue;
    }
    const uint32_t to = smem_address(ring.here()) + place;
#pragma unroll
    for (int j = 0; j < kTileK * 8 / kDownProducers; ++j) {
      const int which = k0 + thread / 8 + j * (kDownProducers / 8);
      const bool there = which < size;
      const uint32_t neuron = there ? list[which] : 0, at = to + j * (kDownProducers / 8 * 128);
      async_copy_16(at, w + static_cast<int64_t>(neuron) * f.d_model, there && inside);
      if (8 * chunk < f.rows) async_copy_16(at + kDownSide, h + neuron * kRows64Max, there);
    }
    async_arrive(&ring.full[ring.at]);
  }
}

// Writes which rows are finite and, if requested, how many neurons each fires. The rows are divided among CTAs; one
// warp writes them. broken: a bit a row. nnz: [rows] or null.
__device__ __forceinline__ void write_rows64_results(const Ffn& f, const Rows64Marks& marks, const uint32_t* broken,
                                                     int* nnz, int cta, int thread) {
  const int lane = threadIdx.x % 32;
  for (int row = cta; row < f.rows && thread < 32; row += gridDim.x * gridDim.y) {
    const bool fine = !(broken[row / 32] >> (row & 31) & 1);
    if (thread == 0) f.finite[row] = fine;
    if (nnz == nullptr) continue;
    int sum = 0;
    for (int g = lane; g < marks.groups; g += 32) sum += marks.counts[g * f.rows + row];
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) nnz[row] = fine ? sum : 0;
  }
}

// Computes the product over this CTA's share of the union, of which a warpgroup takes half of each stage, and sends the
// sums to the CTAs whose outputs they are.
template <typename T, int kSplits>
__device__ __forceinline__ void consume_rows64_down(Stages& ring, const Ffn& f, const uint16_t* list, int size,
                                                    typename DownSpace<kSplits>::Parts parts, int group,
                                                    uint32_t rank) {
  constexpr int kShare = DownSpace<kSplits>::kShare;
  const int lane = threadIdx.x % 32;
  const int half = group, skip = half * (kTileK / kDownHalves) * 128;
  const Consumer c{0, static_cast<int>(threadIdx.x) / 32 % 4, lane};
  float d[kDownOutputs / 2] = {};
  int k0 = 0;
  const auto ready = [&](int stage, uint32_t phase) {
    const bool run = is_run(list, k0, size);
    barrier_wait(&ring.full[stage], phase);
    // Threads copy through the generic proxy, and the tensor cores read through the async proxy.
    if (!run) fence_async_proxy();
    k0 += kTileK;
  };
  multiply<T, kDownOutputs, kTileK / 16 / kDownHalves, 1>(d, ring, (size + kTileK - 1) / kTileK, kDownSide + skip, skip,
                                                          ready, lane == 0,
                                                          [&](int stage) { barrier_arrive(&ring.empty[stage]); });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.row() + 8 * h;
    if (row >= f.rows) continue;
#pragma unroll
    for (int j = 0; j < kDownOutputs / 8; ++j)
      store_remote(
          remote_address(&parts[rank * kDownHalves + half][row][8 * j % kShare + 2 * (lane & 3)], 8 * j / kShare),
          d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
  }
}

// Adds what the cluster's warpgroups have sent once all have, in order, and writes this CTA's outputs, NaN in rows that
// are not finite.
template <typename T, int kSplits>
__device__ __forceinline__ void write_rows64_outputs(const Ffn& f, typename DownSpace<kSplits>::Parts parts,
                                                     const uint32_t* broken, int out0, uint32_t rank) {
  constexpr int kShare = DownSpace<kSplits>::kShare, kPairs = kShare / 2, kAll = kDownConsumers + kDownProducers;
  constexpr int kEach = (kRows64Max * kPairs + kAll - 1) / kAll;  // pairs of outputs to a thread
  const T* bias = static_cast<const T*>(f.b_down);
  const auto each = [&](auto run) {  // run(pair, row, its place in a share, output)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = threadIdx.x + i * kAll, row = at / kPairs, place = 2 * (at % kPairs),
                out = out0 + rank * kShare + place;
      if (row < f.rows && out < min(out0 + kDownOutputs, f.d_model)) run(i, row, place, out);
    }
  };
  uint32_t added[kEach];
  each([&](int i, int row, int, int out) { added[i] = added_to<uint32_t>(f, row, out); });
  cluster_sync();
  each([&](int i, int row, int place, int out) {
    float2 sum = bias != nullptr ? make_float2(static_cast<float>(bias[out]), static_cast<float>(bias[out + 1]))
                                 : make_float2(0.f, 0.f);
#pragma unroll
    for (int r = 0; r < DownSpace<kSplits>::kParts; ++r) {
      const float2 part = *reinterpret_cast<const float2*>(&parts[r][row][place]);
      sum.x += part.x, sum.y += part.y;
    }
    store_with<T>(f, row, out, added[i], broken[row / 32] >> (row & 31) & 1 ? kNanPair : round_pair<T>(sum.x, sum.y));
  });
}

template <typename T, int kSplits>
__global__ void __launch_bounds__(kDownConsumers + kDownProducers)
    rows64_down(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap h_map, const Ffn f,
                int* nnz, int stages) {
  constexpr int kAll = kDownConsumers + kDownProducers;
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ uint64_t stage_barriers[2][kRows64Stages];
  __shared__ uint32_t broken[kRows64Words];
  __shared__ int sums[4];
  const int group = uniform(static_cast<int>(threadIdx.x) / 128), out0 = blockIdx.y * kDownOutputs;
  const bool consumes = group < 2;
  const uint32_t rank = cluster_rank();
  uint64_t *full = in_register(stage_barriers[0]), *empty = full + kRows64Stages;
  Stages ring{in_register(raw), full, empty, stages, kDownStageBytes, !consumes};
  const DownSpace<kSplits> space(f.d_ff);
  unsigned char* rest = ring.base + stages * ring.bytes;
  const auto parts = reinterpret_cast<typename DownSpace<kSplits>::Parts>(rest + space.parts);
  uint16_t *list = reinterpret_cast<uint16_t*>(rest + space.list),
           *before = reinterpret_cast<uint16_t*>(rest + space.before);
  uint64_t* fired = reinterpret_cast<uint64_t*>(rest + space.fired);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i)
      barrier_init(&full[i], 1 + kDownProducers), barrier_init(&empty[i], kDownConsumers / 32);
    fence_barrier_init();
    for (uint32_t& word : broken) word = 0;
  }
  if (threadIdx.x == 32) prefetch_map(&w_map), prefetch_map(&h_map);
  cluster_sync();
  let_next_launch();
  wait_for_launches();
  const Rows64Marks marks(f);
  if (group == 2) {
    scan_union(marks, fired, before, sums, threadIdx.x % 128);
  } else {
    for (int i = threadIdx.x - (consumes ? 0 : 128); i < marks.groups * kRows64Words; i += kAll - 128)
      if (const uint32_t rows = marks.broken[i]) atomicOr(&broken[i % kRows64Words], rows);
    __syncthreads();
  }
  __syncthreads();
  const int total = sums[0] + sums[1] + sums[2] + sums[3], share = ((total + kSplits - 1) / kSplits + 15) & ~15;
  const int low = min(static_cast<int>(rank) * share, total), size = min(share, total - low);
  list_share64(list, fired, before, marks.groups, low, size);
  __syncthreads();
  if (!consumes) {
    produce_rows64_down<T>(ring, w_map, h_map, f, list, size, out0);
    write_rows64_results(f, marks, broken, nnz, blockIdx.y * kSplits + rank, threadIdx.x - kDownConsumers);
  } else {
    consume_rows64_down<T, kSplits>(ring, f, list, size, parts, group, rank);
  }
  write_rows64_outputs<T, kSplits>(f, parts, broken, out0, rank);
}

}  // namespace twell::hopper
