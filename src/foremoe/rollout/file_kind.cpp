#include "foremoe/rollout/file_kind.h"

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"

namespace foremoe {

FileKind file_kind(const Safetensors& file) {
  const std::string& format = file.text("format");
  if (format == kTraceFormat || format == kTraceFormat2) return FileKind::kTrace;
  if (format == kLoadFormat || format == kLoadFormat2) return FileKind::kLoad;
  if (format == kPlanFormat) return FileKind::kPlan;
  if (format == kHomesFormat) return FileKind::kHomes;
  file.fail(
      "__metadata__.format", "",
      fmt::format("'{}', expected {}, {}, {} or {}", format, kTraceFormat, kLoadFormat, kPlanFormat, kHomesFormat));
}

FileKind file_kind(const std::string& path) { return file_kind(Safetensors::open(path)); }

void expect_format(const Safetensors& file, std::string_view format, std::string_view newer) {
  const std::string& found = file.text("format");
  if (found == format || (!newer.empty() && found == newer)) return;
  file.fail("__metadata__.format", "",
            fmt::format("'{}', expected {}{}{}", found, format, newer.empty() ? "" : " or ", newer));
}

std::vector<int> read_per_layer(const Safetensors& file, const char* key, std::size_t layers, int least) {
  constexpr std::size_t kMaxText = 16;  // characters per number in JSON
  if (!file.metadata().contains(key)) return {};
  const std::string field = fmt::format("__metadata__.{}", key);
  const std::string& text = file.text(key);
  nlohmann::json list;
  if (text.size() <= (layers + 1) * kMaxText) list = nlohmann::json::parse(text, nullptr, false);
  if (!list.is_array() || list.size() != layers) {
    file.fail(field, "", fmt::format("expected a JSON list of {} integers", layers));
  }
  std::vector<int> numbers;
  for (const nlohmann::json& number : list) {
    constexpr int kMost = std::numeric_limits<int>::max();
    const bool fits = number.is_number_unsigned() && number.get<std::uint64_t>() <= kMost && number.get<int>() >= least;
    if (!fits) file.fail(field, fmt::format("[{}]", numbers.size()), must_be_integer(least, kMost));
    numbers.push_back(number.get<int>());
  }
  return numbers;
}

void expect_layers(const LayerShapes& of, const std::string& file) {
  const auto expect = [&](const char* field, std::span<const int> values, int most) {
    if (!values.empty() && values.size() != of.layers) {
      throw InputError({.file = file, .field = field},
                       fmt::format("{} entries, expected one for each of {} layers", values.size(), of.layers));
    }
    for (std::size_t l = 0; l < values.size(); ++l) {
      if (values[l] >= 1 && values[l] <= most) continue;
      throw InputError({.file = file, .field = field, .index = fmt::format("[{}]", l)},
                       fmt::format("{}, expected 1 to {}", values[l], most));
    }
  };
  expect("experts_of_layer", of.experts_of_layer, of.experts);
  expect("top_k_of_layer", of.top_k_of_layer, of.top_k);
  for (std::size_t l = 0; l < of.experts_of_layer.size(); ++l) {
    const int top_k = of.top_k_of_layer.empty() ? of.top_k : of.top_k_of_layer[l];
    if (top_k <= of.experts_of_layer[l]) continue;
    throw InputError({.file = file, .field = "experts_of_layer", .index = fmt::format("[{}]", l)},
                     fmt::format("{}, but a token chooses {} of them", of.experts_of_layer[l], top_k));
  }
}

}  // namespace foremoe
