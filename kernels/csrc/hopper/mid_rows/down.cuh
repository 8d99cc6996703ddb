// The down product of a block of up to 128 rows, y = h Wd^T + b over the block's union: a cluster of kSplits CTAs for
// kOut outputs; its CTAs divide the union, and their sums are added in one order.
#pragma once

#include "common/bits.cuh"
#include "hopper/mid_rows/down_load.cuh"
#include "hopper/output.cuh"

namespace twell::hopper {

// How many of `total` neurons each CTA but the last takes.
__device__ __forceinline__ int share_of(int total, int splits) {
  return ((total + splits - 1) / splits + kTileK - 1) / kTileK * kTileK;
}

// Writes the neurons of this CTA's share of the block's union, ascending, to `list`; returns how many. By kWarps warps,
// this thread of which is the thread-th; sync() is a barrier of theirs. meanwhile() runs while the bits of what fired
// are in flight.
template <int kWarps, typename Sync, typename Meanwhile>
__device__ __forceinline__ int list_share(const TiledMarks& marks, const Ffn& f, int splits, int rank, uint16_t* list,
                                          int (&sums)[kWarps], int thread, Sync sync, Meanwhile meanwhile) {
  const int groups = (f.d_ff + 15) / 16, each = (groups + 32 * kWarps - 1) / (32 * kWarps), lane = thread % 32,
            warp = thread / 32;
  const int from = min(thread * each, groups), to = min(from + each, groups);
  const uint32_t first = from < to ? marks.fired[from] : 0;  // usually all that a thread has
  meanwhile();
  int mine = __popc(first);
  for (int g = from + 1; g < to; ++g) mine += __popc(marks.fired[g]);
  int at = sum_upto(mine, lane);
  if (lane == 31) sums[warp] = at;
  sync();
  at -= mine;
  int total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) at += w < warp ? sums[w] : 0, total += sums[w];
  const int share = share_of(total, splits), low = min(rank * share, total);
  const int size = min(share, total - low);
  at -= low;
  for (int g = from; g < to; ++g) at = list_sixteen(list, size, at, g == from ? first : marks.fired[g], 16 * g);
  if (thread < (-size & kTileK - 1)) list[size + thread] = 0;  // producers that gather read whole steps
  return size;
}

// Requests the first stages, `count` times 64 neurons from `first` on, if all of these fire; returns whether they do.
// By the producers: warps take the stages in turns, since each stage's requests are alike.
template <int kOut, int kSplits>
__device__ __forceinline__ bool request_early(const Stages& ring, const DownLoad<kOut, kSplits>& load,
                                              const uint16_t* fired, int first, int count) {
  const int lane = threadIdx.x % 32;
  const bool fires = lane >= count || reinterpret_cast<const uint64_t*>(fired + first / 16)[lane] == ~0ull;
  if (count == 0 || !__all_sync(~0u, fires)) return false;
  if (lane == 0)
    for (int i = threadIdx.x / 32 - kConsumerWarps; i < count; i += kProducerWarps) {
      barrier_expect(&ring.full[i], load.bytes());
      load.request(ring.base + i * ring.bytes, &ring.full[i], first + i * kTileK);
      barrier_arrive_for(&ring.full[i], kProducers);
    }
  return true;
}

// Fills the stages of all steps but the first `begin`: 64 neurons of the block's hidden state and of the outputs'
// weights. Where the neurons are consecutive, by tensor copies, which the warps issue in turns as in `load_tiled`.
// Otherwise a thread copies 16 of each 128 bytes for four neurons: it reads their numbers at once and before it waits,
// since a read between copies would wait for the copies before it.
template <typename T, int kOut, int kSplits>
__device__ __forceinline__ void produce_tiled_down(Stages& ring, const DownLoad<kOut, kSplits>& load, const Ffn& f,
                                                   int block, const uint16_t* list, int size, bool all, int begin) {
  using Down = TiledDown<kOut, kSplits>;
  constexpr int kEach = kTileK * 8 / kProducers;
  static_assert(kEach == 4);
  const int thread = threadIdx.x - kConsumers, first = thread / 8 * kEach, chunk = thread % 8;
  const uint32_t place = first * 128 + (((chunk ^ first) & 7) << 4);
  const T* h = hidden_of<T>(f, block, 0) + 8 * chunk;
  const T* w = static_cast<const T*>(f.w_down) + load.out0 + 8 * chunk;
  const int outputs = f.d_model - load.out0 - 8 * chunk;  // how many exist from the thread's first on
  all = all && ring.count >= kProducerWarps;              // else a warp would meet a stage that is two rounds behind
  const int bytes = load.bytes();
  for (int k0 = begin * kTileK; k0 < size; k0 += kTileK, ring.next()) {
    const int turn = k0 / kTileK % kProducerWarps;
    if (all && turn != thread / 32) continue;
    const bool run = is_run(list, k0, size);
    const uint2 neurons = *reinterpret_cast<const uint2*>(list + k0 + first);
    uint64_t* full = &ring.full[ring.at];
    barrier_wait(&ring.empty[ring.at], ring.phase);
    if (thread == 32 * turn) {
      barrier_expect(full, run ? bytes : 0);
      if (run) load.request(ring.here(), full, list[k0]);
    }
    if (run) {
      arrive_as_warp(full, all ? kProducers : 32);
      continue;
    }
    const uint32_t stage = smem_address(ring.here()) + place;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t neuron = (i < 2 ? neurons.x : neurons.y) >> 16 * (i % 2) & 0xffffu,
                     to = (stage ^ i << 4) + i * 128;
      const bool there = k0 + first + i < size;
#pragma unroll
      for (int p = 0; p < 2; ++p) async_copy_16(to + p * Down::kSide, h + neuron * kBlockRows + 64 * p, there);
#pragma unroll
      for (int p = 0; p < Down::kPanels; ++p) {
        const int at = 64 * p + load.shift_of(64 * p + 8 * chunk);
        if (64 * (p + 1) <= kOut || chunk < kOut % 64 / 8)
          async_copy_16(to + (2 + p) * Down::kSide, w + neuron * static_cast<uint32_t>(f.d_model) + at,
                        there && at < outputs);
      }
    }
    async_arrive(full);
  }
}

// Each CTA of the cluster sends its sums of the others' outputs to them, and adds those of its own outputs, in order of
// rank, into the first of `d`. [CTAs][kShare / 8][consumers] of four sums arrive at `to`, in the layout of registers,
// and are counted by `sent`. The producers make a cluster_meet meanwhile.
template <int kOut, int kSplits>
__device__ __forceinline__ void add_shares(float (&d)[kOut / 2], unsigned char* to, uint64_t* sent, int rank) {
  constexpr int kRuns = TiledDown<kOut, kSplits>::kShare / 8;
  float4* parts = reinterpret_cast<float4*>(to) + threadIdx.x;
  const auto place = [](int from, int run) { return (from * kRuns + run) * kConsumers; };
  const auto mine = [&](int i) { return make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]); };
  cluster_meet();  // all have read their rings
#pragma unroll
  for (int r = 0; r < kSplits; ++r)
    if (r != rank)
#pragma unroll
      for (int i = 0; i < kRuns; ++i)
        if (r * kRuns + i < kOut / 8) send_remote(parts + place(rank, i), sent, mine(r * kRuns + i), r);
  barrier_wait(sent, 0);
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < kSplits; ++r) {
      float4 part;
      if (r == rank && r * kRuns + i < kOut / 8)
        part = mine(r * kRuns + i);
      else
        part = parts[place(r, i)];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    d[4 * i] = sum.x, d[4 * i + 1] = sum.y, d[4 * i + 2] = sum.z, d[4 * i + 3] = sum.w;
  }
}

// Writes which rows are finite and, if requested, how many neurons each fires. By the producers of one CTA for each
// block, a thread for a row. nonfinite: a bit a row. nnz: [rows of the call] or null.
__device__ __forceinline__ void write_row_results(const Ffn& f, const TiledMarks& marks, const uint32_t* nonfinite,
                                                  int* nnz, int tiles, int m0, int rows) {
  const int row = threadIdx.x - kConsumers;
  if (row < rows) {
    const bool finite = !(nonfinite[row / 32] >> (row & 31) & 1);
    f.finite[m0 + row] = finite;
    if (nnz != nullptr) {
      int sum = 0;
#pragma unroll 8
      for (int t = 0; t < tiles; ++t) sum += marks.counts_of(t)[row];
      nnz[m0 + row] = finite ? sum : 0;
    }
  }
}

// Writes this CTA's outputs of the block's rows to y, with the bias, and NaN in rows that are not finite. They pass
// through `staging`, [128 rows][kPitch bytes], so that whole lines are written; a warp moves its own 16 rows.
template <typename T, int kOut, int kSplits>
__device__ __forceinline__ void store_outputs(float (&d)[kOut / 2], unsigned char* staging,
                                              const DownLoad<kOut, kSplits>& load, const Ffn& f, const Consumer& c,
                                              const uint32_t* nonfinite, int rank, int m0, int rows) {
  constexpr int kShare = TiledDown<kOut, kSplits>::kShare, kPitch = TiledDown<kOut, kSplits>::kPitch;
  const T* bias = static_cast<const T*>(f.b_down);
  const int own = rank * kShare, matrix = c.lane >> 3, low = c.group * 64 + c.warp * 16;
  unsigned char* to = staging + (low + (matrix & 1) * 8 + (c.lane & 7)) * kPitch + (matrix >> 1) * 16;
#pragma unroll
  for (int j = 0; j < kShare / 8; j += 2) {
    if (bias != nullptr)
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int out = load.output(own + 8 * (j + g / 2)) + 2 * (c.lane & 3) + g % 2;
        const float b = out < f.d_model ? static_cast<float>(bias[out]) : 0.f;
        d[4 * (j + g / 2) + g % 2] += b, d[4 * (j + g / 2) + 2 + g % 2] += b;
      }
    store_matrices(to + 16 * j, round_pair<T>(d[4 * j], d[4 * j + 1]), round_pair<T>(d[4 * j + 2], d[4 * j + 3]),
                   round_pair<T>(d[4 * j + 4], d[4 * j + 5]), round_pair<T>(d[4 * j + 6], d[4 * j + 7]));
  }
  __syncwarp();
  for (int i = c.lane; i < 16 * (kShare / 8); i += 32) {
    const int row = low + i / (kShare / 8), chunk = i % (kShare / 8), out = load.output(own + 8 * chunk);
    if (row >= rows || own + 8 * chunk >= kOut || out >= f.d_model) continue;
    uint4 values = *reinterpret_cast<const uint4*>(staging + row * kPitch + chunk * 16);
    if (nonfinite[row / 32] >> (row & 31) & 1) values = make_uint4(kNanPair, kNanPair, kNanPair, kNanPair);
    store_with<T>(f, m0 + row, out, added_to<uint4>(f, m0 + row, out), values);
  }
}

// Joins the tiles' marks of rows that are not finite into `nonfinite`, a bit a row. words: those that this thread has
// read already.
__device__ __forceinline__ void join_nonfinite(const TiledMarks& marks, uint32_t* nonfinite, uint32_t words,
                                               int tiles) {
  const int thread = threadIdx.x, kRowWords = kBlockRows / 32;
  if (words) atomicOr(&nonfinite[thread % kRowWords], words);
#pragma unroll 4
  for (int i = thread + kThreads; i < tiles * kRowWords; i += kThreads)
    if (const uint32_t more = marks.broken[i]) atomicOr(&nonfinite[i % kRowWords], more);
}

// The product over this CTA's share of the union, the sum over the cluster, and the outputs. By the consumers.
// `unread`: this many of the first stages have neurons that are not in this share, and are freed unread. all: every
// step is 64 consecutive neurons.
template <typename T, int kOut, int kSplits>
__device__ __forceinline__ void consume_tiled_down(Stages& ring, const DownLoad<kOut, kSplits>& load, const Ffn& f,
                                                   uint64_t* sent, const uint32_t* nonfinite, int size, bool all,
                                                   int unread, int rank, int m0, int rows) {
  using Down = TiledDown<kOut, kSplits>;
  const int thread = threadIdx.x;
  const Consumer c{thread / 128, thread / 32 % 4, thread % 32};
  float d[kOut / 2] = {};
  const auto ready = [&](int stage, uint32_t phase) {
    barrier_wait(&ring.full[stage], phase);
    // Threads copy through the generic proxy, and the tensor cores read through the async proxy.
    if (!all) fence_async_proxy();
  };
  const auto release = [&](int stage) { barrier_arrive(&ring.empty[stage]); };
  for (int i = 0; i < unread; ++i) {
    wait_as_warp(&ring.full[i], 0);
    if (c.lane == 0) release(i);
  }
  multiply<T, kOut, kTileK / 16, 1>(d, ring, (size + kTileK - 1) / kTileK, c.group * Down::kSide, 2 * Down::kSide,
                                    ready, c.lane == 0, release);
  if constexpr (kSplits > 1) add_shares<kOut, kSplits>(d, ring.base, sent, rank);
  // The ring has been read, and so have the sums that arrived there: the outputs use its memory on their way to whole
  // lines.
  named_sync<kConsumers>(3);
  store_outputs<T, kOut, kSplits>(d, ring.base, load, f, c, nonfinite, rank, m0, rows);
}

// Prepares the barriers of `stages` stages and of the cluster's sums, and clears the marks. By one thread.
template <int kOut, int kSplits>
__device__ __forceinline__ void begin_tiled_down(uint64_t* full, uint64_t* empty, uint64_t* sent,
                                                 uint32_t (&nonfinite)[kBlockRows / 32], bool* has_requested,
                                                 int stages, int rank) {
  for (int i = 0; i < stages; ++i) barrier_init(&full[i], 1 + kProducers), barrier_init(&empty[i], kConsumerWarps);
  barrier_init(sent, 1);
  fence_barrier_init();
  if constexpr (kSplits > 1) barrier_expect(sent, TiledDown<kOut, kSplits>::sent_bytes(rank));
  for (uint32_t& word : nonfinite) word = 0;
  *has_requested = false;
}

// One block of up to 128 rows and kOut outputs for a cluster. Its shared memory is `stages` stages of the ring, then
// this CTA's list of neurons. Before the list is made, the producers request the first stages if the union seems to be
// every neuron: this CTA's share then begins at `first`. has_requested: whether they have. usable: whether the share
// does begin there. all: every step is 64 consecutive neurons.
template <typename T, int kOut, int kSplits>
__global__ void __launch_bounds__(kThreads, 1)
    tiled_down(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap half_map,
               const __grid_constant__ CUtensorMap h_map, const Ffn f, int block_rows, int* nnz, int tiles,
               int stages) {
  using Down = TiledDown<kOut, kSplits>;
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ uint64_t stage_barriers[2][kTiledStages], sent;
  __shared__ uint32_t nonfinite[kBlockRows / 32];
  __shared__ int sums[kThreads / 32];
  __shared__ bool has_requested;
  const int thread = threadIdx.x, block = blockIdx.z, rank = kSplits > 1 ? cluster_rank() : 0;
  const int m0 = block * block_rows, rows = min(block_rows, f.rows - m0);
  const bool consumes = thread < kConsumers;
  uint64_t *full = in_register(stage_barriers[0]), *empty = full + kTiledStages;
  Stages ring{in_register(raw), full, empty, stages, Down::kStageBytes, !consumes};
  uint16_t* list = reinterpret_cast<uint16_t*>(ring.base + stages * Down::kStageBytes);
  const DownLoad<kOut, kSplits> load{w_map, half_map, h_map, block * f.panels * kPanelColumns, f.d_model};
  if (thread == 0) begin_tiled_down<kOut, kSplits>(full, empty, &sent, nonfinite, &has_requested, stages, rank);
  if (thread == 32) prefetch_map(&w_map), prefetch_map(&h_map);
  __syncthreads();
  let_next_launch();
  wait_for_launches();
  const TiledMarks marks(f, block, tiles);
  const uint32_t words = thread < tiles * (kBlockRows / 32) ? marks.broken[thread] : 0;
  const int share_of_all = share_of(f.d_ff, kSplits), first = rank * share_of_all;
  const int early_stages = max(min(min(kEarlyStages, stages), min(share_of_all, f.d_ff - first) / kTileK), 0);
  const int size = list_share(
      marks, f, kSplits, rank, list, sums, thread, [] { __syncthreads(); },
      [&] {
        if (!consumes && request_early(ring, load, marks.fired, first, early_stages) && thread == kConsumers)
          has_requested = true;
      });
  join_nonfinite(marks, nonfinite, words, tiles);
  __syncthreads();
  const bool all = uniform(size > 0 && size % kTileK == 0 && list[size - 1] - list[0] == size - 1);
  const bool requested = uniform(has_requested);
  const bool usable = uniform(requested && size >= early_stages * kTileK && list[0] == first);
  if (requested && !(consumes && usable)) ring.skip(early_stages);
  if (!consumes) {
    registers_down<kProducerRegisters>();
    produce_tiled_down<T, kOut, kSplits>(ring, load, f, block, list, size, all, usable ? early_stages : 0);
    if (blockIdx.y == block % gridDim.y && rank == 0) write_row_results(f, marks, nonfinite, nnz, tiles, m0, rows);
    async_wait();
    __syncwarp();
    if constexpr (kSplits > 1) cluster_meet();  // as the consumers do
  } else {
    registers_up<kConsumerRegisters>();
    consume_tiled_down<T, kOut, kSplits>(ring, load, f, &sent, nonfinite, size, all,
                                         requested && !usable ? early_stages : 0, rank, m0, rows);
  }
}

}  // namespace twell::hopper
