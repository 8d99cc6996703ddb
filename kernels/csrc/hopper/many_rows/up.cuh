// The up product over each block's union, and the hidden state: h = g > 0 ? g * (x Wu^T + b) : 0, in place of the
// gate's panels.
//
// A task is a block and up to 256 neurons of its union. Their rows of Wu are fetched by 16-byte copies that apply the
// swizzle themselves, and so are the block's rows of x; by tensor copies if the rows are consecutive, and the weights
// if the union is every neuron. The gate's panels arrive in the staging tile during the main loop, become the hidden
// state there, and leave in the same layout: as the images of shared memory that `down` multiplies. Tiles whose up
// product the gate's kernel has computed are not among the tasks.
#pragma once

#include "hopper/gather.cuh"
#include "hopper/up_epilogue.cuh"

namespace twell::hopper {

// The tasks of the plan. Those left after whole rounds of the CTAs are cut into smaller ones if they would leave most
// CTAs idle.
struct UpTasks {
  int whole, shift, total;  // each of those after the whole ones in 1 << shift
  __device__ __forceinline__ explicit UpTasks(const Ffn& f) {
    const int planned = static_cast<int>(f.row_sums[f.rows]), ctas = gridDim.x, left = planned % ctas;
    shift = 4 * left <= ctas ? 2 : 2 * left <= ctas ? 1 : 0;
    whole = planned - left, total = whole + (left << shift);
  }
  // The t-th task, from the plan; past the last, an empty one.
  __device__ __forceinline__ int2 planned(const Ffn& f, int t) const {
    return t < total ? reinterpret_cast<const int2*>(f.tasks)[min(t, whole) + (max(t - whole, 0) >> shift)] : int2{};
  }
};

struct UpTask {
  // The first panel, and how many: none if a task is cut into more shares than it has panels.
  int block, panel, panels;
  bool consecutive;  // the block's rows
  bool all, stays;   // the union is every neuron; and the gate values are in `spill`
  __device__ __forceinline__ UpTask(const UpTasks& tasks, int t, int2 planned) {
    block = planned.x, panel = planned.y / 32, panels = planned.y % 8;
    consecutive = planned.y & 8, all = planned.y & 16, stays = all && consecutive;
    const int cuts = 1 << tasks.shift, share = (panels + cuts - 1) >> tasks.shift,
              before = ((t - tasks.whole) & (cuts - 1)) * share;
    if (t >= tasks.whole) panel += before, panels = min(share, panels - before);
  }
  // How many of the task's places have a neuron of the union, of the first-th and every 16th from there. Past these the
  // list has neuron 0, and the gate no values.
  __device__ __forceinline__ int listed(const Ffn& f, int first) const {
    const int places = min(abs(f.union_sizes[block]) - panel * kPanelColumns, panels * kPanelColumns);
    return (places - first + 15) / 16;
  }
  __device__ __forceinline__ const uint16_t* list(const Ffn& f) const {
    return f.unions + (static_cast<int64_t>(block) * f.panels + panel) * kPanelColumns;
  }
};

// Calls work(task) for the tasks of this CTA. The plan's entry of a task is read while the task before runs.
template <typename Work>
__device__ __forceinline__ void each_up_task(const Ffn& f, const UpTasks& tasks, Work work) {
  int2 next = tasks.planned(f, blockIdx.x);
#pragma unroll 1
  for (int t = blockIdx.x; t < tasks.total; t += gridDim.x) {
    const UpTask task(tasks, t, next);
    next = tasks.planned(f, t + gridDim.x);
    if (task.panels > 0) work(task);
  }
}

constexpr int kHalf = kPanelBytes / 2;                     // bytes of a warpgroup's rows of a panel
constexpr int kPanelWeights = kPanelColumns * kTileK * 2;  // bytes of a stage

// Fills the ring with a task's steps if rows are consecutive and the union is every neuron. By a warp.
__device__ __forceinline__ void load_steps(const CUtensorMap& x_map, const CUtensorMap& w_map, Shared& s, Ring ring,
                                           const UpTask& task, int steps, int lane) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.next()) {
    uint64_t* full = &s.full[ring.stage];
    wait_as_warp(&s.empty[ring.stage], ring.phase);
    if (lane == 0) {
      barrier_expect(full, kABytes + task.panels * kPanelWeights);
      barrier_arrive_for(full, kProducers);  // for the threads that copy in other cases
      tma_load_2d(s.a[ring.stage], &x_map, full, step * kTileK, task.block * kTileM);
#pragma unroll 1
      for (int p = 0; p < task.panels; ++p)
        tma_load_2d(s.b[ring.stage] + p * kPanelWeights, &w_map, full, step * kTileK, (task.panel + p) * kPanelColumns);
    }
  }
}

// Requests the copy engine's part of one step of a task: consecutive rows by the producers' first thread, and if the
// union is every neuron the weights, each panel's by one lane of each warp.
__device__ __forceinline__ void request_step(const CUtensorMap& x_map, const CUtensorMap& w_map, Shared& s,
                                             const Ring& ring, const UpTask& task, int step, int warp, int thread) {
  uint64_t* full = &s.full[ring.stage];
  if (thread == 0) {
    barrier_expect(full, task.consecutive ? kABytes : 0);
    if (task.consecutive) tma_load_2d(s.a[ring.stage], &x_map, full, step * kTileK, task.block * kTileM);
  }
  if (const int p = kProducerWarps - 1 - warp; thread % 32 == 0 && task.all && p < task.panels) {
    barrier_expect_more(full, kPanelWeights);
    tma_load_2d(s.b[ring.stage] + p * kPanelWeights, &w_map, full, step * kTileK, (task.panel + p) * kPanelColumns);
  }
}

// Where in k a block's tasks that gather begin, to go round from there. Blocks fire much the same neurons, so CTAs that
// begin together would all request the same lines.
__device__ __forceinline__ int first_step_of(int block, int steps) { return uniform(block * 5 % steps); }

template <typename T>
__device__ __forceinline__ void produce_up(const CUtensorMap& x_map, const CUtensorMap& w_map, const Ffn& f, Shared& s,
                                           const UpTasks& tasks, int steps) {
  // Rows of a stage that a thread copies: one in 16.
  constexpr int kRows = kTileN / (kProducers / 8), kXRows = kTileM / (kProducers / 8);
  const int thread = threadIdx.x - kConsumers, warp = uniform(thread / 32), first = thread / 8, chunk = thread & 7;
  const T *x = static_cast<const T*>(f.x), *w = static_cast<const T*>(f.w_up);
  const uint32_t place = first * 128 + ((chunk ^ (first & 7)) << 4);
  Ring ring;
  ring.phase = 1;
  each_up_task(f, tasks, [&](const UpTask& task) {
    if (task.stays) {  // the copy engine fetches all of it; one warp issues the copies
      if (warp == 0) load_steps(x_map, w_map, s, ring, task, steps, thread);
      ring.skip(steps);
      named_sync<kProducers>(kProducerBarrier);  // no thread waits for a stage that was freed once before
      return;
    }
    const uint32_t pitch = f.d_model * sizeof(T);
    uint32_t offset[kRows], row[kXRows], there = 0;  // there: a bit for each of these rows
    const int listed = task.listed(f, first);        // weights of other places are not fetched
#pragma unroll
    for (int i = 0; i < kRows; ++i) offset[i] = !task.all && i < listed ? task.list(f)[first + 16 * i] * pitch : 0;
#pragma unroll
    for (int i = 0; i < kXRows; ++i) {
      const int at = task.consecutive ? f.rows : f.order[task.block * kTileM + first + 16 * i];
      row[i] = at < f.rows ? at : 0, there |= (at < f.rows) << i;
    }
    int step = first_step_of(task.block, steps);
#pragma unroll 1
    for (int left = steps; left > 0; --left, step = step + 1 < steps ? step + 1 : 0, ring.next()) {
      const int k = step * kTileK + chunk * 8;
      const bool inside = k < f.d_model;
      barrier_wait(&s.empty[ring.stage], ring.phase);
      request_step(x_map, w_map, s, ring, task, step, warp, thread);
      if (!task.all) {
        const uint32_t to = smem_address(s.b[ring.stage]) + place;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (i < listed) async_copy_16(to + i * 2048, bytes_on(w + (inside ? k : 0), offset[i]), inside);
      }
      if (!task.consecutive) {
        const uint32_t to = smem_address(s.a[ring.stage]) + place, from = inside ? there : 0;
#pragma unroll
        for (int i = 0; i < kXRows; ++i)
          async_copy_16(to + i * 2048, bytes_on(x + (inside ? k : 0), uint64_t{row[i]} * pitch), from >> i & 1);
      }
      async_arrive(&s.full[ring.stage]);
    }
  });
  async_wait();
}

// Requests the gate's values of a warp's panel into `half`, this warpgroup's rows of it in the staging tile: from
// `spill` if they stay there, else from `hidden`. By a warp; sees: whether this lane requests them, as the task has
// such a panel.
__device__ __forceinline__ void fetch_gate(const CUtensorMap& spill_map, Shared& s, const Consumer& c,
                                           const UpTask& task, unsigned char* half, unsigned char* hidden, bool sees) {
  if (c.lane != 0) return;
  bulk_wait_read<0>();  // the task before has left the staging tile
  barrier_expect(&s.staged[c.group], sees ? kHalf : 0);
  if (!sees) return;
  if (task.stays)
    tma_load_2d(half, &spill_map, &s.staged[c.group], (task.panel + c.warp) * kPanelColumns,
                task.block * kTileM + c.group * 64);
  else
    bulk_load(half, hidden, kHalf, &s.staged[c.group]);
}

// Marks the row at a position as not finite, if this is `real`.
__device__ __forceinline__ void mark_nonfinite(const Ffn& f, int position, bool real) {
  const int row = f.order[position];
  if (!real || row >= f.rows) return;
  f.finite[row] = 0;
  if (f.nnz != nullptr) f.nnz[row] = 0;
}

// Where to count the used products of the row at a position; null: nowhere.
__device__ __forceinline__ int* used_of(const Ffn& f, int position) {
  const int row = f.nnz_used != nullptr ? f.order[position] : f.rows;
  return row < f.rows ? f.nnz_used + row : nullptr;
}

template <typename T>
__device__ __forceinline__ void consume_up(const CUtensorMap& spill_map, const Ffn& f, Shared& s, const Consumer& c,
                                           const UpTasks& tasks, int steps) {
  Ring ring;
  uint32_t phase = 0;
  float d[128];
  // Consumers run the epilogue once, without effect, before there is anything to multiply: its instructions come from
  // memory the first time, which takes thousands of cycles.
  bool rehearsed = false;
  each_up_task(f, tasks, [&](const UpTask& task) {
    const bool sees = c.lane == 0 && c.warp < task.panels;  // each warp is responsible for one panel
    unsigned char* half = s.staging + c.warp * kPanelBytes + c.group * kHalf;
    unsigned char* hidden = hidden_panel(f, task.block, task.panel + c.warp) + c.group * kHalf;
    const auto fetch = [&] { fetch_gate(spill_map, s, c, task, half, hidden, sees); };
    const T* biases = static_cast<const T*>(f.b_up);
    const auto bias = [&](int column) { return static_cast<float>(biases[task.list(f)[column]]); };
    const auto run = [&]<int kPanels>() {
#pragma unroll 1
      for (int pass = rehearsed; pass < 2; ++pass) {
        const bool real = pass == 1;
        multiply<T, 64 * kPanels, 0, 1>(d, s, ring, real ? steps : 0, !task.stays, c, fetch);
        if (real) barrier_wait(&s.staged[c.group], phase), phase ^= 1;
        finish_up<T, kPanels>(
            d, s, c, biases != nullptr, bias,
            [&](int in_block) { mark_nonfinite(f, task.block * kTileM + in_block, real); },
            [&](int in_block) { return real ? used_of(f, task.block * kTileM + in_block) : nullptr; });
        fence_async_proxy();
        c.sync();
        if (sees && real) bulk_store(hidden, half, kHalf), bulk_commit();
      }
      rehearsed = true;
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
  });
  if (c.lane == 0) bulk_wait<0>();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
       const __grid_constant__ CUtensorMap spill_map, const Ffn f) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  if (threadIdx.x == 0) prefetch_map(&spill_map);
  if (threadIdx.x == kConsumers) prefetch_map(&x_map), prefetch_map(&w_map);
  begin_ring(s);
  wait_for_launches();
  // `down` reads the plan before its own wait: the plan is complete once this kernel has waited for it.
  let_next_launch();
  if (is_needless(f)) return;
  const UpTasks tasks(f);
  const int steps = (f.d_model + kTileK - 1) / kTileK;
  if (threadIdx.x >= kConsumers) {
    registers_down<kProducerRegisters>();
    produce_up<T>(x_map, w_map, f, s, tasks, steps);
  } else {
    registers_up<kConsumerRegisters>();
    const Consumer c = Consumer::here();
    consume_up<T>(spill_map, f, s, c, tasks, steps);
  }
}

}  // namespace twell::hopper
