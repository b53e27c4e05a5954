#include "foremoe/rollout/file_kind.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"
#include "foremoe/rollout/importers/importer.h"

namespace foremoe {
namespace {

// "a trace" for foremoe.trace/1; empty for formats of others.
std::string_view kind_of(std::string_view format) {
  for (const auto& [name, kind] : {std::pair{kTraceFormat, "a trace"}, std::pair{kLoadFormat, "a load"},
                                   std::pair{kPlanFormat, "a plan"}, std::pair{kHomesFormat, "homes"}}) {
    if (format.substr(0, format.find('/')) == name.substr(0, name.find('/'))) return kind;
  }
  return {};
}

// How to get a file of another kind. {}: the file at hand.
struct Conversion {
  std::string_view found, expected, advice;
};
constexpr std::array<Conversion, 8> kConversions{{
    {"a trace", "a load", "Count it with: foremoe collect {} --ranks R --out load.safetensors"},
    {"a trace", "a plan", "Plan it with: foremoe plan {} --out plan.safetensors"},
    {"a load", "a plan", "Plan it with: foremoe plan {} --out plan.safetensors"},
    {"a trace", "homes", "Choose homes with: foremoe homes {} --out homes.safetensors"},
    {"a load", "homes", "Choose homes from its trace with: foremoe homes TRACE --out homes.safetensors"},
    {"a load", "a trace", "A load has no routes: give the trace that it counts"},
    {"a plan", "a trace", "Give the trace or load that it plans"},
    {"homes", "a trace", "Give it as --homes, beside a trace or load"},
}};

bool looks_like_safetensors(std::span<const std::byte> bytes) {
  std::uint64_t header_bytes = 0;  // before the beginning of a JSON object; a damaged file can pass
  if (bytes.size() <= sizeof header_bytes) return false;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  return header_bytes <= kMaxHeaderBytes && bytes[sizeof header_bytes] == std::byte{'{'};
}

}  // namespace

Safetensors open_input(const std::string& path) {
  const auto file = std::make_shared<const MappedFile>(path);
  if (looks_like_safetensors(file->bytes())) return Safetensors::parse(file->bytes(), path, file);
  const auto format = find_format({path, file->bytes()});
  if (!format)
    throw InputError({.file = path}, "is not a safetensors file, and in no format that foremoe import reads");
  const bool counts = format == ImportFormat::kCounts;
  throw InputError(
      {.file = path},
      fmt::format("is a {} file. Convert it with: foremoe import {}{} --out {}.safetensors", name_of(*format), path,
                  counts ? " --ranks R --top-k K" : "", counts ? "load" : "trace"));
}

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

FileKind file_kind(const std::string& path) { return file_kind(open_input(path)); }

void expect_format(const Safetensors& file, std::string_view format, std::string_view newer) {
  const std::string& found = file.text("format");
  if (found == format || (!newer.empty() && found == newer)) return;
  const std::string_view kind = kind_of(found);
  if (!kind.empty() && kind != kind_of(format)) refuse_kind(file, {format});
  file.fail("__metadata__.format", "",
            fmt::format("'{}', expected {}{}{}", found, format, newer.empty() ? "" : " or ", newer));
}

void refuse_kind(const Safetensors& file, std::initializer_list<std::string_view> expected) {
  const std::string_view found = kind_of(file.text("format"));
  std::string names;
  std::string advice;
  for (const std::string_view format : expected) {
    names += fmt::format("{}{}", names.empty() ? "" : " or ", kind_of(format));
    for (const Conversion& of : kConversions) {
      if (advice.empty() && of.found == found && of.expected == kind_of(format))
        advice = ". " + fmt::format(fmt::runtime(of.advice), file.name());
    }
  }
  file.fail("", "", fmt::format("is {}, expected {}{}", found, names, advice));
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

void add_per_layer(Metadata& metadata, const char* key, const std::vector<int>& numbers) {
  if (!numbers.empty()) metadata.emplace(key, nlohmann::json(numbers).dump());
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
