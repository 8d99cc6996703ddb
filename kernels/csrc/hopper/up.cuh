// The up product over each block's union, and the hidden state: h = g > 0 ? g * (x Wu^T + b) : 0, in place of the gate's panels.
//
// A task is a block and up to 256 neurons of its union. Their rows of Wu come by 16-byte copies that do the swizzle by hand, and so do
// the block's rows of x; by tensor copies where the rows are consecutive, and the weights where the union is every neuron. The gate's
// panels arrive in the staging tile during the main loop, become the hidden state there, and leave as they came: as the images of
// shared memory that `down` multiplies.
#pragma once

#include "hopper/gather.cuh"

namespace twell::hopper {

// The tasks: those of the plan, but that what is left after whole rounds of the CTAs is cut where it would leave most of them idle.
struct UpTasks {
  int whole, cuts, total;
  __device__ __forceinline__ explicit UpTasks(const Ffn& f) {
    const int planned = f.tasks[0], ctas = gridDim.x, left = planned % ctas;
    cuts = 4 * left <= ctas ? 4 : 2 * left <= ctas ? 2 : 1;
    whole = planned - left, total = whole + left * cuts;
  }
};

struct UpTask {
  int block, panel, panels;  // first panel, and how many: none where a task is cut into more parts than it has panels
  bool consecutive;          // the block's rows
  bool all, stays;           // the union is every neuron; and the gate values are in `spill`
  // Past the last: of any task.
  __device__ __forceinline__ UpTask(const Ffn& f, const UpTasks& tasks, int t) {
    t = min(t, tasks.total - 1);
    const int late = max(t - tasks.whole, 0), part = late % tasks.cuts;
    const int2 task = reinterpret_cast<const int2*>(f.tasks)[1 + min(t, tasks.whole) + late / tasks.cuts];
    block = task.x, panel = task.y / 16, panels = task.y % 8, consecutive = task.y & 8;
    const int share = (panels + tasks.cuts - 1) / tasks.cuts, before = part * share;
    if (t >= tasks.whole) panel += before, panels = min(share, panels - before);
    const int size = abs(f.union_sizes[block]);
    all = size == f.d_ff, stays = f.union_sizes[block] < 0;
  }
  __device__ __forceinline__ const uint16_t* list(const Ffn& f) const {
    return f.unions + (static_cast<int64_t>(block) * f.panels + panel) * kPanelColumns;
  }
};

// Calls work(task) for the tasks of this CTA. A task is read while the one before it runs.
template <typename Work>
__device__ __forceinline__ void each_up_task(const Ffn& f, const UpTasks& tasks, Work work) {
  UpTask next(f, tasks, blockIdx.x);
  for (int t = blockIdx.x; t < tasks.total; t += gridDim.x) {
    const UpTask task = next;
    next = UpTask(f, tasks, t + gridDim.x);
    if (task.panels > 0) work(task);
  }
}

template <typename T>
__device__ __forceinline__ void produce_up(const CUtensorMap& x_map, const CUtensorMap& w_map, const Ffn& f, Shared& s, const UpTasks& tasks,
                                           int steps) {
  constexpr int kRows = kTileN / (kProducers / 8), kXRows = kTileM / (kProducers / 8);  // of a stage to a thread: one in 16
  const int thread = threadIdx.x - kConsumers, first = thread / 8, chunk = thread & 7;
  constexpr int kPanelWeights = kPanelColumns * kTileK * 2;                             // bytes of a stage
  const T *x = static_cast<const T*>(f.x), *w = static_cast<const T*>(f.w_up);
  const uint32_t place = first * 128 + ((chunk ^ (first & 7)) << 4);
  Ring ring;
  ring.phase = 1;
  each_up_task(f, tasks, [&](const UpTask& task) {
    uint32_t offset[kRows];  // in values
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      offset[i] = i < 4 * task.panels ? static_cast<uint32_t>(task.list(f)[first + 16 * i]) * f.d_model : 0;
    int row[kXRows];
#pragma unroll
    for (int i = 0; i < kXRows; ++i) row[i] = task.consecutive ? 0 : f.order[task.block * kTileM + first + 16 * i];
    for (int step = 0; step < steps; ++step, ring.next()) {
      const int k = step * kTileK + chunk * 8;
      barrier_wait(&s.empty[ring.stage], ring.phase);
      uint64_t* full = &s.full[ring.stage];
      if (thread == 0) {
        barrier_expect(full, task.consecutive ? kABytes : 0);
        if (task.consecutive) tma_load_2d(s.a[ring.stage], &x_map, full, step * kTileK, task.block * kTileM);
      }
      if (const int p = kProducerWarps - 1 - thread / 32; thread % 32 == 0 && task.all && p < task.panels) {  // a panel's to each warp
        barrier_expect_more(full, kPanelWeights);
        tma_load_2d(s.b[ring.stage] + p * kPanelWeights, &w_map, full, step * kTileK, (task.panel + p) * kPanelColumns);
      }
      if (!task.all) {
        const uint32_t to = smem_address(s.b[ring.stage]) + place;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (i < 4 * task.panels) async_copy_16(to + i * 2048, w + offset[i] + (k < f.d_model ? k : 0), k < f.d_model);
      }
      if (!task.consecutive) {
        const uint32_t to = smem_address(s.a[ring.stage]) + place;
#pragma unroll
        for (int i = 0; i < kXRows; ++i) {
          const bool inside = k < f.d_model && row[i] < f.rows;
          async_copy_16(to + i * 2048, x + (inside ? static_cast<int64_t>(row[i]) * f.d_model + k : 0), inside);
        }
      }
      async_arrive(full);
    }
  });
  async_wait();
}

template <typename T, int kPanels>
__device__ __forceinline__ void finish_up(float (&d)[128], const Ffn& f, Shared& s, const UpTask& task, const Consumer& c) {
  const T* bias = static_cast<const T*>(f.b_up);
  if (bias != nullptr) {
#pragma unroll
    for (int j = 0; j < 8 * kPanels; ++j) {
      const uint16_t* neuron = task.list(f) + 8 * j + 2 * (c.lane & 3);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = static_cast<float>(bias[neuron[e]]);
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
  }
  const Corner corner(c.lane);
  unsigned char* row = s.staging + (c.group * 64 + c.warp * 16 + corner.row) * 128;
  float peak[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 8 * kPanels; j += 2) {
    unsigned char* at = row + (j / 8) * kPanelBytes + ((((j & 7) + corner.chunk) ^ (corner.row & 7)) << 4);
    uint32_t pair[4];  // of columns 8 j and 8 j + 8, each for the thread's two rows
    sm80::load_matrices<false>(pair, smem_address(at));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float g0 = half_of<T>(pair[i], 0), g1 = half_of<T>(pair[i], 1);
      const float h0 = g0 > 0.f ? g0 * d[4 * j + 2 * i] : 0.f, h1 = g1 > 0.f ? g1 * d[4 * j + 2 * i + 1] : 0.f;
      peak[i % 2] = max_nan(peak[i % 2], max_nan(fabsf(h0), fabsf(h1)));
      pair[i] = round_pair<T>(h0, h1);
    }
    store_matrices(at, pair[0], pair[1], pair[2], pair[3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (!stays_finite<T>(peak[h])) {
      const int at = f.order[task.block * kTileM + c.row() + 8 * h];
      if (at < f.rows) f.finite[at] = 0;
    }
}

template <typename T>
__device__ __forceinline__ void consume_up(const CUtensorMap& spill_map, const Ffn& f, Shared& s, const Consumer& c, const UpTasks& tasks,
                                           int steps) {
  Ring ring;
  uint32_t phase = 0;
  float d[128];
  each_up_task(f, tasks, [&](const UpTask& task) {
    unsigned char* half = s.staging + c.group * (kPanelBytes / 2);  // this warpgroup's rows of each panel
    const auto hidden = [&](int p) { return hidden_panel(f, task.block, task.panel + p) + c.group * (kPanelBytes / 2); };
    const auto fetch = [&] {
      if (!c.leads()) return;
      bulk_wait_read<0>();  // the task before has left the staging tile
      barrier_expect(&s.staged[c.group], task.panels * (kPanelBytes / 2));
      for (int p = 0; p < task.panels; ++p)
        if (task.stays)
          tma_load_2d(half + p * kPanelBytes, &spill_map, &s.staged[c.group], (task.panel + p) * kPanelColumns,
                      task.block * kTileM + c.group * 64);
        else
          bulk_load(half + p * kPanelBytes, hidden(p), kPanelBytes / 2, &s.staged[c.group]);
    };
    const auto run = [&]<int kPanels>() {
      multiply<T, 64 * kPanels, 0, 1, true>(d, s, ring, steps, c, fetch);
      barrier_wait(&s.staged[c.group], phase);
      phase ^= 1;
      finish_up<T, kPanels>(d, f, s, task, c);
    };
    switch (task.panels) {
      case 1: run.template operator()<1>(); break;
      case 2: run.template operator()<2>(); break;
      case 3: run.template operator()<3>(); break;
      default: run.template operator()<4>();
    }
    fence_async_proxy();
    c.sync();
    if (c.leads()) {
      for (int p = 0; p < task.panels; ++p) bulk_store(hidden(p), half + p * kPanelBytes, kPanelBytes / 2);
      bulk_commit();
    }
  });
  if (c.leads()) bulk_wait<0>();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
       const __grid_constant__ CUtensorMap spill_map, const Ffn f) {
  extern __shared__ unsigned char raw[];
  Shared& s = aligned(raw);
  begin_ring(s);
  wait_for_launches();
  let_next_launch();  // `down` looks at the plan before its own wait: it is there for good once this has waited for it
  const UpTasks tasks(f);
  const int steps = (f.d_model + kTileK - 1) / kTileK;
  if (threadIdx.x >= kConsumers) {
    registers_down<kProducerRegisters>();
    produce_up<T>(x_map, w_map, f, s, tasks, steps);
  } else {
    registers_up<kConsumerRegisters>();
    const Consumer c{static_cast<int>(threadIdx.x) / 128, static_cast<int>(threadIdx.x) / 32 % 4, static_cast<int>(threadIdx.x) % 32};
    consume_up<T>(spill_map, f, s, c, tasks, steps);
  }
}

}  // namespace twell::hopper
