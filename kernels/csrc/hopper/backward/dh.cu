#include "hopper/backward/dh.cuh"

namespace twell::hopper {

template <>
void launch_dh<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_dh_of<TWELL_T>(b, stream);
}

}  // namespace twell::hopper
