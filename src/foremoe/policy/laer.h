#pragma once

// LAER-MoE (ASPLOS'26, https://github.com/PKU-DAIR/Hetu-Galvatron): the experts are laid out anew for every micro-step,
// by what the last few of them sent where; a token stays on its node wherever its expert has a replica there. The
// layout, its candidates and their price are in laer/expert_layout.h. Residency `free`.
//
// Read so. The public planner runs beside the training, sees the loads of the last five iterations and lays out the
// next one; so `laer` knows the micro-steps before, not the one that it plans. Before the first of them: the last ones
// of the former step where its load is given, else the mean of this step, which foresight permits, as for our FineMoE.
// `laer-oracle` lays out every micro-step by its own load instead. G slots per rank are added to the E/R of the
// homes; prices are those of the public planner, whatever the cluster.
//
// No counterpart in a plan. LAER-MoE shards every expert over all ranks (FSEP) and restores whatever experts a layout
// asks for, so a changed layout costs it no more than the same one; here each newcomer is a copy. Which replica serves
// which source is the plan's (route_tokens), which keeps tokens on their node exactly where LAER does.

#include "foremoe/policy/laer/expert_layout.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

struct LaerOptions {
  int history = 5;  // micro-steps before the planned one that the layout sees; 0: the planned one alone
  laer::Prices prices;
};

std::unique_ptr<Policy> make_laer(const LaerOptions& options = {});
std::unique_ptr<Policy> make_laer_oracle(const LaerOptions& options = {});

}  // namespace foremoe
