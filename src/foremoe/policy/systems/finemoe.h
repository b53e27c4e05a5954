#pragma once

// FineMoE (Zhao et al., arXiv 2511.16947, earlier MicroMoE; FineEP is its parallelization): replicas placed so that
// they join ranks well, and in every micro-step the tokens split over the replicas of their experts by a linear
// program.
//
//                        placement                                           residency   G guest slots
//   finemoe-random       further replicas shuffled (figure 8)                resident    (d − 1)·E/R
//   finemoe-symmetric    Cayley graph, "FineMoE (w/o AR)" (§6.2, app. B)     resident    (d − 1)·E/R
//   finemoe              the same at first, replaced adaptively by           free        any
//                        asymmetric ones, "FineMoE" (§6.3, §6.4)
//
// The parts are in finemoe/, each with its section of the paper and what was inferred: symmetric_placement.h
// (also random), asymmetric_placement.h (and its adaptive replacement), replica_load_lp.h (LP 1 and LP 4),
// token_scheduler.h (whole tokens, pipelining, algorithm 1).
//
// Without CLP all three are skipped, unless the scheduler's solver is kExact.
//
// As a plan. d copies of the model's experts on R ranks, in the paper R ÷ (E/R) data-parallel groups, are here one
// expert per home and d − 1 guests for each. What every former step knew is its load (`previous_load`); without it,
// this step's mean, which foresight permits, as for our EPLB. A former plan of `finemoe` for the same shape says where
// experts are when the step begins, else it is the symmetric placement, or nothing where there is none. Routing is the
// plan's (route_tokens), which is algorithm 1 with locality in nodes.
//
// No counterpart in a plan: the groups in which gradients of one expert are reduced and the order of their reductions
// (§B.3, see the placements), distributed against central scheduling (§5.3) and its overlap (§5.4), moving optimizer
// states with the experts.

#include "foremoe/policy/policy.h"
#include "foremoe/policy/systems/finemoe/asymmetric_placement.h"
#include "foremoe/policy/systems/finemoe/token_scheduler.h"

namespace foremoe {

struct FineMoeOptions {
  finemoe::SchedulerOptions scheduler;
  finemoe::ReplacementOptions replacement;  // of `finemoe`
  bool overlap = false;                     // §5.4: scheduling beside the permutation that precedes dispatch
};

std::unique_ptr<Policy> make_finemoe_random(const FineMoeOptions& options = {});
std::unique_ptr<Policy> make_finemoe_symmetric(const FineMoeOptions& options = {});
std::unique_ptr<Policy> make_finemoe(const FineMoeOptions& options = {});

}  // namespace foremoe
