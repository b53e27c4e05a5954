#pragma once

// FEPLB (arXiv 2604.19654): dispatches rows to homes. Then copy engines move whole experts (weights and tokens) from
// the busiest to the least loaded rank of a node while other experts compute, in every layer and micro-step.
//
// Problem. Homes are fixed. `dyn` experts per rank are dynamic: another rank of the node may serve all tokens of a
// dynamic expert from one of its buffers. Minimise the largest rank load of each node.
//
// Method. A greedy search per node moves the busiest dynamic expert of the most loaded rank to the least loaded rank
// that has a free buffer. It stops if the receiver would reach the sender's load before the move or the expert has at
// most τ tokens. Ties go to the lowest id.
//
// Invariant. No move raises the largest load of a node, so the result is never worse than without moves.
// Complexity. O(E log(E/R) + moves · ranks per node), with at most `dyn` moves from a rank.
//
// We know the paper only from a description. For the greedy search it gives "busiest dynamic expert on most-loaded
// device", "least loaded", "while devices_unbalanced()" and "if token_count(expert) > threshold τ" with τ = 0. dyn is
// 2, 4 (default) or 8 "experts per device eligible for rebalancing"; max_num_dyn is 8 buffers per device. Inferred:
//   - which experts are dynamic: the `dyn` busiest in the micro-step. Another reading is a fixed set, because the first
//     phase of dispatch collects the tokens of dynamic experts (first_experts: the lowest ids);
//   - when the search stops: at the first busiest expert that does not help. Continuing with smaller experts
//     (try_smaller) would balance better;
//   - an expert moves once, from its home; a rank without a free buffer receives none;
//   - how results return before combine, which the description calls unchanged. With charge_return, results return to
//     their homes in an exchange that is not overlapped, the largest possible cost. Otherwise the return takes no time.
// We fitted a routing model to the published waste before balancing. With it, these readings best reproduce the
// fraction of the straggler removed at EP8 and the small influence of dyn (lab/policies.md).
//
// For a collapsed router, the description says that FEPLB "copies its weights to all other devices" and routes the
// "remaining tokens across all devices". This contradicts moving whole experts, so we omit it. We also omit the router
// predictor, which assigns experts to devices at checkpoints. Plans do not record that a layer computes static before
// dynamic experts. The simulator models this (OnlineWork): planning and copies run while a rank computes its own
// experts.

#include <cstdint>
#include <memory>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct FeplbOptions {
  int dyn = 4;                  // dynamic experts per rank
  std::int64_t min_tokens = 0;  // τ: experts with at most this many tokens stay
  int max_num_dyn = 8;          // buffers per rank, at most its guest slots
  bool first_experts = false;   // dynamic experts are a rank's lowest ids; else its busiest in the micro-step
  bool try_smaller = false;
  bool charge_return = true;  // whether the return of moved rows' results takes time
};

// Named `feplb`, or `feplb-smaller` with try_smaller.
std::unique_ptr<Policy> make_feplb(const FeplbOptions& options = {});

}  // namespace foremoe
