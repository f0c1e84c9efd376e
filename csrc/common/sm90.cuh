// PTX that kernels are made of, under the names that CUTLASS has for it: asynchronous copies (SM80
// and later); mbarriers, clusters, bulk copies, named barriers, register reallocation and wgmma
// ordering (Hopper). Addresses of shared memory are 32-bit. No torch include.
#pragma once

#include <cstdint>

namespace dgmoe {

__device__ __forceinline__ uint32_t cast_smem_ptr_to_uint(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// ---- shared memory by address ----

__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t smem) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(smem) : "memory");
  return word;
}
__device__ __forceinline__ void ld_shared_v2_b32(uint32_t (&words)[2], uint32_t smem) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ void ld_shared_v4_b32(uint32_t (&words)[4], uint32_t smem) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t smem) {
  float2 values;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(values.x), "=f"(values.y)
               : "r"(smem)
               : "memory");
  return values;
}
__device__ __forceinline__ void ld_shared_v4_f32(float (&values)[4], uint32_t smem) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ void st_shared_v2_b32(uint32_t smem, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem), "r"(first), "r"(second) : "memory");
}
__device__ __forceinline__ void st_shared_f32(uint32_t smem, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(value) : "memory");
}
__device__ __forceinline__ void st_shared_v4_f32(uint32_t smem, float a, float b, float c,
                                                 float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
// Four 8 x 8 matrices of 16-bit values. A lane gives the address of a row, lanes 0 to 7 those of
// the first matrix and so on, and gets one word of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&words)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t smem, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// ---- cp.async ----

__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(gmem) : "memory");
}
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(gmem) : "memory");
}
// Zero-fills instead where the predicate is false; then nothing is read.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t smem, const void* gmem, bool pred) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(pred ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_4_zfill(uint32_t smem, const void* gmem, bool pred) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem),
               "r"(pred ? 4 : 0)
               : "memory");
}
// Commits the thread's copies since the last commit as a group.
__device__ __forceinline__ void cp_async_fence() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kGroups of the thread's groups are pending.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
// The thread arrives when its copies so far have landed; the arrival is one of the mbarrier's
// count.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t mbar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mbar) : "memory");
}

// ---- mbarriers ----

__device__ __forceinline__ void mbarrier_init(uint32_t mbar, int arrive_count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(mbar), "r"(arrive_count) : "memory");
}
// Makes initialised mbarriers visible to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives at an mbarrier of any CTA of the cluster, by its mapped address. Without
// .release.cluster: for threads that have only read, whose arrival need not order any write.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t mbar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_and_expect_tx(uint32_t mbar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(mbar), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t mbar, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(mbar),
      "r"(phase)
      : "memory");
}

// ---- clusters ----

__device__ __forceinline__ int block_rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// The same place in the shared memory of the CTA of this rank.
__device__ __forceinline__ uint32_t map_smem_to_cta(uint32_t smem, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(smem), "r"(rank));
  return mapped;
}
// Copies to the same place of every CTA of the mask, and counts the bytes at the mbarrier of each.
__device__ __forceinline__ void bulk_copy_g2s_multicast(uint32_t smem, const void* gmem,
                                                        uint32_t bytes, uint32_t mbar,
                                                        uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(smem),
      "l"(gmem), "r"(bytes), "r"(mbar), "h"(cta_mask)
      : "memory");
}

// ---- named barriers of a CTA, 0 to 15; 0 is __syncthreads ----

template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
// Whether the predicate holds in any of the threads.
template <int kThreads>
__device__ __forceinline__ bool named_barrier_sync_or(int barrier, bool pred) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %2, 0;\nbarrier.cta.red.or.pred q, %1, %3, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(barrier), "r"(static_cast<uint32_t>(pred)), "n"(kThreads)
      : "memory");
  return any != 0;
}

// ---- warpgroups ----

template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Orders accesses to registers and shared memory before the wgmmas that follow.
__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kBatches committed batches are pending.
template <int kBatches>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kBatches) : "memory");
}
// Keeps the compiler from moving uses of a wgmma's registers over the fence or the wait.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
__device__ __forceinline__ void warpgroup_fence_operand(uint32_t (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(values[i])::"memory");
}
// Makes generic writes to shared memory visible to the async proxy, through which wgmma reads.
__device__ __forceinline__ void fence_view_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- shared memory descriptors of wgmma ----

// A K-major tile without swizzle: core matrices of 8 rows of 16 bytes. Byte offsets from one to the
// next: leading along K, stride along M or N.
template <int kLeadingBytes, int kStrideBytes>
__device__ __forceinline__ uint64_t make_smem_desc_no_swizzle(uint32_t smem) {
  constexpr uint64_t kLeading = kLeadingBytes;
  constexpr uint64_t kStride = kStrideBytes;
  return static_cast<uint64_t>(smem >> 4 & 0x3fff) | kLeading >> 4 << 16 | kStride >> 4 << 32;
}
// A K-major tile of rows of 128 bytes with 128-byte swizzle, atoms of 8 rows after one another. The
// low half can be advanced, in 16 bytes, before the descriptor is put together.
__device__ __forceinline__ uint32_t make_smem_desc_128b_lo(uint32_t smem) {
  return (smem >> 4 & 0x3fffu) | 1u << 16;
}
__device__ __forceinline__ uint64_t make_smem_desc_128b(uint32_t lo) {
  uint64_t desc;
  asm("mov.b64 %0, {%1, %2};" : "=l"(desc) : "r"(lo), "r"(64u | 1u << 30));
  return desc;
}

// ---- register hints ----

// A value that all lanes of the warp share: tells the compiler, which then keeps it in a uniform
// register. The whole warp calls.
__device__ __forceinline__ uint32_t warp_uniform(uint32_t value) {
  return __reduce_max_sync(0xffffffffu, value);
}
// Keeps a value in a register that the compiler would rematerialise.
__device__ __forceinline__ uint32_t no_rematerialize(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace dgmoe
