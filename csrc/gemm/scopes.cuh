// What the scopes that this thread is in ask of its GEMMs (dgmoe_ops/backends/scopes.py).
#pragma once

#include <cstdint>

namespace dgmoe {

struct GemmSettings {
  int64_t alignment = 0;  // of segments; 0 where nothing is asked
  int64_t num_sms = 0;    // likewise
  int64_t pdl = -1;       // 0 or 1; -1 where nothing is asked
  bool overlap = false;
};

inline GemmSettings& gemm_settings() {
  thread_local GemmSettings settings;
  return settings;
}

}  // namespace dgmoe
