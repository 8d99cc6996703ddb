// One CTA takes one row, which it reads once: a histogram of the upper bits of what fires tells where the k-th greatest
// is, a second one, of the lower bits there, which it is. Bits of sizes are in the order of the sizes.
#include "common/launch.cuh"
#include "strongest/strongest.h"

namespace twell::strongest {

namespace {

constexpr int kThreads = 256;
constexpr int kLowBits = 7, kUpper = 1 << (15 - kLowBits), kLower = 1 << kLowBits;  // bins of either histogram

constexpr int kSize = 0x7fff;  // bits of a value without its sign

struct Found {
  int bin, k;  // where the k-th greatest of all is; which of the bin's it is
};

// Returns the bin of the k-th greatest, of so many bins in the order of values, k from 1 to what they hold. By a warp.
template <int kBins>
__device__ __forceinline__ Found find(const int* bins, int k) {
  constexpr int kEach = kBins / 32;
  // A lane has kEach bins, the first lane the greatest.
  const int lane = threadIdx.x % 32, top = kBins - 1 - kEach * lane;
  int mine = 0;
  for (int i = 0; i < kEach; ++i) mine += bins[top - i];
  int upto = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  const int owner = __ffs(__ballot_sync(~0u, upto >= k)) - 1;
  Found found{top, k - (upto - mine)};
  if (lane == owner)
    while (found.k > bins[found.bin]) found.k -= bins[found.bin--];
  return {__shfl_sync(~0u, found.bin, owner), __shfl_sync(~0u, found.k, owner)};
}

// Calls one(bits of a value) for each of a row's.
template <typename One>
__device__ __forceinline__ void each(const uint4& unit, One one) {
  for (const uint32_t pair : {unit.x, unit.y, unit.z, unit.w}) one(pair & 0xffffu), one(pair >> 16);
}

__global__ void __launch_bounds__(kThreads)
    keep_strongest(const uint4* hidden, uint4* left, int units, float share, uint32_t least) {
  extern __shared__ uint4 row[];
  __shared__ int upper[kUpper], lower[kLower];
  __shared__ Found found;
  __shared__ uint32_t kept;  // the bits of the least size that stays
  __shared__ int total;      // firings
  const int thread = threadIdx.x;
  hidden += static_cast<int64_t>(blockIdx.x) * units, left += static_cast<int64_t>(blockIdx.x) * units;
  for (int i = thread; i < kUpper; i += kThreads) upper[i] = 0;
  for (int i = thread; i < kLower; i += kThreads) lower[i] = 0;
  if (thread == 0) total = 0;
  __syncthreads();
  int fired = 0;
  for (int i = thread; i < units; i += kThreads) {
    row[i] = hidden[i];
    each(row[i], [&](uint32_t bits) {
      if ((bits & kSize) > least) atomicAdd(&upper[(bits & kSize) >> kLowBits], 1), ++fired;
    });
  }
  fired = __reduce_add_sync(~0u, fired);
  if (thread % 32 == 0 && fired > 0) atomicAdd(&total, fired);
  __syncthreads();
  if (const int k = static_cast<int>(ceilf(__fmul_rn(share, static_cast<float>(total)))); k > 0) {
    if (thread < 32) {
      const Found first = find<kUpper>(upper, k);
      if (thread == 0) found = first;
    }
    __syncthreads();
    for (int i = thread; i < units; i += kThreads)
      each(row[i], [&](uint32_t bits) {
        const uint32_t size = bits & kSize;
        if (size > least && static_cast<int>(size >> kLowBits) == found.bin) atomicAdd(&lower[size % kLower], 1);
      });
    __syncthreads();
    if (thread < 32) {
      const Found second = find<kLower>(lower, found.k);
      if (thread == 0) kept = max(least + 1, static_cast<uint32_t>(found.bin << kLowBits | second.bin));
    }
  } else if (thread == 0) {
    kept = kSize + 1;
  }
  __syncthreads();
  const auto stays = [&](uint32_t pair) {
    return ((pair & kSize) >= kept ? pair & 0xffffu : 0) | ((pair >> 16 & kSize) >= kept ? pair & 0xffff0000u : 0);
  };
  for (int i = thread; i < units; i += kThreads) {
    const uint4 unit = row[i];
    left[i] = make_uint4(stays(unit.x), stays(unit.y), stays(unit.z), stays(unit.w));
  }
}

}  // namespace

void launch(const void* hidden, void* left, int64_t rows, int columns, float share, int least, void* stream) {
  const int units = columns / 8;
  if (rows > 0 && units > 0)
    twell::launch(keep_strongest, static_cast<unsigned>(rows), kThreads, units * 16, static_cast<cudaStream_t>(stream),
                  static_cast<const uint4*>(hidden), static_cast<uint4*>(left), units, share,
                  static_cast<uint32_t>(least));
}

}  // namespace twell::strongest
