// From 65 to 2 048 rows: too many to take every row at once as fewer do, too few to fill the multiprocessors with tiles of 128 x 256
// and to pay for an order and a plan. Two launches that overlap.
//
// `mid_gate_up` gives a CTA 128 rows and 48 to 176 neurons, and for those of its neurons that any of its rows fires it takes the up
// product at once. `mid_down` goes over the union of a block of 128 rows, tile after tile of what they fired; where outputs are few, the
// CTAs of a cluster share out the union and add up in one order.
// What bounds both is what a multiprocessor takes in, about 40 bytes a cycle by the copy engine, multicast too, and half of that
// by threads' own copies.
//
// What they leave each other: in `hidden`, for each block, [panels * 64 neurons][128 rows], neurons of the block's union alone. In
// `unions`, for each block, `MidMarks`, and its counts in `tails`.
#pragma once

#include "hopper/stream.cuh"

namespace twell::hopper {

constexpr int kMidStages = 12;

// How many neurons a CTA takes of the gate and up products: what costs least in waves of CTAs, each of which reads its rows and its
// neurons' weights, at a rate that is the same on all multiprocessors, and has a part that is as long where it reads less.
inline int mid_width(const Ffn& f, int processors) {
  int best = 0, least = 0;
  for (const int width : {48, 96, 128, 176}) {
    const int ctas = (f.d_ff + width - 1) / width * f.blocks, cost = (ctas + processors - 1) / processors * (kBlockRows + width + 32);
    if (best == 0 || cost < least) best = width, least = cost;
  }
  return best;
}

// What a block's tiles say of it.
struct MidMarks {
  uint16_t* fired;   // [panels * 4], a bit a neuron
  uint32_t* broken;  // [tiles][4], a bit a row that is not finite
  uint8_t* counts;   // [tiles][128], how many fired
  __device__ __forceinline__ MidMarks(const Ffn& f, int block, int tiles) {
    fired = f.unions + static_cast<int64_t>(block) * f.panels * kPanelColumns;
    broken = reinterpret_cast<uint32_t*>(fired + f.panels * 4);
    counts = reinterpret_cast<uint8_t*>(f.tails) + static_cast<int64_t>(block) * tiles * kBlockRows;
  }
};

// Where a neuron's hidden state of a block's rows lies.
template <typename T>
__device__ __forceinline__ T* hidden_of(const Ffn& f, int block, int neuron) {
  return static_cast<T*>(f.hidden) + (static_cast<int64_t>(block) * f.panels * kPanelColumns + neuron) * kBlockRows;
}

// Four matrices of 8 x 8 from where a product's sums lie: lane 8 i + j gives the address of row j of matrix i, transposed of column j.
// No order is kept with other reads and writes: what is written is read after a barrier.
template <bool kTransposed>
__device__ __forceinline__ void store_fragments(void* smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)), "r"(a), "r"(b), "r"(c), "r"(d));
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)), "r"(a), "r"(b), "r"(c), "r"(d));
}

}  // namespace twell::hopper
