#pragma once

// LAER-MoE (ASPLOS'26, https://github.com/PKU-DAIR/Hetu-Galvatron): computes a new layout of experts for every
// micro-step from recent traffic between sources and experts. A token stays on its node if the node has a replica of
// its expert. best_layout() describes the layout, its candidates and their price. Residency `free`.
//
// Our reading. The public planner runs in parallel to training and lays out the next iteration from the loads of the
// last five. So `laer` uses the previous micro-steps, but not the planned one. For the first, it uses the last ones of
// the previous step if its load is given, else this step's mean, known from recorded routes, as for our FineMoE.
// `laer-oracle` lays out every micro-step by its own load. G slots per rank are added to the E/R home slots. Prices are
// those of the public planner, for any cluster.
//
// Weights. LAER-MoE shards every expert over all ranks (FSEP) and restores the experts of the layout, so a changed
// layout costs no more than an unchanged one. A plan cannot express this; the simulator charges its cost
// (OnlineWork::shards_experts). With `sharded` off, experts are not sharded and each new replica is a copy, as when
// `run` executes the plan. The plan decides which replica serves which source (route_tokens), and keeps the same tokens
// on their node as LAER-MoE.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/policy/inside_first.h"
#include "foremoe/policy/policy.h"

namespace foremoe::laer {

// LAER-MoE's expert layout: the number of replicas of each expert, their ranks, and the routes of tokens to them.
//
// Problem. Given the tokens from each source to each expert, fill R·C slots to minimise 4·Σ communication + (3 +
// checkpointing)·max computation. The factor 4 is dispatch and combine, forward and backward; Σ is over sources. The
// factor 3 is the forward and two products of the backward; checkpointing repeats the forward. The max is over ranks.
//
// Method. A candidate is a list of replica counts. Each is placed greedily, routed and priced; the cheapest layout
//   wins. even    R·C / E replicas each, if that is a whole number
//   heap    one replica per node (or just one, if the slots do not suffice); then repeatedly one more for the expert
//           with the most load per replica, or one more on every node if it has at least as many as there are nodes
//   perturbed   (option) heap, with one replica of a random expert reassigned to another, or one per node if both
//           counts are multiples of the number of nodes; skipped if the first expert would have none left
//   place   replicas by load, largest first: the least loaded rank with a free slot among the nodes with the fewest
//           replicas of the expert, or anywhere if those nodes are full. A rank may get an expert twice.
//   route   a source's tokens go in equal parts to the replicas on its node, or to all replicas if it has none
//
// Inferred: the remainder of the division goes to the lowest ranks. Ties, including those of the sort by load, go to
// the lowest id. Slots stay empty if too few are left for any expert's next replicas.
// Complexity. Placing O(R²·C), routing O(R·E·replicas).
//
// Source. LAER-MoE (ASPLOS'26) and its planner in https://github.com/PKU-DAIR/Hetu-Galvatron, csrc/greedy_balancer.cpp.

// Prices of the public planner: bf16 rows of 4,096 values, and rates that its authors measured on their cluster.
struct Prices {
  bool checkpointing = true;
  double seconds_per_token = 1.484375e-6;  // one token in an expert, forward
  std::int64_t bytes_per_token = 8192;
  double bytes_per_second_inside_nodes = 216.269e9;
  double bytes_per_second_between_nodes = 88.9539e9;
};

struct Shape {
  Topology topology;
  int slots_per_rank = 0;  // R · slots_per_rank ≥ experts
};

// Return replica counts, [expert]. even_replicas() is empty if the slots cannot be divided evenly. `load` is [expert],
// tokens.
std::vector<int> heap_replicas(std::span<const std::int64_t> load, const Shape& shape);
std::vector<int> even_replicas(std::size_t num_experts, const Shape& shape);

// Returns at most `count` variations of `replicas`, all distinct and different from it. Deterministic.
std::vector<std::vector<int>> perturbed_replicas(std::span<const int> replicas, int count, const Shape& shape);

// Returns [rank][slot], kNoExpert in slots without a replica.
Array<ExpertId, 2> place_replicas(std::span<const std::int64_t> load, std::span<const int> replicas,
                                  const Shape& shape);

double seconds_of(const InsideFirstRoutes& routed, const Prices& prices);

struct Search {
  Prices prices;
  int perturbations = 0;  // candidates derived from heap; LAER-MoE's artifact has 2
};

// Returns the cheapest candidate. Ties go to even, then to heap, then to its perturbations.
Array<ExpertId, 2> best_layout(ArrayView<const std::int64_t, 2> by_source, const Shape& shape, const Search& search);

}  // namespace foremoe::laer

namespace foremoe {

struct LaerOptions {
  int history = 5;      // previous micro-steps that determine the layout; 0: the planned micro-step only
  bool sharded = true;  // each expert is sharded over all ranks
  laer::Search search;
};

std::unique_ptr<Policy> make_laer(const LaerOptions& options = {});
std::unique_ptr<Policy> make_laer_oracle(const LaerOptions& options = {});

}  // namespace foremoe
