// g, h, and from dh = dy Wd^T the values of du and dg, for all of some neurons of some rows: three dense products of
// 128 rows and 128 neurons, one after the other, whose rounded results stay in registers.
//
// By neuron they leave as chunks, for the weights' gradients, else as panels, for dx: as images of shared memory, a
// warpgroup's 64 rows by itself. Rows that are not finite have zeros.
#pragma once

#include "hopper/backward/compact/jobs.cuh"

namespace twell::hopper {

constexpr int kDenseNeurons = 128, kDenseGroups = kDenseNeurons / kListNeurons;
constexpr int kDensePairs = kDenseNeurons / 4;  // of a thread: of columns 8 j and the row 8 h further, the 2 j + h-th
constexpr int kDenseWidth = 8;                  // tiles of neurons that follow each other before the next rows
constexpr int kDenseBBytes = kBBytes / 2;       // of a stage; the other half has h, by neuron
constexpr int kImageBytes = kListNeurons * kChunk * 2;

// The t-th tile of a launch.
struct DenseTile {
  int block, pair;  // the block of rows, and the pair of groups of neurons: those of the launch, from 0 on
  __device__ __forceinline__ DenseTile(int t, int blocks, int pairs) {
    const int of_width = kDenseWidth * blocks, left = t % of_width, before = t / of_width * kDenseWidth,
              width = min(kDenseWidth, pairs - before);
    block = left / width, pair = before + left % width;
  }
};

// The tiles of a launch, which are about [first, first + count) of the groups of neurons or of the blocks of rows.
template <bool kByNeuron>
struct DenseTiles {
  int blocks, pairs, first_block, first_group, groups;
  __device__ __forceinline__ explicit DenseTiles(const CompactBackward& b)
      : blocks(kByNeuron ? b.blocks : b.count),
        first_block(kByNeuron ? 0 : b.first),
        first_group(kByNeuron ? b.first : 0),
        groups(kByNeuron ? b.count : b.panels) {
    pairs = (groups + kDenseGroups - 1) / kDenseGroups;
  }
  template <typename Work>
  __device__ __forceinline__ void each(Work work) const {
#pragma unroll 1
    for (int t = blockIdx.x; t < blocks * pairs; t += gridDim.x) work(DenseTile(t, blocks, pairs));
  }
};

// By a warp.
template <bool kByNeuron>
__device__ __forceinline__ void produce_dense(const CUtensorMap& x_map, const CUtensorMap& dy_map,
                                              const CUtensorMap& gate_map, const CUtensorMap& up_map,
                                              const CUtensorMap& down_map, const CompactBackward& b, Shared& s,
                                              const DenseTiles<kByNeuron>& tiles, int steps, int lane) {
  Ring ring;
  ring.phase = 1;
  tiles.each([&](const DenseTile& tile) {
    const int row0 = (tiles.first_block + tile.block) * kTileM,
              neuron0 = (tiles.first_group + tile.pair * kDenseGroups) * kListNeurons;
    const auto load = [&](const CUtensorMap& rows, const CUtensorMap& weights) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step, ring.next()) {
        wait_as_warp(&s.empty[ring.stage], ring.phase);
        if (lane == 0) {
          barrier_expect(&s.full[ring.stage], kABytes + kDenseBBytes);
          tma_load_2d(s.a[ring.stage], &rows, &s.full[ring.stage], step * kTileK, row0);
          tma_load_2d(s.b[ring.stage], &weights, &s.full[ring.stage], step * kTileK, neuron0);
        }
      }
    };
    load(x_map, gate_map);
    if (!b.plain) load(x_map, up_map);
    load(dy_map, down_map);
  });
}

// The values of a thread: du in place of gate values, dg, and h.
struct DenseValues {
  uint32_t gate[kDensePairs], other[kDensePairs], hidden[kDensePairs];

  template <typename T>
  __device__ __forceinline__ void take_gate(const float (&z)[128]) {
#pragma unroll
    for (int i = 0; i < kDensePairs; ++i) hidden[i] = gate[i] = round_activated<T>(z[2 * i], z[2 * i + 1]);
  }
  template <typename T>
  __device__ __forceinline__ void take_up(const float (&u)[128]) {
#pragma unroll
    for (int i = 0; i < kDensePairs; ++i)
      hidden[i] = positive_halves<T>(gate[i]) &
                  round_pair<T>(half_of<T>(gate[i], 0) * u[2 * i], half_of<T>(gate[i], 1) * u[2 * i + 1]);
  }
  // there: whether each of the thread's two rows exists and is finite; l1_scale: of each, 0 if it does not count.
  template <typename T>
  __device__ __forceinline__ void take_dh(const float (&dh)[128], const bool (&there)[2], const float (&l1_scale)[2]) {
#pragma unroll
    for (int i = 0; i < kDensePairs; ++i) {
      const auto of = [&](int e) {
        return ValueGradients(half_of<T>(gate[i], e), half_of<T>(hidden[i], e), dh[2 * i + e], l1_scale[i % 2]);
      };
      const ValueGradients low = of(0), high = of(1);
      gate[i] = round_pair<T>(low.du, high.du), other[i] = round_pair<T>(low.dg, high.dg);
      if (!there[i % 2]) gate[i] = other[i] = hidden[i] = 0;
    }
  }
};

// Where a warpgroup's images of two groups' h lie, by neuron.
__device__ __forceinline__ unsigned char* hidden_images(Shared& s, const Consumer& c) {
  return s.b[c.group] + kDenseBBytes;
}

// Writes a thread's pairs transposed into the images [64 neurons][64 tokens] of two groups, `pitch` bytes from each
// other.
__device__ __forceinline__ void stage_chunks(const uint32_t (&pairs)[kDensePairs], unsigned char* images, int pitch,
                                             const Consumer& c) {
  const int chunk = 2 * c.warp + (c.lane >> 3 & 1), neuron0 = (c.lane >> 4) * 8 + (c.lane & 7);
#pragma unroll
  for (int j = 0; j < kDenseNeurons / 8; j += 2) {
    unsigned char* to = images + j / 8 * pitch + (neuron0 + j % 8 * 8) * 128 + ((chunk ^ (c.lane & 7)) << 4);
    store_matrices<true>(to, pairs[2 * j], pairs[2 * j + 1], pairs[2 * j + 2], pairs[2 * j + 3]);
  }
}

// Writes a thread's pairs into its warpgroup's rows of the staging tile's panels `panel` and the next one.
__device__ __forceinline__ void stage_panels(const uint32_t (&pairs)[kDensePairs], Shared& s, int panel,
                                             const Consumer& c) {
  const Corner corner(c.lane);
  unsigned char* row = s.staging + panel * kPanelBytes + (c.group * 64 + c.warp * 16 + corner.row) * 128;
#pragma unroll
  for (int j = 0; j < kDenseNeurons / 8; j += 2)
    store_matrices(row + j / 8 * kPanelBytes + (((j % 8 + corner.chunk) ^ (corner.row & 7)) << 4), pairs[2 * j],
                   pairs[2 * j + 1], pairs[2 * j + 2], pairs[2 * j + 3]);
}

// Stages the values of a tile, and sends this warpgroup's to the arena: a warp each of the four parts.
template <bool kByNeuron>
__device__ __forceinline__ void send_dense(const DenseValues& v, const CompactBackward& b, Shared& s,
                                           const DenseTiles<kByNeuron>& tiles, const DenseTile& tile,
                                           const Consumer& c) {
  constexpr int kPair = 2 * kImageBytes;  // du and dg of a group
  unsigned char* arena = static_cast<unsigned char*>(b.chunks);
  const int which = c.warp / 2, at = c.warp % 2, group = tile.pair * kDenseGroups + at;
  unsigned char *pairs = s.staging + c.group * (2 * kPair), *from, *to;
  int bytes;
  if (c.lane == 0) bulk_wait_read<0>();
  c.sync();
  if constexpr (kByNeuron) {
    stage_chunks(v.gate, pairs, kPair, c), stage_chunks(v.other, pairs + kImageBytes, kPair, c);
    stage_chunks(v.hidden, hidden_images(s, c), kImageBytes, c);
    to = arena + (static_cast<int64_t>(group) * b.blocks * 2 + 2 * tile.block + c.group) * (kChunkValues * 2) +
         which * kPair;
    from = which == 0 ? pairs + at * kPair : hidden_images(s, c) + at * kImageBytes;
    bytes = which == 0 ? kPair : kImageBytes;
  } else {
    stage_panels(v.gate, s, 0, c), stage_panels(v.other, s, 2, c);
    constexpr int kHalfPanel = kPanelBytes / 2;
    to = arena + ((static_cast<int64_t>(tile.block) * 2 + which) * b.panels + group) * kPanelBytes +
         c.group * kHalfPanel;
    from = s.staging + c.warp * kPanelBytes + c.group * kHalfPanel;
    bytes = kHalfPanel;
  }
  fence_async_proxy();
  c.sync();
  if (c.lane == 0 && group < tiles.groups) bulk_store(to, from, bytes), bulk_commit();
}

template <typename T, bool kByNeuron>
__device__ __forceinline__ void consume_dense(const CompactBackward& b, Shared& s, const DenseTiles<kByNeuron>& tiles,
                                              int steps, const Consumer& c) {
  static_assert(kBlockRows == 2 * kChunk && kTileM == kBlockRows && kStages >= 2 &&
                sizeof(s.staging) == 8 * kImageBytes);
  Ring ring;
  float d[128];
  const float scale = *b.l1_scale;
  tiles.each([&](const DenseTile& tile) {
    DenseValues v;
    const auto run = [&] { multiply<T, kDenseNeurons, 0, 1>(d, s, ring, steps, false, c, [] {}); };
    const auto add = [&](const void* bias) {
      add_bias<T, kDenseNeurons>(d, bias, (tiles.first_group + tile.pair * kDenseGroups) * kListNeurons, b.d_ff,
                                 c.lane);
    };
    run(), add(b.b_gate);
    v.template take_gate<T>(d);
    if (!b.plain) run(), add(b.b_up), v.template take_up<T>(d);
    run();
    bool there[2];
    float l1_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (tiles.first_block + tile.block) * kBlockRows + c.row() + 8 * h;
      there[h] = row < b.rows && b.finite[row];
      l1_scale[h] = there[h] && (b.counted == nullptr || b.counted[row] != 0) ? scale : 0.f;
    }
    v.template take_dh<T>(d, there, l1_scale);
    send_dense<kByNeuron>(v, b, s, tiles, tile, c);
  });
  if (c.lane == 0) bulk_wait<0>();
}

template <typename T, bool kByNeuron>
__global__ void __launch_bounds__(kThreads, 1)
    dense_values(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap dy_map,
                 const __grid_constant__ CUtensorMap gate_map, const __grid_constant__ CUtensorMap up_map,
                 const __grid_constant__ CUtensorMap down_map, const __grid_constant__ CompactBackward b) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], kConsumers);
    fence_barrier_init();
  }
  __syncthreads();
  let_next_launch();
  wait_for_launches();
  if (needs_no_passes(b)) return;
  const DenseTiles<kByNeuron> tiles(b);
  const int steps = (b.d_model + kTileK - 1) / kTileK;
  if (threadIdx.x >= kConsumers) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x < kConsumers + 32)
      produce_dense<kByNeuron>(x_map, dy_map, gate_map, up_map, down_map, b, s, tiles, steps, threadIdx.x % 32);
  } else {
    registers_up<kConsumerRegisters>();
    consume_dense<T, kByNeuron>(b, s, tiles, steps, Consumer::here());
  }
}

}  // namespace twell::hopper
