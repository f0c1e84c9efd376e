// The CPU kernel behind the grouped and dense GEMMs. Every layout becomes a list of row ranges.
// Ranges of few rows are summed here, in an order that k alone decides; those of many rows by the
// machine's matrix product on one expert's widened weight. Which it is follows from the row count
// alone, so a row has the same bits in every layout. DGMOE_BATCH_INVARIANT=1 keeps to the former:
// then a row has the same bits at any row count and with any number of threads.
#pragma once

#include "../grouped_gemm.h"

namespace dgmoe {

// Fills the valid rows of plan.d; the others keep what they held. Reads masked_m or m_indices first
// and throws std::invalid_argument, naming `op`, where they point outside the operands. `like` says
// where to allocate.
void grouped_gemm_cpu(const char* op, const GroupedGemmPlan& plan, const Tensor& like);

}  // namespace dgmoe
