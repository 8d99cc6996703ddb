// Products whose second operand's rows are gathered: panels [rows of an item][k] times the rows of a list, [k][256
// outputs].
//
// A `Job` defines the items, lists and outputs: `dx` and `weights` are the two. Panels are fetched by bulk copies, as
// images of shared memory; rows by 16-byte copies in runs of 512 bytes. Each warp's 16 rows of outputs are written by a
// bulk copy each.
#pragma once

#include "hopper/backward/even_shares.cuh"
#include "hopper/gather.cuh"
#include "hopper/gemm.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

// A warp's part of the staging tile: 16 rows of 512 bytes in different banks.
constexpr int kResultRows = 16, kResultBytes = 512, kResultPitch = kResultBytes + 16,
              kResultWarp = kResultRows * kResultPitch;
constexpr int kProductSharedBytes = kSharedBytes - sizeof(Shared::staging) + kConsumerWarps * kResultWarp;

struct ProductMemory {
  EvenSharesMemory shares;
  int last;  // whether this CTA is the last to have a piece of a tile
};
static_assert(kProductSharedBytes + sizeof(ProductMemory) <= 227 * 1024);

template <typename Job>
__device__ __forceinline__ void produce_product(const Job& job, Shared& s, const EvenShares& shares) {
  constexpr int kRows = kTileK / kProducerWarps;  // rows of a stage for each warp; a copy takes a row of 512 bytes
  const int thread = threadIdx.x - kConsumers, warp = uniform(thread / 32), lane = thread % 32;
  const int place = warp * kRows + lane % kRows;  // in a step, the row that this lane looks up
  const uint32_t pitch = job.d_model() * 2;
  Ring ring;
  ring.phase = 1;
#pragma unroll 1
  for (int i = 0, count = uniform(shares.count()); i < count; ++i) {
    const SharedPiece piece = shares.piece(i);
    const int n0 = job.first_output(piece.column) + 8 * lane, steps = job.steps(piece.item);
    const bool inside = n0 < job.d_model();
    const uint32_t bytes = job.panel_bytes(piece.column);
    int ahead = piece.first < piece.end ? job.row(piece.item, piece.first, place) : 0;
#pragma unroll 1
    for (int step = piece.first; step < piece.end; ++step, ring.next()) {
      // a bit for each that exists
      const uint32_t offset = max(ahead, 0) * pitch, rows = __ballot_sync(~0u, ahead >= 0);
      if (step + 1 < piece.end) ahead = job.row(piece.item, step + 1, place);
      const void* base = bytes_on(job.matrix(piece.column, step, steps), inside ? n0 * 2 : 0);
      barrier_wait(&s.empty[ring.stage], ring.phase);
      uint64_t* full = &s.full[ring.stage];
      if (thread == 0) {
        barrier_expect(full, bytes);
        bulk_load(s.a[ring.stage], job.panel(piece.item, piece.column, step, steps), bytes, full);
      }
      const uint32_t to = smem_address(s.b[ring.stage]) + (lane >> 3) * (kBBytes / 4) + warp * kRows * 128;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        async_copy_16(to + r * 128 + (((lane ^ r) & 7) << 4), bytes_on(base, __shfl_sync(~0u, offset, r)),
                      inside && rows >> r & 1);
      async_arrive(full);
    }
  }
  async_wait();
}

// A thread's part of a piece that several CTAs share: 16 bytes of every 4 KB.
__device__ __forceinline__ float4* part_of(const Backward& b, int slot) {
  return reinterpret_cast<float4*>(b.parts) + static_cast<int64_t>(slot) * (kTileM * kTileN / 4) + threadIdx.x;
}

// Writes this CTA's sums; returns true for the last CTA that does, which then has the sums of all pieces, added in
// order.
template <int kSums, typename Pass>
__device__ __forceinline__ bool join_pieces(float (&d)[128], const Pass& b, ProductMemory& memory,
                                            const SharedPiece& piece) {
  float4* mine = part_of(b, EvenShares::slot(blockIdx.x, piece));
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i)
    __stcg(mine + i * kConsumers, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  __threadfence();
  named_sync<kConsumers>(4);
  if (threadIdx.x == 0) {
    int* arrived = b.arrived + piece.phase * kMostCtas + piece.owner;
    memory.last = add_in_order(arrived, 1) == piece.final - piece.owner;
    if (memory.last) *arrived = 0;  // for the next product
  }
  named_sync<kConsumers>(4);
  if (!memory.last) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < kSums; ++i) d[i] = 0.f;
#pragma unroll 1
  for (int cta = piece.owner; cta <= piece.final; ++cta) {
    const float4* part = part_of(b, EvenShares::slot(cta, piece));
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float4 v = __ldcg(part + i * kConsumers);
      d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
      if (i % 8 == 7) __syncwarp();  // else registers are spilled, as all reads would come first
    }
  }
  return true;
}

// Writes kN columns from n0 on of the warp's 16 rows, or adds them to what is there. to(row): where a row of outputs
// begins, or null. Out: T or float.
template <typename T, typename Out, int kN, typename To>
__device__ __forceinline__ void write_rows(const float (&d)[128], Shared& s, const Consumer& c, int n0, int d_model,
                                           To to, bool adds = false) {
  constexpr int kColumns = std::min<int>(kN, kResultBytes / sizeof(Out));  // at a time
  unsigned char* out = s.staging + (c.group * 4 + c.warp) * kResultWarp;
  Out* row = c.lane < kResultRows ? to(c.lane) : nullptr;
#pragma unroll
  for (int column0 = 0; column0 < kN; column0 += kColumns) {
    bulk_wait_read<0>();  // what was sent before has left
    __syncwarp();
    if constexpr (sizeof(Out) == 2) {
      const Corner corner(c.lane);
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        const float* v = d + 4 * (column0 / 8 + j);
        store_matrices(out + corner.row * kResultPitch + (j + corner.chunk) * 16, round_pair<T>(v[0], v[1]),
                       round_pair<T>(v[2], v[3]), round_pair<T>(v[4], v[5]), round_pair<T>(v[6], v[7]));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* v = d + 4 * (column0 / 8 + j) + 2 * h;
          *reinterpret_cast<float2*>(out + (c.lane / 4 + 8 * h) * kResultPitch + (8 * j + 2 * (c.lane % 4)) * 4) =
              make_float2(v[0], v[1]);
        }
    }
    fence_async_proxy();
    __syncwarp();
    const int left = d_model - n0 - column0;
    if (row != nullptr && left > 0) {
      const int bytes = min(kColumns, left) * static_cast<int>(sizeof(Out));
      if (adds)
        bulk_add<Out>(row + n0 + column0, out + c.lane * kResultPitch, bytes);
      else
        bulk_store(row + n0 + column0, out + c.lane * kResultPitch, bytes);
    }
    bulk_commit();
  }
}

template <typename Job>
__device__ __forceinline__ void consume_product(const Job& job, Shared& s, ProductMemory& memory,
                                                const EvenShares& shares, const Consumer& c) {
  Ring ring;
  float d[128];
#pragma unroll 1
  for (int i = 0, count = uniform(shares.count()); i < count; ++i) {
    const auto run = [&]<int kN>(const Consumer& part, int steps) {
      if (steps == 0) {
#pragma unroll
        for (float& sum : d) sum = 0.f;
      }
      multiply<typename Job::Value, kN, 1, 1>(d, s, ring, steps, true, part, [] {});
      const SharedPiece piece = shares.piece(i);  // computed again: keeping it during the product costs registers
      if (piece.whole || join_pieces<kN / 2>(d, job.b, memory, piece)) job.template write<kN>(d, s, piece, part);
    };
    const SharedPiece piece = shares.piece(i);
    const int steps = uniform(piece.end - piece.first);
    if (job.is_light(piece.column))  // 64 rows: each warpgroup takes half of the outputs
      run.template operator()<kTileN / 2>({c.group, c.warp, c.lane, 0, c.group * (kTileN / 2)}, steps);
    else
      run.template operator()<kTileN>(c, steps);
  }
  bulk_wait<0>();
}

template <typename Job>
__global__ void __launch_bounds__(kThreads, 1) gathered_product(const __grid_constant__ typename Job::Pass b) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  __shared__ ProductMemory memory;
  begin_ring(s);
  let_next_launch();
  wait_for_launches();
  const Job job{b};
  if (job.is_needless()) return;
  const EvenShares shares(memory.shares, job.items(), job.columns(), job.phases(),
                          [&](int item) { return job.steps(item); });
  if (threadIdx.x >= kConsumers) {
    registers_down<kProducerRegisters>();
    produce_product(job, s, shares);
  } else {
    registers_up<kConsumerRegisters>();
    consume_product(job, s, memory, shares, Consumer::here());
  }
}

template <typename Job>
void launch_product(const typename Job::Pass& b, cudaStream_t stream) {
  launch_overlapping(gathered_product<Job>, std::min(multiprocessors(), kMostCtas), kThreads, kProductSharedBytes, 1,
                     stream, b);
}

// Launches a product whose results are weights' gradients, of float32 or of 16 bits.
template <typename Wide, typename Narrow>
void launch_weights_product(const typename Wide::Pass& b, cudaStream_t stream) {
  b.float_weights ? launch_product<Wide>(b, stream) : launch_product<Narrow>(b, stream);
}

}  // namespace twell::hopper
