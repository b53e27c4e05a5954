#pragma once

// Words for numbers.

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace foremoe::cli {

// "1 rank", "8 ranks".
inline std::string counted(std::int64_t n, std::string_view noun) {
  return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
}

}  // namespace foremoe::cli
