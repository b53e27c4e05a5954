#pragma once

// The rest of ForeMoE's planner as its review tells it (§3.3): for one micro-step, which experts serve elsewhere.
//
// MDA, the deviation adjuster (algorithm 2). Pairs of a rank above (1 + ε)·ideal and one below (1 − ε)·ideal, the
// largest difference first: the expert with most tokens on the first goes to the second, if it has room and those
// tokens are at most 1.5 times the excess over ideal ("would not over-correct").
// Token validator. Every token is served where its expert is, and no rank holds more than it can.
// Load verifier. Adjusts again while a rank is above (1 + ε)·ideal; what does not lower the largest load is taken
// back, so that at worst the base placement remains (the fallback).
//
// Read so. The move is for this micro-step alone: the next one begins with the base placement, and the adjustment lists
// no way back, so the weights at the source stay and only those at the destination are a copy. Each pair has one turn,
// in the order before the first move; it passes when its first rank is no longer above or its second no longer below
// the band (the algorithm as written says "break" for the first, and nothing for the second). The expert is the largest
// that the second rank does not hold; when it is too large nothing moves, as written; `try_smaller` takes the largest
// that is not. Of an expert with a replica, the part that the first rank serves moves. The verifier's target is the
// band of MDA; "can attempt additional adjustments" is up to kMaxRounds of MDA.
//
// Cost. O(R² log R + moves · E) per round.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/policy/systems/foremoe_review/base_placement.h"

namespace foremoe::review {

struct Move {
  int expert;
  int from;
  int to;

  friend bool operator==(const Move&, const Move&) = default;
};

// Tokens of an expert that a rank serves.
struct Part {
  int rank;
  std::int64_t tokens;
};

inline constexpr int kMaxRounds = 8;

struct AdjustOptions {
  double epsilon = 0.1;      // of the review's algorithm 3
  double overshoot = 1.5;    // largest tokens of a move ÷ excess
  bool try_smaller = false;  // experts than the largest, when that would over-correct
  int rounds = kMaxRounds;   // of MDA, the first included
};

// Host and replica serve an expert's load in halves, the odd token on the lower rank. [expert], one or two parts
std::vector<std::vector<Part>> base_parts(const BasePlacement& base, std::span<const std::int64_t> load);

// The same after the moves, in any order of moves.
std::vector<std::vector<Part>> adjusted_parts(const BasePlacement& base, std::span<const Move> moves,
                                              std::span<const std::int64_t> load);

// MDA with the verifier. `load` is [expert], tokens of the micro-step.
std::vector<Move> adjust(const BasePlacement& base, std::span<const std::int64_t> load, const BaseShape& shape,
                         const AdjustOptions& options);

// The validator: whether the moves take experts from ranks that hold them in the base placement to others, at most once
// to each, and no rank holds more than its slots.
bool is_consistent(const BasePlacement& base, std::span<const Move> moves, const BaseShape& shape);

}  // namespace foremoe::review
