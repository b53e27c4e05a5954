#include "foremoe/planner/local_guests.h"

#include <algorithm>
#include <vector>

namespace foremoe::planner {

namespace {

// A local guest replaces another only if it makes at least this many more tokens local, in mean rank loads.
constexpr float kWorthACopy = 0.1F;

bool held_on(const LayerProblem& p, const ReplicaGraph& graph, int expert, int node) {
  for (int s = graph.first_holder(expert); s >= 0; s = graph.next_holder(s)) {
    if (p.topology.node_of(RankId{graph.rank_of(s)}).value == node) return true;
  }
  return false;
}

// Copies on each rank's link: those that its home experts are copied from, and those that it receives.
struct LinkCopies {
  std::vector<int> from;  // [rank]
  std::vector<int> to;    // [rank]

  // The copies that turn `found` into `graph`. found: null if only homes were there before.
  LinkCopies(const LayerProblem& p, const ReplicaGraph& graph, const ReplicaGraph* found)
      : from(p.num_ranks()), to(p.num_ranks()) {
    for (int s = 0; s < graph.num_slots(); ++s) {
      const int e = graph.expert_in(s);
      if (e < 0 || s == p.home_slot[e]) continue;
      if (found == nullptr || found->find(e, graph.rank_of(s)) < 0) add(p.home[e], graph.rank_of(s));
    }
  }

  void add(int source, int rank) {
    ++from[source];
    ++to[rank];
  }
  int busiest() const { return std::max(std::ranges::max(from), std::ranges::max(to)); }
};

}  // namespace

LocalGuests::LocalGuests(const LayerProblem& problem, const PlannerOptions& options) : problem_(problem) {
  const int num_nodes = problem.topology.num_nodes();
  if (preference(options) == Prefer::kBalance || num_nodes == 1) return;
  if (preference(options) == Prefer::kTime) {
    price_ = options.copy_price.value();
    free_copies_ = options.free_copies.value_or(0);
  }
  tokens_ = Array<float, 2>({static_cast<std::size_t>(problem.num_experts), static_cast<std::size_t>(num_nodes)});
  for (int m = 0; m < problem.num_micro_steps; ++m) {
    for (int e = 0; e < problem.num_experts; ++e) {
      for (int n = 0; n < num_nodes; ++n) {
        tokens_(e, n) += static_cast<float>(problem.node_load(m, e, n)) * problem.per_mean[m];
      }
    }
  }
}

int LocalGuests::copies_from(int rank, const ReplicaGraph& graph) const {
  int copies = 0;
  for (int s = graph.first_slot(rank); s < graph.first_slot(rank) + problem_.homes_per_rank(); ++s) {
    copies += graph.num_holders(graph.expert_in(s)) - 1;
  }
  return copies;
}

float LocalGuests::tokens(const ReplicaGraph& graph, int expert, int rank) const {
  if (!count() || (price_ && copies_from(problem_.home[expert], graph) >= most_from_)) return 0;
  const NodeId node = problem_.topology.node_of(RankId{rank});
  return held_on(problem_, graph, expert, node.value) ? 0 : tokens_(expert, node.index());
}

std::pair<LocalGuests::Placement, int> LocalGuests::best(const Place& place) const {
  if (!price_) return {place(kNoLimit), kNoLimit};
  Placement best = place(0);
  int limit = 0;
  const double free = std::max<double>(free_copies_, best.copies);
  const auto worth = [&](const Placement& p) {
    return p.tokens / static_cast<float>(problem_.topology.num_nodes()) - *price_ * std::max(0.0, p.copies - free);
  };
  float last = best.tokens;
  for (int most = 1;; ++most) {
    Placement next = place(most);
    if (next.tokens <= last && most > best.copies) break;
    last = next.tokens;
    if (worth(next) <= worth(best)) continue;
    best = std::move(next);
    limit = most;
  }
  return {std::move(best), limit};
}

void LocalGuests::add(float least, ReplicaGraph& graph) {
  if (!count()) return;
  struct Offer {
    float tokens;
    int expert;
    int node;
  };
  std::vector<Offer> offers;
  for (int e = 0; e < problem_.num_experts; ++e) {
    for (int n = 0; n < problem_.topology.num_nodes(); ++n) {
      if (tokens_(e, n) > least && !held_on(problem_, graph, e, n)) offers.push_back({tokens_(e, n), e, n});
    }
  }
  std::ranges::stable_sort(offers, std::greater(), &Offer::tokens);
  std::vector<float> load_at_homes(problem_.num_ranks(), 0.0F);  // in mean rank loads
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    for (int e = 0; e < problem_.num_experts; ++e) {
      load_at_homes[problem_.home[e]] += static_cast<float>(problem_.load(m)[e]) * problem_.per_mean[m];
    }
  }
  const auto place = [&](int most) {
    Placement placed{.graph = graph};
    LinkCopies copies(problem_, graph, nullptr);
    std::vector<float> load = load_at_homes;
    for (const Offer& offer : offers) {
      const int home = problem_.home[offer.expert];
      if (copies.from[home] >= most) continue;
      const RankRange ranks = problem_.topology.ranks_of(NodeId{offer.node});
      int slot = -1;
      for (int s = graph.first_slot(ranks.first); s < graph.first_slot(ranks.last); ++s) {
        const int r = graph.rank_of(s);
        if (placed.graph.expert_in(s) >= 0 || copies.to[r] >= most) continue;
        if (slot < 0 || load[r] < load[graph.rank_of(slot)]) slot = s;
      }
      if (slot < 0) continue;
      const int rank = graph.rank_of(slot);
      placed.graph.put(slot, offer.expert);
      placed.tokens += offer.tokens;
      copies.add(home, rank);
      load[home] -= offer.tokens;
      load[rank] += offer.tokens;
    }
    placed.copies = copies.busiest();
    return placed;
  };
  auto [placement, limit] = best(place);
  graph = std::move(placement.graph);
  most_from_ = limit;
}

void LocalGuests::renew(int m, const Assignment& a, const ReplicaGraph& found, ReplicaGraph& graph) const {
  if (!count()) return;
  struct Offer {
    float tokens;
    int expert;
    int slot;
  };
  std::vector<Offer> offers;
  for (int n = 0; n < problem_.topology.num_nodes(); ++n) {
    const RankRange ranks = problem_.topology.ranks_of(NodeId{n});
    std::vector<int> slots;
    for (int r = ranks.first; r < ranks.last; ++r) {
      for (int s = graph.first_slot(r + 1) - problem_.guest_slots; s < graph.first_slot(r + 1); ++s) {
        if (a.quota[s] == 0) slots.push_back(s);
      }
    }
    const auto kept = [&](int slot) {
      return graph.expert_in(slot) < 0 ? 0 : problem_.node_load(m, graph.expert_in(slot), n);
    };
    std::ranges::stable_sort(slots, {}, kept);
    std::vector<int> missing;
    for (int e = 0; e < problem_.num_experts; ++e) {
      if (!held_on(problem_, graph, e, n)) missing.push_back(e);
    }
    std::ranges::stable_sort(missing, std::greater(), [&](int e) { return problem_.node_load(m, e, n); });
    for (std::size_t i = 0; i < std::min(slots.size(), missing.size()); ++i) {
      const std::int64_t gain = problem_.node_load(m, missing[i], n) - kept(slots[i]);
      const float tokens = static_cast<float>(gain) * problem_.per_mean[m];
      if (tokens < kWorthACopy) break;
      offers.push_back({tokens, missing[i], slots[i]});
    }
  }
  std::ranges::stable_sort(offers, std::greater(), &Offer::tokens);
  const auto place = [&](int most) {
    Placement placed{.graph = graph};
    LinkCopies copies(problem_, graph, &found);
    for (const auto& [tokens, expert, slot] : offers) {
      const int rank = graph.rank_of(slot);
      if (copies.from[problem_.home[expert]] >= most || copies.to[rank] >= most) continue;
      if (placed.graph.expert_in(slot) >= 0) placed.graph.drop(slot);
      placed.graph.put(slot, expert);
      placed.tokens += tokens;
      copies.add(problem_.home[expert], rank);
    }
    placed.copies = copies.busiest();
    return placed;
  };
  graph = best(place).first.graph;
}

}  // namespace foremoe::planner
