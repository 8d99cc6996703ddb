// Gradients of the biases: sums of du and dg over tokens, from the chunks of each group of 64 neurons, and of dy over
// rows.
//
// A cluster of eight CTAs for each group, or for 64 outputs, each with an equal part of the chunks or rows. The first
// CTA adds what the others have, in their order: same call, same bits.
#pragma once

#include "hopper/backward/weights.cuh"

namespace twell::hopper {

constexpr int kSumCtas = 8, kSumThreads = 512;
constexpr int kSlab = 64;  // outputs, or neurons, of a cluster: eight threads read 16 bytes each of them

// A float of another CTA's shared memory.
__device__ __forceinline__ float load_remote_float(const float* value, uint32_t cta) {
  float loaded;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(loaded) : "r"(remote_address(value, cta)) : "memory");
  return loaded;
}

// Adds the eight values of a unit of memory.
template <typename T>
__device__ __forceinline__ float sum_of(const uint4& unit) {
  const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
  float sum = 0.f;
#pragma unroll
  for (const uint32_t word : words) sum += half_of<T>(word, 0) + half_of<T>(word, 1);
  return sum;
}

template <typename T>
__device__ __forceinline__ void write_sum(void* to, int at, float sum, bool as_float) {
  if (as_float)
    static_cast<float*>(to)[at] = sum;
  else
    static_cast<T*>(to)[at] = static_cast<T>(sum);
}

// Adds the CTAs' sums of a value that each has at `own`. By the first CTA, once all have met.
__device__ __forceinline__ float add_ctas(const float* own) {
  float total = 0.f;
#pragma unroll
  for (int cta = 0; cta < kSumCtas; ++cta) total += load_remote_float(own, cta);
  return total;
}

template <typename Job>
__global__ void __launch_bounds__(kSumThreads) sum_neurons(const __grid_constant__ typename Job::Pass b) {
  using T = typename Job::Value;
  static_assert(kSumThreads == kListNeurons * kChunk * 2 / 16 && kSlab == kListNeurons);
  __shared__ float sums[2][kListNeurons];  // of du, of dg
  let_next_launch();
  wait_for_launches();
  const Job job{b};
  if (job.is_needless()) return;
  const int group = static_cast<int>(blockIdx.x) / kSumCtas, rank = cluster_rank(), thread = threadIdx.x,
            steps = job.steps(group);
  float du = 0.f, dg = 0.f;
#pragma unroll 4
  for (int step = steps * rank / kSumCtas; step < steps * (rank + 1) / kSumCtas; ++step) {
    const uint4* units = static_cast<const uint4*>(job.panel(group, 0, step, steps)) + thread;
    du += sum_of<T>(units[0]), dg += sum_of<T>(units[kSumThreads]);
  }
#pragma unroll
  for (int other = 1; other < 8; other *= 2)
    du += __shfl_xor_sync(~0u, du, other), dg += __shfl_xor_sync(~0u, dg, other);
  if (thread % 8 == 0) sums[0][thread / 8] = du, sums[1][thread / 8] = dg;
  __syncthreads();
  cluster_sync();
  if (rank == 0 && thread < 2 * kListNeurons) {
    const int which = thread / kListNeurons, r = thread % kListNeurons, neuron = job.neuron(group, r);
    void* const to = which == 0 ? b.d_b_up : b.d_b_gate;
    const float total = add_ctas(&sums[which][r]);
    if (neuron >= 0 && to != nullptr) write_sum<T>(to, neuron, total, b.float_weights);
  }
  __syncthreads();
  cluster_sync();  // no CTA ends while another may still read its sums
}

// Sums of a matrix's columns.
struct ColumnSums {
  const void* matrix;  // [rows, width]
  void* to;            // [width]
  int rows, width;
  bool as_float;          // whether `to` is float32
  const uint8_t* finite;  // [rows]: rows that count, or null: all
  const int* asked;       // null, or [1]: nothing is done if it is more than `most`
  int most;
};

template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_columns(const __grid_constant__ ColumnSums m) {
  constexpr int kRows = kSumThreads / 8;  // at a time
  __shared__ float sums[kSumThreads / 32][kSlab], of_cta[kSlab];
  let_next_launch();
  wait_for_launches();
  if (m.asked != nullptr && *m.asked > m.most) return;
  const int first = static_cast<int>(blockIdx.x) / kSumCtas * kSlab, rank = cluster_rank(), thread = threadIdx.x,
            part = thread % 8;
  const int end = static_cast<int>(static_cast<int64_t>(m.rows) * (rank + 1) / kSumCtas), column = first + 8 * part;
  float sum[8] = {};
#pragma unroll 4
  for (int row = static_cast<int>(static_cast<int64_t>(m.rows) * rank / kSumCtas) + thread / 8; row < end;
       row += kRows) {
    if (column >= m.width || (m.finite != nullptr && !m.finite[row])) continue;
    const uint4 unit =
        *reinterpret_cast<const uint4*>(static_cast<const T*>(m.matrix) + static_cast<int64_t>(row) * m.width + column);
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += half_of<T>(words[i / 2], i % 2);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 8), sum[i] += __shfl_xor_sync(~0u, sum[i], 16);
    if (thread % 32 < 8) sums[thread / 32][8 * part + i] = sum[i];
  }
  __syncthreads();
  if (thread < kSlab) {
    float total = 0.f;
    for (int warp = 0; warp < kSumThreads / 32; ++warp) total += sums[warp][thread];
    of_cta[thread] = total;
  }
  __syncthreads();
  cluster_sync();
  if (rank == 0 && thread < kSlab) {
    const float total = add_ctas(of_cta + thread);
    if (first + thread < m.width) write_sum<T>(m.to, first + thread, total, m.as_float);
  }
  __syncthreads();
  cluster_sync();
}

template <typename T>
void launch_column_sums(const ColumnSums& sums, cudaStream_t stream) {
  const int slabs = (sums.width + kSlab - 1) / kSlab;
  launch_overlapping(sum_columns<T>, slabs * kSumCtas, kSumThreads, 0, kSumCtas, stream, sums);
}

// groups: how many of the job's there are
template <typename Job>
void launch_neuron_sums(const typename Job::Pass& b, int groups, cudaStream_t stream) {
  launch_overlapping(sum_neurons<Job>, groups * kSumCtas, kSumThreads, 0, kSumCtas, stream, b);
}

}  // namespace twell::hopper
