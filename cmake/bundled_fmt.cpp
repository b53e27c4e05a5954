// What the folders use of fmt, compiled into libforemoe.a, so that whoever links it need not have fmt. Formatting is
// done by functions that fmt's headers declare and libfmt defines. With FMT_HEADER_ONLY the headers define them too, as
// inline functions: this source uses them, is compiled without inlining, and so holds them all as weak symbols. A
// program that has an fmt of its own links all the same. (fmt::fmt-header-only for every source costs 2 s each at -O3.)
// tests/packaging/installed_tree looks for functions of fmt that are missing.

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
