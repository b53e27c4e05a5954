#pragma once

// EMA LB, the baseline of the review of ForeMoE (§6.1): "step-level EMA prediction with greedy relocation". Once per
// step experts change ranks by the load that a moving average over steps predicts; nothing is replicated, and nothing
// changes inside the step.
//
// Prediction (§1.5). ĉ ← α·c + (1 − α)·ĉ for each expert, from step to step. The review gives no α. A plan knows one
// step before its own at most (`previous_load`), so that the average is that step's mean; without one it is this step's
// own mean, which is what the average approaches (§2.2: "ĉ ≈ c̄").
//
// Greedy relocation. While the most loaded rank gets lighter: exchange one of its experts with a lighter one of another
// rank, of all pairs the one that leaves the larger of the two rank loads smallest. Inferred: the review names no rule.
// Exchanges keep E/R experts on every rank, so relocation needs no memory beyond vanilla's. Each one lowers the sum of
// the squared rank loads, so the search ends. Among equals: the lowest ids.
//
// As a plan. A relocated expert has a new home, with its optimizer state, as in pre-training: home moves, residency
// `static`, no guest slots, and the policy update runs on it. The relocation begins with the given homes; a run that
// hands on a plan's homes (`homes`) continues from the step before. The review names no period (of pre-training
// it says "every T steps (e.g., T = 50)", §2.2); here every step relocates, and pays for the moves.
//
// Cost. O(E²/R) per exchange.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/policy/policy.h"

namespace foremoe {

// [expert]: homes after the exchanges. `load` is [expert], tokens in any unit; `home` is [expert].
std::vector<RankId> relocate_greedily(std::span<const std::int64_t> load, std::span<const RankId> home, int num_ranks);

std::unique_ptr<Policy> make_ema();

}  // namespace foremoe
