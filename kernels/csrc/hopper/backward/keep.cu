#include "hopper/backward/keep.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_keep<TWELL_T>(const Ffn& f, const Kept& kept, const uint8_t* counted, cudaStream_t stream) {
  launch_overlapping(keep<TWELL_T>, f.blocks * kKeepCtas, kKeepThreads, keep_shared_bytes(f), kKeepCtas, stream, f, kept, counted);
}

}  // namespace twell::hopper
