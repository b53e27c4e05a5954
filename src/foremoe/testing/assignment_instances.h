#pragma once

// Instances of token assignment for tests, and a solver call that checks all properties that hold for any instance.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/planner/token_assignment.h"
#include "foremoe/testing/assignment_at_homes.h"
#include "foremoe/testing/complete_assignment.h"

namespace foremoe::planner {

using Loads = std::vector<std::int64_t>;        // [expert], tokens
using Holders = std::vector<std::vector<int>>;  // [expert], ranks with a replica of it

struct Instance {
  ReplicaGraph graph;
  Loads load;
};

inline ReplicaGraph graph_of(int num_ranks, const Holders& holders) {
  ReplicaGraph graph(num_ranks, static_cast<int>(holders.size()), static_cast<int>(holders.size()));
  for (int e = 0; e < std::ssize(holders); ++e) {
    for (const int r : holders[e]) graph.put(graph.first_slot(r) + e, e);
  }
  return graph;
}

inline Holders holders_of(const ReplicaGraph& graph) {
  Holders holders(graph.num_experts());
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) >= 0) holders[graph.expert_in(s)].push_back(graph.rank_of(s));
  }
  return holders;
}

inline std::int64_t total(const Loads& load) { return std::accumulate(load.begin(), load.end(), std::int64_t{0}); }

inline std::int64_t ceil_mean(const Instance& i) {
  return (total(i.load) + i.graph.num_ranks() - 1) / i.graph.num_ranks();
}

// Expects that the assignment has load max_load, and that the ranks in tight_set prove this load minimal.
inline void expect_certified(const Instance& i, const Assignment& a, std::int64_t max_load,
                             const std::vector<int>& tight_set) {
  ASSERT_EQ(*std::max_element(a.rank_load.begin(), a.rank_load.end()), max_load);
  if (tight_set.empty()) {
    ASSERT_EQ(max_load, ceil_mean(i));
    return;
  }
  const std::set<int> within(tight_set.begin(), tight_set.end());
  ASSERT_EQ(within.size(), tight_set.size());
  std::int64_t tokens = 0;
  const Holders holders = holders_of(i.graph);
  for (int e = 0; e < i.graph.num_experts(); ++e) {
    if (std::all_of(holders[e].begin(), holders[e].end(), [&](int r) { return within.contains(r); })) {
      tokens += i.load[e];
    }
  }
  ASSERT_EQ((tokens + std::ssize(tight_set) - 1) / std::ssize(tight_set), max_load);
}

// Solves from the given assignment and checks all properties that hold for any instance.
inline std::int64_t solve_from(const Instance& i, Assignment& a) {
  static AssignmentSearch search;  // reused for many shapes: the state of earlier calls must not matter
  std::vector<int> tight_set{-1};
  const std::int64_t max_load = assign_tokens(i.graph, ceil_mean(i), a, search, &tight_set);
  test::expect_complete(i.graph, i.load, a);
  expect_certified(i, a, max_load, tight_set);
  return max_load;
}

inline std::int64_t solve(const Instance& i) {
  Assignment a;
  water_fill(i.graph, i.load, a);
  test::expect_complete(i.graph, i.load, a);
  return solve_from(i, a);
}

struct Limits {
  int ranks;
  int experts;
  std::uint64_t load;
};

// Draws an instance within the limits, mostly with few holders per expert. A third of the loads are small.
inline Instance random_instance(Random& random, Limits most) {
  const int num_ranks = 1 + static_cast<int>(random.below(most.ranks));
  const int num_experts = 1 + static_cast<int>(random.below(most.experts));
  Holders holders(num_experts);
  Loads load(num_experts);
  for (int e = 0; e < num_experts; ++e) {
    const std::uint64_t tries = 1 + random.below(random.below(4) == 0 ? num_ranks : 2);
    std::set<int> ranks;
    for (std::uint64_t n = 0; n < tries; ++n) ranks.insert(static_cast<int>(random.below(num_ranks)));
    holders[e].assign(ranks.begin(), ranks.end());
    load[e] = static_cast<std::int64_t>(random.below(random.below(3) == 0 ? 1 + most.load / 16 : 1 + most.load));
  }
  return {graph_of(num_ranks, holders), load};
}

}  // namespace foremoe::planner
