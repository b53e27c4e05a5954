#include "foremoe/policy/next_window.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace foremoe {
namespace {

constexpr double kLeastPredictedGain = 0.03;  // relative to the busiest rank of EPLB's placement
constexpr double kLeastShare = 0.01;          // of an expert, relative to the mean; bounds logarithms
constexpr double kMostForSeparation = 1.001;  // relative to the busiest rank
constexpr double kNoChange = 1 - 1e-9;        // excludes exchanges that only move rounding errors

struct Forecast {
  std::vector<double> tokens;  // [expert], in any unit
  double spread = 0;           // s
};

std::vector<double> sum_of(ArrayView<const double, 3> windows, std::size_t layer) {
  std::vector<double> sum(windows.extent(2));
  for (std::size_t m = 0; m < windows.extent(0); ++m) {
    const auto of_window = windows.row(m, layer);
    std::ranges::transform(sum, of_window, sum.begin(), std::plus<>());
  }
  return sum;
}

Forecast forecast(ArrayView<const double, 3> windows, std::size_t layer) {
  const std::size_t num_experts = windows.extent(2);
  std::vector<double> share(num_experts);
  std::vector<double> square(num_experts);
  double count = 0;  // of windows with tokens
  for (std::size_t m = 0; m < windows.extent(0); ++m) {
    const auto tokens = windows.row(m, layer);
    const double total = std::reduce(tokens.begin(), tokens.end());
    if (total <= 0) continue;
    ++count;
    for (std::size_t e = 0; e < num_experts; ++e) {
      share[e] += tokens[e] / total;
      square[e] += tokens[e] / total * (tokens[e] / total);
    }
  }
  if (count < 2) return {.tokens = sum_of(windows, layer)};

  double variance = 0;
  std::vector<double> log_share(num_experts);
  for (std::size_t e = 0; e < num_experts; ++e) {
    share[e] /= count;
    const double of_mean = std::max(0.0, square[e] / count - share[e] * share[e]) / (count - 1);
    share[e] = std::max(share[e], kLeastShare / static_cast<double>(num_experts));
    variance += of_mean / (share[e] * share[e]) / static_cast<double>(num_experts);
    log_share[e] = std::log(share[e]);
  }
  const double centre = std::reduce(log_share.begin(), log_share.end()) / static_cast<double>(num_experts);
  double of_experts = 0;
  for (const double log : log_share) of_experts += (log - centre) * (log - centre);
  of_experts /= std::max(1.0, static_cast<double>(num_experts) - 1);
  const double weight = of_experts > variance ? variance / of_experts : 1;  // B
  for (std::size_t e = 0; e < num_experts; ++e) share[e] = std::exp(weight * centre + (1 - weight) * log_share[e]);
  return {.tokens = std::move(share), .spread = std::sqrt(variance)};
}

// Converts to EPLB's unit. A power of two keeps the single-precision values of the reference.
Array<std::int64_t, 2> in_eplb_units(std::span<const double> tokens) {
  Array<std::int64_t, 2> units({1, tokens.size()});
  const double most = std::ranges::max(tokens);
  const int shift = most > 0 ? 40 - std::ilogb(most) : 0;
  std::ranges::transform(tokens, units.flat().begin(), [&](double t) { return std::llround(std::ldexp(t, shift)); });
  return units;
}

// Load of one replica of each expert: [expert]. EplbPlacement has one layer here and below.
std::vector<double> replica_loads(const Forecast& expected, const EplbPlacement& placement) {
  std::vector<double> load(expected.tokens.size());
  for (std::size_t e = 0; e < load.size(); ++e) load[e] = expected.tokens[e] / placement.num_replicas(0, e);
  double squares = 0;
  for (const ExpertId e : placement.slot_expert.flat()) squares += load[e.index()] * load[e.index()];
  const auto num_ranks = static_cast<double>(placement.slot_expert.extent(1));
  if (squares <= 0) return load;
  const double risk = expected.spread * std::sqrt(std::log(num_ranks) * num_ranks / squares);
  for (double& l : load) l += risk * l * l;
  return load;
}

double sum_of_loads(std::span<const ExpertId> experts, std::span<const double> load) {
  double sum = 0;
  for (const ExpertId e : experts) sum += load[e.index()];
  return sum;
}

// [rank] of slots [rank][slot]; `load` is [expert], of one replica.
std::vector<double> rank_loads(ArrayView<const ExpertId, 2> slots, std::span<const double> load) {
  std::vector<double> loads;
  for (std::size_t r = 0; r < slots.extent(0); ++r) loads.push_back(sum_of_loads(slots.row(r), load));
  return loads;
}

double busiest(ArrayView<const ExpertId, 2> slots, std::span<const double> load) {
  return std::ranges::max(rank_loads(slots, load));
}

// Calls visit(rank, slot) for each slot whose expert an earlier slot of the rank has. `visit` may change slots.
template <class Visit>
void visit_duplicates(ArrayView<const ExpertId, 2> slots, const Visit& visit) {
  for (std::size_t r = 0; r < slots.extent(0); ++r) {
    for (std::size_t s = 1; s < slots.extent(1); ++s) {
      if (std::ranges::count(slots.row(r).first(s), slots(r, s)) > 0) visit(r, s);
    }
  }
}

// The replicas of one node, and exchanges between its ranks.
class NodeReplicas {
 public:
  NodeReplicas(ArrayView<ExpertId, 2> slots, std::span<const double> load)
      : slots_(slots), load_(load), rank_load_(rank_loads(slots, load)) {}

  void separate_duplicates() {
    visit_duplicates(slots_, [&](std::size_t r, std::size_t s) {
      Exchange best;
      find(r, s, /*lowers=*/false, best);
      if (best.other != nullptr) apply(best);
    });
  }

  void lower_busiest() {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const auto r = static_cast<std::size_t>(std::ranges::max_element(rank_load_) - rank_load_.begin());
      Exchange best{.busier = rank_load_[r] * kNoChange};
      for (std::size_t s = 0; s < slots_.extent(1); ++s) find(r, s, /*lowers=*/true, best);
      if (best.other == nullptr) return;
      apply(best);
    }
  }

 private:
  struct Exchange {
    double busier = std::numeric_limits<double>::infinity();  // load of the busier of both ranks afterwards
    std::size_t rank = 0;
    ExpertId* one = nullptr;  // on `rank`
    std::size_t other_rank = 0;
    ExpertId* other = nullptr;
  };

  bool has(std::size_t rank, ExpertId expert) const {
    const auto experts = slots_.row(rank);
    return std::ranges::find(experts, expert) != experts.end();
  }

  // Updates `best` with exchanges of one slot. lowers: only those that take load from this rank.
  void find(std::size_t rank, std::size_t slot, bool lowers, Exchange& best) {
    ExpertId& one = slots_(rank, slot);
    for (std::size_t r = 0; r < slots_.extent(0); ++r) {
      if (r == rank) continue;
      for (ExpertId& other : slots_.row(r)) {
        const double moved = load_[one.index()] - load_[other.index()];
        if (lowers && moved <= 0) continue;
        const double busier = std::max(rank_load_[rank] - moved, rank_load_[r] + moved);
        if (busier >= best.busier || has(r, one) || has(rank, other)) continue;
        best = {.busier = busier, .rank = rank, .one = &one, .other_rank = r, .other = &other};
      }
    }
  }

  void apply(const Exchange& exchange) {
    std::swap(*exchange.one, *exchange.other);
    for (const std::size_t r : {exchange.rank, exchange.other_rank}) rank_load_[r] = sum_of_loads(slots_.row(r), load_);
  }

  ArrayView<ExpertId, 2> slots_;
  std::span<const double> load_;
  std::vector<double> rank_load_;
};

bool repeats(ArrayView<const ExpertId, 2> slots) {
  bool found = false;
  visit_duplicates(slots, [&](std::size_t, std::size_t) { found = true; });
  return found;
}

// Replicas of one node, and replacements of a replica by one of another expert of the node.
class NodeCounts {
 public:
  NodeCounts(ArrayView<ExpertId, 2> slots, std::span<const double> tokens, std::span<int> num_replicas)
      : slots_(slots),
        tokens_(tokens),
        num_replicas_(num_replicas),
        experts_(slots.flat().begin(), slots.flat().end()) {
    for (std::size_t e = 0; e < tokens.size(); ++e) load_.push_back(tokens[e] / std::max(1, num_replicas[e]));
  }

  void exchange_duplicates() { NodeReplicas(slots_, load_).separate_duplicates(); }

  void replace_duplicates() {
    visit_duplicates(slots_, [&](std::size_t r, std::size_t s) {
      Replacement best;
      find(r, s, experts_, best);
      if (best.slot != nullptr) put(*best.slot, best.by);
    });
  }

  // Alternates exchanges and replacements until the busiest rank has at most `limit`. Returns whether it has.
  bool reach(double limit) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      NodeReplicas(slots_, load_).lower_busiest();
      const std::vector<double> loads = rank_loads(slots_, load_);
      const auto rank = static_cast<std::size_t>(std::ranges::max_element(loads) - loads.begin());
      const double most = loads[rank];
      if (most <= limit) return true;
      Replacement best{.most = most * kNoChange};
      const std::set<ExpertId> own(slots_.row(rank).begin(), slots_.row(rank).end());
      for (std::size_t r = 0; r < slots_.extent(0); ++r) {
        for (std::size_t s = 0; s < slots_.extent(1); ++s) find(r, s, r == rank ? experts_ : own, best);
      }
      if (best.slot == nullptr) return false;
      put(*best.slot, best.by);
    }
    return false;
  }

 private:
  struct Replacement {
    double most = std::numeric_limits<double>::infinity();  // load of the busiest rank afterwards
    ExpertId* slot = nullptr;
    ExpertId by = kNoExpert;
  };

  void put(ExpertId& slot, ExpertId by) {
    const ExpertId old = std::exchange(slot, by);
    --num_replicas_[old.index()];
    ++num_replicas_[by.index()];
    for (const ExpertId e : {old, by}) load_[e.index()] = tokens_[e.index()] / num_replicas_[e.index()];
  }

  // Updates `best` with replacements of one slot by any of `others`.
  void find(std::size_t rank, std::size_t s, const std::set<ExpertId>& others, Replacement& best) {
    ExpertId& slot = slots_(rank, s);
    const ExpertId old = slot;
    if (num_replicas_[old.index()] < 2) return;
    for (const ExpertId by : others) {
      if (std::ranges::count(slots_.row(rank), by) > 0) continue;
      put(slot, by);
      if (const double most = busiest(slots_, load_); most < best.most) best = {.most = most, .slot = &slot, .by = by};
      put(slot, old);
    }
  }

  ArrayView<ExpertId, 2> slots_;
  std::span<const double> tokens_;
  std::span<int> num_replicas_;
  std::set<ExpertId> experts_;  // of the node
  std::vector<double> load_;    // [expert], of one replica
};

// Separates the replicas of an expert on each rank of a node, at any price if `distinct`, and otherwise unless the
// busiest rank would have more than `limit` tokens. Tries to exchange duplicates before it replaces them, then not.
void separate(ArrayView<ExpertId, 2> slots, std::span<const double> tokens, std::span<int> num_replicas, double limit,
              bool distinct) {
  for (const bool exchanges : {true, false}) {
    Array<ExpertId, 2> tried(slots.shape());
    std::ranges::copy(slots.flat(), tried.flat().begin());
    std::vector<int> counts(num_replicas.begin(), num_replicas.end());
    NodeCounts node(tried, tokens, counts);
    if (exchanges) node.exchange_duplicates();
    node.replace_duplicates();
    if (repeats(tried)) return;
    if (!node.reach(limit) && !(distinct && !exchanges)) continue;
    std::ranges::copy(tried.flat(), slots.flat().begin());
    std::ranges::copy(counts, num_replicas.begin());
    return;
  }
}

// Places one layer.
EplbPlacement place_layer(ArrayView<const double, 3> windows, std::size_t layer, const EplbShape& shape,
                          bool distinct) {
  const Forecast expected = forecast(windows, layer);
  EplbPlacement placement = eplb_rebalance(in_eplb_units(expected.tokens), shape);
  EplbPlacement reference =
      expected.spread == 0 ? placement : eplb_rebalance(in_eplb_units(sum_of(windows, layer)), shape);
  const auto ranks_per_node = static_cast<std::size_t>(
      shape.num_groups % shape.num_nodes == 0 ? shape.num_ranks / shape.num_nodes : shape.num_ranks);
  const auto nodes_of = [&](EplbPlacement& of) {
    std::vector<ArrayView<ExpertId, 2>> nodes;  // [node][rank of the node][slot]
    for (std::size_t r = 0; r < of.slot_expert.extent(1); r += ranks_per_node) {
      nodes.push_back({of.slot_expert.row(0, r).data(), {ranks_per_node, of.slot_expert.extent(2)}});
    }
    return nodes;
  };
  const std::vector<double> load = replica_loads(expected, placement);
  for (const ArrayView<ExpertId, 2> slots : nodes_of(placement)) {
    NodeReplicas node(slots, load);
    node.separate_duplicates();
    node.lower_busiest();
  }
  const double reference_load = busiest(reference.slot_expert[0], replica_loads(expected, reference));
  const bool gains = busiest(placement.slot_expert[0], load) < (1 - kLeastPredictedGain) * reference_load;
  EplbPlacement& chosen = gains || distinct ? placement : reference;
  const double most = busiest(chosen.slot_expert[0], replica_loads({.tokens = expected.tokens}, chosen));
  for (const ArrayView<ExpertId, 2> slots : nodes_of(chosen)) {
    if (!repeats(slots)) continue;
    separate(slots, expected.tokens, chosen.num_replicas.row(0), most * kMostForSeparation, distinct);
  }
  return chosen;
}

}  // namespace

EplbPlacement place_for_next_window(ArrayView<const double, 3> windows, const EplbShape& shape, bool distinct) {
  expect_placeable(shape, windows.extent(2));
  const std::size_t num_layers = windows.extent(1);
  const auto num_ranks = static_cast<std::size_t>(shape.num_ranks);
  EplbPlacement all{.slot_expert = Array<ExpertId, 3>(
                        {num_layers, num_ranks, static_cast<std::size_t>(shape.num_replicas) / num_ranks}),
                    .num_replicas = Array<int, 2>({num_layers, windows.extent(2)})};
  for (std::size_t l = 0; l < num_layers; ++l) {
    const EplbPlacement placed = place_layer(windows, l, shape, distinct);
    std::ranges::copy(placed.slot_expert.flat(), all.slot_expert[l].flat().begin());
    std::ranges::copy(placed.num_replicas.flat(), all.num_replicas.row(l).begin());
  }
  return all;
}

}  // namespace foremoe
