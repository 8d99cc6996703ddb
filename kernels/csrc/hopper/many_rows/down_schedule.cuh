// How the down product is divided among CTAs. A task is a block's product for 256 outputs; its steps follow from the
// size of the block's union.
//
// With many blocks, CTAs take whole tasks in turns. With fewer, those would rarely come out even: the steps of all
// tasks, laid end to end, are cut into equal shares. The CTA that has a task's last steps owns the task, and adds the
// sums that other CTAs leave for its other steps in order, so that a sum has one order. What a CTA leaves is the first
// piece of its share, and a CTA waits only for those before it in the grid: none waits for a CTA that has not begun.
//
// If all tasks have the same length, whole ones are taken in turns first, and one or two for each CTA are shared. CTAs
// then work on few blocks at a time, and a hidden state that has been read from memory stays in the L2 for all outputs.
//
// A task is laid from its last step to its first, though it runs from its first to its last. All CTAs thus begin at the
// first steps of a task; and if a share is about as long as a task, its second piece, the last steps of another task,
// continues about where the first piece has ended. CTAs then read the same steps of weights and hidden state at the
// same time.
//
// If all blocks run dense, a cluster of two CTAs takes two blocks for the same outputs, each CTA a block, and each
// fetches half of the weights for both: without that they wait for the L2. All of the above then goes by pairs of
// blocks and clusters. Of an odd number of blocks the last has no other: its tasks come last, and in each the cluster's
// CTAs take outputs of their own.
//
// Example: three CTAs; three blocks with one task each (d_model 256), whose unions take 10, 6 and 26 steps. Each task
// counts kTaskSteps more: 14, 10 and 30 are 54 in all, and an equal share is 18.
//   Share 1 would begin at 18, which is 4 into task 1 of 6 steps. That is too near its end to cut, so the share begins
//   with the nearest task, task 2.
//   Share 2 would begin at 36, which is 12 into task 2. By whole tasks it begins with task 2 too; if cut, 12 steps from
//   that task's end.
// By whole tasks the shares would take 24, 0 and 30. 30 is more than 18 + kCutSteps, so tasks are cut:
//   share 0 (CTA 2): tasks 0 and 1;   share 1 (CTA 1): the last 12 steps of task 2;   share 2 (CTA 0): its first 14
//   steps.
// Share 1 has the last steps and owns the task: it waits for CTA 0, which is earlier in the grid, and adds the sums
// that CTA 0 has left.
#pragma once

#include "common/bits.cuh"
#include "hopper/gemm.cuh"

namespace twell::hopper {

// up to this many blocks, equal shares; with more, consecutive blocks should meet in the L2
constexpr int kShareBlocks = 256;
constexpr int kDownCluster = 2;  // CTAs
constexpr int kTaskSteps = 4;    // what a task takes besides its steps, in steps
constexpr int kCutSteps = 8;     // what a cut takes, in steps: sums that are left and fetched
constexpr int kLeastSteps = 4;   // fewest steps on either side of a cut

// How many tasks a block has.
__host__ __device__ __forceinline__ int down_tasks(const Ffn& f) { return (f.d_model + kTileN - 1) / kTileN; }

__device__ __forceinline__ int steps_of(int signed_size) { return (abs(signed_size) + kTileK - 1) / kTileK; }

// The last `upto` steps of a task, or all of them, except for the last `without`.
struct Piece {
  static constexpr int kAll = 1 << 30;
  int block, outputs, without = 0, upto = kAll;
};

struct Position {
  // task: of those that are shared, every block for the first 256 outputs, then for the next ones; step: from its end
  int task, step;
};

// In shared memory.
struct SharesMemory {
  int sizes[kShareBlocks];         // as in f.union_sizes, of the blocks' unions
  int before[kShareBlocks + 1];    // what the blocks before each one take for 256 outputs
  int alike;                       // what every task takes; 0 if tasks differ
  bool dense;                      // whether all blocks run dense
  Position starts[2][kParts + 1];  // where each share begins and the one before it ends: by whole tasks, and cut
};

class Shares {
 public:
  // By all threads, of which there are more than shares.
  __device__ __forceinline__ Shares(const Ffn& f, SharesMemory& memory)
      : m_(memory), blocks_(f.blocks), outputs_(down_tasks(f)), tasks_(f.blocks * outputs_) {
    if (in_turns()) return;
    if (threadIdx.x < 32) {
      int sum = 0, least = 1 << 30, most = 0;
      bool dense = true;
#pragma unroll 1
      for (int block0 = 0; block0 < blocks_; block0 += 32) {
        const int block = block0 + threadIdx.x, size = block < blocks_ ? __ldcg(f.union_sizes + block) : 0;
        const int mine = block < blocks_ ? steps_of(size) + kTaskSteps : 0;
        const int upto = sum_upto(mine, threadIdx.x);
        if (block < blocks_) {
          m_.sizes[block] = size, m_.before[block] = sum + upto - mine;
          least = min(least, mine), most = max(most, mine), dense = dense && abs(size) == f.d_ff;
        }
        sum += __shfl_sync(~0u, upto, 31);
      }
      least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most), dense = __all_sync(~0u, dense);
      if (threadIdx.x == 0) m_.before[blocks_] = sum, m_.alike = least == most ? most : 0, m_.dense = dense;
    }
    __syncthreads();
    if (m_.dense) {
      const int single = blocks_ % kDownCluster;
      paired_ = true, blocks_ /= kDownCluster, tasks_ = blocks_ * outputs_ + single * ((outputs_ + 1) / kDownCluster);
    }
    if (m_.alike > 0) rounds_ = max(min(tasks_ / ctas() - 1, blocks_ * outputs_ / ctas()), 0);
    // A lane for each share; a warp's last share is the next warp's first, so that every lane but the last has the next
    // share in its neighbour.
    const int lane = threadIdx.x % 32, share = threadIdx.x / 32 * 31 + lane, equal_share = total() / ctas();
    bool uneven = false;
    if (share - lane <= ctas()) {
      const int weight = find(min(share, ctas()), equal_share);
      uneven = __shfl_down_sync(~0u, weight, 1) - weight > equal_share + kCutSteps;
    }
    cut_ = __syncthreads_or(uneven && lane < 31 && share < ctas());
  }

  // Whether the CTAs of a cluster take tasks together. It counts as one of the CTAs then, and a block below is a pair
  // of them.
  __device__ __forceinline__ bool paired() const { return paired_; }
  __device__ __forceinline__ int ctas() const { return paired_ ? gridDim.x / kDownCluster : gridDim.x; }
  __device__ __forceinline__ int cta() const { return paired_ ? blockIdx.x / kDownCluster : blockIdx.x; }
  __device__ __forceinline__ int index() const { return ctas() - 1 - cta(); }  // number of this CTA's share
  // Where this CTA's part of a share's sums is in f.parts.
  __device__ __forceinline__ int part(int share) const { return paired_ ? share * kDownCluster + rank() : share; }
  // Whether the cluster's CTAs have outputs of their own of a block, which is the last one then.
  __device__ __forceinline__ bool apart(int block) const { return paired_ && block == blocks_ * kDownCluster; }

  // How many pieces this CTA has.
  __device__ __forceinline__ int count() const {
    if (in_turns()) return tasks_ / ctas() + (turn(tasks_ / ctas()) < tasks_);
    return rounds_ + to().task - from().task + (to().step > 0);
  }
  // The i-th of them; past the last, a whole task, so that code that reads ahead finds its first steps.
  __device__ __forceinline__ Piece piece(int i) const {
    if (in_turns() || i < rounds_) {
      const int task = in_turns() ? min(turn(i), tasks_ - 1) : i * ctas() + cta();
      return {block_of(task / outputs_), task % outputs_};
    }
    const int in_turns_tasks = rounds_ * ctas(), task = min(from().task + i - rounds_, tasks_ - in_turns_tasks - 1);
    Piece piece;
    if (const int of_single = in_turns_tasks + task - blocks_ * outputs_; of_single >= 0) {
      piece = {blocks_ * kDownCluster, of_single * kDownCluster + rank()};
    } else {
      // The tasks in turns have left `first`, the first block, with the outputs from outputs_done on, and all blocks
      // after it. With none in turns, no division finds that.
      const int first = rounds_ > 0 ? in_turns_tasks / outputs_ : 0, outputs_done = in_turns_tasks - first * outputs_,
                blocks = blocks_ - first, task_after_first = task - outputs_done * (blocks - 1);
      piece = task_after_first < 0 ? Piece{first + 1 + task % (blocks - 1), task / (blocks - 1)}
                                   : Piece{first + task_after_first % blocks, outputs_done + task_after_first / blocks};
      piece.block = block_of(piece.block);
    }
    if (i == rounds_) piece.without = from().step;
    if (task == to().task && to().step > 0) piece.upto = to().step;
    return piece;
  }
  // As in f.union_sizes, but without a read of memory if it is known.
  __device__ __forceinline__ int signed_size(const Ffn& f, int block) const {
    return in_turns() ? f.union_sizes[block] : m_.sizes[block];
  }
  // Whether the block is known to take every neuron, without a read of memory.
  __device__ __forceinline__ bool known_dense(const Ffn& f, int block) const {
    return !in_turns() && abs(m_.sizes[block]) == f.d_ff;
  }
  // Calls add(part) for the part of every other share that has steps of this CTA's last task.
  template <typename Add>
  __device__ __forceinline__ void each_further(Add add) const {
    const int task = uniform(to().task);
    const auto continues_with_up = [&](int share) {
      const Position& start = m_.starts[cut_][share];
      return uniform(start.task) == task && uniform(start.step) > 0;
    };
#pragma unroll 1
    for (int share = index() + 1; continues_with_up(share); ++share) add(part(share));
  }

 private:
  __device__ __forceinline__ const Position& from() const { return m_.starts[cut_][index()]; }
  __device__ __forceinline__ const Position& to() const { return m_.starts[cut_][index() + 1]; }
  __device__ __forceinline__ bool in_turns() const { return blocks_ > kShareBlocks; }
  __device__ __forceinline__ int rank() const { return blockIdx.x % kDownCluster; }
  // This CTA's block of a pair.
  __device__ __forceinline__ int block_of(int block) const { return paired_ ? block * kDownCluster + rank() : block; }
  // Back and forth, as tasks become shorter.
  __device__ __forceinline__ int turn(int round) const {
    return round * ctas() + static_cast<int>(round % 2 ? ctas() - 1 - blockIdx.x : blockIdx.x);
  }
  // What all shared tasks take.
  __device__ __forceinline__ int total() const {
    return m_.alike > 0 ? (tasks_ - rounds_ * ctas()) * m_.alike : m_.before[blocks_] * outputs_;
  }
  // Where a share begins: at an equal share, or at the task nearest to that. Returns what the whole tasks before it
  // take.
  __device__ __forceinline__ int find(int share, int equal_share) {
    const int at = equal_share * share + min(share, total() - equal_share * ctas());
    int task, into, length = m_.alike;
    if (length > 0) {
      task = at / length, into = at - task * length;
    } else {
      const int round = m_.before[blocks_], outputs = at / round, rest = at - outputs * round;
      int block = 0;
      for (int jump = kShareBlocks / 2; jump > 0; jump /= 2)
        if (block + jump < blocks_ && m_.before[block + jump] <= rest) block += jump;
      task = outputs * blocks_ + block, into = rest - m_.before[block],
      length = m_.before[block + 1] - m_.before[block];
    }
    const int steps = length - kTaskSteps, next = 2 * into > steps;
    const bool cuts = into >= kLeastSteps && into <= steps - kLeastSteps;
    m_.starts[0][share] = {task + next, 0};
    m_.starts[1][share] = cuts ? Position{task, into} : m_.starts[0][share];
    return at - into + next * length;
  }

  SharesMemory& m_;
  int blocks_, outputs_, tasks_, cut_ = 0;
  int rounds_ = 0;  // of whole tasks, before what is shared
  bool paired_ = false;
};

}  // namespace twell::hopper
