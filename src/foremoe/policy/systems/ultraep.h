#pragma once

// UltraEP (Wei et al., arXiv 2606.04101; https://github.com/Dots-Infra/UltraEP): in every layer of every micro-step,
// after the router, what each replica is to serve is searched for directly; experts are copied as the quotas need them.
//
// Problem. Homes stay; G guest slots per rank. Choose guests and their tokens so that the largest rank load is small,
// with few guests.
//
// Method. A search for the least target T that a greedy attempt can meet:
//   1. try T = ⌈1.01·⌈mean⌉⌉ and take the attempt if it succeeds;
//   2. else bisect T between ⌈mean⌉ and the largest load, which needs no guest at all.
// An attempt visits the ranks above T, the most loaded first, and on each its experts, the largest first. While the
// rank is above T it exports to the rank with most room below T that has a free slot and not this expert, as many
// tokens as excess, room and expert permit, but no fewer than min_tokens_per_replica. It fails when a rank stays above.
//
// Complexity. An attempt costs O(E + exports·R); exports are at most R·G, attempts at most 1 + log₂ of the largest
// load. Guarantee. None but that no rank is above T, and T never above the largest load without guests.
//
// From the public code rather than the paper as told to us: a home keeps one token of every expert that has any
// (allow_zero_master_quota is off by default); ranks are visited in the order of their loads before any export. That
// code takes a failed 1.01 up by 1 % of the largest load at most twice before it searches, to save time on a GPU:
// retries_before_search has that, and is 0 here, for the better plan. It probes five targets at once where we bisect.
//
// As a plan. Tokens go to replicas by route_tokens, not in the proportions of its reroute kernel. One scale-up domain
// is the whole group, as in its EP64 on one rack-scale node; inside_nodes searches every node for itself, as it would
// run where NVLink ends at the node. Its copies' relay trees are paths, not plan: send_by_relays().
//
// The minimum of 1,024 tokens is its default, for 65,536 tokens per rank and more. Micro-steps here can be far smaller,
// where it leaves most of the imbalance: `ultraep` is registered without one, and `ultraep-minimum` with it.

#include <cstdint>
#include <memory>
#include <span>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct UltraEpOptions {
  double tolerance = 0.01;                     // of the first target above ⌈mean⌉
  std::int64_t min_tokens_per_replica = 1024;  // 1: none
  bool keep_a_token_at_home = true;
  int retries_before_search = 0;  // the public code: 2
  bool inside_nodes = false;
  double planning_us = 72;  // published: 67 to 78 over three loads, for EP64, 256 experts and 2 guest slots on the GPU
};

// Its weight_sync by default (csrc/kernels/task_build.cu): with n ≥ 6 copies of an expert, its home sends ⌊√n⌋ ≤ 8 of
// them. Those go to the ranks that send least so far, experts by home; the other copies come from these relays in turn,
// then from whichever sends least. A relay passes chunks on as they arrive. With fewer copies, or for gradients, each
// crosses the home's link.
void send_by_relays(const CopiesOfExpert& copies, std::span<int> sent);

// `ultraep` without a minimum, else `ultraep-minimum`.
std::unique_ptr<Policy> make_ultraep(const UltraEpOptions& options = {});

}  // namespace foremoe
