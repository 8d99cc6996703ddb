// Zeros where the gate product adds. A kernel, as what follows a memset in a stream does not overlap it.
#pragma once

#include "hopper/tma_launch.cuh"

namespace twell::hopper {

static __global__ void __launch_bounds__(1024) clear(uint32_t* words, int many) {
  let_next_launch();
  wait_for_launches();
  for (int i = blockIdx.x * 1024 + threadIdx.x; i < many; i += gridDim.x * 1024) words[i] = 0;
}

inline void launch_clear(uint32_t* words, int many, cudaStream_t stream) {
  launch_overlapping(clear, std::clamp(many / 1024, 1, 32), 1024, 0, 1, stream, words, many);
}

}  // namespace twell::hopper
