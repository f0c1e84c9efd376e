// What the kernels of many_rows.cuh say to a Hopper multiprocessor.
#pragma once

#include <cstdint>

namespace dgmoe {
namespace many_rows {

// Adds 16 columns' product of 64 rows, from registers, and kRows rows, in shared memory, to d. It is
// under way until waited for.
#define DGMOE_8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define DGMOE_16(i) DGMOE_8(i), DGMOE_8(i + 8)
#define DGMOE_SUMS_0                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define DGMOE_SUMS_16                          \
  ", %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define DGMOE_SUMS_32                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define DGMOE_SUMS_48                          \
  ", %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define DGMOE_SUMS_64                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define DGMOE_SUMS_80                          \
  ", %80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define DGMOE_SUMS_96                              \
  ", %96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define DGMOE_SUMS_112                                 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
// What follows the sums: the numbers of the operands below them.
#define DGMOE_MULTIPLY(rows, sums, left0, left1, left2, left3, right_, ...)                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" rows "k16.f32.bf16.bf16 {" sums "}, {" left0 \
               ", " left1 ", " left2 ", " left3 "}, " right_ ", 1, 1, 1, 0;"                    \
               : __VA_ARGS__                                                                    \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

template <int kRows>
__device__ __forceinline__ void multiply(float (&d)[kRows / 2], const uint32_t (&left)[4],
                                         uint64_t right) {
  static_assert(kRows == 64 || kRows == 128 || kRows == 160 || kRows == 192 || kRows == 256);
  if constexpr (kRows == 64) {
    DGMOE_MULTIPLY("64", DGMOE_SUMS_0 DGMOE_SUMS_16, "%32", "%33", "%34", "%35", "%36", DGMOE_16(0),
                   DGMOE_16(16));
  } else if constexpr (kRows == 128) {
    DGMOE_MULTIPLY("128", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48, "%64", "%65",
                   "%66", "%67", "%68", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32), DGMOE_16(48));
  } else if constexpr (kRows == 160) {
    DGMOE_MULTIPLY("160", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48 DGMOE_SUMS_64,
                   "%80", "%81", "%82", "%83", "%84", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32),
                   DGMOE_16(48), DGMOE_16(64));
  } else if constexpr (kRows == 192) {
    DGMOE_MULTIPLY(
        "192", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48 DGMOE_SUMS_64 DGMOE_SUMS_80,
        "%96", "%97", "%98", "%99", "%100", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32), DGMOE_16(48),
        DGMOE_16(64), DGMOE_16(80));
  } else {
    DGMOE_MULTIPLY("256",
                   DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48 DGMOE_SUMS_64
                       DGMOE_SUMS_80 DGMOE_SUMS_96 DGMOE_SUMS_112,
                   "%128", "%129", "%130", "%131", "%132", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32),
                   DGMOE_16(48), DGMOE_16(64), DGMOE_16(80), DGMOE_16(96), DGMOE_16(112));
  }
}

#undef DGMOE_MULTIPLY
#undef DGMOE_SUMS_112
#undef DGMOE_SUMS_96
#undef DGMOE_SUMS_80
#undef DGMOE_SUMS_64
#undef DGMOE_SUMS_48
#undef DGMOE_SUMS_32
#undef DGMOE_SUMS_16
#undef DGMOE_SUMS_0
#undef DGMOE_16
#undef DGMOE_8

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
// Keeps a value in a register that would be computed anew instead.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace many_rows
}  // namespace dgmoe
