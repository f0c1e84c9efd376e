// What the kernels whose blocks work in pairs say to a Hopper multiprocessor.
#pragma once

#include <cstdint>

namespace dgmoe {
namespace mx_cluster {

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// The address of what has this one in a block of the pair.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int block) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
// Arrives at a barrier of either block of the pair. What arrives has only read, so that no writes
// need be ordered for the cluster, which would take long.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and the phase ends no sooner than `bytes` more have been copied.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Copies to both blocks of a pair, and counts at the barrier of each.
__device__ __forceinline__ void copy_to_pair(uint32_t to, const void* from, uint32_t bytes,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ int block_of_pair() {
  uint32_t block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return static_cast<int>(block);
}
__device__ __forceinline__ void meet_pair() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// Barriers of the block beyond those of all threads and of the groups. Readers of weights arrive at
// these, not at one in shared memory: here each thread's reads count, there those of one lane.
constexpr int kReaderBarriers = 3;
constexpr int kReadersAndWriters = 128 * 2 + 64;
// A warp has read a step's weights, and whoever writes the next ones there may.
__device__ __forceinline__ void done_reading(int slot) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(kReaderBarriers + slot), "n"(kReadersAndWriters)
               : "memory");
}
__device__ __forceinline__ void wait_for_readers(int slot) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(kReaderBarriers + slot), "n"(kReadersAndWriters)
               : "memory");
}
// The four warps that multiply together; one barrier each.
__device__ __forceinline__ void meet(int group) {
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(group + 1) : "memory");
}
__device__ __forceinline__ bool any_of_group(int group, bool here) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %2, 0;\nbarrier.cta.red.or.pred q, %1, 128, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(group + 1), "r"(static_cast<uint32_t>(here))
      : "memory");
  return any != 0;
}
// Four 8 x 8 matrices of bf16, transposed; a lane gives the address of a row.
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// What the tensor core reads: rows of 128 bytes whose 16-byte chunks are exchanged by row. The low
// half counts in 16 bytes.
__device__ __forceinline__ uint32_t low_descriptor(uint32_t address) {
  return (address >> 4 & 0x3fffu) | 1u << 16;
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  uint64_t described;
  asm("mov.b64 %0, {%1, %2};" : "=l"(described) : "r"(low), "r"(64u | 1u << 30));
  return described;
}
// A value that is the same in all lanes: this says so to the compiler, which has it in uniform
// registers then. A warp calls together.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __reduce_max_sync(0xffffffffu, value);
}
// Keeps a value in a register that would be computed anew instead.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace mx_cluster
}  // namespace dgmoe
