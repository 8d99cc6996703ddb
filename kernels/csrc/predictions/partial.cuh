// Sums over some of a row's logits, from which loss and entropy follow, of values however great: all are relative to
// the greatest of them.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace twell::predictions {

struct Partial {
  float most = -INFINITY;  // the greatest x
  float sum = 0.f;         // of e^(x - most)
  float weighted = 0.f;    // of (x - most) e^(x - most)

  // Makes the sums relative to a greater value.
  __device__ __forceinline__ void raise(float other) {
    if (sum > 0.f) {
      const float by = most - other, factor = expf(by);
      weighted = factor > 0.f ? (weighted + by * sum) * factor : 0.f, sum *= factor;
    }
    most = other;
  }
  // Adds a value that is at most `most`. What -inf rules out adds nothing; NaN makes the sums NaN.
  __device__ __forceinline__ void add(float x) {
    const float below = x - most, term = expf(below);
    if (x == -INFINITY) return;
    sum += term;
    if (term > 0.f) weighted += below * term;
  }
  __device__ __forceinline__ void merge(Partial other) {
    if (other.most > most)
      raise(other.most);
    else if (most > other.most)
      other.raise(most);
    sum += other.sum, weighted += other.weighted;
  }
  __device__ __forceinline__ float loss(float x) const { return most + logf(sum) - x; }
  __device__ __forceinline__ float entropy() const { return logf(sum) - weighted / sum; }
};

}  // namespace twell::predictions
