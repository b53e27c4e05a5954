#pragma once

// ForeMoE's planning of one micro-step as described in its review (§3.3): moves experts to other ranks.
//
// MDA, the deviation adjuster (algorithm 2). It visits pairs of a rank above (1 + ε)·ideal and a rank below
// (1 − ε)·ideal, largest difference first. The overloaded rank's expert with the most tokens moves to the other rank if
// that has room and the tokens are at most 1.5 times the excess over ideal ("would not over-correct").
// Token validator. It checks that every token is served where its expert is, and that no rank exceeds its slots.
// Load verifier. It repeats the adjustment while a rank is above (1 + ε)·ideal. A round that does not lower the largest
// load is undone, so in the worst case the base placement remains (the fallback).
//
// Our reading. A move applies to one micro-step; the next micro-step starts from the base placement. Weights stay at
// the source, so only the destination needs a copy, and nothing moves back. Each pair is visited once, in the order
// before the first move. A pair is skipped if its first rank is no longer above the band or its second is no longer
// below (the review says "break" for the first, and nothing for the second). The candidate is the largest expert that
// the second rank does not hold. If it is too large, no expert moves, as in the review; `try_smaller` then moves the
// largest expert that is not. If an expert has a replica, the part on the first rank moves. The verifier's target is
// MDA's band; "can attempt additional adjustments" means up to kMaxRounds of MDA.
//
// Complexity. O(R² log R + moves · E) per round.

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

// Tokens of one expert that one rank serves.
struct Part {
  int rank;
  std::int64_t tokens;
};

inline constexpr int kMaxRounds = 8;

struct AdjustOptions {
  double epsilon = 0.1;      // of the review's algorithm 3
  double overshoot = 1.5;    // largest tokens of a move ÷ excess
  bool try_smaller = false;  // if the largest expert would over-correct
  int rounds = kMaxRounds;   // of MDA, including the first
};

// Returns one or two parts per expert, [expert]: host and replica serve half each, the lower rank the odd token.
std::vector<std::vector<Part>> base_parts(const BasePlacement& base, std::span<const std::int64_t> load);

// Returns the parts after the moves, which may be in any order.
std::vector<std::vector<Part>> adjusted_parts(const BasePlacement& base, std::span<const Move> moves,
                                              std::span<const std::int64_t> load);

// Runs MDA with the verifier. `load` is [expert], tokens of the micro-step.
std::vector<Move> adjust(const BasePlacement& base, std::span<const std::int64_t> load, const BaseShape& shape,
                         const AdjustOptions& options);

// The validator. Returns whether the moves are from ranks that hold the expert in the base placement to ranks that do
// not, at most once per source and destination, and no rank exceeds its slots.
bool is_consistent(const BasePlacement& base, std::span<const Move> moves, const BaseShape& shape);

}  // namespace foremoe::review
