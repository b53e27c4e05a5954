#include "load_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace foremoe::cli {
namespace {

constexpr double kFullBar =
    3;  // multiple of the mean at which bars are cut; otherwise one hot rank would hide differences between the others
constexpr std::array<std::string_view, 9> kEighths = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

// 256-colour palette by load ÷ mean: idle blue, mean grey, overloaded red.
int color_of(double ratio) {
  constexpr std::array<std::pair<double, int>, 9> kPalette = {
      {{0.25, 21}, {0.5, 33}, {0.75, 74}, {0.9, 152}, {1.1, 250}, {1.25, 222}, {1.5, 214}, {2.0, 202}, {1e300, 196}}};
  return std::ranges::find_if(kPalette, [&](const auto& step) { return ratio < step.first; })->second;
}

// Returns the bar for a fraction: empty for 0, at least one eighth for larger values.
std::string_view bar(double fraction) {
  const int eighths = static_cast<int>(std::lround(8 * std::clamp(fraction, 0.0, 1.0)));
  return kEighths[fraction > 0 ? std::max(eighths, 1) : 0];
}

// Returns the maximum of each `per_bar` consecutive values.
std::vector<double> merged(std::span<const double> values, std::size_t per_bar) {
  std::vector<double> result;
  for (std::size_t i = 0; i < values.size(); i += per_bar) {
    result.push_back(std::ranges::max(values.subspan(i, std::min(per_bar, values.size() - i))));
  }
  return result;
}

std::size_t values_per_bar(std::size_t values, std::size_t columns) {
  return std::max<std::size_t>(1, (values + columns - 1) / std::max<std::size_t>(1, columns));
}

// Returns load ÷ mean per rank; all 0 without load.
std::vector<double> ratios(std::span<const Tokens> loads) {
  const std::int64_t total = std::accumulate(loads.begin(), loads.end(), Tokens{}).value;
  std::vector<double> result(loads.size());
  if (total == 0) return result;
  const double mean = static_cast<double>(total) / static_cast<double>(loads.size());
  std::ranges::transform(loads, result.begin(), [&](Tokens load) { return static_cast<double>(load.value) / mean; });
  return result;
}

}  // namespace

std::string sparkline(std::span<const double> values, double low, double high, std::size_t columns) {
  std::string line;
  const double range = std::max(high - low, 1e-12);
  for (const double value : merged(values, values_per_bar(values.size(), columns))) {
    line += kEighths[1 + static_cast<std::size_t>(std::lround(7 * std::clamp((value - low) / range, 0.0, 1.0)))];
  }
  return line;
}

std::string draw(const LoadPicture& picture) {
  const auto& loads = picture.rank_loads;
  std::vector<Tokens> step(loads.extent(1));
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    for (std::size_t r = 0; r < step.size(); ++r) step[r] += loads(m, r);
  }
  constexpr std::size_t kBesideBars = 30;
  const std::size_t columns = static_cast<std::size_t>(std::max(picture.columns, 40)) - kBesideBars;
  const std::size_t per_bar = values_per_bar(step.size(), columns);
  double top = std::ranges::max(ratios(step));
  for (std::size_t m = 0; m < loads.extent(0); ++m) top = std::max(top, std::ranges::max(ratios(loads.row(m))));
  const double full = std::min(top, kFullBar);

  const auto row = [&](const std::string& name, std::span<const Tokens> of_ranks) {
    const std::vector<double> values = ratios(of_ranks);
    std::string line = fmt::format("  {:<14}  ", name);
    for (const double value : merged(values, per_bar)) {
      const std::string_view block = bar(full > 0 ? value / full : 0);
      line += picture.color ? fmt::format("\x1b[38;5;{}m{}", color_of(value), block) : std::string(block);
    }
    if (picture.color) line += "\x1b[0m";
    const double largest = std::ranges::max(values);
    return line + (largest > 0 ? fmt::format("  ρ {:.2f}\n", largest) : "  no load\n");
  };
  std::string out = fmt::format("{}\nA bar is {}'s load ÷ mean; a full bar is {:.2f}{}.\n", picture.title,
                                per_bar == 1 ? "a rank" : fmt::format("the busiest of {} neighbouring ranks", per_bar),
                                full, top > full ? " or more" : "");
  out += row("whole step", step);
  const std::size_t rows = std::min(loads.extent(0), static_cast<std::size_t>(picture.max_rows));
  for (std::size_t m = 0; m < rows; ++m) out += row(fmt::format("micro-step {}", m), loads.row(m));
  if (rows < loads.extent(0)) out += fmt::format("  … and {} more (--rows)\n", loads.extent(0) - rows);
  return out;
}

}  // namespace foremoe::cli
