#pragma once

// EMA LB, the baseline of the review of ForeMoE (§6.1): "step-level EMA prediction with greedy relocation". Once per
// step, experts change ranks according to loads predicted by a moving average over steps. There are no replicas, and
// nothing changes within the step.
//
// Prediction (§1.5). ĉ ← α·c + (1 − α)·ĉ for each expert, from step to step. The review gives no α. A plan knows at
// most one previous step (`previous_load`), so the average is that step's mean. Without `previous_load`, the average is
// this step's mean, which the moving average approaches (§2.2: "ĉ ≈ c̄").
//
// Greedy relocation. Exchange an expert of the most loaded rank with a lighter one of another rank, while this lowers
// the largest rank load. Choose the pair that minimises the larger of the two resulting rank loads. Inferred, since the
// review gives no rule. Exchanges keep E/R experts on every rank, so relocation needs no more memory than vanilla. Each
// exchange lowers the sum of squared rank loads, so the search terminates. Ties go to the lowest ids.
//
// As a plan. As in pre-training, a relocated expert and its optimizer state get a new home. The plan has residency
// `static` and no guest slots. The policy update runs on this plan. Relocation starts from the input's homes, which may
// come from the previous step's plan (`homes`). The review gives no period (for pre-training it says "every T steps
// (e.g., T = 50)", §2.2). Here every step relocates experts and is charged for the moves.
//
// Complexity. O(E²/R) per exchange.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/policy/policy.h"

namespace foremoe {

// Returns the homes after the exchanges, [expert]. `load` is [expert], tokens in any unit; `home` is [expert].
std::vector<RankId> relocate_greedily(std::span<const std::int64_t> load, std::span<const RankId> home, int num_ranks);

std::unique_ptr<Policy> make_ema();

}  // namespace foremoe
