// What the forward pass keeps: the position in its block, gate value and hidden value of each non-zero, six bytes in
// buckets by panel.
//
// A cluster of four CTAs for each block, each with one row in four, since rows are in order of nnz. A CTA reads the
// bits of what its rows fire, to count how many values each panel of the union has, and lists them in shared memory;
// the CTAs add their counts; then each thread writes some of its CTA's list. Values that do not fit into the list are
// read again. Values in a bucket are in any order: nothing is summed in that order. The sums of |h| have one order of
// their own.
//
// With room for g and h as matrices, the rows of the first launch say whether those are kept instead:
// compact/keep_whole.cuh.
//
// A block whose values no longer fit is left out. One that fires much asks before they are listed, as that takes longer
// than all else here: whether the rows so far are such that all will fit, since some are of no use. If a block was left
// out, the backward pass repeats gate, plan, up and `keep`, with memory for all values, each block's at a place of its
// own; else it copies what was kept there.
#pragma once

#include "common/bits.cuh"
#include "common/convert.cuh"
#include "hopper/backward/params.h"
#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kKeepThreads = 512, kKeepWarps = kKeepThreads / 32;

constexpr int kListed = 4096;  // most values of a CTA's list

constexpr int kLeftOut = -1;  // in place of a block's first value: there is no room for them

// Firings of a row in the mean of a block, from which it is asked early whether there is room.
constexpr int kLoudRows = 256;

// A value in the list: its neuron and row, slot in its tile, and place in its panel's bucket.
struct ListedValue {
  uint16_t neuron, place;
  uint8_t row, slot;
};

// Dynamic shared memory: bits of the union and counts before its words, counts of each panel and where its values go,
// firings of each neuron; and the list.
inline int keep_shared_bytes(const Ffn& f) {
  return (2 * f.tiles * kMaskWords + 2 * f.panels + f.d_ff) * 4 + kListed * sizeof(ListedValue);
}

template <typename T>
struct Keeper {
  const Ffn& f;
  const uint32_t* bits;  // of the block's union, a bit a neuron
  const int* before;     // neurons of the union before each word
  int block;
  bool all;  // the union is every neuron, and a neuron's rank is its number

  __device__ __forceinline__ int rank_of(int neuron) const {
    return all ? neuron : before[neuron >> 5] + __popc(bits[neuron >> 5] & ((1u << (neuron & 31)) - 1));
  }

  // The gate value of a row's neuron, which is the slot-th that fires in its tile.
  __device__ __forceinline__ uint16_t gate(int row, int neuron, int slot) const {
    const int64_t at = static_cast<int64_t>(row) * f.tiles + neuron / kTile;
    const int column = neuron % kTile;
    if (f.heads[at * kHead] > kSlots)  // past its slots, or marked so: it is dense in `spill`
      return static_cast<const uint16_t*>(f.spill)[at * kTile + (((column >> 3) ^ (row & 7)) << 3) + (column & 7)];
    const int word = slot + 1;
    return (word < kHead ? f.heads[at * kHead + word] : f.tails[at * kTail + word - kHead]) >> 16;
  }

  // The hidden value at a row of the block and a rank of its union.
  __device__ __forceinline__ uint16_t hidden(int in_block, int rank) const {
    const unsigned char* panel = hidden_panel(f, block, rank / kPanelColumns);
    const int column = rank % kPanelColumns;
    return *reinterpret_cast<const uint16_t*>(panel + in_block * 128 + (((column >> 3) ^ (in_block & 7)) << 4) +
                                              (column & 7) * 2);
  }

  // Calls one(neuron, slot, at) for each neuron that a row fires, by a warp, a lane for a word of 32 neurons.
  // begin(many), for each 32 words, returns the position of the first of them in a list; `at` counts on from there.
  template <typename Begin, typename One>
  __device__ __forceinline__ void each(int row, int lane, Begin begin, One one) const {
    const int words = f.tiles * kMaskWords;
    for (int word0 = 0; word0 < words; word0 += 32) {
      const int word = word0 + lane;
      uint32_t left = word < words ? f.masks[static_cast<int64_t>(row) * words + word] : 0;
      if (const int outside = 32 * (word + 1) - f.d_ff; outside > 0) left &= outside < 32 ? ~0u >> outside : 0;
      const int mine = __popc(left);
      int before = sum_upto(mine, lane);
      const int many = __shfl_sync(~0u, before, 31);
      before -= mine;
      int slot = before - __shfl_sync(~0u, before, lane / kMaskWords * kMaskWords);  // eight lanes have a tile
      for (int at = begin(many) + before; left; left &= left - 1, ++slot, ++at)
        one(32 * word + __ffs(left) - 1, slot, at);
    }
  }
};

// The memory of a CTA of `keep`.
template <typename T>
struct Keeping {
  const Ffn& f;
  const Kept& k;
  const uint8_t* counted;
  uint32_t* bits;      // [words] of the block's union, a bit a neuron
  int *listed, *base;  // how many values there are; in the first CTA the block's first value, or kLeftOut
  int* fired;          // how often the rows of the first launch fire
  int thread = threadIdx.x, block = static_cast<int>(blockIdx.x) / kKeepCtas;
  int rank = cluster_rank(), warp = thread / 32, lane = thread % 32;
  int words = f.tiles * kMaskWords, size = abs(f.union_sizes[block]);
  // what follows the bits, as keep_shared_bytes has it
  int* before = reinterpret_cast<int*>(bits + words);  // [words]: neurons of the union before each word
  int* counts = before + words;                        // [panels]: how many values of each panel this CTA has
  int* cursors = counts + f.panels;                    // [panels]: where the next one goes, from the block's first on
  int* fires = cursors + f.panels;                     // [d_ff]
  ListedValue* values = reinterpret_cast<ListedValue*>(fires + f.d_ff);  // [kListed]
  Keeper<T> keeper{f, bits, before, block, size == f.d_ff};

  // Calls one(row of the block, row, whether it counts) for this CTA's finite rows, a warp for a row.
  template <typename One>
  __device__ __forceinline__ void each_row(One one) const {
    for (int in_block = kKeepCtas * warp + rank; in_block < kBlockRows; in_block += kKeepCtas * kKeepWarps)
      if (const int row = f.order[block * kBlockRows + in_block]; row < f.rows && f.finite[row])
        one(in_block, row, counted == nullptr || counted[row] != 0);
  }

  // Copies order and union, and computes the union's bits. first: the number of the first row, if the rows are some of
  // a call's, as those of any blocks are
  template <typename... First>
  __device__ __forceinline__ void read_union(First... first) const {
    const int64_t list = static_cast<int64_t>(block) * f.panels * kPanelColumns;
    if (threadIdx.x == 0) *listed = 0, *base = 0, *fired = 0;
    for (int i = threadIdx.x; i < words; i += kKeepThreads) bits[i] = 0;
    // cursors and fires follow them
    for (int i = threadIdx.x; i < 2 * f.panels + f.d_ff; i += kKeepThreads) counts[i] = 0;
    for (int i = threadIdx.x; rank == 0 && !k.repeats() && i < kBlockRows; i += kKeepThreads)
      k.order[block * kBlockRows + i] = (f.order[block * kBlockRows + i] + ... + first);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x;
         (rank == 0 || !keeper.all) && i < (size + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
         i += kKeepThreads) {
      const int neuron = f.unions[list + i];
      if (rank == 0 && !k.repeats()) k.unions[list + i] = neuron;
      // of every neuron nobody reads them, and all threads of a warp would meet in one word
      if (i < size && !keeper.all) atomicOr(&bits[neuron >> 5], 1u << (neuron & 31));
    }
    __syncthreads();
    if (warp == 0) count_before(bits, before, words, lane);
    __syncthreads();
  }

  // Whether to leave out a block that fires much: if the rows up to the last of this launch fire more in the mean than
  // there is room for, since then the call's values will hardly all be kept, and some alone are of no use. All CTAs of
  // the cluster agree. first: as in read_union
  template <typename... First>
  __device__ __forceinline__ bool is_left_out(First... first) const {
    if (k.repeats()) return false;
    int sum = 0;  // nnz is 0 where a row is not finite
#pragma unroll
    for (int i = lane; i < kBlockRows; i += 32)
      if (const int row = f.order[block * kBlockRows + i]; row < f.rows) sum += f.nnz[row];
    sum = __reduce_add_sync(~0u, sum);
    if (sum <= kBlockRows * kLoudRows) return false;
    if (rank == kKeepCtas - 1) {  // the first one has more to do in read_union
      int fired = 0;
#pragma unroll 8
      for (int row = static_cast<int>(threadIdx.x) - (0 + ... + first); row < f.rows; row += kKeepThreads)
        fired += f.nnz[row];
      fired = __reduce_add_sync(~0u, fired);
      if (lane == 0) atomicAdd(base, fired);
      __syncthreads();
      if (threadIdx.x == 0) {
        const int64_t rows = f.rows + (0 + ... + first);
        const bool left_out = *base * static_cast<int64_t>(k.rows) > k.capacity * rows;
        if (left_out) atomicMax(k.used, k.capacity + 1), k.union_sizes[block] = f.union_sizes[block];
        *base = left_out ? kLeftOut : 0;
      }
    }
    cluster_sync();
    return load_remote(base, kKeepCtas - 1) == kLeftOut;
  }

  // Counts how often each neuron fires in this CTA's rows, listing no values: a thread for a word of 32, whose counts
  // lie across the bits of as many words as a count has bits.
  __device__ __forceinline__ void count_fires() const {
    constexpr int kRows = kBlockRows / kKeepCtas, kBits = 6, kAhead = 8;
    static_assert(kRows < 1 << kBits && kRows <= kKeepThreads);
    int* const rows = reinterpret_cast<int*>(values);  // whose masks are read, or -1
    if (const int i = threadIdx.x; i < kRows) {
      const int row = f.order[block * kBlockRows + kKeepCtas * i + rank];
      rows[i] = row < f.rows && f.finite[row] && (counted == nullptr || counted[row] != 0) ? row : -1;
    }
    __syncthreads();
    for (int word = threadIdx.x; word < words; word += kKeepThreads) {
      uint32_t planes[kBits] = {};
      for (int first = 0; first < kRows; first += kAhead) {
        uint32_t carries[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int row = rows[first + i];
          carries[i] = row < 0 ? 0 : f.masks[static_cast<int64_t>(row) * words + word];
        }
#pragma unroll
        for (uint32_t carry : carries)
#pragma unroll
          for (uint32_t& plane : planes) {
            const uint32_t both = plane & carry;
            plane ^= carry, carry = both;
          }
      }
      for (int bit = 0; bit < 32 && 32 * word + bit < f.d_ff; ++bit) {
        int many = 0;
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane) many |= (planes[plane] >> bit & 1) << plane;
        fires[32 * word + bit] = many;
      }
    }
  }

  // Counts and lists the values.
  __device__ __forceinline__ void list_values() const {
    const auto begin = [&](int many) {
      return __shfl_sync(~0u, lane == 0 && many > 0 ? atomicAdd(listed, many) : 0, 0);
    };
    each_row([&](int in_block, int row, bool counts_here) {
      keeper.each(row, lane, begin, [&](int neuron, int slot, int at) {
        const int place = atomicAdd(&counts[keeper.rank_of(neuron) / kPanelColumns], 1);
        if (at < kListed)
          values[at] = {static_cast<uint16_t>(neuron), static_cast<uint16_t>(place), static_cast<uint8_t>(in_block),
                        static_cast<uint8_t>(slot)};
        if (counts_here) atomicAdd(&fires[neuron], 1);
      });
    });
  }

  // Computes where buckets begin, and where in each this CTA's values go: after those of the CTAs before it. By a warp,
  // once all CTAs have counted.
  __device__ __forceinline__ void place_buckets() const {
    int sum = 0;
    int* starts = k.starts + static_cast<int64_t>(block) * (f.panels + 1);
    for (int panel0 = 0; panel0 < f.panels; panel0 += 32) {
      const int panel = panel0 + lane;
      int all = 0, others = 0;
      for (int cta = 0; cta < kKeepCtas && panel < f.panels; ++cta) {
        others += cta == rank ? all : 0;
        all += load_remote(counts + panel, cta);
      }
      const int upto = sum_upto(all, lane);
      if (panel < f.panels) cursors[panel] = sum + upto - all + others;
      if (panel < f.panels && rank == 0) starts[panel] = sum + upto - all;
      sum += __shfl_sync(~0u, upto, 31);
    }
    if (rank > 0) return;
    __syncwarp();
    int first = block * kBlockRows * f.d_ff;
    if (!k.repeats()) first = __shfl_sync(~0u, lane == 0 ? atomicAdd(k.used, sum) : 0, 0);
    for (int panel = lane; panel < f.panels; panel += 32) starts[panel] += first;
    if (lane > 0) return;
    *base = first + sum <= k.capacity ? first : kLeftOut, starts[f.panels] = first + sum;
    if (!k.repeats()) k.union_sizes[block] = f.union_sizes[block];
  }

  __device__ __forceinline__ void write(int in_block, int row, int neuron, int slot, int in_union, int at) const {
    k.positions[at] = (in_union / kPanelColumns % 4) << 13 | in_block << 6 | in_union % kPanelColumns;
    k.gates[at] = keeper.gate(row, neuron, slot);
    k.hidden[at] = keeper.hidden(in_block, in_union);
  }

  // Writes the values from the block's first on: those listed, or all of them if the list is too short.
  __device__ __forceinline__ void write_values(int first) const {
    if (first == kLeftOut) return;
    if (*listed > kListed) {
      each_row([&](int in_block, int row, bool) {
        keeper.each(
            row, lane, [](int) { return 0; },
            [&](int neuron, int slot, int) {
              const int in_union = keeper.rank_of(neuron);
              write(in_block, row, neuron, slot, in_union, first + atomicAdd(&cursors[in_union / kPanelColumns], 1));
            });
      });
      return;
    }
#pragma unroll 2
    for (int i = threadIdx.x; i < *listed; i += kKeepThreads) {
      const ListedValue v = values[i];
      const int in_union = keeper.rank_of(v.neuron);
      write(v.row, f.order[block * kBlockRows + v.row], v.neuron, v.slot, in_union,
            first + cursors[in_union / kPanelColumns] + v.place);
    }
  }

  // Returns this warp's sum of |h|, in all lanes; the panels have h where it is not zero, in an order of their own.
  __device__ __forceinline__ float sum_hidden() const {
    float sum = 0.f;
    each_row([&](int in_block, int, bool counts_here) {
#pragma unroll 4
      for (int column = 8 * lane; counts_here && column < (size + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
           column += 256) {
        const unsigned char* line = hidden_panel(f, block, column / kPanelColumns) + in_block * 128;
        const uint4 eight = *reinterpret_cast<const uint4*>(line + column % kPanelColumns * 2);
        for (const uint32_t pair : {eight.x, eight.y, eight.z, eight.w})
          sum += fabsf(half_of<T>(pair, 0)) + fabsf(half_of<T>(pair, 1));
      }
    });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  }
};

}  // namespace twell::hopper
