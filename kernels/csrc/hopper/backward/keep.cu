#include "hopper/backward/compact/keep_whole.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

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
