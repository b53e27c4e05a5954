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
// The parts are in foremoe_review/, each with how it was read: base_placement.h, adjustment.h.
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

#include "foremoe/policy/policy.h"
#include "foremoe/policy/systems/foremoe_review/adjustment.h"

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
