#pragma once

// Kind of a file, from the `format` in its metadata, and limits on the sizes that it may claim.

#include <cstdint>
#include <string>
#include <string_view>

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
inline constexpr std::string_view kPlanFormat = "foremoe.plan/1";
inline constexpr std::string_view kHomesFormat = "foremoe.homes/1";

// Throw InputError if the file has no known format, or a version that this build does not read.
FileKind file_kind(const Safetensors& file);
FileKind file_kind(const std::string& path);
void expect_format(const Safetensors& file, std::string_view format);

}  // namespace foremoe
