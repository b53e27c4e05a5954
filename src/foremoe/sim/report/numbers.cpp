#include "foremoe/sim/report/numbers.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <string_view>

namespace foremoe::report {
namespace {

// Three digits that count.
std::string three_digits(double value) {
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

}  // namespace

std::string seconds_text(double seconds) {
  if (seconds == 0) return "0\u00A0s";
  const double size = std::abs(seconds);
  if (size >= 0.9995) return three_digits(seconds) + "\u00A0s";
  if (size >= 0.9995e-3) return three_digits(1e3 * seconds) + "\u00A0ms";
  return three_digits(1e6 * seconds) + "\u00A0µs";
}

std::string bytes_text(double bytes) {
  constexpr std::array<std::string_view, 6> kUnits{"B", "kB", "MB", "GB", "TB", "PB"};
  std::size_t unit = 0;
  for (; std::abs(bytes) >= 999.5 && unit + 1 < kUnits.size(); ++unit) bytes /= 1000;
  return unit == 0 ? fmt::format("{:.0f}\u00A0B", bytes)
                   : fmt::format("{}\u00A0{}", three_digits(bytes), kUnits.at(unit));
}

std::string times_text(double factor) { return fmt::format("{:.{}f}×", factor, factor >= 99.5 ? 0 : 2); }

std::string percent_text(double fraction) { return fmt::format("{:.1f}\u00A0%", 100 * fraction); }

std::string counted_text(std::int64_t count) {
  std::string digits = fmt::format("{}", count);
  const std::size_t first = count < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) digits.insert(at -= 3, ",");
  return digits;
}

std::string ratio_text(double ratio) { return fmt::format("{:.{}f}", ratio, std::abs(ratio) >= 9.9995 ? 1 : 3); }

std::string tick_text(double value) { return fmt::format("{:.6g}", std::abs(value) < 1e-12 ? 0.0 : value); }

}  // namespace foremoe::report
