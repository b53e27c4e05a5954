#include "foremoe/plan/route_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using Replica = RouteWorkspace::Replica;

// Collects the replicas with quota, sorted by expert, then rank.
void collect_replicas(const RoutingProblem& problem, RouteWorkspace& ws) {
  const LayerQuotas& quotas = problem.quotas;
  const std::size_t num_experts = problem.load.extent(1);
  if (quotas.slot_expert.extent(0) != problem.load.extent(0) ||
      quotas.slot_tokens.shape() != quotas.slot_expert.shape() ||
      problem.topology.num_ranks != static_cast<int>(problem.load.extent(0)) || problem.topology.ranks_per_node < 1) {
    throw InputError({.field = "load"}, "its ranks, those of the slots and those of the topology differ");
  }
  if (std::ranges::any_of(problem.load.flat(), [](Tokens t) { return t < Tokens{0}; })) {
    throw InputError({.field = "load"}, "has negative tokens");
  }
  const std::span<const ExpertId> expert_of_slot = quotas.slot_expert.flat();
  const std::span<const Tokens> tokens_of_slot = quotas.slot_tokens.flat();
  const std::size_t slots_per_rank = quotas.slot_expert.extent(1);
  const auto serves = [&](std::size_t s) { return expert_of_slot[s] != kNoExpert && tokens_of_slot[s] > Tokens{0}; };

  ws.first_replica.assign(num_experts + 1, 0);
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    if (!serves(s)) continue;
    if (expert_of_slot[s].index() >= num_experts) {
      throw InputError(
          {.field = "slot_expert", .index = fmt::format("[{}, {}]", s / slots_per_rank, s % slots_per_rank)},
          fmt::format("expert {} is not in 0 … {}", expert_of_slot[s].value, num_experts - 1));
    }
    ++ws.first_replica[expert_of_slot[s].index() + 1];
  }
  for (std::size_t e = 0; e < num_experts; ++e) ws.first_replica[e + 1] += ws.first_replica[e];

  ws.replicas.resize(ws.first_replica[num_experts]);
  ws.cursor.assign(ws.first_replica.begin(), ws.first_replica.end());
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    if (!serves(s)) continue;
    ws.replicas[ws.cursor[expert_of_slot[s].index()]++] = {RankId{s / slots_per_rank}, SlotId{s % slots_per_rank},
                                                           tokens_of_slot[s].value};
  }
}

constexpr std::int64_t kCarryUnit = std::int64_t{1} << 32;  // of RouteWorkspace::carry: one row

__extension__ using Wide = __int128;

struct Divided {
  std::int64_t whole;
  std::int64_t remainder;
};

// a · b ÷ c, exactly.
Divided divided(std::int64_t a, std::int64_t b, std::int64_t c) {
  if (std::int64_t product = 0; !__builtin_mul_overflow(a, b, &product)) return {product / c, product % c};
  const Wide product = Wide{a} * b;
  return {static_cast<std::int64_t>(product / c), static_cast<std::int64_t>(product % c)};
}

// Runs the sweeps of one expert.
struct Sweeper {
  ExpertId expert;
  std::span<std::int64_t> rows_left;  // [ranks]
  std::vector<Shipment>& out;

  void send(int source, Replica& replica, std::int64_t rows) const {
    if (rows == 0) return;
    out.push_back({expert, RankId{source}, replica.rank, Tokens{rows}, replica.slot});
    rows_left[source] -= rows;
    replica.left -= rows;
  }

  // Sends share[s] rows of each source in [first, last) to these replicas, both in ascending order.
  void fill(int first, int last, std::span<const std::int64_t> share, std::span<Replica> replicas) const {
    auto replica = replicas.begin();
    for (int s = first; s < last; ++s) {
      for (std::int64_t left = share[s]; left > 0;) {
        while (replica->left == 0) ++replica;
        const std::int64_t rows = std::min(left, replica->left);
        send(s, *replica, rows);
        left -= rows;
      }
    }
  }

  // Sends share[s] rows of each source, divided among these replicas in proportion to their remaining quotas. Rounds
  // down, then sends one more row each to the replicas with the largest remainders.
  void deal(int first, int last, std::span<const std::int64_t> share, std::span<Replica> replicas) const {
    std::int64_t quota = quota_of(replicas);
    std::vector<std::pair<std::int64_t, std::size_t>> remainders;
    std::vector<std::int64_t> rows(replicas.size());
    for (int s = first; s < last; ++s) {
      if (share[s] == 0) continue;
      remainders.clear();
      std::int64_t rest = share[s];
      for (std::size_t i = 0; i < replicas.size(); ++i) {
        const auto [whole, remainder] = divided(share[s], replicas[i].left, quota);
        rows[i] = whole;
        rest -= whole;
        if (remainder != 0) remainders.emplace_back(-remainder, i);
      }
      std::ranges::sort(remainders);
      for (std::int64_t i = 0; i < rest; ++i) ++rows[remainders[static_cast<std::size_t>(i)].second];
      quota -= share[s];
      for (std::size_t i = 0; i < replicas.size(); ++i) send(s, replicas[i], rows[i]);
    }
  }

  static std::int64_t quota_of(std::span<const Replica> replicas) {
    std::int64_t quota = 0;
    for (const Replica& replica : replicas) quota += replica.left;
    return quota;
  }
};

// The sweeps of one expert.
void route_expert(const Sweeper& sweeper, std::span<Replica> replicas, const RoutingProblem& problem,
                  RouteWorkspace& ws) {
  const auto send = [&](int first, int last, std::span<Replica> to) {
    if (problem.rows == Rows::kToken) {
      sweeper.deal(first, last, ws.share, to);
    } else {
      sweeper.fill(first, last, ws.share, to);
    }
  };
  const std::span<std::int64_t> rows_left = sweeper.rows_left;
  for (Replica& own : replicas) {
    const int source = own.rank.value;
    sweeper.send(source, own, std::min(rows_left[source], own.left));
  }
  for (auto first = replicas.begin(); first != replicas.end();) {
    const NodeId node = problem.topology.node_of(first->rank);
    const auto last =
        std::find_if(first, replicas.end(), [&](const Replica& r) { return problem.topology.node_of(r.rank) != node; });
    const RankRange sources = problem.topology.ranks_of(node);
    const auto of_sources = [&](std::span<std::int64_t> all) { return all.subspan(sources.first, sources.size()); };
    divide_fairly(Sweeper::quota_of({first, last}), of_sources(rows_left), of_sources(ws.carry), of_sources(ws.share));
    send(sources.first, sources.last, {first, last});
    first = last;
  }
  std::ranges::copy(rows_left, ws.share.begin());
  send(0, problem.topology.num_ranks, replicas);  // sources with rows left have no quota left on their node
}

// Appends the shipments that the rank sends or receives.
void keep_own(std::span<const Shipment> shipments, RankId rank, RoutedRank& routed) {
  for (const Shipment& s : shipments) {
    if (s.source == rank) routed.sent.push_back(s);
    if (s.replica == rank) routed.received.push_back(s);
  }
}

void expect_quotas(std::span<const Replica> replicas, ExpertId e, std::int64_t rows) {
  std::int64_t quota = 0;
  for (const Replica& replica : replicas) quota += replica.left;
  if (quota == rows) return;
  throw InputError({.field = "slot_tokens"},
                   fmt::format("the replicas of expert {} serve {} rows, but its load is {}", e.value, quota, rows));
}

// Stable: preserves the order of experts and sweeps within a source.
void sort_by_source(std::span<const Shipment> shipments, std::size_t num_ranks, RouteWorkspace& ws,
                    RoutedLayer& routed) {
  routed.first.assign(num_ranks + 1, 0);
  for (const Shipment& s : shipments) ++routed.first[s.source.index() + 1];
  for (std::size_t r = 0; r < num_ranks; ++r) routed.first[r + 1] += routed.first[r];
  routed.shipments.resize(shipments.size());
  ws.cursor.assign(routed.first.begin(), routed.first.end());
  for (const Shipment& s : shipments) routed.shipments[ws.cursor[s.source.index()]++] = s;
}

}  // namespace

void divide_fairly(std::int64_t quota, std::span<const std::int64_t> rows, std::span<std::int64_t> carry,
                   std::span<std::int64_t> share) {
  const std::int64_t total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  if (total <= quota) {
    std::ranges::copy(rows, share.begin());
    return;
  }
  std::vector<std::pair<std::int64_t, std::size_t>> candidates;
  std::int64_t rest = quota;
  for (std::size_t s = 0; s < rows.size(); ++s) {
    const auto [whole, remainder] = divided(quota, rows[s], total);
    share[s] = whole;
    rest -= whole;
    if (remainder == 0) continue;
    carry[s] += divided(remainder, kCarryUnit, total).whole;
    candidates.emplace_back(-carry[s], s);
  }
  std::ranges::sort(candidates);
  for (std::int64_t i = 0; i < rest; ++i) {
    const std::size_t s = candidates[static_cast<std::size_t>(i)].second;
    ++share[s];
    carry[s] -= kCarryUnit;
  }
}

LayerQuotas layer_quotas(const StepPlan& plan, EventId event, LayerId layer) {
  return {plan.slot_expert[event][layer], plan.slot_tokens[event][layer]};
}

void route_tokens(const RoutingProblem& problem, RouteWorkspace& ws, RoutedLayer& routed) {
  const std::size_t num_ranks = problem.load.extent(0);
  const std::size_t num_experts = problem.load.extent(1);
  collect_replicas(problem, ws);

  ws.by_expert.clear();
  ws.rows_left.resize(num_ranks);
  ws.share.resize(num_ranks);
  ws.carry.assign(num_ranks, 0);
  for (std::size_t e = 0; e < num_experts; ++e) {
    for (std::size_t s = 0; s < num_ranks; ++s) ws.rows_left[s] = problem.load(s, e).value;
    const std::span replicas =
        std::span(ws.replicas).subspan(ws.first_replica[e], ws.first_replica[e + 1] - ws.first_replica[e]);
    expect_quotas(replicas, ExpertId{e}, std::accumulate(ws.rows_left.begin(), ws.rows_left.end(), std::int64_t{0}));
    const Sweeper sweeper{ExpertId{e}, ws.rows_left, ws.by_expert};
    route_expert(sweeper, replicas, problem, ws);
    assert(std::ranges::all_of(ws.rows_left, [](std::int64_t left) { return left == 0; }));
    assert(std::ranges::all_of(replicas, [](const Replica& r) { return r.left == 0; }));
  }
  sort_by_source(ws.by_expert, num_ranks, ws, routed);
}

void route_tokens_of(const RoutingProblem& problem, RankId rank, RouteWorkspace& ws, RoutedRank& routed) {
  const std::size_t num_ranks = problem.load.extent(0);
  const std::size_t num_experts = problem.load.extent(1);
  collect_replicas(problem, ws);
  ws.total.assign(num_experts, 0);
  for (std::size_t s = 0; s < num_ranks; ++s) {
    for (std::size_t e = 0; e < num_experts; ++e) ws.total[e] += problem.load(s, e).value;
  }

  routed.sent.clear();
  routed.received.clear();
  ws.rows_left.resize(num_ranks);
  ws.share.resize(num_ranks);
  ws.carry.assign(num_ranks, 0);
  for (std::size_t e = 0; e < num_experts; ++e) {
    const std::span replicas =
        std::span(ws.replicas).subspan(ws.first_replica[e], ws.first_replica[e + 1] - ws.first_replica[e]);
    expect_quotas(replicas, ExpertId{e}, ws.total[e]);
    if (replicas.size() == 1 && replicas.front().rank != rank) {
      const Replica& only = replicas.front();
      if (problem.load(rank, e) == Tokens{0}) continue;
      routed.sent.push_back({ExpertId{e}, rank, only.rank, problem.load(rank, e), only.slot});
      continue;
    }
    for (std::size_t s = 0; s < num_ranks; ++s) ws.rows_left[s] = problem.load(s, e).value;
    ws.by_expert.clear();
    const Sweeper sweeper{ExpertId{e}, ws.rows_left, ws.by_expert};
    route_expert(sweeper, replicas, problem, ws);
    keep_own(ws.by_expert, rank, routed);
  }
}

RoutedLayer route_tokens(const RoutingProblem& problem) {
  RouteWorkspace workspace;
  RoutedLayer routed;
  route_tokens(problem, workspace, routed);
  return routed;
}

Array<Tokens, 2> dispatch_table(const RoutedLayer& routed) {
  const std::size_t num_ranks = routed.first.size() - 1;
  Array<Tokens, 2> rows({num_ranks, num_ranks});
  for (const Shipment& s : routed.shipments) rows(s.source, s.replica) += s.rows;
  return rows;
}

}  // namespace foremoe
