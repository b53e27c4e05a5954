#include "foremoe/homes/home_search.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "foremoe/core/array.h"
#include "foremoe/core/random.h"

namespace foremoe {
namespace {

// The first threshold is this part of the first cost: higher ones took longer and did not shorten the simulated step.
constexpr std::int64_t kFirstThreshold = 10'000;

// Largest load [assignments] of each node that costs nothing.
std::vector<std::int64_t> load_limits(const TokenSets& sets, Topology topology, double tolerance) {
  std::vector<std::int64_t> limits;
  for (int n = 0; n < topology.num_nodes(); ++n) {
    const double share =
        static_cast<double>(sets.num_assignments()) * topology.ranks_of(NodeId{n}).size() / topology.num_ranks;
    limits.push_back(static_cast<std::int64_t>((1 + tolerance) * share));
  }
  return limits;
}

class NodeSearch {
 public:
  NodeSearch(std::span<const RankId> home, const TokenSets& sets, Topology topology, double tolerance)
      : sets_(sets), limit_(load_limits(sets, topology, tolerance)) {
    const auto experts = static_cast<std::size_t>(sets.num_experts);
    const auto nodes = static_cast<std::size_t>(topology.num_nodes());
    for (const RankId r : home) node_.push_back(topology.node_of(r));
    tokens_of_.resize(experts);
    load_.resize(nodes);
    alone_.resize(experts);
    absent_ = Array<std::int64_t, 2>({experts, nodes});
    touching_ = Array<std::uint16_t, 2>({sets.size(), nodes});
    for (std::size_t t = 0; t < sets.size(); ++t) {
      ++touching_(t, sets.source[t]);  // the token is at its own node whatever its experts
      for (const ExpertId e : sets.token(t)) {
        tokens_of_[e.index()].push_back(static_cast<std::uint32_t>(t));
        ++load_[node_of(e)];
        if (touching_(t, node_of(e))++ == 0) ++cost_;
      }
    }
    for (std::size_t t = 0; t < sets.size(); ++t) {
      for (const ExpertId e : sets.token(t)) {
        if (touching_(t, node_of(e)) == 1) ++alone_[e.index()];
        for (std::size_t n = 0; n < nodes; ++n) absent_(e, n) += touching_(t, n) == 0 ? 1 : 0;
      }
    }
    for (std::size_t n = 0; n < nodes; ++n) cost_ += excess(n, load_[n]);
  }

  std::int64_t cost() const { return cost_; }
  const std::vector<NodeId>& nodes() const { return node_; }

  // Exchanges two experts of different nodes if that increases the cost by less than `threshold`.
  bool exchange_below(std::int64_t threshold, ExpertId a, ExpertId b) {
    const std::size_t from = node_of(a);
    const std::size_t to = node_of(b);
    std::int64_t change = absent_(a, to) - alone_[a.index()] + absent_(b, from) - alone_[b.index()];
    const std::int64_t more = load_of(b) - load_of(a);  // load of `from`, after the exchange
    change += excess(from, load_[from] + more) - excess(from, load_[from]);
    change += excess(to, load_[to] - more) - excess(to, load_[to]);
    if (change >= threshold) return false;
    change += tokens_unchanged_by_exchange(a, b);
    if (change >= threshold) return false;
    load_[from] += more;
    load_[to] -= more;
    move(a, to);
    move(b, from);
    cost_ += change;
    return true;
  }

 private:
  std::size_t node_of(ExpertId e) const { return node_[e.index()].index(); }
  std::int64_t load_of(ExpertId e) const { return std::ssize(tokens_of_[e.index()]); }
  std::int64_t excess(std::size_t n, std::int64_t load) const { return std::max<std::int64_t>(0, load - limit_[n]); }

  // A token that chose both experts touches the same nodes after an exchange, but counts as alone before it.
  std::int64_t tokens_unchanged_by_exchange(ExpertId a, ExpertId b) const {
    if (load_of(b) < load_of(a)) std::swap(a, b);
    std::int64_t count = 0;
    for (const std::uint32_t t : tokens_of_[a.index()]) {
      if (std::ranges::find(sets_.token(t), b) == sets_.token(t).end()) continue;
      count += (touching_(t, node_of(a)) == 1 ? 1 : 0) + (touching_(t, node_of(b)) == 1 ? 1 : 0);
    }
    return count;
  }

  void move(ExpertId e, std::size_t to) {
    const std::size_t from = node_of(e);
    for (const std::uint32_t t : tokens_of_[e.index()]) {
      const std::span<const ExpertId> token = sets_.token(t);
      if (touching_(t, from) == 1) --alone_[e.index()];
      if (--touching_(t, from) == 0) {
        for (const ExpertId x : token) ++absent_(x, from);
      } else if (touching_(t, from) == 1) {
        count_alone(t, from, e, +1);
      }
      if (touching_(t, to) == 0) {
        for (const ExpertId x : token) --absent_(x, to);
        ++alone_[e.index()];
      } else if (touching_(t, to) == 1) {
        count_alone(t, to, e, -1);
      }
      ++touching_(t, to);
    }
    node_[e.index()] = NodeId{static_cast<int>(to)};
  }

  // Adds to `alone_` of the only expert of the token at node n, if there is one besides `moving`.
  void count_alone(std::size_t t, std::size_t n, ExpertId moving, int change) {
    for (const ExpertId x : sets_.token(t)) {
      if (x != moving && node_of(x) == n) alone_[x.index()] += change;
    }
  }

  const TokenSets& sets_;
  std::vector<std::int64_t> limit_;                    // [node], assignments
  std::vector<NodeId> node_;                           // [expert]
  std::vector<std::vector<std::uint32_t>> tokens_of_;  // [expert], ascending
  std::vector<std::int64_t> load_;                     // [node], assignments
  std::vector<std::int64_t> alone_;                    // [expert]
  Array<std::int64_t, 2> absent_;                      // [expert][node]
  Array<std::uint16_t, 2> touching_;                   // [token][node], its experts there, and 1 at its own node
  std::int64_t cost_ = 0;
};

// Calls f(a, b) for all pairs of experts on different nodes. Returns whether any call returned true.
bool any_exchange(const NodeSearch& search, int num_experts, const auto& f) {
  bool any = false;
  for (int a = 0; a < num_experts; ++a) {
    for (int b = a + 1; b < num_experts; ++b) {
      if (search.nodes()[a] != search.nodes()[b]) any |= f(ExpertId{a}, ExpertId{b});
    }
  }
  return any;
}

// Ranks of a node, heaviest expert first, each to the rank with the least load that has room.
void spread_over_ranks(RankRange ranks, std::vector<ExpertId> experts, std::span<const std::int64_t> load,
                       std::span<RankId> home) {
  std::ranges::stable_sort(experts, std::greater{}, [&](ExpertId e) { return load[e.index()]; });
  const std::size_t room = experts.size() / ranks.size();
  std::vector<std::int64_t> of_rank(ranks.size());
  std::vector<std::size_t> held(ranks.size());
  for (const ExpertId e : experts) {
    std::size_t lightest = held.size();
    for (std::size_t r = 0; r < held.size(); ++r) {
      if (held[r] < room && (lightest == held.size() || of_rank[r] < of_rank[lightest])) lightest = r;
    }
    ++held[lightest];
    of_rank[lightest] += load[e.index()];
    home[e.index()] = RankId{ranks.first + static_cast<int>(lightest)};
  }
}

}  // namespace

std::int64_t search_cost(std::span<const RankId> home, const TokenSets& sets, Topology topology, double tolerance) {
  std::int64_t cost = costs_of(home, sets, topology).pairs;
  std::vector<std::int64_t> load(topology.num_nodes());
  for (std::size_t t = 0; t < sets.size(); ++t) {
    for (const ExpertId e : sets.token(t)) ++load[topology.node_of(home[e.index()]).index()];
  }
  const std::vector<std::int64_t> limits = load_limits(sets, topology, tolerance);
  for (std::size_t n = 0; n < load.size(); ++n) cost += std::max<std::int64_t>(0, load[n] - limits[n]);
  return cost;
}

std::vector<RankId> search_homes(std::span<const RankId> home, const TokenSets& sets, Topology topology,
                                 const HomeSearchOptions& options) {
  NodeSearch search(home, sets, topology, options.tolerance);
  std::vector<NodeId> best = search.nodes();
  if (topology.num_nodes() > 1 && sets.size() > 0) {
    std::int64_t least = search.cost();
    const auto experts = static_cast<std::uint64_t>(sets.num_experts);
    const std::uint64_t tries = experts * (experts - 1) / 2 * static_cast<std::uint64_t>(options.sweeps);
    const std::int64_t first_threshold = search.cost() / kFirstThreshold;
    Random random(options.seed);
    for (std::uint64_t i = 0; i < tries; ++i) {
      const ExpertId a{static_cast<int>(random.below(experts))};
      const ExpertId b{static_cast<int>(random.below(experts))};
      if (search.nodes()[a.index()] == search.nodes()[b.index()]) continue;
      const auto left = static_cast<double>(tries - i) / static_cast<double>(tries);
      const auto threshold = static_cast<std::int64_t>(left * static_cast<double>(first_threshold));
      if (!search.exchange_below(threshold, a, b) || search.cost() >= least) continue;
      least = search.cost();
      best = search.nodes();
    }
    while (any_exchange(search, sets.num_experts,
                        [&](ExpertId a, ExpertId b) { return search.exchange_below(0, a, b); })) {
    }
    if (search.cost() < least) best = search.nodes();
  }
  std::vector<std::int64_t> load(sets.num_experts);
  for (std::size_t t = 0; t < sets.size(); ++t) {
    for (const ExpertId e : sets.token(t)) ++load[e.index()];
  }
  std::vector<RankId> result(home.size());
  for (int n = 0; n < topology.num_nodes(); ++n) {
    std::vector<ExpertId> of_node;
    for (int e = 0; e < sets.num_experts; ++e) {
      if (best[e] == NodeId{n}) of_node.push_back(ExpertId{e});
    }
    spread_over_ranks(topology.ranks_of(NodeId{n}), of_node, load, result);
  }
  assert(search_cost(result, sets, topology, options.tolerance) <=
         search_cost(home, sets, topology, options.tolerance));
  return result;
}

}  // namespace foremoe
