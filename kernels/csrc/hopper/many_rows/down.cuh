// The down product: y = h Wd^T + b over each block's union, 128 rows by 256 outputs to a task.
//
// The hidden state's panels are images of shared memory and are fetched by plain bulk copies; the union's rows of Wd
// (by neuron) by 16-byte copies in runs of 512 bytes. A warp's 16 rows of y are written by tensor copies if they are
// consecutive, and otherwise by a bulk copy each. Sums that another CTA has left for a task come last, through the ring
// as well.
#pragma once

#include "hopper/gather.cuh"
#include "hopper/many_rows/down_schedule.cuh"
#include "hopper/output.cuh"

namespace twell::hopper {

// A warp's part of the staging tile: four panels of 16 rows, or 16 rows in different banks.
constexpr int kOutRows = 16, kOutPitch = kTileN * 2 + 16, kOutBytes = 9216;
constexpr int kDownSharedBytes = kSharedBytes - sizeof(Shared::staging) + kConsumerWarps * kOutBytes;
static_assert(kOutRows * kOutPitch <= kOutBytes && kOutBytes % 1024 == 0);

// A piece, and what its warp reads of the block. It is read while the piece before runs, since a piece may be only a
// step long.
struct DownPiece {
  int block, n0, signed_size, first, end;  // steps first to end
  // For a producer, the `at`-th neuron of the union from `first` on; for a consumer, the `at`-th row of the block.
  int looked_up;
  __device__ __forceinline__ DownPiece(const Ffn& f, const Shares& shares, int i, int at) {
    const Piece piece = shares.piece(i);
    const bool exists = piece.outputs * kTileN < f.d_model;  // else the cluster's other CTA has the last outputs
    block = uniform(piece.block), n0 = uniform(piece.outputs) * kTileN, first = 0,
    signed_size = uniform(shares.signed_size(f, block));
    // If the piece begins its task, nothing here waits for the size.
    if (const int upto = uniform(piece.upto); upto != Piece::kAll) first = steps() - upto;
    if (threadIdx.x < kConsumers)
      looked_up = exists ? f.order[block * kTileM + at] : f.rows;
    else
      looked_up = shares.known_dense(f, block)
                      ? 0
                      : f.unions[static_cast<int64_t>(block) * f.panels * kPanelColumns + first * kTileK + at];
    end = steps() - uniform(piece.without);
  }
  __device__ __forceinline__ int size() const { return abs(signed_size); }
  __device__ __forceinline__ int steps() const { return steps_of(signed_size); }  // of the whole task
  __device__ __forceinline__ bool is_whole() const { return first == 0 && end == steps(); }
  // Whether the piece's sums go to the share that has the last steps.
  __device__ __forceinline__ bool left_to_other() const { return end < steps(); }
  // Whether the piece adds what others have left.
  __device__ __forceinline__ bool joins_others() const { return !left_to_other() && first > 0; }
};

// Calls work(piece) for the pieces of this CTA, after the launches before have ended.
template <typename Work>
__device__ __forceinline__ void each_down_piece(const Ffn& f, const Shares& shares, int at, Work work) {
  DownPiece next(f, shares, 0, at);  // reads the plan, which is complete
  wait_for_launches();
  let_next_launch();  // the probes read nothing that this kernel writes: they use the processors as they become free
#pragma unroll 1
  for (int i = 0, count = uniform(shares.count()); i < count; ++i) {
    const DownPiece piece = next;
    next = DownPiece(f, shares, i + 1, at);
    work(piece);
  }
}

constexpr int kPartBytes = kTileM * kTileN * 4, kPartQuarters = 4;  // of what a share leaves
static_assert(kPartBytes / kPartQuarters <= kBBytes);

// A thread's share of a part of f.parts: 16 bytes of every 4 KB.
__device__ __forceinline__ float4* part_of(const Ffn& f, int at) {
  return reinterpret_cast<float4*>(f.parts) + static_cast<int64_t>(at) * (kTileM * kTileN / 4) + threadIdx.x;
}

// Writes the sums for the share that owns the task.
__device__ __forceinline__ void leave_part(const float (&d)[128], const Ffn& f, int at) {
  float4* part = part_of(f, at);
#pragma unroll
  for (int i = 0; i < 32; ++i)
    __stcg(part + i * kConsumers, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
}

// Announces them; by the same warps. It waits for the writes, so it is best called some time later.
__device__ __forceinline__ void announce_part(const Ffn& f, int at) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) release_store(f.part_ready + at * kPartWarps + threadIdx.x / 32, 1);
}

// Fetches a part that a share has left, once it is announced, through the ring: a quarter of every thread's sums for
// each stage. By the producers.
__device__ __forceinline__ void bring_part(const Ffn& f, Shared& s, Ring& ring, int at) {
  const int thread = threadIdx.x - kConsumers, warp = thread / 32, lane = thread % 32;
  const int* ready = f.part_ready + at * kPartWarps + lane;
  while (!__all_sync(~0u, lane >= kPartWarps || acquire_load(ready))) {
  }
  fence_async_proxy_global();  // others' writes before, the copy engine's reads after
  const unsigned char* part = reinterpret_cast<const unsigned char*>(f.parts) + static_cast<int64_t>(at) * kPartBytes;
#pragma unroll 1
  for (int quarter = 0; quarter < kPartQuarters; ++quarter, ring.next()) {
    wait_as_warp(&s.empty[ring.stage], ring.phase);
    if (lane == 0) {
      constexpr int kBytes = kPartBytes / kPartQuarters, kShare = kBytes / kProducerWarps;
      uint64_t* full = &s.full[ring.stage];
      if (warp == 0) barrier_expect(full, kBytes), barrier_arrive_for(full, kProducers);
      bulk_load(s.b[ring.stage] + warp * kShare, part + quarter * kBytes + warp * kShare, kShare, full);
    }
  }
}

// Adds it to this thread's sums. By the consumers. paired: whether stages are freed in both CTAs of the cluster
__device__ __forceinline__ void add_part(float (&d)[128], Shared& s, Ring& ring, bool paired) {
  constexpr int kFours = 32 / kPartQuarters;
#pragma unroll
  for (int quarter = 0; quarter < kPartQuarters; ++quarter, ring.next()) {
    barrier_wait(&s.full[ring.stage], ring.phase);
    const float4* part = reinterpret_cast<const float4*>(s.b[ring.stage]) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 v = part[i * kConsumers];
      float* sums = d + 4 * (quarter * kFours + i);
      sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
    }
    fence_async_proxy();  // read through the generic proxy; the copy engine writes there next, through the async proxy
    __syncwarp();         // else registers are spilled
    // Each thread arrives for itself: racecheck does not accept another thread's arrival for what a thread has read.
    barrier_arrive(&s.empty[ring.stage]);
    if (paired) barrier_arrive_remote(&s.empty[ring.stage], cluster_rank() ^ 1);
  }
}

// Fills the ring with a task's steps if it takes every neuron, from `turned` steps further on and round. shared: for
// two CTAs that take the same outputs, half of the weights for both. By a warp.
__device__ __forceinline__ void load_steps(const CUtensorMap& w_map, const Ffn& f, Shared& s, Ring ring,
                                           const DownPiece& task, int turned, bool shared, int lane) {
  constexpr int kColumns = 64;  // of a box of W
  const int half = cluster_rank() * (kTileN / kDownCluster);
#pragma unroll 1
  for (int i = task.first; i < task.end; ++i, ring.next()) {
    const int step = i + turned - (i + turned >= task.end ? task.end : 0);
    uint64_t* full = &s.full[ring.stage];
    wait_as_warp(&s.empty[ring.stage], ring.phase);
    if (lane == 0) {
      barrier_expect(full, kABytes + kBBytes);
      barrier_arrive_for(full, kProducers);  // for the threads that copy in other cases
      bulk_load(s.a[ring.stage], hidden_panel(f, task.block, step), kPanelBytes, full);
#pragma unroll
      for (int n = 0; n < kTileN; n += kColumns)
        if (!shared)
          tma_load_2d(s.b[ring.stage] + n * (kTileK * 2), &w_map, full, task.n0 + n, step * kTileK);
        else if (n < kTileN / kDownCluster)
          tma_load_2d_multicast(s.b[ring.stage] + (half + n) * (kTileK * 2), &w_map, full, task.n0 + half + n,
                                step * kTileK, (1 << kDownCluster) - 1);
    }
  }
}

template <typename T>
__device__ __forceinline__ void produce_down(const CUtensorMap& w_map, const Ffn& f, Shared& s, const Shares& shares) {
  constexpr int kRows = kTileK / kProducerWarps;  // rows of a stage for each warp; a copy takes a row of 512 bytes
  const int thread = threadIdx.x - kConsumers, warp = uniform(thread / 32), lane = thread % 32;
  Ring ring;
  ring.phase = 1;
  const int place = warp * kRows + lane % kRows;  // in a step, the neuron that this lane looks up
  int turned = 0;  // a whole task after a first piece begins where that has ended, so that CTAs stay at the same steps
  each_down_piece(f, shares, place, [&](const DownPiece& task) {
    if (task.size() == f.d_ff) {  // the copy engine fetches all of it; one warp issues the copies
      if (warp == 0)
        load_steps(w_map, f, s, ring.of_warp(), task, task.is_whole() ? turned : 0,
                   shares.paired() && !shares.apart(task.block), lane);
      if (task.left_to_other()) turned = task.end;
      ring.skip(task.end - task.first);
      named_sync<kProducers>(kProducerBarrier);  // no thread waits for a stage that was freed once before
    } else {
      const bool inside = task.n0 + 8 * lane < f.d_model;
      const T* w = static_cast<const T*>(f.w_down) + (inside ? task.n0 + 8 * lane : 0);
      const uint16_t* list = f.unions + static_cast<int64_t>(task.block) * f.panels * kPanelColumns + place;
      uint32_t ahead = task.looked_up;
      ring = ring.of_warp();
#pragma unroll 1
      for (int step = task.first; step < task.end; ++step, ring.next()) {
        const uint32_t offset = ahead * f.d_model * static_cast<uint32_t>(sizeof(T));
        if (step + 1 < task.end) ahead = list[(step + 1) * kTileK];
        barrier_wait(&s.empty[ring.stage], ring.phase);
        uint64_t* full = &s.full[ring.stage];
        if (thread == 0) {
          barrier_expect(full, kABytes);
          bulk_load(s.a[ring.stage], hidden_panel(f, task.block, step), kPanelBytes, full);
        }
        const int left = task.size() - step * kTileK - warp * kRows;  // rows of the union; those after are zeros
        const uint32_t to = smem_address(s.b[ring.stage]) + (lane >> 3) * (kBBytes / 4) + warp * kRows * 128;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          async_copy_16(to + i * 128 + (((lane ^ i) & 7) << 4), bytes_on(w, __shfl_sync(~0u, offset, i)),
                        inside && i < left);
        async_arrive(full);
      }
    }
    if (task.joins_others()) shares.each_further([&](int part) { bring_part(f, s, ring, part); });
  });
  async_wait();
}

// Adds what the call adds to a warp's 16 rows of a task, which lie in `out`, a chunk of 16 bytes of each row to a lane.
// place(row, chunk): where
template <typename T, typename Place>
__device__ __forceinline__ void add_to_staged(unsigned char* out, const Ffn& f, const DownPiece& task, int lane,
                                              Place place) {
  static_assert(kTileN == 8 * 32);
  constexpr int kAtOnce = 8;  // rows
  const int column = task.n0 + 8 * lane;
#pragma unroll
  for (int first = 0; first < kOutRows; first += kAtOnce) {
    uint4 added[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = __shfl_sync(~0u, task.looked_up, first + i);
      if (row < f.rows && column < f.d_model) added[i] = added_to<uint4>(f, row, column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      uint4& values = *reinterpret_cast<uint4*>(out + place(first + i, lane));
      values = add_pairs<T>(values, added[i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void finish_down(float (&d)[128], const CUtensorMap& y_map, const Ffn& f, Shared& s,
                                            const DownPiece& task, const Consumer& c, const bool (&row_finite)[2]) {
  const T* bias = static_cast<const T*>(f.b_down);
  const int row0 = task.block * kTileM + c.group * 64 + c.warp * kOutRows;
  const bool consecutive = __all_sync(~0u, task.looked_up == row0 + c.lane % kOutRows);
  unsigned char* out = s.staging + (c.group * 4 + c.warp) * kOutBytes;
  bulk_wait_read<0>();  // the task before has left it
  __syncwarp();
  if (bias != nullptr) {
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const int column = task.n0 + 8 * j + 2 * (c.lane & 3);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = column + e < f.d_model ? static_cast<float>(bias[column + e]) : 0.f;
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
  }
  if (!__all_sync(~0u, row_finite[0] && row_finite[1])) {
#pragma unroll
    for (int i = 0; i < 128; ++i)
      if (!row_finite[i / 2 % 2]) d[i] = __int_as_float(0x7fffffff);  // NaN
  }
  const Corner corner(c.lane);
  const auto write = [&](auto place) {  // place(row, chunk of 16 bytes)
#pragma unroll
    for (int j = 0; j < kTileN / 8; j += 2)
      store_matrices(out + place(corner.row, j + corner.chunk), round_pair<T>(d[4 * j], d[4 * j + 1]),
                     round_pair<T>(d[4 * j + 2], d[4 * j + 3]), round_pair<T>(d[4 * j + 4], d[4 * j + 5]),
                     round_pair<T>(d[4 * j + 6], d[4 * j + 7]));
    if (f.added == nullptr) return;
    __syncwarp();
    add_to_staged<T>(out, f, task, c.lane, place);
  };
  if (consecutive)
    write([](int row, int chunk) { return chunk / 8 * (kOutRows * 128) + row * 128 + (((chunk ^ row) & 7) << 4); });
  else
    write([](int row, int chunk) { return row * kOutPitch + chunk * 16; });
  fence_async_proxy();
  __syncwarp();
  if (consecutive) {
    if (c.lane < kTileN / 64 && task.n0 + 64 * c.lane < f.d_model && row0 < f.rows)
      tma_store_2d(&y_map, out + c.lane * (kOutRows * 128), task.n0 + 64 * c.lane, row0);
  } else if (c.lane < kOutRows && task.looked_up < f.rows) {
    bulk_store(static_cast<T*>(f.y) + static_cast<int64_t>(task.looked_up) * f.d_model + task.n0,
               out + c.lane * kOutPitch, min(kTileN, f.d_model - task.n0) * 2);
  }
  bulk_commit();
}

// Computes the down products of this CTA's pieces. Those that another CTA finishes are left to it; others are finished
// here.
template <typename T>
__device__ __forceinline__ void consume_down(const CUtensorMap& y_map, const Ffn& f, Shared& s, const Shares& shares) {
  const Consumer c = Consumer::here();
  Ring ring;
  float d[128];
  bool announces = false;  // whether to announce what it has left, during the next piece
  each_down_piece(f, shares, c.group * 64 + c.warp * 16 + c.lane % 16, [&](const DownPiece& task) {
    bool row_finite[2];  // whether the thread's two rows are finite
    if (task.steps() == 0) {
#pragma unroll
      for (float& value : d) value = 0.f;
    }
    const auto read_ahead = [&] {
      if (announces) announce_part(f, shares.part(shares.index()));
      announces = false;
      if (task.left_to_other()) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = __shfl_sync(~0u, task.looked_up, c.lane / 4 + 8 * h);
        row_finite[h] = row >= f.rows || f.finite[row];
      }
      if (f.added != nullptr && c.lane < kOutRows && task.looked_up < f.rows)
        prefetch_bulk(static_cast<const T*>(f.added) + static_cast<int64_t>(task.looked_up) * f.d_model + task.n0,
                      min(kTileN, f.d_model - task.n0) * 2);
    };
    if (task.end == task.first) read_ahead();
    if (shares.paired())
      multiply<T, kTileN, 1, kDownCluster, 0, 32>(d, s, ring, task.end - task.first, false, c, read_ahead);
    else
      multiply<T, kTileN, 1, 1>(d, s, ring, task.end - task.first, task.size() != f.d_ff, c, read_ahead);
    if (task.left_to_other()) {
      leave_part(d, f, shares.part(shares.index()));
      announces = true;
      return;
    }
    int parts = 0;  // counted apart: work for each at once costs registers
    if (task.joins_others()) shares.each_further([&](int) { ++parts; });
    parts = uniform(parts);
#pragma unroll 1
    for (; parts > 0; --parts) add_part(d, s, ring, shares.paired());
    finish_down<T>(d, y_map, f, s, task, c, row_finite);
  });
  if (announces) announce_part(f, shares.part(shares.index()));
  bulk_wait<0>();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    down(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map, const Ffn f) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  __shared__ SharesMemory memory;
  if (threadIdx.x == 0) prefetch_map(&y_map);
  if (threadIdx.x == kConsumers) prefetch_map(&w_map);
  if (f.w_up == nullptr) wait_for_launches();  // the launch before is the plan itself
  const Shares shares(f, memory);
  begin_ring(s, shares.paired() ? kDownCluster * kConsumers : kConsumers);
  if (shares.paired()) cluster_meet();  // both have begun, so their barriers and rings may be written
  if (threadIdx.x >= kConsumers) {
    registers_down<kProducerRegisters>();
    produce_down<T>(w_map, f, s, shares);
  } else {
    registers_up<kConsumerRegisters>();
    consume_down<T>(y_map, f, s, shares);
  }
  if (shares.paired()) cluster_sync();  // no CTA ends while the other may still write to it
}

}  // namespace twell::hopper
