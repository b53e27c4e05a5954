#pragma once

// FEPLB (arXiv 2604.19654): in every layer of every micro-step, after ordinary dispatch, whole experts (weights and
// tokens) go from the busiest to the idlest rank of a node by copy engines, while the experts that stay compute.
//
// Problem. Homes stay. `dyn` experts per rank are dynamic: one of them may be served, all its tokens, in a buffer of
// another rank of its node. Make the largest rank load of each node small.
//
// Method. Greedy, in every node by itself: take the busiest dynamic expert of the most loaded rank to the least loaded
// one that has a free buffer, while this helps, which is while that rank stays below what the other had, and while the
// expert has more than τ tokens. Ties go to the lowest id.
//
// Invariant. No move makes the largest load of a node larger: never worse than without.
// Complexity. O(E log(E/R) + moves · ranks per node); at most `dyn` moves from a rank.
//
// The paper is known to us by a description of it alone, which says "busiest dynamic expert on most-loaded device",
// "least loaded", "while devices_unbalanced()", "if token_count(expert) > threshold τ", dyn 2, 4 (default) or 8
// "experts per device eligible for rebalancing", τ = 0, max_num_dyn = 8 buffers per device. Inferred:
//   - which experts are dynamic: the `dyn` busiest of the micro-step. Another reading is a fixed set, as the
//     tokens of dynamic experts are collected by the first phase of dispatch (first_experts: those of lowest id);
//   - what stops the greedy: the first busiest expert that does not help. Going on with smaller ones (try_smaller)
//     would balance better;
//   - an expert moves once, from its home; a rank without a free buffer receives none;
//   - how results get back before combine, which the description says is unchanged: charge_return has them go to their
//     homes in an exchange that nothing hides, the most that they can cost. Without it they cost nothing, the least.
// With a routing model fitted to the published waste before balancing, these readings come nearest to what is
// published, both in how much of the straggler goes at EP8 and in how little dyn matters; lab/policies.md has the
// figures.
//
// "Copies its weights to all other devices" and routes the "remaining tokens across all devices", which the description
// says of a collapsed router, contradicts whole experts, and is not done. No counterpart in a plan: the router
// predictor that assigns experts to devices at checkpoints, and the order of static before dynamic experts in a layer,
// which the simulator follows (OnlineWork): a rank's own experts are the time in which plan and copies are made.

#include <cstdint>
#include <memory>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct FeplbOptions {
  int dyn = 4;                  // dynamic experts per rank
  std::int64_t min_tokens = 0;  // τ: experts of so few tokens stay
  int max_num_dyn = 8;          // buffers per rank; no more than its guest slots
  bool first_experts = false;   // the dynamic ones are the rank's lowest ids; else its busiest in the micro-step
  bool try_smaller = false;
  bool charge_return = true;  // of the results of rows that were moved; else they are back in no time
};

// `feplb`, or `feplb-smaller` with try_smaller.
std::unique_ptr<Policy> make_feplb(const FeplbOptions& options = {});

}  // namespace foremoe
