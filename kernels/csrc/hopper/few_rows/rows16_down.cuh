// The down product of up to 16 rows, y = h Wd^T + b over what fired: a cluster of four CTAs for 64 outputs, whose 32
// warps divide the groups of neurons. The copy engine fetches the weights of whole groups; threads fetch those of other
// groups, straight into their registers, as soon as they are listed; the hidden state comes later.
#pragma once

#include "hopper/few_rows/rows16.cuh"
#include "hopper/output.cuh"

namespace twell::hopper {

constexpr int kRows16Outputs = 64, kRows16Splits = 4, kRows16Share = kRows16Outputs / kRows16Splits,
              kRows16Slots = kRows16Splits * kRows16Warps;

template <int kTiles, int kNeurons>
struct Rows16Down {
  // kPitch: floats of a row's sums, so that rows lie banks apart. kDepth: boxes of a ring.
  static constexpr int kRows = 8 * kTiles, kPitch = kRows16Outputs + 4;
  static constexpr int kDepth = kTiles == 1 && kNeurons == kGroupNeurons ? 2 : 1;
  // of a warp; its sums are stored there in the end
  static constexpr int kRingBytes = kDepth * kRows16BoxBytes<kNeurons>;
  static_assert(kRows * kPitch * 4 <= kRingBytes);
  struct Shared {
    float parts[kRows16Splits][kRows][kRows16Share];  // each CTA's sums of this one's outputs
    uint64_t full[kRows16Warps][kDepth], sent;
    uint32_t broken;  // a bit a row that is not finite, by this CTA's groups
  };
  static constexpr int kBytes = kRows16Warps * kRingBytes + sizeof(Shared) + 1024;
};

// Groups whose weights fit into registers.
template <int kTiles, int kNeurons>
constexpr int kRows16AtOnce = kTiles == 2 ? 2 : (kNeurons == kGroupNeurons ? 4 : 3);

// Adds 16 neurons: four of them for eight outputs and all rows.
template <typename T, int kTiles>
__device__ __forceinline__ void add_sixteen(float (&d)[4][kTiles][4], const uint4 (&a)[4], const uint2 (&b)[kTiles]) {
  const uint32_t *k0 = &a[0].x, *k1 = &a[1].x, *k2 = &a[2].x, *k3 = &a[3].x;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // outputs 2 j and 2 j + 1 of each eight
    const uint32_t pairs[4] = {__byte_perm(k0[j], k1[j], 0x5410), __byte_perm(k0[j], k1[j], 0x7632),
                               __byte_perm(k2[j], k3[j], 0x5410), __byte_perm(k2[j], k3[j], 0x7632)};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) sm80::mma_16x8x16<T>(d[j][n], pairs, b[n].x, b[n].y);
  }
}

// Prepares the barriers of a CTA: those of a warp's boxes, and `sent`, which completes once all CTAs of the cluster
// have sent their sums.
template <int kTiles, int kNeurons>
__device__ __forceinline__ void begin_rows16_down(typename Rows16Down<kTiles, kNeurons>::Shared& s, int rows,
                                                  int thread) {
  if (thread == 0) s.broken = 0, barrier_init(&s.sent, 1);
  if (thread < kRows16Warps * Rows16Down<kTiles, kNeurons>::kDepth) barrier_init(&s.full[0][thread], 1);
  fence_barrier_init();
  if (thread == 0) barrier_expect(&s.sent, kRows16Splits * rows * kRows16Share * sizeof(float));
}

// Adds the sums of the CTA's warps, in order, and sends each CTA of the cluster those of its outputs; NaN of rows that
// are not finite.
template <int kTiles, int kNeurons>
__device__ __forceinline__ void send_rows16_sums(typename Rows16Down<kTiles, kNeurons>::Shared& s,
                                                 const unsigned char* rings, int rows, int rank, int thread) {
  using Down = Rows16Down<kTiles, kNeurons>;
  for (int i = thread; i < rows * (kRows16Outputs / 4); i += kRows16Threads) {
    const int row = i / (kRows16Outputs / 4), out = i % (kRows16Outputs / 4) * 4;
    const float none = s.broken >> row & 1 ? NAN : 0.f;
    float4 sum = make_float4(none, none, none, none);
#pragma unroll
    for (int v = 0; v < kRows16Warps; ++v) {
      const float4 part =
          *reinterpret_cast<const float4*>(rings + v * Down::kRingBytes + (row * Down::kPitch + out) * 4);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    send_remote(reinterpret_cast<float4*>(&s.parts[rank][row][out % kRows16Share]), &s.sent, sum, out / kRows16Share);
  }
}

// Adds what the cluster's CTAs send, in order of rank, and writes this CTA's outputs. Rows that are not finite have
// sums that are NaN.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void write_rows16_outputs(typename Rows16Down<kTiles, kNeurons>::Shared& s, const Ffn& f,
                                                     int out0, int rank, int thread) {
  constexpr int kPairs = kRows16Share / 2;
  static_assert(kRows16Max * kPairs <= kRows16Threads);  // a pair of outputs to a thread
  const T* bias = static_cast<const T*>(f.b_down);
  const int row = thread / kPairs, place = 2 * (thread % kPairs), out = out0 + rank * kRows16Share + place;
  const bool writes = row < f.rows && out < f.d_model;
  uint32_t added = 0;
  if (f.added != nullptr) {
    wait_for_launches();  // for the gate's, which has waited for the one that wrote it
    if (writes) added = added_to<uint32_t>(f, row, out);
  }
  float2 sum = bias != nullptr && writes ? make_float2(static_cast<float>(bias[out]), static_cast<float>(bias[out + 1]))
                                         : make_float2(0.f, 0.f);
  barrier_wait(&s.sent, 0);
  if (!writes) return;
#pragma unroll
  for (int r = 0; r < kRows16Splits; ++r) {
    const float2 part = *reinterpret_cast<const float2*>(&s.parts[r][row][place]);
    sum.x += part.x, sum.y += part.y;
  }
  store_with<T>(f, row, out, added, round_pair<T>(sum.x, sum.y));
}

// Writes which rows are finite and, if requested, how many neurons each fires. The rows are divided among CTAs; a CTA's
// last warp writes them.
template <typename T, int kNeurons>
__device__ __forceinline__ void write_rows16_results(const Ffn& f, const Rows16Space<T, kNeurons>& space, int* nnz,
                                                     int cta, int warp, int lane) {
  constexpr int kEach = 4;  // groups that a lane reads at once
  for (int row = cta; row < f.rows && warp == kRows16Warps - 1; row += kRows16Splits * gridDim.y) {
    uint32_t broken = 0, sum = 0;
    for (int base = lane; base - lane < space.groups; base += 32 * kEach) {
      uint32_t counts[kEach], marks[kEach];
      until_written([&] {
        bool written = true;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int g = min(base + 32 * j, space.groups - 1);
          counts[j] = sm80::load_relaxed_4(&space.group[g].counts[row / 4], base + 32 * j < space.groups);
          marks[j] = sm80::load_relaxed_4(&space.group[g].broken, base + 32 * j < space.groups);
          written = written && counts[j] != kUnwritten && marks[j] != kUnwritten;
        }
        return written;
      });
#pragma unroll
      for (int j = 0; j < kEach; ++j) sum += counts[j] >> 8 * (row % 4) & 0xff, broken |= marks[j];
    }
    broken = __reduce_or_sync(~0u, broken) >> row & 1, sum = __reduce_add_sync(~0u, sum);
    if (lane > 0) continue;
    f.finite[row] = !broken;
    if (nnz != nullptr) nnz[row] = broken ? 0 : sum;
  }
}

template <typename T, int kTiles, int kNeurons>
__global__ void __launch_bounds__(kRows16Threads, 2)
    rows16_down(const __grid_constant__ CUtensorMap map, const Ffn f, int* nnz) {
  using Down = Rows16Down<kTiles, kNeurons>;
  constexpr int kAtOnce = kRows16AtOnce<kTiles, kNeurons>, kSixteens = kNeurons / 16;
  constexpr int kSteps = kTiles == 2 ? 1 : (kNeurons == kGroupNeurons ? 3 : 2);
  extern __shared__ unsigned char raw[];
  unsigned char* rings = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  typename Down::Shared& s = *reinterpret_cast<typename Down::Shared*>(rings + kRows16Warps * Down::kRingBytes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4, eighth = lane / 4;
  const int rank = cluster_rank(), slot = rank * kRows16Warps + warp, cta = blockIdx.y * kRows16Splits + rank;
  const int out0 = blockIdx.y * kRows16Outputs;
  begin_rows16_down<kTiles, kNeurons>(s, f.rows, thread);
  cluster_sync();  // all have begun, so their shared memory may be written

  const Rows16Space<T, kNeurons> space(f);
  const bool inside = out0 + 8 * eighth < f.d_model;
  const T* w = static_cast<const T*>(f.w_down) + (inside ? out0 + 8 * eighth : 0);
  const char* lists = reinterpret_cast<const char*>(space.group->list + 4 * quad);
  const T* h = space.hidden + (quad * Down::kRows + eighth) * 4;
  unsigned char* ring = rings + warp * Down::kRingBytes;
  uint32_t used = 0;          // boxes
  uint32_t nan[kTiles] = {};  // pairs, NaN once a value of the hidden state is not finite
  float d[4][kTiles][4] = {};
  for (int base = slot; base < space.groups; base += kAtOnce * kRows16Slots) {
    uint32_t count[kAtOnce];
    uint2 list[kAtOnce];  // four neurons each
    const auto read_list = [&](int i, int step) {
      const int g = base + i * kRows16Slots;
      list[i] = sm80::load_relaxed_8(lists + static_cast<uint32_t>(g * sizeof(Rows16Group<kNeurons>) + 32 * step),
                                     g < space.groups);
      return is_written(list[i]);
    };
    const auto hidden = [&](uint2(&b)[kTiles], int g, int step, bool there) {
      bool written = true;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        b[n] = sm80::load_relaxed_8(h + static_cast<uint32_t>((g * kNeurons / 4 + 4 * step) * Down::kRows * 4 + 32 * n),
                                    there);
        written = written && is_written(b[n]);
      }
      return written;
    };
    const auto mark = [&](const uint2(&b)[kTiles]) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) nan[n] = break_pair<T>(break_pair<T>(nan[n], b[n].x), b[n].y);
    };
    until_written([&] {
      bool written = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int g = base + i * kRows16Slots;
        count[i] = sm80::load_relaxed_4(&space.group[g < space.groups ? g : 0].count, g < space.groups);
        written = read_list(i, 0) && count[i] != kUnwritten && written;
      }
      return written;
    });
    uint32_t dense_groups = 0, most = 0;  // a bit a group; the most neurons of another one
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (const uint32_t broken = count[i] >> kBrokenGate) atomicOr(&s.broken, broken);
      count[i] %= 1 << kBrokenGate;
      if (count[i] == kNeurons)
        dense_groups |= 1u << i;
      else
        most = max(most, count[i]);
    }
    uint32_t pending = dense_groups;
    const auto fetch = [&] {
      const int i = __ffs(pending) - 1, fetched = used + __popc(dense_groups) - __popc(pending);
      pending &= pending - 1;
      uint64_t* full = &s.full[warp][fetched % Down::kDepth];
      if (lane == 0) {
        barrier_expect(full, kRows16BoxBytes<kNeurons>);
        tma_load_2d(ring + fetched % Down::kDepth * kRows16BoxBytes<kNeurons>, &map, full, out0,
                    (base + i * kRows16Slots) * kNeurons);
      }
    };
#pragma unroll
    for (int i = 0; i < Down::kDepth; ++i)
      if (pending) fetch();
    for (int step = 0; 16 * step < most; ++step) {
      uint4 a[kAtOnce][4];
      uint2 b[kAtOnce][kTiles];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t neuron = (e & 2 ? list[i].y : list[i].x) >> 16 * (e & 1) & 0xffffu;  // from 1 on
          a[i][e] = sm80::load_16(w + (neuron - 1) * static_cast<uint32_t>(f.d_model), inside && neuron > 0);
        }
      }
      until_written([&] {
        bool written = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          written = hidden(b[i], base + i * kRows16Slots, step, (list[i].x & 0xffffu) > 0) && written;
        return written;
      });
      if (16 * (step + 1) < most)
        until_written([&] {
          bool written = true;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) written = read_list(i, step + 1) && written;
          return written;
        });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) mark(b[i]), add_sixteen<T>(d, a[i], b[i]);
    }
    for (; dense_groups; dense_groups &= dense_groups - 1, ++used) {
      const int g = base + (__ffs(dense_groups) - 1) * kRows16Slots, at = used % Down::kDepth;
      uint2 b[kSixteens][kTiles];
      until_written([&] {
        bool written = true;
#pragma unroll
        for (int step = 0; step < kSixteens; ++step) written = hidden(b[step], g, step, true) && written;
        return written;
      });
      barrier_wait(&s.full[warp][at], used / Down::kDepth & 1);
#pragma unroll kSteps
      for (int step = 0; step < kSixteens; ++step) {
        uint4 a[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int k = 16 * step + 4 * quad + e;
          a[e] = *reinterpret_cast<const uint4*>(ring + at * kRows16BoxBytes<kNeurons> + k * 128 +
                                                 ((eighth ^ (k & 7)) << 4));
        }
        mark(b[0]), add_sixteen<T>(d, a, b[0]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int s = 1; s < kSixteens; ++s) b[s - 1][n] = b[s][n];
      }
      __syncwarp();
      if (pending) fetch();
    }
  }
  let_next_launch();  // whose prefetches would have come before what this one waits for
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    if (nan[n] != 0) atomicOr(&s.broken, 1u << (8 * n + eighth));
  float(*sums)[Down::kPitch] = reinterpret_cast<float(*)[Down::kPitch]>(ring);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float4* to = reinterpret_cast<float4*>(&sums[8 * n + 2 * quad + e][8 * eighth]);
      to[0] = make_float4(d[0][n][e], d[0][n][2 + e], d[1][n][e], d[1][n][2 + e]);
      to[1] = make_float4(d[2][n][e], d[2][n][2 + e], d[3][n][e], d[3][n][2 + e]);
    }
  __syncthreads();
  send_rows16_sums<kTiles, kNeurons>(s, rings, f.rows, rank, thread);
  write_rows16_results(f, space, nnz, cta, warp, lane);
  write_rows16_outputs<T, kTiles, kNeurons>(s, f, out0, rank, thread);
  wait_for_launches();  // so that this does not end before the launch before, which the next one does not wait for
}

}  // namespace twell::hopper
