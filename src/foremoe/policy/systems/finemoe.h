#pragma once

// FineMoE (Zhao et al., arXiv 2511.16947, earlier MicroMoE; FineEP is its parallelization): places replicas so that
// they connect ranks well. A linear program splits the tokens of every micro-step over the replicas of their experts.
//
//                        placement                                           residency   G guest slots
//   finemoe-random       random, by shuffling (figure 8)                     resident    (d − 1)·E/R
//   finemoe-symmetric    Cayley graph, "FineMoE (w/o AR)" (§6.2, app. B)     resident    (d − 1)·E/R
//   finemoe              symmetric at first, adaptively replaced by          free        any
//                        asymmetric ones, "FineMoE" (§6.3, §6.4)
//
// The parts are in finemoe/. Each file cites its section of the paper and marks inferences: symmetric_placement.h (also
// random), asymmetric_placement.h (and its adaptive replacement), replica_load_lp.h (LP 1 and LP 4), token_scheduler.h
// (whole tokens, pipelining, algorithm 1).
//
// Builds without CLP skip all three policies, unless the scheduler's solver is kExact.
//
// As a plan. The paper's d copies of the model's experts, one per data-parallel group, become one home and d − 1 guests
// per expert. As for our EPLB, expected loads are the previous step's (`previous_load`), else this step's mean, known
// from recorded routes. The step starts with the placement of a previous `finemoe` plan of the same shape. Without one,
// it starts with the symmetric placement, if defined. The plan routes tokens by route_tokens, i.e. algorithm 1 with
// locality in nodes.
//
// Not part of a plan: the groups that reduce gradients of one expert and the order of their reductions (§B.3, see the
// placements), distributed versus central scheduling (§5.3) and its overlap (§5.4), and moving optimizer states with
// the experts.

#include "foremoe/policy/policy.h"
#include "foremoe/policy/systems/finemoe/asymmetric_placement.h"
#include "foremoe/policy/systems/finemoe/token_scheduler.h"

namespace foremoe {

struct FineMoeOptions {
  finemoe::SchedulerOptions scheduler;
  finemoe::ReplacementOptions replacement;  // only for `finemoe`
  bool overlap = false;                     // §5.4: scheduling overlaps with the permutation before dispatch
};

std::unique_ptr<Policy> make_finemoe_random(const FineMoeOptions& options = {});
std::unique_ptr<Policy> make_finemoe_symmetric(const FineMoeOptions& options = {});
std::unique_ptr<Policy> make_finemoe(const FineMoeOptions& options = {});

}  // namespace foremoe
