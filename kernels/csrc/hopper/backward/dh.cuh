// dh = dy Wd^T over each block's union, and from it du = dh g and dg = dh u, for neurons that fire.
//
// The product is that of `up`, with dy for x and Wd for Wu. Its sums go through the staging tile: each kept value reads
// its dh there, adds the gradient of l1, and writes du and dg twice: over the block's union, as panels that `dx`
// multiplies, and over its group's tokens, as chunks that the weights' gradients multiply.
#pragma once

#include "hopper/activation.cuh"
#include "hopper/backward/params.h"
#include "hopper/many_rows/up.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

constexpr int kDhBarrier = 4;  // its number: both consumer warpgroups meet there

constexpr int kHeld = 9;  // kept values of a task that a thread has in registers; it reads any further ones again

// The kept values of a task, those of its panels one after the other. A thread takes one in kConsumers.
struct TaskValues {
  int first, end;
  int place[kHeld];  // in the staging tile
  uint32_t pair[kHeld];

  __device__ __forceinline__ TaskValues(const Backward& b, const UpTask& task) {
    const int* starts = b.kept.starts + static_cast<int64_t>(task.block) * (b.panels + 1) + task.panel;
    first = starts[0], end = starts[task.panels];
  }
  // Prefetches them into the L2.
  __device__ __forceinline__ void prefetch(const Backward& b) const {
    constexpr int kLine = 64;  // values of 16 bits
    for (int value = first + threadIdx.x * kLine; value < end + kLine; value += kConsumers * kLine) {
      prefetch_line(b.kept.positions + min(value, end)), prefetch_line(b.kept.gates + min(value, end));
      prefetch_line(b.kept.hidden + min(value, end));
      prefetch_line(b.places + min(value, end)), prefetch_line(b.places + min(value + kLine / 2, end));
    }
  }
  static __device__ __forceinline__ int row_of(int position) { return position >> 6 & 127; }
  static __device__ __forceinline__ int place_of(const UpTask& task, int position) {
    const int row = row_of(position), column = position & 63, panel = ((position >> 13) - task.panel) & 3;
    return panel * kPanelBytes + row * 128 + (((column >> 3) ^ (row & 7)) << 4) + (column & 7) * 2;
  }
  // Writes half of each pair, du (0) or dg (1), to the staging tile.
  __device__ __forceinline__ void put(const Backward& b, Shared& s, const UpTask& task, int half) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (first + static_cast<int>(threadIdx.x) + i * kConsumers < end)
        *reinterpret_cast<uint16_t*>(s.staging + place[i]) = static_cast<uint16_t>(pair[i] >> half * 16);
    const uint16_t* made = static_cast<const uint16_t*>(b.chunks) + half * kListNeurons * kChunk;  // by this thread
#pragma unroll 4
    for (int value = first + threadIdx.x + kHeld * kConsumers; value < end; value += kConsumers)
      *reinterpret_cast<uint16_t*>(s.staging + place_of(task, b.kept.positions[value])) = made[b.places[value]];
  }
};

// Rounds this warpgroup's sums into the staging tile, as panels.
template <typename T, int kPanels>
__device__ __forceinline__ void stage_dh(const float (&d)[128], Shared& s, const Consumer& c) {
  const Corner corner(c.lane);
  unsigned char* row = s.staging + (c.group * 64 + c.warp * 16 + corner.row) * 128;
#pragma unroll
  for (int p = 0; p < kPanels; ++p)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* v = d + 32 * p + 8 * j;
      store_matrices(row + p * kPanelBytes + (((2 * j + corner.chunk) ^ (corner.row & 7)) << 4),
                     round_pair<T>(v[0], v[1]), round_pair<T>(v[2], v[3]), round_pair<T>(v[4], v[5]),
                     round_pair<T>(v[6], v[7]));
    }
}

// The values from which du and dg of a kept value are computed.
struct Ingredients {
  uint16_t position, gate, hidden;
  uint32_t place;
  __device__ __forceinline__ void read(const Backward& b, int value) {
    position = b.kept.positions[value], gate = b.kept.gates[value], hidden = b.kept.hidden[value],
    place = b.places[value];
  }
};

// Computes du | dg of a kept value from its dh in the staging tile, and writes them and h to its group's chunk.
template <typename T>
__device__ __forceinline__ uint32_t make_pair(const Backward& b, Shared& s, const UpTask& task, const Ingredients& in,
                                              int place, float l1_scale) {
  const float g = half_of<T>(in.gate, 0), h = half_of<T>(in.hidden, 0);
  const float dh = half_of<T>(*reinterpret_cast<const uint16_t*>(s.staging + place), 0);
  const int position = task.block * kBlockRows + TaskValues::row_of(in.position);
  const bool counts = b.counted == nullptr || b.counted[b.kept.order[position]] != 0;
  const ValueGradients of(g, h, dh, counts ? l1_scale : 0.f);
  const uint32_t pair = round_pair<T>(of.du, of.dg);
  uint16_t* to = static_cast<uint16_t*>(b.chunks) + in.place;
  to[0] = pair, to[kListNeurons * kChunk] = pair >> 16, to[2 * kListNeurons * kChunk] = in.hidden;
  return pair;
}

// Turns the dh of a task's kept values into du and dg: those in registers in one batch of reads, then any further ones.
template <typename T>
__device__ __forceinline__ void make_pairs(const Backward& b, Shared& s, const UpTask& task, TaskValues& values,
                                           float l1_scale) {
  const int mine = values.first + threadIdx.x;
  Ingredients in[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (mine + i * kConsumers < values.end) in[i].read(b, mine + i * kConsumers);
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (mine + i * kConsumers < values.end) {
      values.place[i] = TaskValues::place_of(task, in[i].position);
      values.pair[i] = make_pair<T>(b, s, task, in[i], values.place[i], l1_scale);
    }
#pragma unroll 1
  for (int value = mine + kHeld * kConsumers; value < values.end; value += 4 * kConsumers) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (value + i * kConsumers < values.end) in[i].read(b, value + i * kConsumers);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (value + i * kConsumers < values.end)
        make_pair<T>(b, s, task, in[i], TaskValues::place_of(task, in[i].position), l1_scale);
  }
}

// Which of `panels_of_rows` is the first one of du (0) or dg (1) of a block.
__device__ __forceinline__ int64_t first_panel(const Backward& b, int block, int which) {
  return (static_cast<int64_t>(block) * 2 + which) * b.panels;
}

// Whether a pass has no products of this kind; `compact/` has another answer.
__device__ __forceinline__ bool needs_no_products(const Backward&) { return false; }

// Sends the panels of the staging tile to du (0) or dg (1) of the block.
template <typename Pass>
__device__ __forceinline__ void send_panels(const Pass& b, Shared& s, const UpTask& task, int which) {
  fence_async_proxy();
  named_sync<kConsumers>(kDhBarrier);
  if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < task.panels) {
    const int panel = threadIdx.x / 32;
    const int64_t to = first_panel(b, task.block, which) + task.panel + panel;
    bulk_store(static_cast<unsigned char*>(b.panels_of_rows) + to * kPanelBytes, s.staging + panel * kPanelBytes,
               kPanelBytes);
    bulk_commit();
  }
}

// Waits until panels that were sent may be overwritten.
__device__ __forceinline__ void wait_for_sent() {
  if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
  named_sync<kConsumers>(kDhBarrier);
}

template <typename T, typename Pass>
__device__ __forceinline__ void consume_dh(const Ffn& f, const Pass& b, Shared& s, const Consumer& c,
                                           const UpTasks& tasks, int steps) {
  Ring ring;
  float d[128];
  const float l1_scale = *b.l1_scale;
  each_up_task(f, tasks, [&](const UpTask& task) {
    TaskValues values(b, task);
    const auto run = [&]<int kPanels>() {
      multiply<T, 64 * kPanels, 0, 1>(d, s, ring, steps, !task.stays, c, [&] { values.prefetch(b); });
      wait_for_sent();
      stage_dh<T, kPanels>(d, s, c);
    };
    switch (task.panels) {
      case 1:
        run.template operator()<1>();
        break;
      case 2:
        run.template operator()<2>();
        break;
      case 3:
        run.template operator()<3>();
        break;
      default:
        run.template operator()<4>();
    }
    named_sync<kConsumers>(kDhBarrier);
    make_pairs<T>(b, s, task, values, l1_scale);
    named_sync<kConsumers>(kDhBarrier);
    for (int i = threadIdx.x; i < task.panels * (kPanelBytes / 16); i += kConsumers)
      reinterpret_cast<uint4*>(s.staging)[i] = make_uint4(0, 0, 0, 0);
    named_sync<kConsumers>(kDhBarrier);
    values.put(b, s, task, 0);
    send_panels(b, s, task, 0);
    wait_for_sent();
    values.put(b, s, task, 1);  // dg replaces du, and the rest stays zero
    send_panels(b, s, task, 1);
  });
  if (c.lane == 0) bulk_wait<0>();
}

// f: as for `up`, with dy for x, Wd for Wu, and the tasks of this pass.
template <typename T, typename Pass>
__global__ void __launch_bounds__(kThreads, 1)
    dh(const __grid_constant__ CUtensorMap dy_map, const __grid_constant__ CUtensorMap w_map,
       const __grid_constant__ Ffn f, const __grid_constant__ Pass b) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  if (threadIdx.x == kConsumers) prefetch_map(&dy_map), prefetch_map(&w_map);
  begin_ring(s);
  let_next_launch();
  wait_for_launches();
  if (needs_no_products(b)) return;
  const UpTasks tasks(f);
  const int steps = (f.d_model + kTileK - 1) / kTileK;
  if (threadIdx.x >= kConsumers) {
    registers_down<kProducerRegisters>();
    produce_up<T>(dy_map, w_map, f, s, tasks, steps);
  } else {
    registers_up<kConsumerRegisters>();
    const Consumer c = Consumer::here();
    consume_dh<T>(f, b, s, c, tasks, steps);
  }
}

// Launches the product dy w_down^T: it is read as that of a forward pass whose up weights are the down weights.
template <typename T, typename Pass>
void launch_dh_of(const Pass& b, cudaStream_t stream) {
  Ffn f{};
  f.rows = b.rows, f.d_model = b.d_model, f.d_ff = b.d_ff, f.blocks = b.blocks, f.panels = b.panels;
  f.x = b.dy, f.w_up = b.w_down;
  f.order = b.kept.order, f.unions = b.kept.unions, f.union_sizes = b.kept.union_sizes;
  f.tasks = b.tasks, f.row_sums = b.task_count - f.rows;  // `up` reads their number from there
  const auto dy = tensor_map<T>(f.x, f.rows, f.d_model, kTileM);
  const auto w = tensor_map<T>(f.w_up, f.d_ff, f.d_model, kPanelColumns);
  launch_overlapping(dh<T, Pass>, std::min(multiprocessors(), f.blocks * f.panels), kThreads, kSharedBytes, 1, stream,
                     dy, w, f, b);
}

}  // namespace twell::hopper
