#pragma once

// Kind of a file, from the `format` in its metadata, limits on the sizes that it may claim, and numbers per layer.

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/safetensors.h"

namespace foremoe {

// Limits above any model or cluster, but low enough to reject a damaged file before allocating memory for it.
inline constexpr std::int64_t kMaxExperts = std::int64_t{1} << 16;
inline constexpr std::int64_t kMaxRanks = std::int64_t{1} << 16;
inline constexpr std::int64_t kMaxLoadCells = std::int64_t{1} << 32;       // per load table: 32 GiB
inline constexpr std::int64_t kMaxTokensPerLayer = std::int64_t{1} << 53;  // per micro-step; exact as double
inline constexpr int kDefaultRanksPerNode = 8;

enum class FileKind : std::uint8_t { kTrace, kLoad, kPlan, kHomes };

inline constexpr std::string_view kTraceFormat = "foremoe.trace/1";
inline constexpr std::string_view kLoadFormat = "foremoe.load/1";
// Version 2: layers may differ, ids may be weightless, and tokens may have fewer than top_k experts.
inline constexpr std::string_view kTraceFormat2 = "foremoe.trace/2";
inline constexpr std::string_view kLoadFormat2 = "foremoe.load/2";
inline constexpr std::string_view kPlanFormat = "foremoe.plan/1";
inline constexpr std::string_view kHomesFormat = "foremoe.homes/1";

// Opens one of ForeMoE's files. For any other file, throws InputError with what it is and the command that converts it.
Safetensors open_input(const std::string& path);

// Throw InputError if the file has no known format, or a version that this build does not read.
FileKind file_kind(const Safetensors& file);
FileKind file_kind(const std::string& path);

// Throws InputError unless the file has this format: what it is and, if there is one, the command that converts it.
void expect_format(const Safetensors& file, std::string_view format, std::string_view newer = {});

// Reads the optional metadata `key`, a JSON list [layers] of integers from `least` on. Empty if absent.
std::vector<int> read_per_layer(const Safetensors& file, const char* key, std::size_t layers, int least);

// Adds it, unless it is empty.
void add_per_layer(Metadata& metadata, const char* key, const std::vector<int>& numbers);

// Layers of a trace or load. The lists are [layers], or empty if all layers are equal.
struct LayerShapes {
  std::size_t layers = 0;
  int experts = 0;
  int top_k = 0;
  std::span<const int> experts_of_layer = {};
  std::span<const int> top_k_of_layer = {};
};
// Throws InputError with field and index unless each layer has 1 to `experts` experts, and tokens choose 1 to `top_k`
// of them.
void expect_layers(const LayerShapes& shapes, const std::string& file);

// Throws InputError for a file of ours that has another kind than those expected, such as {kHomesFormat, kPlanFormat}.
[[noreturn]] void refuse_kind(const Safetensors& file, std::initializer_list<std::string_view> expected);

}  // namespace foremoe
