#include "hopper/backward/compact/keep_whole.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

// kWhole: whether there is room for g and h; first: as in read_union
template <typename T, bool kWhole, typename... First>
__global__ void __launch_bounds__(kKeepThreads)
    keep(const __grid_constant__ Ffn f, const __grid_constant__ Kept k, const uint8_t* counted, First... first) {
  extern __shared__ uint32_t words_memory[];
  __shared__ float sums[kKeepWarps];
  __shared__ int listed, base, fired;
  let_next_launch();
  wait_for_launches();
  if (is_needless(f)) return;
  const int thread = threadIdx.x;
  const Keeping<T> keeping{f, k, counted, words_memory, &listed, &base, &fired};
  keeping.read_union(first...);
  bool whole = false;
  if constexpr (kWhole) whole = keeps_whole(keeping, first...);
  const bool left_out = whole || keeping.is_left_out(first...);
  left_out ? keeping.count_fires() : keeping.list_values();
  __syncthreads();  // and no warp diverges at the cluster's barrier
  cluster_sync();
  if (keeping.warp == 0 && !left_out) keeping.place_buckets();
  for (int i = thread; i < f.d_ff && !k.repeats(); i += kKeepThreads)
    if (keeping.fires[i] > 0) atomicAdd(k.fires + i, keeping.fires[i]);
  __syncthreads();
  cluster_sync();
  keeping.write_values(left_out ? kLeftOut : load_remote(&base, 0));
  float sum = 0.f;
  if constexpr (kWhole)
    sum = whole ? write_whole(keeping) : keeping.sum_hidden();
  else if (!k.repeats())
    sum = keeping.sum_hidden();
  if (keeping.lane == 0) sums[keeping.warp] = sum;
  __syncthreads();
  if (thread == 0 && !k.repeats()) {
    float total = 0.f;
    for (int i = 0; i < kKeepWarps; ++i) total += sums[i];
    k.l1_parts[blockIdx.x] = total;
  }
  __syncthreads();
  cluster_sync();  // no CTA ends while another may still read its counts
}

namespace {

constexpr int kRestoreThreads = 512;

// Copies what a forward pass kept to memory that has room for all values; nothing if it could not keep them all.
__global__ void __launch_bounds__(kRestoreThreads) restore(const Kept from, const Kept to, int starts) {
  let_next_launch();
  wait_for_launches();
  const int used = *from.used, units = (used + 7) / 8;  // of eight values
  if (used > from.capacity) return;
  const auto copy = [](uint16_t* target, const uint16_t* source, int unit) {
    reinterpret_cast<uint4*>(target)[unit] = reinterpret_cast<const uint4*>(source)[unit];
  };
  const int thread = blockIdx.x * kRestoreThreads + threadIdx.x, threads = gridDim.x * kRestoreThreads;
  for (int unit = thread; unit < units; unit += threads)
    copy(to.positions, from.positions, unit), copy(to.gates, from.gates, unit), copy(to.hidden, from.hidden, unit);
  for (int i = thread; i < starts; i += threads) to.starts[i] = from.starts[i];
}

}  // namespace

template <>
void launch_keep<TWELL_T>(const Ffn& f, const Kept& kept, const uint8_t* counted, cudaStream_t stream, int first) {
  const auto run = [&](auto kernel, auto... more) {
    launch_overlapping(kernel, f.blocks * kKeepCtas, kKeepThreads, keep_shared_bytes(f), kKeepCtas, stream, f, kept,
                       counted, more...);
  };
  if (first == 0)
    kept.whole != nullptr ? run(keep<TWELL_T, true>) : run(keep<TWELL_T, false>);
  else
    kept.whole != nullptr ? run(keep<TWELL_T, true, int>, first) : run(keep<TWELL_T, false, int>, first);
}

template <>
void launch_restore<TWELL_T>(const Backward& b, const Kept& kept, cudaStream_t stream) {
  launch_overlapping(restore, multiprocessors(), kRestoreThreads, 0, 1, stream, kept, b.kept,
                     b.blocks * (b.panels + 1));
}

}  // namespace twell::hopper
