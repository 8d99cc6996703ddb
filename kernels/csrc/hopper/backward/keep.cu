#include "hopper/backward/keep.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_keep<TWELL_T>(const Ffn& f, const Kept& kept, const uint8_t* counted, cudaStream_t stream, int first) {
  const auto run = [&](auto kernel, auto... more) {
    launch_overlapping(kernel, f.blocks * kKeepCtas, kKeepThreads, keep_shared_bytes(f), kKeepCtas, stream, f, kept, counted, more...);
  };
  if (first == 0)
    run(keep<TWELL_T>);
  else
    run(keep<TWELL_T, int>, first);
}

template <>
void launch_restore<TWELL_T>(const Backward& b, const Kept& kept, cudaStream_t stream) {
  launch_overlapping(restore, multiprocessors(), kRestoreThreads, 0, 1, stream, kept, b.kept, b.blocks * (b.panels + 1));
}

}  // namespace twell::hopper
