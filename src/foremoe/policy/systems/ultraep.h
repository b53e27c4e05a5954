#pragma once

// UltraEP (Wei et al., arXiv 2606.04101; https://github.com/Dots-Infra/UltraEP): after the router in every layer and
// micro-step, searches directly for the replicas' quotas, and copies the experts that the quotas require.
//
// Problem. Homes are fixed; each rank has G guest slots. Choose guests and their tokens to minimise the largest rank
// load with few guests.
//
// Method. Search for the least target T that a greedy attempt can meet:
//   1. try T = ⌈1.01·⌈mean⌉⌉ and accept the attempt if it succeeds;
//   2. otherwise bisect T between ⌈mean⌉ and the largest load, which needs no guests.
// An attempt visits the ranks above T, most loaded first, and their experts, largest first. While the rank is above T,
// it exports tokens. The target is the rank farthest below T among those with a free slot and without this expert. It
// receives the minimum of excess, room and the expert's tokens. If that is less than min_tokens_per_replica, the rank
// continues with its next expert. The attempt fails if a rank stays above T.
//
// Complexity. An attempt costs O(E + exports·R), with at most R·G exports. Without retries there are at most 3 +
// log₂(largest load) attempts. Guarantee. No rank load exceeds T or the largest load without guests.
//
// Two rules follow the public code, not the paper. A home keeps one token of every expert that has any
// (allow_zero_master_quota is off by default). Ranks are visited by initial load. If 1.01 fails, the public code raises
// the target at most twice by 1 % of the largest load before it searches, to save time on a GPU
// (retries_before_search). Our default, 0, produces better plans. That code tests five targets at once; we bisect.
//
// As a plan. route_tokens routes tokens to replicas, not in the proportions of UltraEP's reroute kernel. The whole
// group is one scale-up domain, as in its EP64 on one rack-scale node; inside_nodes searches each node separately, as
// if NVLink ended at the node. Relay trees of copies are paths, not part of the plan; send_by_relays() models them.
//
// UltraEP's default minimum is 1,024 tokens, for 65,536 or more tokens per rank. Micro-steps here can be far smaller,
// and the minimum then leaves most of the imbalance. So `ultraep` has no minimum; `ultraep-minimum` has it.

#include <cstdint>
#include <memory>
#include <span>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct UltraEpOptions {
  double tolerance = 0.01;                     // of the first target, relative to ⌈mean⌉
  std::int64_t min_tokens_per_replica = 1024;  // 1: none
  bool keep_a_token_at_home = true;
  int retries_before_search = 0;  // the public code: 2
  bool inside_nodes = false;
  double planning_us = 72;  // published: 67 to 78 over three loads, for EP64, 256 experts and 2 guest slots on the GPU
};

// UltraEP's default weight_sync (csrc/kernels/task_build.cu). If an expert has n ≥ 6 copies, its home sends only
// min(⌊√n⌋, 8), to the ranks that send least so far. Experts are visited in order of home. These ranks relay the other
// copies: first one each, then always the rank that sends least. A relay forwards chunks as they arrive. With fewer
// copies, and for gradients, every transfer crosses the home's link.
void send_by_relays(const CopiesOfExpert& copies, std::span<int> sent);

// Named `ultraep` without a minimum, else `ultraep-minimum`.
std::unique_ptr<Policy> make_ultraep(const UltraEpOptions& options = {});

}  // namespace foremoe
