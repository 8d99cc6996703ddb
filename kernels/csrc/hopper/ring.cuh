// What the kernels for fewer rows share: a ring of stages of any size and number, and the product over the stages.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

// A ring of stages in shared memory, and a thread's position in it.
struct Stages {
  unsigned char* base;
  uint64_t *full, *empty;
  int count, bytes;
  uint32_t phase;
  int at = 0;
  __device__ __forceinline__ unsigned char* here() const { return base + at * bytes; }
  __device__ __forceinline__ void next() {
    if (++at == count) at = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int stages) {  // by at most `count`
    if ((at += stages) >= count) at -= count, phase ^= 1;
  }
};

// Writes the neurons from `neuron` on whose bits are set in `fires`, of 16, to a list from its at-th entry on, as far
// as they fit; returns the entry after them. All 16 are written as two words.
__device__ __forceinline__ int list_sixteen(uint16_t* list, int size, int at, uint32_t fires, int neuron) {
  if (fires == 0xffff && at % 8 == 0 && at >= 0 && at + 16 <= size) {
    const uint32_t pair = neuron * 0x10001u + 0x10000u;
    uint4* to = reinterpret_cast<uint4*>(list + at);
    to[0] = make_uint4(pair, pair + 0x20002u, pair + 0x40004u, pair + 0x60006u);
    to[1] = make_uint4(pair + 0x80008u, pair + 0xa000au, pair + 0xc000cu, pair + 0xe000eu);
    return at + 16;
  }
  for (uint32_t left = fires; left; left &= left - 1, ++at)
    if (static_cast<unsigned>(at) < static_cast<unsigned>(size)) list[at] = neuron + __ffs(left) - 1;
  return at;
}

// Arrives for this many threads of this warp, which has waited for a stage that the copy engine fills. A thread that
// waits for a stage in each round must be among the arrivals that make it full: a late thread would find it freed once
// more, and wait for a round that never comes.
__device__ __forceinline__ void arrive_as_warp(uint64_t* full, uint32_t arrivals) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive_for(full, arrivals);
}

// Whether a stage's 64 neurons from the k0-th of a list on are consecutive, so that the copy engine can copy them at
// once.
__device__ __forceinline__ bool is_run(const uint16_t* list, int k0, int size) {
  return k0 + kTileK <= size && list[k0 + kTileK - 1] - list[k0] == kTileK - 1;
}

// Calls `products(stage)` for `stages` stages, each once ready(stage, phase) returns; the products of one stage are
// always in flight. They are issued one after the other, and narrow ones end as fast as the code between them runs, so
// that code is short. release(stage) is called by the lanes that free stages, once products are done, for stages that
// are filled again, `further` of them for others: each thread that is signalled has yet to wait, so a CTA may end after
// that.
template <typename Products, typename Ready, typename Release>
__device__ __forceinline__ void stream(Stages& s, int stages, Products products, Ready ready, bool gives_back,
                                       Release release, int further = 0) {
  const int last = uniform(stages) - 1, count = uniform(s.count);
  const uint32_t again = gives_back ? max(last + 1 + further - count, 0) : 0;  // stages that are filled again
  int at = uniform(s.at), before = 0;
  uint32_t phase = uniform(s.phase);
#pragma unroll 1
  for (int i = -1; i < last; ++i) {  // stages that are done
    ready(at, phase);
    wgmma_fence();
    products(at);
    wgmma_commit();
    wgmma_wait<1>();
    if (static_cast<uint32_t>(i) < again) release(before);
    before = at;
    if (++at == count) at = 0, phase ^= 1;
  }
  wgmma_wait<0>();
  if (static_cast<uint32_t>(last) < again) release(before);
  s.at = at, s.phase = phase;
}

// D[64 x kN] += A B^T over stages, of each of which this warpgroup takes kSteps times 16 of k, with A and B at their
// offsets. kByNeuron: both operands are [k][64]; otherwise [64][k] and [kN][k].
template <typename T, int kN, int kSteps, int kByNeuron, int kSize, typename Ready, typename Release>
__device__ __forceinline__ void multiply(float (&d)[kSize], Stages& s, int stages, int a_at, int b_at, Ready ready,
                                         bool gives_back, Release release, int further = 0) {
  constexpr uint32_t kStep = kByNeuron ? 2048 / 16 : 32 / 16;
  const uint32_t base = smem_address(s.base), each = uniform(s.bytes / 16);
  const Operand a(uniform(base + a_at), 8192, 1024), b(uniform(base + b_at), 8192, 1024);
  const auto products = [&](int stage) {
    const uint64_t a_here = a.at(stage * each), b_here = b.at(stage * each);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) wgmma<T, kN, kByNeuron, kByNeuron>(d, a_here + k * kStep, b_here + k * kStep, 1);
  };
  stream(s, stages, products, ready, gives_back, release, further);
}

// The same for kPieces times 64 rows, one after the other, with operands by rows: each 16 of k of B is multiplied with
// all of them in turn.
template <typename T, int kN, int kPieces, int kSize, typename Ready, typename Release>
__device__ __forceinline__ void multiply_pieces(float (&d)[kPieces][kSize], Stages& s, int stages, int a_at, int b_at,
                                                Ready ready, bool gives_back, Release release, int further = 0) {
  constexpr uint32_t kPiece = 64 * kTileK * 2 / 16, kStep = 32 / 16;
  const uint32_t base = smem_address(s.base), each = uniform(s.bytes / 16);
  const Operand a(uniform(base + a_at), 8192, 1024), b(uniform(base + b_at), 8192, 1024);
  const auto products = [&](int stage) {
    const uint64_t a_here = a.at(stage * each), b_here = b.at(stage * each);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k)
#pragma unroll
      for (int p = 0; p < kPieces; ++p) wgmma<T, kN, 0>(d[p], a_here + k * kStep + p * kPiece, b_here + k * kStep, 1);
  };
  stream(s, stages, products, ready, gives_back, release, further);
}

}  // namespace twell::hopper
