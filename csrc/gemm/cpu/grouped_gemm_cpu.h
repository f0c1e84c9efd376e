// The CPU kernel behind the grouped and dense GEMMs. Every layout becomes a list of row ranges.
// Small M: our own kernel, whose order of summation depends on k alone. Large M: PyTorch's fp32
// matrix product on the expert's dequantised weight. The row count of a range alone decides, so a
// row has the same bits in every layout. DGMOE_BATCH_INVARIANT=1 uses our own kernel always: then a
// row has the same bits at any row count and with any number of threads.
#pragma once

#include "../grouped_gemm.h"

namespace dgmoe {

// Writes the valid rows of plan.d and no others. Reads masked_m or m_indices first
// and throws std::invalid_argument, naming `op`, where they point outside the operands. `like` says
// where to allocate.
void grouped_gemm_cpu(const char* op, const GroupedGemmPlan& plan, const Tensor& like);

}  // namespace dgmoe
