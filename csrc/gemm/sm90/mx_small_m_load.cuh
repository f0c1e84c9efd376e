// Of sm90_mx_small_m: the asynchronous copies that fill a stage.
#pragma once

#include "mx_small_m_scheduler.cuh"

namespace dgmoe {
namespace sm90 {
namespace mx_small_m {

// What one thread copies of a tile, K block by K block.
template <bool kFp4, bool kGranK32, typename Config>
struct Loader {
  static constexpr int kBChunks = kSmallMRowBytes / 16;
  static constexpr int kBRowsAtOnce = kSmallMThreads / kBChunks;
  static constexpr int kBCopies = kSmallMBlockN / kBRowsAtOnce;
  static constexpr int kAChunks = Config::kBlockK / 16;
  static constexpr int kARowsAtOnce = kSmallMThreads / kAChunks;
  static constexpr int kACopies = (Config::kBlockM + kARowsAtOnce - 1) / kARowsAtOnce;
  static constexpr int kBlocksPerAWord = (kGranK32 ? 128 : 512) / Config::kBlockK;

  const uint8_t *b, *a;
  const int32_t *b_scale, *a_scale;
  int64_t b_stride, a_stride;  // from one of the thread's copies to the next
  int64_t b_scale_step;        // from one K block to the next
  int32_t b_rows, a_rows;      // that exist, from the thread's first one on
  int32_t b_bytes, a_bytes;    // that a row still has, from the thread's chunk on
  int32_t b_words;             // of scales, likewise
  bool a_scale_exists;

  // The thread's chunk and first row of a. FP8: eight rows of a column of chunks together, as in a
  // core matrix.
  static __device__ __forceinline__ int32_t a_chunk() {
    const int32_t thread = threadIdx.x;
    return kFp4 ? thread % kAChunks : thread / 8 % kAChunks;
  }
  static __device__ __forceinline__ int32_t a_row() {
    const int32_t thread = threadIdx.x;
    return kFp4 ? thread / kAChunks : thread / (8 * kAChunks) * 8 + thread % 8;
  }

  __device__ __forceinline__ void set_tile(const MxSmallMPlan& p,
                                           const LoadScheduler<Config>& scheduler) {
    const OutputTile& output = scheduler.output;
    const int32_t expert = scheduler.expert;
    const int32_t thread = threadIdx.x;
    const int32_t row_bytes = kFp4 ? p.k / 2 : p.k;
    {
      const int32_t byte = thread % kBChunks * 16;
      const int32_t first = output.first_n + thread / kBChunks;
      b = p.b + (int64_t{expert} * p.n + first) * row_bytes + byte;
      b_stride = int64_t{kBRowsAtOnce} * row_bytes;
      b_rows = p.n - first;
      b_bytes = row_bytes - byte;
    }
    {
      const int32_t column = a_chunk() * 16;
      const int32_t first = a_row();
      a = p.a + (output.row + first) * p.k + column;
      a_stride = int64_t{kARowsAtOnce} * p.k;
      a_rows = (Config::kBlockM < output.rows ? Config::kBlockM : output.rows) - first;
      a_bytes = p.k - column;
    }
    const int32_t n = output.first_n + thread % kSmallMBlockN;
    const int32_t word = thread / kSmallMBlockN;
    b_scale = p.b_scale + expert * p.b_scale_batch + n * p.b_scale_row + word * p.b_scale_word;
    b_scale_step = Config::kWords * p.b_scale_word;
    b_words = n < p.n && word < Config::kWords ? p.k / 128 - word : 0;
    a_scale_exists = thread < Config::kBlockM && thread < output.rows;
    a_scale = p.a_scale + (p.masked ? expert * p.a_scale_batch : 0) +
              (scheduler.scale_row + thread) * p.a_scale_row;
  }

  // Issues the copies of a K block and advances to the next. What does not exist is zero-filled.
  __device__ __forceinline__ void load(const MxSmallMPlan& p, int32_t k_block, uint32_t stage) {
    const int thread = threadIdx.x;
    {
      // Swizzled by row, so that ldmatrix reads without bank conflicts.
      const int first = thread / kBChunks;
      const uint32_t to = stage + first * kSmallMRowBytes + (thread % kBChunks ^ first % 8) * 16;
      const uint8_t* from = b;
      const int32_t rows = b_bytes > 0 ? b_rows : 0;
#pragma unroll
      for (int i = 0; i < kBCopies; ++i, from += b_stride) {
        cp_async_16_zfill(to + i * kBRowsAtOnce * kSmallMRowBytes, from, i * kBRowsAtOnce < rows);
      }
      b += kSmallMRowBytes;
      b_bytes -= kSmallMRowBytes;
    }
    {
      // FP4: row-major, to be split later; FP8: straight into core matrices.
      const uint8_t* from = a;
      const int32_t rows = a_bytes > 0 ? a_rows : 0;
#pragma unroll
      for (int i = 0; i < kACopies; ++i, from += a_stride) {
        const int row = a_row() + i * kARowsAtOnce;
        if (Config::kBlockM < kARowsAtOnce && row >= Config::kBlockM) break;
        const int offset = kFp4 ? Config::row_major(row, a_chunk())
                                : Config::core_matrix(row, a_chunk() / 2, a_chunk() % 2);
        cp_async_16_zfill(stage + Config::kA + offset, from, i * kARowsAtOnce < rows);
      }
      a += Config::kBlockK;
      a_bytes -= Config::kBlockK;
    }
    if (Config::kWords == 2 || thread < kSmallMBlockN) {
      cp_async_4_zfill(stage + Config::kBScale + thread * 4, b_scale, b_words > 0);
      b_scale += b_scale_step;
      b_words -= Config::kWords;
    }
    if (thread < Config::kBlockM) {
      cp_async_4_zfill(stage + Config::kAScale + thread * 4, a_scale, a_scale_exists);
      if (kBlocksPerAWord == 1 || k_block % kBlocksPerAWord == kBlocksPerAWord - 1) {
        a_scale += p.a_scale_word;
      }
    }
  }
};

}  // namespace mx_small_m
}  // namespace sm90
}  // namespace dgmoe
