// Instructions of Hopper, one thin function each: barriers in shared memory, the bulk tensor copy engine (TMA),
// warpgroup matrix products (WGMMA), and the fences between them. No torch, no policy.
#pragma once

#include <cuda.h>  // CUtensorMap
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/smem.cuh"

namespace twell::sm90 {

// ---- mbarriers

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives for this many of the arrivals that the barrier expects.
__device__ __forceinline__ void barrier_arrive_for(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Arrives at the same barrier of another CTA of the cluster. Its release has the scope of this CTA, which is all that a
// stage needs: the tensor cores have read it, and the copy engine will write it. A release over the cluster costs a
// memory barrier, about a thousand cycles.
__device__ __forceinline__ void barrier_arrive_remote(uint64_t* barrier, uint32_t cta) {
  asm volatile(
      "{\n .reg .b32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(smem_address(barrier)),
      "r"(cta)
      : "memory");
}

// The same, at an address that `remote_address` returned, for this many arrivals.
template <int kArrivals = 1>
__device__ __forceinline__ void barrier_arrive_remote(uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(remote), "n"(kArrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// The same without arriving, for a thread that arrives later.
__device__ __forceinline__ void barrier_expect_more(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether a wait would end at once, with one answer for the whole warp.
__device__ __forceinline__ bool barrier_ready(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred done;\n"
      " mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      " selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return __all_sync(~0u, done);
}

template <int kThreads>
__device__ __forceinline__ void named_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---- bulk copies

__device__ __forceinline__ void tma_load_2d(void* smem, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// Requests a box into the L2.
__device__ __forceinline__ void tma_prefetch_2d(const CUtensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

// Copies the same box to the same offset in every CTA of `mask`; the barrier of each counts the bytes.
__device__ __forceinline__ void tma_load_2d_multicast(void* smem, const CUtensorMap* map, uint64_t* barrier, int x,
                                                      int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d(void* smem, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                            int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(smem)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem_address(smem)),
               "r"(bytes)
               : "memory");
}

// Adds to values of float32 or bfloat16 in global memory. Which sums come first is not known where several are added to
// one value.
template <typename Value>
__device__ __forceinline__ void bulk_add(void* global, const void* smem, uint32_t bytes) {
  if constexpr (sizeof(Value) == 4) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(smem_address(smem)), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(global),
                 "r"(smem_address(smem)), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, const void* smem, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(smem_address(smem)), "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, const void* smem, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(smem_address(smem)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void bulk_wait_read() {  // until the sources may be overwritten
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
template <int kLeft>
__device__ __forceinline__ void bulk_wait() {  // until the destinations are written
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Loads into the L2 alone. This is a hint: no other memory operation needs a fence for it.
__device__ __forceinline__ void prefetch_bulk(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Prefetches the line of that address into the L2. Unlike bulk copies, it takes no time of the copy engine.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Orders earlier ordinary writes to shared memory before later reads by the copy engine or the tensor cores.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders writes to global memory that this thread has observed before later reads by the copy engine.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Copies 16 bytes; unless `inside`, writes zeros and reads nothing.
__device__ __forceinline__ void async_copy_16(uint32_t smem, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(inside ? 16 : 0)
               : "memory");
}
// Arrives, as one of the arrivals that the barrier expects, once all copies that this thread has issued are complete.
__device__ __forceinline__ void async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void async_wait_but() {  // for all copies except those of the last kLeft commits
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
__device__ __forceinline__ void async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- memory that CTAs share

// A write that releases all earlier writes of this thread, and of those it has synchronised with, to the device; and
// the read that acquires them.
__device__ __forceinline__ void release_store(int* global, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}
__device__ __forceinline__ int acquire_load(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// Adds with release and acquire, so that a thread that adds observes the writes of all that added before; returns the
// old value.
__device__ __forceinline__ int add_in_order(int* global, int value) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(global), "r"(value) : "memory");
  return before;
}

// ---- launches that overlap, clusters, and registers

// Lets the next kernel of the stream start once a thread of every CTA of this one has called this. It runs up to its
// `wait_for_launches`; where it reads before that what this one writes, both see to the order themselves.
__device__ __forceinline__ void let_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same without making writes visible: for data that was only read, and for initialised barriers.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address of the same variable in another CTA of the cluster, and a write to it that the next cluster_sync makes
// visible there.
__device__ __forceinline__ uint32_t remote_address(const void* pointer, uint32_t cta) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(pointer)), "r"(cta));
  return remote;
}
__device__ __forceinline__ void store_remote(uint32_t remote, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(a), "f"(b) : "memory");
}
// A word of another CTA's shared memory.
__device__ __forceinline__ int load_remote(const int* word, uint32_t cta) {
  int value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(remote_address(word, cta)) : "memory");
  return value;
}
// A write there, which the barrier beside the variable counts by its bytes.
__device__ __forceinline__ void send_remote(int* to, uint64_t* barrier, int value, uint32_t cta) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 "
      "[%0], %1, [%2];" ::"r"(remote_address(to, cta)),
      "r"(value), "r"(remote_address(barrier, cta))
      : "memory");
}
__device__ __forceinline__ void send_remote(float4* to, uint64_t* barrier, float4 v, uint32_t cta) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address(to, cta)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote_address(barrier, cta))
      : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- warpgroup products

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Descriptor of a 128-byte-swizzled operand. K-major (rows of 64 values; 8 rows take 1024 bytes): `lead` is not read,
// stride is 1024. MN-major (rows of 64 values of the other dimension): lead = bytes between blocks of 64, stride =
// bytes between groups of 8 rows of K. at(i): the descriptor 16 i bytes further, by one addition, which stays within
// the low word.
struct Operand {
  uint32_t low, high;
  __device__ __forceinline__ Operand(uint32_t smem, uint32_t lead, uint32_t stride)
      : low((smem & 0x3FFFF) >> 4 | lead >> 4 << 16), high(stride >> 4 | 1u << 30) {}
  __device__ __forceinline__ uint64_t at(int sixteens) const {
    uint64_t value;
    asm("mov.b64 %0, {%1, %2};" : "=l"(value) : "r"(low + sixteens), "r"(high));
    return value;
  }
};
__device__ __forceinline__ uint64_t descriptor(const void* smem, uint32_t lead, uint32_t stride) {
  return Operand(smem_address(smem), lead, stride).at(0);
}

}  // namespace twell::sm90
