// What the launchers share: tensor maps, and launches that overlap.
#pragma once

#include "common/launch.cuh"
#include "hopper/gemm.cuh"

namespace twell::hopper {

// The driver makes tensor maps and needs a context. The runtime creates a thread's context at its first call that needs
// one, which may be this one if all memory comes from torch's cache.
inline void have_context() {
  thread_local const bool once = [] {
    int device;
    check(cudaGetDevice(&device), "device");
    check(cudaSetDevice(device), "context");
    return true;
  }();
  static_cast<void>(once);
}

inline CUtensorMap encode_map(CUtensorMapDataType type, const void* matrix, int rank, const cuuint64_t* sizes,
                              const cuuint64_t* strides, const cuuint32_t* box, bool swizzled) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  have_context();
  CUtensorMap map;
  const cuuint32_t every[] = {1, 1, 1};
  const CUresult result =
      encode(&map, type, rank, const_cast<void*>(matrix), sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("tensor map: the driver answers " + std::to_string(result));
  return map;
}

template <typename T>
constexpr CUtensorMapDataType kMapType =
    std::is_same_v<T, __nv_bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// A map of a row-major matrix [height, width] of T, copied in boxes of [box_height, 64] with zeros outside, which are
// 128-byte swizzled in shared memory, or laid out as in global memory.
template <typename T>
CUtensorMap tensor_map(const void* matrix, int height, int width, int box_height, bool swizzled = true) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height)},
                   strides[] = {sizes[0] * sizeof(T)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_height)};
  return encode_map(kMapType<T>, matrix, 2, sizes, strides, box, swizzled);
}

// The same matrix, swizzled, in boxes of `tiles` such boxes that are consecutive in k. The box is at (0, row, tile); if
// the width is no multiple of 64, boxes have one each, at (k, row, 0).
template <typename T>
CUtensorMap tiles_map(const void* matrix, int height, int width, int box_height, int tiles) {
  const bool even = width % 64 == 0;
  const cuuint64_t columns = even ? 64 : width, row = width * sizeof(T);
  const cuuint64_t sizes[] = {columns, static_cast<cuuint64_t>(height), even ? width / columns : 1};
  const cuuint64_t strides[] = {row, even ? columns * sizeof(T) : row * height};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_height), even ? static_cast<cuuint32_t>(tiles) : 1};
  return encode_map(kMapType<T>, matrix, 3, sizes, strides, box, true);
}

// `hidden` for the middle rows, [blocks][panels * 64 neurons][128 rows], in boxes of 64 rows of `neurons`, swizzled.
template <typename T>
CUtensorMap hidden_map(const Ffn& f, int neurons) {
  const cuuint64_t columns = static_cast<cuuint64_t>(f.panels) * kPanelColumns, row = kBlockRows * sizeof(T);
  const cuuint64_t sizes[] = {kBlockRows, columns, static_cast<cuuint64_t>(f.blocks)}, strides[] = {row, row * columns};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(neurons), 1};
  return encode_map(kMapType<T>, f.hidden, 3, sizes, strides, box, true);
}

// Returns how many clusters of that many CTAs of the kernel run at once.
template <typename... Parameters>
int clusters_at_once(void (*kernel)(Parameters...), int threads, int shared, int cluster) {
  allow_shared(kernel, shared);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = cluster, config.blockDim = threads, config.dynamicSmemBytes = shared;
  config.attrs = &attribute, config.numAttrs = 1;
  int count;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "clusters");
  return count;
}

// Returns what ask() says of the current device; each thread asks once for each device and each type of `ask`.
template <typename Ask>
const auto& of_this_device(Ask ask) {
  thread_local std::map<int, decltype(ask())> known;
  int device;
  check(cudaGetDevice(&device), "device");
  const auto found = known.find(device);
  return found != known.end() ? found->second : known[device] = ask();
}

// Launches in clusters of that many CTAs. The kernel may start before the one before it in the stream has ended, and
// waits for that itself. kBesideOthers: as in allow_shared
template <bool kBesideOthers = false, typename... Parameters, typename... Arguments>
void launch_overlapping(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, int cluster,
                        cudaStream_t stream, const Arguments&... arguments) {
  allow_shared(kernel, shared, kBesideOthers);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "launch");
}

}  // namespace twell::hopper
