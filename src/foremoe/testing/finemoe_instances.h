#pragma once

// Placements and loads for the tests of FineMoE.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/random.h"
#include "foremoe/planner/replica_graph.h"
#include "foremoe/testing/density_bound.h"

namespace foremoe::finemoe::test {

using Holders = std::vector<std::vector<int>>;  // [expert], ranks with a replica of it

// Returns a graph in which every rank has one slot per expert.
inline planner::ReplicaGraph graph_of(int num_ranks, const Holders& holders) {
  planner::ReplicaGraph graph(num_ranks, static_cast<int>(holders.size()), static_cast<int>(holders.size()));
  for (int e = 0; e < std::ssize(holders); ++e) {
    for (const int r : holders[e]) graph.put(graph.first_slot(r) + e, e);
  }
  return graph;
}

inline Holders holders_of(ArrayView<const RankId, 3> placement) {
  Holders holders;
  for (std::size_t r = 0; r < placement.extent(0); ++r) {
    for (std::size_t j = 0; j < placement.extent(1); ++j) {
      holders.emplace_back();
      for (const RankId rank : placement.row(r, j)) holders.back().push_back(rank.value);
    }
  }
  return holders;
}

inline Holders holders_of(ArrayView<const ExpertId, 2> placement, std::size_t num_experts) {
  Holders holders(num_experts);
  for (std::size_t r = 0; r < placement.extent(0); ++r) {
    for (const ExpertId e : placement.row(r)) {
      if (e != kNoExpert) holders[e.index()].push_back(static_cast<int>(r));
    }
  }
  return holders;
}

// Returns the bound of equation 3, rounded up, by enumerating all sets of ranks.
inline std::int64_t densest_set(const Holders& holders, std::span<const std::int64_t> load, int num_ranks) {
  std::vector<Tokens> tokens(load.size());
  std::vector<std::uint32_t> bits(load.size());
  for (std::size_t e = 0; e < load.size(); ++e) {
    tokens[e] = Tokens{load[e]};
    for (const int r : holders[e]) bits[e] |= 1U << r;
  }
  return foremoe::test::density_lower_bound(tokens, bits, num_ranks).value;
}

// Gives the i-th most popular expert about tokens · i^−s ÷ Σ i^−s. Experts are in random order.
inline std::vector<std::int64_t> zipf_load(std::size_t num_experts, double s, std::int64_t tokens, Random& random) {
  std::vector<double> weight(num_experts);
  for (std::size_t i = 0; i < num_experts; ++i) weight[i] = std::pow(static_cast<double>(i + 1), -s);
  const double sum = std::accumulate(weight.begin(), weight.end(), 0.0);
  for (std::size_t i = num_experts; i > 1; --i) std::swap(weight[i - 1], weight[random.below(i)]);
  std::vector<std::int64_t> load(num_experts);
  std::ranges::transform(weight, load.begin(),
                         [&](double w) { return std::llround(static_cast<double>(tokens) * w / sum); });
  return load;
}

// Divides each expert's load evenly among the sources: [source][expert].
inline Array<std::int64_t, 2> spread_over_sources(std::span<const std::int64_t> load, int num_ranks) {
  Array<std::int64_t, 2> input({static_cast<std::size_t>(num_ranks), load.size()});
  for (int r = 0; r < num_ranks; ++r) {
    for (std::size_t e = 0; e < load.size(); ++e) input(r, e) = load[e] / num_ranks + (r < load[e] % num_ranks ? 1 : 0);
  }
  return input;
}

}  // namespace foremoe::finemoe::test
