#pragma once

// UltraEP (Wei et al., arXiv 2606.04101; https://github.com/Dots-Infra/UltraEP): after the router in every layer and
// micro-step, searches directly for the replicas' quotas, and copies the experts that the quotas require.
//
// Problem. Homes are fixed; each rank has G guest slots. In every NVLink domain, choose guests and their tokens to
// minimise the largest rank load with few guests.
//
// Method. Search for the least target T that a greedy attempt can meet:
//   1. try T = ⌈1.01·⌈mean⌉⌉, then twice T + ⌈1 % of the largest load⌉, and accept the first attempt that succeeds;
//   2. otherwise try ⌈mean⌉, then search between it and the largest load, which needs no guests: of four targets that
//      divide the interval evenly, the least that succeeds and the one below it are the next interval.
// An attempt visits the ranks above T, most loaded first, and their experts, largest first. While the rank is above T,
// it exports tokens. The target is the rank farthest below T among those with a free slot and without this expert. It
// receives the minimum of excess, room and the expert's tokens. If that is too little, the rank continues with its next
// expert. Too little is less than ⌈excess ÷ number of such ranks⌉ in the first three attempts, and less than
// min_tokens_per_replica in the search. The attempt fails if a rank stays above T.
//
// Complexity. An attempt costs O(E + exports·R), with at most R·G exports. There are at most 5 + 4·log₅(largest load)
// attempts. Guarantee. No rank load exceeds T or the largest load without guests.
//
// All rules follow version 1.0.0 of the code (csrc/kernels/placement.cu), also where the paper differs: a home keeps
// one token of every expert that has any, and ranks are visited by initial load.
//
// As a plan. route_tokens routes tokens to replicas, not in the proportions of UltraEP's reroute kernel. The domain is
// the node, because UltraEP copies over NVLink only. If NVLink joins a rack, set the rack as the node (ranks_per_node),
// or whole_group to keep the nodes. Relay trees of copies are paths, not part of the plan; send_by_relays() models
// them.

#include <cstdint>
#include <memory>
#include <span>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct UltraEpOptions {
  double tolerance = 0.01;                     // of the first target, relative to ⌈mean⌉
  std::int64_t min_tokens_per_replica = 1024;  // in the search only
  bool keep_a_token_at_home = true;
  bool whole_group = false;  // one domain of all nodes, as on one NVLink rack
  // Published: 67 to 78 over three loads, for EP64, 256 experts and 2 guest slots on the GPU. Smaller groups may take
  // less, but no source says how much.
  double planning_us = 72;
};

// UltraEP's default weight_sync (csrc/kernels/weight_sync.cu). In a domain of more than 8 ranks, if an expert has n ≥ 4
// copies, its home sends only min(⌊√n⌋, 8), to the ranks that send least so far. Experts are visited in order of home.
// These ranks relay the other copies: first one each, then always the rank that sends least. A relay forwards chunks as
// they arrive. Otherwise, and for gradients, every transfer crosses the home's link. The code also requires that relays
// take at least two copies off the busiest sender; n ≥ 4 implies it.
void send_by_relays(const CopiesOfExpert& copies, std::span<int> sent);           // a domain is a node
void send_by_relays_of_group(const CopiesOfExpert& copies, std::span<int> sent);  // the group is one domain

std::unique_ptr<Policy> make_ultraep(const UltraEpOptions& options = {});

}  // namespace foremoe
