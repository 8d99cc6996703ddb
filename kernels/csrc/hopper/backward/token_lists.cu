#include "hopper/backward/token_lists.cuh"

namespace twell::hopper {

template <>
void launch_token_lists<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_lists_of(b, stream);
  launch_overlapping(place_values, b.blocks + b.panels * kZeroSlices, kListThreads, b.panels * 32, 1, stream, b);
}

}  // namespace twell::hopper
