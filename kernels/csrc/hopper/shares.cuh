// How the down product is shared out among CTAs. A task is a block's product for 256 outputs, of as many steps as its union asks.
//
// Of many blocks, CTAs take whole tasks in turns. Of fewer, those seldom come out even: the steps of all tasks, laid end to end, are
// cut into equal shares. The CTA that has a task's last steps owns it, and adds what others leave of the rest in their order, so that
// a sum has one order. What a CTA leaves is the first that it does, and CTAs wait only for those before them in the grid: none waits
// for one that has not begun.
//
// A task is laid from its last step to its first, though it runs from its first to its last: so all CTAs begin at the first steps of
// some task, and where a share is about as long as a task, its second piece, the last steps of another, goes on about where the first
// has come to. CTAs read the same steps of weights and hidden state at the same time.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kShareBlocks = 256;  // up to so many, shares; of more, blocks that follow each other shall meet in L2
constexpr int kTaskSteps = 4;      // what a task takes beside its steps, in steps
constexpr int kCutSteps = 8;       // what a cut takes, likewise: sums that are left and fetched
constexpr int kLeastSteps = 4;     // of a task that is cut, on either side

// How many tasks a block has.
__host__ __device__ __forceinline__ int down_tasks(const Ffn& f) { return (f.d_model + kTileN - 1) / kTileN; }

__device__ __forceinline__ int steps_of(int signed_size) { return (abs(signed_size) + kTileK - 1) / kTileK; }

// Of a task its last `upto` steps, or all, but for the last `without`.
struct Piece {
  static constexpr int kAll = 1 << 30;
  int block, outputs, without = 0, upto = kAll;
};

struct Position {
  int task, step;  // task: every block for the first 256 outputs, then for the next; steps from its end
};

// In shared memory.
struct SharesMemory {
  int before[kShareBlocks + 1];  // what the blocks before each take for 256 outputs
  int weights[kParts + 1];       // what comes before each share
  Position starts[kParts + 1];   // where each share begins, and the one before it ends
};

class Shares {
 public:
  // By all threads, more than there are shares.
  __device__ __forceinline__ Shares(const Ffn& f, SharesMemory& memory) : m_(memory), blocks_(f.blocks), tasks_(f.blocks * down_tasks(f)) {
    if (in_turns()) return;
    if (threadIdx.x < 32) {
      int sum = 0;
      for (int block0 = 0; block0 < blocks_; block0 += 32) {
        const int block = block0 + threadIdx.x, mine = block < blocks_ ? steps_of(__ldcg(f.union_sizes + block)) + kTaskSteps : 0;
        int upto = mine;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          const int other = __shfl_up_sync(~0u, upto, lanes);
          if (threadIdx.x >= lanes) upto += other;
        }
        if (block < blocks_) m_.before[block] = sum + upto - mine;
        sum += __shfl_sync(~0u, upto, 31);
      }
      if (threadIdx.x == 0) m_.before[blocks_] = sum;
    }
    __syncthreads();
    const int share = threadIdx.x, fair = m_.before[blocks_] * down_tasks(f) / ctas();
    if (share <= ctas()) find(f, share, false);
    __syncthreads();
    if (__syncthreads_or(share < ctas() && m_.weights[share + 1] - m_.weights[share] > fair + kCutSteps)) {
      if (share <= ctas()) find(f, share, true);
      __syncthreads();
    }
  }

  __device__ __forceinline__ int ctas() const { return gridDim.x; }
  __device__ __forceinline__ int index() const { return gridDim.x - 1 - blockIdx.x; }  // of this CTA's share

  // How many pieces this CTA takes.
  __device__ __forceinline__ int count() const {
    if (in_turns()) return tasks_ / ctas() + (turn(tasks_ / ctas()) < tasks_);
    return to().task - from().task + (to().step > 0);
  }
  // The i-th of them; past the last, all of some task, so that whoever reads ahead finds its first steps.
  __device__ __forceinline__ Piece piece(int i) const {
    if (in_turns()) {
      const int outputs = tasks_ / blocks_, task = min(turn(i), tasks_ - 1);
      return {task / outputs, task % outputs};
    }
    const int task = min(from().task + i, tasks_ - 1);
    return {task % blocks_, task / blocks_, i == 0 ? from().step : 0, task == to().task && to().step > 0 ? to().step : Piece::kAll};
  }
  // Calls add(share) for every other share in which this CTA's last task goes on.
  template <typename Add>
  __device__ __forceinline__ void each_further(Add add) const {
    for (int share = index() + 1; m_.starts[share].task == to().task && m_.starts[share].step > 0; ++share)
      if (m_.starts[share + 1].task != to().task || m_.starts[share + 1].step != m_.starts[share].step) add(share);
  }

 private:
  __device__ __forceinline__ const Position& from() const { return m_.starts[index()]; }
  __device__ __forceinline__ const Position& to() const { return m_.starts[index() + 1]; }
  __device__ __forceinline__ bool in_turns() const { return blocks_ > kShareBlocks; }
  // Forth and back, as tasks become shorter.
  __device__ __forceinline__ int turn(int round) const {
    return round * ctas() + static_cast<int>(round % 2 ? ctas() - 1 - blockIdx.x : blockIdx.x);
  }
  // Where a share begins: where an equal one would, or where the task nearest to that does.
  __device__ __forceinline__ void find(const Ffn& f, int share, bool cut) {
    const int round = m_.before[blocks_], total = round * down_tasks(f);
    const int at = total / ctas() * share + min(share, total % ctas()), outputs = at / round, rest = at % round;
    int block = 0;
    for (int jump = kShareBlocks / 2; jump > 0; jump /= 2)
      if (block + jump < blocks_ && m_.before[block + jump] <= rest) block += jump;
    const int into = rest - m_.before[block], steps = m_.before[block + 1] - m_.before[block] - kTaskSteps;
    const bool cuts = cut && into >= kLeastSteps && into <= steps - kLeastSteps, next = !cuts && 2 * into > steps;
    m_.starts[share] = {outputs * blocks_ + block + next, cuts ? into : 0};
    m_.weights[share] = outputs * round + m_.before[block + next];
  }

  SharesMemory& m_;
  int blocks_, tasks_;
};

}  // namespace twell::hopper
