#pragma once

// What a file may claim. Far above any model or cluster, and low enough that a damaged file is refused before
// memory is asked for in its name.

#include <cstdint>

namespace foremoe {

inline constexpr std::int64_t kMaxExperts = std::int64_t{1} << 16;
inline constexpr std::int64_t kMaxRanks = std::int64_t{1} << 16;
inline constexpr std::int64_t kMaxLoadCells = std::int64_t{1} << 32;       // of a load table: 32 GiB
inline constexpr std::int64_t kMaxTokensPerLayer = std::int64_t{1} << 53;  // of a micro-step: exact as double too
inline constexpr int kDefaultRanksPerNode = 8;

}  // namespace foremoe
