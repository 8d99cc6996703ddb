// All gradients of a pass that does not fit, densely and each value once: g, h, du and dg as matrices [rows, d_ff] in
// the arena, by products in the main loop of the gate's: tiles of 128 x 256, clusters of two CTAs that share the second
// operand's tile, both operands by tensor copies.
//
//   1. g = act(x Wg^T)                2. h = g (x Wu^T)         3. dh = dy Wd^T, from it du in place of g, and dg
//   4. dx = du Wu + dg Wg             5. dWu = du^T x, dWg = dg^T x, dWd = h^T dy
//
// A plain FFN has no second product, no du, and h in place of g. Bytes from the L2: 32 KB a CTA for 1 024 cycles of
// products. Of calls whose arena has room for three such matrices, and of which every row is finite: others are
// computed in `dense.cuh`'s passes.
//
// A call that has kept g and h whole begins with the third product, and reads them where they were kept. With room for
// them that is not used so, h of a gated FFN lies where it would have been kept, behind the values that were, and the
// arena has two matrices.
#pragma once

#include "hopper/backward/compact/jobs.cuh"
#include "hopper/up_epilogue.cuh"

namespace twell::hopper {

constexpr int kFits = 1, kByPasses = 0, kAtOnce = -1, kFromKept = -2;  // values of `fits`

enum class Whole { kGate, kUp, kDh, kDx, kWeights };  // the products

// What a product reads and writes as boxes. a, b: operands of each of its products (of du, dg and h), or of each part
// of its sum (of du and dg); in: tiles for the epilogue; out: its results, unless rows are written; kept: the first
// matrix where it was kept, g or in a plain FFN h, in place of the one that is made.
struct WholeMaps {
  CUtensorMap a[3], b[3], in[2], out[2], kept;
};

constexpr int kBox = 64;  // columns, and in most maps rows, of a box
constexpr int kBoxBytes = kBox * kBox * 2;

struct WholeMemory {
  uint64_t fetched[2][2];  // tiles for the epilogue: of each warpgroup, of even and odd panels
};
constexpr int kWholeSharedBytes = std::max<int>(kSharedBytes, kProductSharedBytes);
static_assert(kWholeSharedBytes + sizeof(WholeMemory) <= 227 * 1024);

// The tiles of a product, those of a cluster one after the other.
template <Whole kWhole>
struct WholeTiles {
  static constexpr bool kValues = kWhole <= Whole::kDh, kOfNeurons = kWhole == Whole::kWeights;
  static constexpr int kProducts = kOfNeurons ? 3 : 1, kParts = kWhole == Whole::kDx ? 2 : 1;
  int height, width, steps, pairs, columns;  // steps: of each part of the sum; pairs: of tiles, one above the other
  // the first product, or the first part of the sum: 1 without du
  int first;
  __device__ __forceinline__ explicit WholeTiles(const CompactBackward& b)
      : height(kOfNeurons ? b.d_ff : b.rows), width(kValues ? b.d_ff : b.d_model) {
    const int depth = kOfNeurons ? b.rows : kValues ? b.d_model : b.d_ff;
    first = b.plain && (kOfNeurons || kWhole == Whole::kDx);
    steps = (depth + kTileK - 1) / kTileK, pairs = (height + 2 * kTileM - 1) / (2 * kTileM),
    columns = (width + kTileN - 1) / kTileN;
  }
  __device__ __forceinline__ int all_steps() const { return kWhole == Whole::kDx ? (kParts - first) * steps : steps; }
  // Calls work(product, first row, first column) for this CTA's tiles.
  template <typename Work>
  __device__ __forceinline__ void each(int rank, Work work) const {
    const int clusters = gridDim.x / 2, of_product = pairs * columns, first_tile = kOfNeurons ? first * of_product : 0;
#pragma unroll 1
    for (int t = first_tile + blockIdx.x / 2; t < kProducts * of_product; t += clusters) {
      const int tile = t % of_product;
      work(t / of_product, (tile / columns * 2 + rank) * kTileM, tile % columns * kTileN);
    }
  }
};

// Requests a step: this CTA's rows from m0 on, and for both CTAs the rank-th half of the second operand, from n on. By
// a lane.
template <Whole kWhole>
__device__ __forceinline__ void request_step(Shared& s, int stage, const CUtensorMap& a, const CUtensorMap& b,
                                             uint64_t* full, int m0, int n, int k0, int rank) {
  barrier_expect(full, kABytes + kBBytes);
  if constexpr (WholeTiles<kWhole>::kOfNeurons) {
    tma_load_2d(s.a[stage], &a, full, m0, k0);
    tma_load_2d(s.a[stage] + kBoxBytes, &a, full, m0 + kBox, k0);
  } else {
    tma_load_2d(s.a[stage], &a, full, k0, m0);
  }
  unsigned char* half = s.b[stage] + rank * (kBBytes / 2);
  if constexpr (WholeTiles<kWhole>::kValues) {
    tma_load_2d_multicast(half, &b, full, k0, n, 3);
  } else {
    tma_load_2d_multicast(half, &b, full, n, k0, 3);
    tma_load_2d_multicast(half + kBoxBytes, &b, full, n + kBox, k0, 3);
  }
}

// By a warp. Each CTA fetches its own rows, and half of the second operand for both. kept_hidden: h is the first
// matrix, and was kept
template <Whole kWhole>
__device__ __forceinline__ void produce_whole(const WholeMaps& maps, Shared& s, const WholeTiles<kWhole>& tiles,
                                              bool kept_hidden, int rank, int lane) {
  using Tiles = WholeTiles<kWhole>;
  Ring ring;
  ring.phase = 1;
  tiles.each(rank, [&](int product, int m0, int n0) {
#pragma unroll 1
    for (int part = kWhole == Whole::kDx ? tiles.first : 0; part < Tiles::kParts; ++part) {
      const CUtensorMap *a = Tiles::kOfNeurons && kept_hidden && product == 2 ? &maps.kept : &maps.a[product + part],
                        *b = &maps.b[product + part];
#pragma unroll 1
      for (int step = 0; step < tiles.steps; ++step, ring.next()) {
        uint64_t* full = &s.full[ring.stage];
        const int k0 = step * kTileK;
        wait_as_warp(&s.empty[ring.stage], ring.phase);
        if (lane == 0) request_step<kWhole>(s, ring.stage, *a, *b, full, m0, n0 + rank * (kTileN / 2), k0, rank);
      }
    }
  });
  __syncwarp();  // all of it meets the cluster
}

// A warpgroup's rows of a panel of the staging tile.
__device__ __forceinline__ unsigned char* half_panel(Shared& s, int panel, const Consumer& c) {
  return s.staging + panel * kPanelBytes + c.group * kBoxBytes;
}

// Requests a box for a warpgroup's rows of a panel. By a lane.
__device__ __forceinline__ void fetch_box(const CUtensorMap& map, unsigned char* to, uint64_t* barrier, int column,
                                          int row) {
  barrier_expect(barrier, kBoxBytes);
  tma_load_2d(to, &map, barrier, column, row);
}

// Sends a box that this warpgroup has written. By a lane; what lies outside of the matrix is left out.
__device__ __forceinline__ void send_box(const CUtensorMap& map, const unsigned char* from, int column, int row) {
  tma_store_2d(&map, from, column, row);
  bulk_commit();
}

// g of a tile from its sums.
template <typename T>
__device__ __forceinline__ void finish_gate(float (&d)[128], const CompactBackward& b, const WholeMaps& maps, Shared& s,
                                            int m0, int n0, const Consumer& c) {
  add_bias<T, kTileN>(d, b.b_gate, n0, b.d_ff, c.lane);
  if (c.lane == 0) bulk_wait_read<0>();
  c.sync();
  const Corner corner(c.lane);
  unsigned char* row = s.staging + (c.group * 64 + c.warp * 16 + corner.row) * 128;
#pragma unroll
  for (int p = 0; p < 4; ++p)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* v = d + 32 * p + 8 * j;
      store_matrices(row + p * kPanelBytes + (((2 * j + corner.chunk) ^ (corner.row & 7)) << 4),
                     round_activated<T>(v[0], v[1]), round_activated<T>(v[2], v[3]), round_activated<T>(v[4], v[5]),
                     round_activated<T>(v[6], v[7]));
    }
  fence_async_proxy();
  c.sync();
  if (c.lane == 0) send_box(maps.out[0], half_panel(s, c.warp, c), n0 + c.warp * kBox, m0 + c.group * 64);
}

// Turns g and h of a warpgroup's rows of a panel, in two panels of the staging tile, into du and dg. l1_scale: of the
// thread's two rows
template <typename T, int kPanel>
__device__ __forceinline__ void finish_panel(const float (&d)[128], Shared& s, const float (&l1_scale)[2],
                                             const Consumer& c) {
  const Corner corner(c.lane);
  unsigned char* row = s.staging + kPanel % 2 * 2 * kPanelBytes + (c.group * 64 + c.warp * 16 + corner.row) * 128;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    unsigned char* at = row + (((2 * j + corner.chunk) ^ (corner.row & 7)) << 4);
    uint32_t gates[4], hidden[4];
    sm80::load_matrices<false>(gates, smem_address(at));
    sm80::load_matrices<false>(hidden, smem_address(at + kPanelBytes));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto of = [&](int e) {
        return ValueGradients(half_of<T>(gates[i], e), half_of<T>(hidden[i], e), d[32 * kPanel + 8 * j + 2 * i + e],
                              l1_scale[i % 2]);
      };
      const ValueGradients low = of(0), high = of(1);
      gates[i] = round_pair<T>(low.du, high.du), hidden[i] = round_pair<T>(low.dg, high.dg);
    }
    store_matrices(at, gates[0], gates[1], gates[2], gates[3]);
    store_matrices(at + kPanelBytes, hidden[0], hidden[1], hidden[2], hidden[3]);
  }
}

// du and dg of a tile from its sums, a panel after the other: g and h of two panels are in the staging tile, or under
// way. The warp-th of its panels is fetched, by the map `in`, and sent by one warp of each warpgroup: g and du by even
// ones, h and dg by odd ones.
template <typename T>
__device__ __forceinline__ void finish_dh(const float (&d)[128], const CompactBackward& b, const WholeMaps& maps,
                                          const CUtensorMap& in, Shared& s, WholeMemory& m, int m0, int n0,
                                          const Consumer& c) {
  const float scale = *b.l1_scale;
  float l1_scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = m0 + c.row() + 8 * h;
    l1_scale[h] = row < b.rows && (b.counted == nullptr || b.counted[row] != 0) ? scale : 0.f;
  }
  const auto finish = [&]<int kPanel>() {
    uint64_t* fetched = &m.fetched[c.group][kPanel % 2];
    wait_as_warp(fetched, kPanel / 2);
    finish_panel<T, kPanel>(d, s, l1_scale, c);
    fence_async_proxy();
    c.sync();
    if (c.lane == 0 && c.warp / 2 == kPanel % 2) {
      unsigned char* half = half_panel(s, c.warp, c);
      if (c.warp % 2 == 1 || !b.plain) send_box(maps.out[c.warp % 2], half, n0 + kPanel * kBox, m0 + c.group * 64);
      if constexpr (kPanel < 2) {
        bulk_wait_read<0>();
        fetch_box(in, half, fetched, n0 + (kPanel + 2) * kBox, m0 + c.group * 64);
      }
    }
    __syncwarp();
  };
  finish.template operator()<0>();
  finish.template operator()<1>();
  finish.template operator()<2>();
  finish.template operator()<3>();
}

template <typename T, typename Out, Whole kWhole>
__device__ __forceinline__ void consume_whole(const WholeMaps& maps, const CompactBackward& b, Shared& s,
                                              WholeMemory& m, const WholeTiles<kWhole>& tiles, int rank,
                                              const Consumer& c) {
  using Tiles = WholeTiles<kWhole>;
  constexpr bool kUp = kWhole == Whole::kUp;
  Ring ring;
  uint32_t phase = 0;
  float d[128];
  const bool kept = kWhole == Whole::kDh && *b.fits == kFromKept && (b.plain || c.warp % 2 == 0);
  const CUtensorMap& in = kept ? maps.kept : maps.in[kUp ? 0 : c.warp % 2];
  tiles.each(rank, [&](int product, int m0, int n0) {
    const auto fetch = [&] {
      if (c.lane > 0 || (kWhole != Whole::kUp && kWhole != Whole::kDh)) return;
      bulk_wait_read<0>();  // the tile before has left
      const int panel = kUp ? c.warp : c.warp / 2;
      fetch_box(in, half_panel(s, c.warp, c), &m.fetched[c.group][kUp ? 0 : panel], n0 + panel * kBox,
                m0 + c.group * 64);
    };
    multiply<T, kTileN, !Tiles::kValues, 2, Tiles::kOfNeurons>(d, s, ring, tiles.all_steps(), false, c, fetch);
    if constexpr (kWhole == Whole::kGate) {
      finish_gate<T>(d, b, maps, s, m0, n0, c);
    } else if constexpr (kUp) {
      wait_as_warp(&m.fetched[c.group][0], phase), phase ^= 1;
      add_bias<T, kTileN>(d, b.b_up, n0, b.d_ff, c.lane);
      finish_up<T, 4>(
          d, s, c, false, [](int) { return 0.f; }, [](int) {}, [](int) { return static_cast<int*>(nullptr); });
      fence_async_proxy();
      c.sync();
      if (c.lane == 0) send_box(maps.out[0], half_panel(s, c.warp, c), n0 + c.warp * kBox, m0 + c.group * 64);
      __syncwarp();
    } else if constexpr (kWhole == Whole::kDh) {
      finish_dh<T>(d, b, maps, in, s, m, m0, n0, c);
    } else {
      constexpr bool kDx = kWhole == Whole::kDx;
      Out* const matrix = static_cast<Out*>(kDx ? b.dx : product == 0 ? b.d_up : product == 1 ? b.d_gate : b.d_down);
      const int first = m0 + c.group * 64 + c.warp * 16;
      write_rows<T, Out, kTileN>(
          d, s, c, n0, b.d_model,
          [&](int r) {
            return first + r < tiles.height ? matrix + static_cast<int64_t>(first + r) * b.d_model : nullptr;
          },
          !kDx && (product == 2 ? b.adds_down : b.adds));
    }
  });
  bulk_wait<0>();
}

template <typename T, typename Out, Whole kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    whole_product(const __grid_constant__ WholeMaps maps, const __grid_constant__ CompactBackward b) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  __shared__ WholeMemory memory;
  const int group = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32,
            rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 2 * kConsumerWarps);
    for (auto& of_group : memory.fetched)
      for (uint64_t& barrier : of_group) barrier_init(&barrier, kWhole == Whole::kUp ? 4 : 2);
    fence_barrier_init();
  }
  let_next_launch();
  wait_for_launches();
  const int fits = *b.fits;
  if (fits > kAtOnce || (fits == kFromKept && kWhole < Whole::kDh)) return;
  cluster_sync();
  const WholeTiles<kWhole> tiles(b);
  if (group == 2) {
    registers_down<kProducerRegisters>();
    if (warp == 0) produce_whole<kWhole>(maps, s, tiles, b.plain && fits == kFromKept, rank, lane);
  } else {
    registers_up<kConsumerRegisters>();
    consume_whole<T, Out, kWhole>(maps, b, s, memory, tiles, rank, {group, warp, lane});
  }
  cluster_sync();  // no CTA ends while the other may still write to it
}

constexpr int kChooseThreads = 512;

// Chooses what computes a pass that does not fit.
static __global__ void __launch_bounds__(kChooseThreads) choose_dense(const CompactBackward b) {
  let_next_launch();
  wait_for_launches();
  if (*b.fits != kByPasses) return;
  bool finite = true;
#pragma unroll 8
  for (int row = threadIdx.x; row < b.rows; row += kChooseThreads) finite &= b.finite[row] != 0;
  if (__syncthreads_and(finite) && threadIdx.x == 0) *b.fits = *b.kept.used == kKeptWhole ? kFromKept : kAtOnce;
}

}  // namespace twell::hopper
