// The environment variables that the libraries read themselves, at every call.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace dgmoe {

// Whether a variable is on: 1, true, on or yes, in any case; 0, false, off, no, the empty string and
// unset are off. Throws std::invalid_argument, naming the variable, for every other value.
// `dgmoe_ops/config.py` reads switches alike, in the same words.
inline bool env_flag(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || value[0] == '\0') return false;
  std::string text(value);
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  for (const char* on : {"1", "true", "on", "yes"}) {
    if (text == on) return true;
  }
  for (const char* off : {"0", "false", "off", "no"}) {
    if (text == off) return false;
  }
  throw std::invalid_argument(std::string(name) +
                              " must be one of 1, true, on, yes, 0, false, off, no, got '" + value +
                              "'");
}

}  // namespace dgmoe
