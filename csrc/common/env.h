// The environment variables that the libraries read themselves, at every call: on where they are
// "1".
#pragma once

#include <cstdlib>

namespace dgmoe {

inline bool env_flag(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] == '1' && value[1] == '\0';
}

}  // namespace dgmoe
