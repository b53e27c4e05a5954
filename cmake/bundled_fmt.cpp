// The functions of libfmt that foremoe uses, compiled into the wheel, which then needs no libfmt. With FMT_HEADER_ONLY
// fmt's headers define them as inline functions: this source uses them and is compiled without inlining, so its object
// has them all. (fmt::fmt-header-only for every source would cost 2 s for each.) `scripts/check quickstart` checks that
// the wheel needs no libfmt.

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cstdio>

namespace foremoe {

std::string bundled_fmt(fmt::string_view format, float single, double number);
std::string bundled_fmt(fmt::string_view format, float single, double number) {
  return fmt::vformat(format, fmt::make_format_args(single, number));
}

// The command prints.
void bundled_fmt(std::FILE* file, fmt::string_view format, fmt::format_args arguments);
void bundled_fmt(std::FILE* file, fmt::string_view format, fmt::format_args arguments) {
  fmt::vprint(format, arguments);
  fmt::vprint(file, format, arguments);
}

}  // namespace foremoe
