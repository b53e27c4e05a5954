#include "foremoe/plan/expected_dispatch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace foremoe {
namespace {

// Rows that one source sends to places of one kind: ranks or nodes.
class Places {
 public:
  void begin(std::size_t num_places, std::span<const Shipment> shipments, const auto& place_of) {
    expected_.assign(num_places, 0);
    of_shipment_.clear();
    for (const Shipment& s : shipments) of_shipment_.push_back(place_of(s));
  }

  // Adds `tokens` tokens whose rows of expert e all go to shipments[serving[e]].
  void add(double tokens, std::span<const std::size_t> serving, TokenChoice& choice) {
    place_.clear();
    for (const std::size_t shipment : serving) place_.push_back(of_shipment_[shipment]);
    missed_.resize(expected_.size());
    choice.misses(place_, missed_);
    for (std::size_t p = 0; p < expected_.size(); ++p) expected_[p] += tokens * (1 - missed_[p]);
  }

  void round(std::span<const Shipment> shipments, std::span<Tokens> rows) {
    bound(shipments);
    double sum = 0;
    double rounded = 0;
    for (std::size_t p = 0; p < rows.size(); ++p) {
      sum += std::clamp(expected_[p], static_cast<double>(busiest_[p]), static_cast<double>(all_[p]));
      const auto whole = static_cast<std::int64_t>(std::floor(sum - rounded + 0.5));
      rows[p] = Tokens{std::clamp(whole, busiest_[p], all_[p])};
      rounded += static_cast<double>(rows[p].value);
    }
  }

 private:
  void bound(std::span<const Shipment> shipments) {
    all_.assign(expected_.size(), 0);
    busiest_.assign(expected_.size(), 0);
    of_expert_.assign(expected_.size(), 0);
    for (std::size_t i = 0; i < shipments.size(); ++i) {
      const std::size_t place = of_shipment_[i];
      all_[place] += shipments[i].rows.value;
      of_expert_[place] += shipments[i].rows.value;
      busiest_[place] = std::max(busiest_[place], of_expert_[place]);
      if (i + 1 == shipments.size() || shipments[i + 1].expert != shipments[i].expert) {
        for (std::size_t j = i + 1; j-- > 0 && shipments[j].expert == shipments[i].expert;) {
          of_expert_[of_shipment_[j]] = 0;
        }
      }
    }
  }

  std::vector<double> expected_, missed_;         // [place]
  std::vector<std::int64_t> all_, busiest_;       // [place], rows of all experts; rows of the place's busiest expert
  std::vector<std::int64_t> of_expert_;           // [place], rows of the current expert
  std::vector<std::size_t> of_shipment_, place_;  // place of each shipment; place of each expert
};

// Positions in the sequence of a source's tokens, from 0 to 1, at which an expert switches to its next replica.
struct Positions {
  std::vector<double> ends;     // [shipment]
  std::vector<double> borders;  // ascending, including 0 and 1

  void find(std::span<const Shipment> shipments, std::span<const Tokens> load) {
    ends.clear();
    borders = {0, 1};
    std::int64_t rows = 0;
    for (std::size_t i = 0; i < shipments.size(); ++i) {
      const ExpertId e = shipments[i].expert;
      rows = (i > 0 && shipments[i - 1].expert == e ? rows : 0) + shipments[i].rows.value;
      ends.push_back(static_cast<double>(rows) / static_cast<double>(load[e.index()].value));
      borders.push_back(ends.back());
    }
    std::ranges::sort(borders);
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  }

  // Sets serving[e] to the shipment that carries the rows of expert e at this position.
  void serve(double position, std::span<const Shipment> shipments, std::span<std::size_t> serving) const {
    for (std::size_t i = shipments.size(); i-- > 0;) {
      if (position < ends[i]) serving[shipments[i].expert.index()] = i;
    }
  }
};

}  // namespace

TokenDispatch expected_token_dispatch(const RoutedLayer& routed, const ExpectedDispatchProblem& problem) {
  const Topology& topology = problem.topology;
  const auto num_ranks = static_cast<std::size_t>(topology.num_ranks);
  const auto num_nodes = static_cast<std::size_t>(topology.num_nodes());
  TokenDispatch table{.to_rank = Array<Tokens, 2>({num_ranks, num_ranks}),
                      .to_node = Array<Tokens, 2>({num_ranks, num_nodes})};
  TokenChoice choice;
  Places ranks;
  Places nodes;
  Positions positions;
  std::vector<std::size_t> serving(problem.load.extent(1));
  for (int s = 0; s < topology.num_ranks; ++s) {
    const std::span<const Shipment> shipments = routed.of_source(RankId{s});
    if (shipments.empty()) continue;
    const std::span<const Tokens> load = problem.load.row(s);
    choice.fit(load, problem.top_k, problem.groups, problem.fitted);
    positions.find(shipments, load);
    ranks.begin(num_ranks, shipments, [](const Shipment& of) { return of.replica.index(); });
    nodes.begin(num_nodes, shipments, [&](const Shipment& of) { return topology.node_of(of.replica).index(); });
    std::ranges::fill(serving, 0);  // experts without rows have no shipment, and weight 0
    for (std::size_t i = 0; i + 1 < positions.borders.size(); ++i) {
      const double begin = positions.borders[i];
      const double end = positions.borders[i + 1];
      positions.serve((begin + end) / 2, shipments, serving);
      ranks.add(choice.tokens() * (end - begin), serving, choice);
      nodes.add(choice.tokens() * (end - begin), serving, choice);
    }
    ranks.round(shipments, table.to_rank.row(s));
    nodes.round(shipments, table.to_node.row(s));
  }
  return table;
}

}  // namespace foremoe
