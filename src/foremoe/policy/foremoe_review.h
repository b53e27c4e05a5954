#pragma once

// ForeMoE as its review tells it (Z. Zhou's review of arXiv 2606.11867, §3.3), beside our own planner: once per step a
// base placement from mean loads (BPO), in every micro-step moves of whole experts against what is left (MDA), a
// validator and a verifier that falls back to the base placement.
//
//                          base placement     moves in micro-steps
//   foremoe-review         BPO                MDA
//   foremoe-review-bpo     BPO                none                     the review's ablation "BPO only"
//   foremoe-review-mda     homes              MDA                      its ablation "MDA only"
//
// The parts, place_base() and adjust(), say how each was read.
//
// As a plan. Loads are this step's own, which replay makes known. A former plan of the same policy and shape is the
// warm start of BPO (the review's "step t's P* is step t+1's P_prev"), else the homes are. BPO's hosts are not homes,
// so the residency is free; for comparison on equal terms also that of `foremoe-review-mda`. The tokens of an expert
// with a replica are halved, as BPO counts them.
//
// Left open by the review: ε of BPO (0.1 is MDA's in its algorithm 3, taken for both), the budget ΔC, the verifier's
// target, and whether MDA's moves return. The published paper's planner has four other stages (our `foremoe`); the
// review's tables are of its own reading.
//
// No counterpart in a plan: the two transfer paths (`run` and `simulate` choose paths) and the overlap of planning.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/ids.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/policy/policy.h"

namespace foremoe::review {

// BPO, the base placement optimizer of ForeMoE as its review tells it (§3.3, algorithm 1): once per step, from mean
// loads, which rank hosts an expert, and which experts have a second replica.
//
// Relocation. Experts by how far the load of their host is from ideal, farthest first: each goes to the least loaded
// other rank with room, if that is less loaded afterwards than its host was before.
// Replication. Ranks above (1 + ε)·ideal, the most loaded first: the expert with most tokens gets one replica on a rank
// with room below (1 − ε)·ideal, and half of its tokens go there.
//
// Read so. A rank's load is the sum of what it hosts (the review divides by R, as one must for the ideal alone). The
// order of experts is that before the first relocation, that of ranks the one before the first replica, as written.
// Among ranks that may take a replica the least loaded does (the order is not given). Room is E/R + G slots for hosts
// and replicas alike; the budget ΔC that the review names is used by none of its lines. One replica per overloaded
// rank, so an expert has at most one: as written, even where the rank stays overloaded.
//
// Cost. O(E·(log E + R) + R²).

struct BaseShape {
  int num_ranks = 1;
  int slots_per_rank = 1;  // E/R + G
};

struct BasePlacement {
  std::vector<int> host;     // [expert], rank
  std::vector<int> replica;  // [expert], another rank, or −1

  bool holds(int rank, int expert) const { return host[expert] == rank || replica[expert] == rank; }
};

// `load` is [expert], tokens in any unit; `host` is where the relocation begins, at most slots_per_rank on a rank.
BasePlacement place_base(std::span<const std::int64_t> load, std::vector<int> host, const BaseShape& shape,
                         double epsilon);

// Warm start: the hosts of a former step's plan. A plan does not tell hosts from replicas, so the host is the rank that
// holds the expert at most events, its home first among equals, then the lowest; when that has no room left, the next.
std::vector<int> hosts_of(const StepPlan& former, LayerId layer);

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

namespace foremoe {

struct ForeMoeReviewOptions {
  bool base = true;             // BPO; off: homes
  double base_epsilon = 0.1;    // of BPO's replication
  bool adjust = true;           // MDA, validator and verifier
  review::AdjustOptions moves;  // of MDA
};

// The name says what is on.
std::unique_ptr<Policy> make_foremoe_review(const ForeMoeReviewOptions& options = {});

}  // namespace foremoe
