#pragma once

// Every target parses its bytes and uses the result. For invalid bytes, the correct result is an InputError that names
// the input or an option. Any other exception, assertion or sanitizer report is a finding.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "foremoe/core/error.h"

namespace foremoe {

inline constexpr const char* kFuzzedInput = "fuzzed input";

[[noreturn]] inline void found(const char* what) {
  std::fprintf(stderr, "found: %s\n", what);
  std::abort();
}

// If FOREMOE_SEEDS is set in the environment, all inputs are seeds and must be readable: a fuzzer that starts from
// rejected seeds explores nothing.
inline bool inputs_are_seeds() { return std::getenv("FOREMOE_SEEDS") != nullptr; }

template <class Read>
int read_or_refuse(const std::uint8_t* data, std::size_t size, Read&& read) {
  try {
    read(std::as_bytes(std::span(data, size)));
  } catch (const InputError& error) {
    const Where& where = error.where();
    const bool names_option = where.file.empty() && !where.field.empty();
    if (where.file != kFuzzedInput && !names_option) found(error.what());  // the error does not name the input
    if (inputs_are_seeds() && size > 0) found(error.what());
  }
  return 0;
}

}  // namespace foremoe
