// Compiles the functions of libfmt that foremoe uses into the wheel, so that the wheel does not need libfmt. With
// FMT_HEADER_ONLY, fmt's headers define them as inline functions. This source uses these functions and is compiled
// without inlining, so its object contains all of them. (fmt::fmt-header-only would add 2 s to the compilation of every
// source.) `scripts/check quickstart` checks that the wheel does not need libfmt.

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cstdio>

namespace foremoe {

std::string bundled_fmt(fmt::string_view format, float single, double number);
std::string bundled_fmt(fmt::string_view format, float single, double number) {
  return fmt::vformat(format, fmt::make_format_args(single, number));
}

// For the command, which prints to files.
void bundled_fmt(std::FILE* file, fmt::string_view format, fmt::format_args arguments);
void bundled_fmt(std::FILE* file, fmt::string_view format, fmt::format_args arguments) {
  fmt::vprint(format, arguments);
  fmt::vprint(file, format, arguments);
}

}  // namespace foremoe
