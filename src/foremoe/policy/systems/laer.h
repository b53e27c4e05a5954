#pragma once

// LAER-MoE (ASPLOS'26, https://github.com/PKU-DAIR/Hetu-Galvatron): the experts are laid out anew for every micro-step,
// by what the last few of them sent where; a token stays on its node wherever its expert has a replica there. The
// layout, its candidates and their price are in best_layout(). Residency `free`.
//
// Read so. The public planner runs beside the training, sees the loads of the last five iterations and lays out the
// next one; so `laer` knows the micro-steps before, not the one that it plans. Before the first of them: the last ones
// of the former step where its load is given, else the mean of this step, which foresight permits, as for our FineMoE.
// `laer-oracle` lays out every micro-step by its own load instead. G slots per rank are added to the E/R of the
// homes; prices are those of the public planner, whatever the cluster.
//
// Weights. LAER-MoE shards every expert over all ranks (FSEP) and restores whatever experts a layout asks for, so a
// changed layout costs it no more than the same one. A plan cannot express this; the simulator charges it
// (OnlineWork::shards_experts). With `sharded` off, experts are whole and each newcomer is a copy, as they are where
// such a plan is executed here. Which replica serves which source is the plan's (route_tokens), which keeps tokens on
// their node exactly where LAER does.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/policy/inside_first.h"
#include "foremoe/policy/policy.h"

namespace foremoe::laer {

// LAER-MoE's expert layout: how many replicas of each expert, on which ranks, and who serves whose tokens.
//
// Problem. From the tokens that each source sends to each expert, fill R·C slots so that 4·Σ communication +
// (3 + checkpointing)·max computation is least: dispatch and combine of forward and backward, summed over the sources;
// forward, two products of backward and the forward that checkpointing repeats, on the slowest rank.
//
// Method. Candidate numbers of replicas, each placed greedily, routed and priced; the cheapest layout wins.
//   even    R·C / E each, where that is a whole number
//   heap    one per node (one, where the slots do not suffice), then again and again the expert with most load per
//           replica gets one more, or one more on every node once it has as many as there are nodes
//   perturbed   (option) heap, with a replica of a random expert given to another, or one per node where both have a
//           multiple of the nodes; skipped where an expert would have none left
//   place   replicas by load, largest first: among the ranks with a free slot on the nodes that hold fewest replicas
//           of the expert, the least loaded; when those nodes are full, the least loaded anywhere. A rank may get an
//           expert twice.
//   route   a source's tokens go in equal parts to the replicas on its node, or to all replicas where it has none
//
// Inferred: the remainder of equal parts goes to the lowest ranks; ties, also those of the sort by load, to the lowest
// id; where no expert can have as many more replicas as it should, slots stay empty.
// Cost. Placing O(R²·C), routing O(R·E·replicas).
//
// Source. LAER-MoE (ASPLOS'26) and its planner in https://github.com/PKU-DAIR/Hetu-Galvatron, csrc/greedy_balancer.cpp.

// Those of the public planner: bf16 rows of 4,096 and what its authors measured on their cluster.
struct Prices {
  bool checkpointing = true;
  double seconds_per_token = 1.484375e-6;  // in an expert, forward
  std::int64_t bytes_per_token = 8192;
  double bytes_per_second_inside_nodes = 216.269e9;
  double bytes_per_second_between_nodes = 88.9539e9;
};

struct Shape {
  Topology topology;
  int slots_per_rank = 0;  // slots of all ranks are at least as many as experts
};

// [expert], replicas; `load` is [expert], tokens. `even_replicas` is empty where the slots cannot be divided evenly.
std::vector<int> heap_replicas(std::span<const std::int64_t> load, const Shape& shape);
std::vector<int> even_replicas(std::size_t num_experts, const Shape& shape);

// At most `count` changes of `replicas`, all different from it and from each other. The same arguments give the same.
std::vector<std::vector<int>> perturbed_replicas(std::span<const int> replicas, int count, const Shape& shape);

// [rank][slot], kNoExpert where there are fewer replicas than slots.
Array<ExpertId, 2> place_replicas(std::span<const std::int64_t> load, std::span<const int> replicas,
                                  const Shape& shape);

double seconds_of(const InsideFirstRoutes& routed, const Prices& prices);

struct Search {
  Prices prices;
  int perturbations = 0;  // of the heap's numbers of replicas, tried as candidates; LAER-MoE's artifact has 2
};

// The cheapest of the candidates; of equal ones the even one, then the first of heap and its perturbations.
Array<ExpertId, 2> best_layout(ArrayView<const std::int64_t, 2> by_source, const Shape& shape, const Search& search);

}  // namespace foremoe::laer

namespace foremoe {

struct LaerOptions {
  int history = 5;      // micro-steps before the planned one that the layout sees; 0: the planned one alone
  bool sharded = true;  // experts, over all ranks
  laer::Search search;
};

std::unique_ptr<Policy> make_laer(const LaerOptions& options = {});
std::unique_ptr<Policy> make_laer_oracle(const LaerOptions& options = {});

}  // namespace foremoe
