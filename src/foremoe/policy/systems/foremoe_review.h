#pragma once

// ForeMoE as described in its review (Z. Zhou's review of arXiv 2606.11867, §3.3), for comparison with our planner.
// Once per step, BPO computes a base placement from mean loads. In every micro-step, MDA moves whole experts to reduce
// the remaining imbalance. A validator and a verifier follow; the verifier falls back to the base placement.
//
//                          base placement     moves in micro-steps
//   foremoe-review         BPO                MDA
//   foremoe-review-bpo     BPO                none                     the review's ablation "BPO only"
//   foremoe-review-mda     homes              MDA                      its ablation "MDA only"
//
// The parts are in foremoe_review/: base_placement.h and adjustment.h. Each documents our reading of the review.
//
// As a plan. Loads are those of this step, known from recorded routes. BPO starts from a previous plan of the same
// policy and shape (the review's "step t's P* is step t+1's P_prev"), else from the homes. BPO's hosts are not homes,
// so residency is `free`, also for `foremoe-review-mda` for a fair comparison. As BPO assumes, the plan gives host and
// replica half of an expert's tokens each.
//
// The review does not specify ε of BPO (we use 0.1, which algorithm 3 gives for MDA), the budget ΔC, the verifier's
// target, or whether MDA's moves are reversed later. The published paper's planner has four other stages (our
// `foremoe`). The review's tables refer to the review's own version.
//
// Not part of a plan: the two transfer paths (`run` and `simulate` choose paths) and overlapped planning.

#include "foremoe/policy/policy.h"
#include "foremoe/policy/systems/foremoe_review/adjustment.h"

namespace foremoe {

struct ForeMoeReviewOptions {
  bool base = true;             // BPO; if false, the base placement is the homes
  double base_epsilon = 0.1;    // of BPO's replication
  bool adjust = true;           // MDA, validator and verifier
  review::AdjustOptions moves;  // of MDA
};

// The policy's name depends on `base` and `adjust`; at least one of them must be true.
std::unique_ptr<Policy> make_foremoe_review(const ForeMoeReviewOptions& options = {});

}  // namespace foremoe
