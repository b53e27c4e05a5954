#include "foremoe/policy/systems/finemoe/token_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::finemoe {

namespace {

// Smaller fractions of a token are within the LP's tolerance and count as 0.
constexpr double kNoToken = 1e-5;

std::vector<std::int64_t> expert_loads(ArrayView<const std::int64_t, 2> input) {
  std::vector<std::int64_t> load(input.extent(1));
  for (std::size_t r = 0; r < input.extent(0); ++r) {
    std::ranges::transform(load, input.row(r), load.begin(), std::plus<>{});
  }
  return load;
}

// Returns quotas, [slot]: equal parts to all replicas, the remainder to the lowest ranks.
std::vector<std::int64_t> equal_parts(const planner::ReplicaGraph& graph, std::span<const std::int64_t> load) {
  planner::Assignment equal;
  const auto one_part = [](int) { return 1; };
  planner::split_equally(graph, load, one_part, equal);
  return std::move(equal.quota);
}

// Returns the placement with one more slot and one more expert per rank; only that rank holds the expert.
planner::ReplicaGraph with_own_expert(const planner::ReplicaGraph& graph) {
  const int slots = graph.slots_per_rank() + 1;
  planner::ReplicaGraph extended(graph.num_ranks(), slots, graph.num_experts() + graph.num_ranks());
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) >= 0) extended.put(s + graph.rank_of(s), graph.expert_in(s));
  }
  for (int r = 0; r < graph.num_ranks(); ++r) extended.put((r + 1) * slots - 1, graph.num_experts() + r);
  return extended;
}

}  // namespace

void TokenScheduler::schedule(const planner::ReplicaGraph& graph, ArrayView<const std::int64_t, 2> input,
                              planner::Assignment& a) {
  if (options_.scheduled_fraction >= 1) return schedule_all(graph, input, a);

  const std::size_t num_experts = input.extent(1);
  Array<std::int64_t, 2> former({input.extent(0), num_experts});
  Array<std::int64_t, 2> latter({input.extent(0), num_experts + input.extent(0)});
  for (std::size_t r = 0; r < input.extent(0); ++r) {
    for (std::size_t e = 0; e < num_experts; ++e) {
      former(r, e) =
          static_cast<std::int64_t>(std::floor((1 - options_.scheduled_fraction) * static_cast<double>(input(r, e))));
      latter(r, e) = input(r, e) - former(r, e);
    }
  }
  const std::vector<std::int64_t> unscheduled = equal_parts(graph, expert_loads(former));
  for (int s = 0; s < graph.num_slots(); ++s) {
    latter(graph.rank_of(s), num_experts + static_cast<std::size_t>(graph.rank_of(s))) += unscheduled[s];
  }
  planner::Assignment extended;
  schedule_all(with_own_expert(graph), latter, extended);
  a.quota = unscheduled;
  for (int s = 0; s < graph.num_slots(); ++s) a.quota[s] += extended.quota[s + graph.rank_of(s)];
  a.rank_load = extended.rank_load;
}

void TokenScheduler::schedule_all(const planner::ReplicaGraph& graph, ArrayView<const std::int64_t, 2> input,
                                  planner::Assignment& a) {
  const std::vector<std::int64_t> load = expert_loads(input);
  if (options_.solver != Solver::kExact && solve_lp(graph, input)) return make_whole(graph, load, a);
  const std::int64_t total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  planner::water_fill(graph, load, a);
  planner::assign_tokens(graph, (total + graph.num_ranks() - 1) / graph.num_ranks(), a, search_);
}

bool TokenScheduler::solve_lp(const planner::ReplicaGraph& graph, ArrayView<const std::int64_t, 2> input) {
  std::vector<int> placement(graph.num_slots());
  for (int s = 0; s < graph.num_slots(); ++s) placement[s] = graph.expert_in(s);
  if (!lp_ || placement != placement_) {
    const bool communication = options_.solver == Solver::kCommunicationAware;
    lp_.emplace(graph, topology_, communication ? std::optional(options_.weights) : std::nullopt);
    placement_ = std::move(placement);
  }
  return lp_->solve(input);
}

void TokenScheduler::make_whole(const planner::ReplicaGraph& graph, std::span<const std::int64_t> load,
                                planner::Assignment& a) {
  const std::span<const double> x = lp_->replica_loads();
  a.quota.assign(graph.num_slots(), 0);
  a.rank_load.assign(graph.num_ranks(), 0);
  std::vector<std::int64_t> left(load.begin(), load.end());  // [expert]
  std::vector<int> by_fraction;                              // slots
  const auto give = [&](int s, std::int64_t tokens) {
    a.quota[s] += tokens;
    a.rank_load[graph.rank_of(s)] += tokens;
    left[graph.expert_in(s)] -= tokens;
  };
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) < 0) continue;
    give(s, std::min(static_cast<std::int64_t>(std::floor(x[s] + kNoToken)), left[graph.expert_in(s)]));
    by_fraction.push_back(s);
  }
  std::ranges::stable_sort(by_fraction, std::greater<>{},
                           [&](int s) { return x[s] - static_cast<double>(a.quota[s]); });
  for (const int s : by_fraction) give(s, std::min<std::int64_t>(1, left[graph.expert_in(s)]));
  for (const int s : by_fraction) give(s, left[graph.expert_in(s)]);  // more than one token only if x is inexact
  const double level = lp_->largest_rank_load();
  search_.relieve(graph, static_cast<std::int64_t>(std::ceil(level - kNoToken)), a);
}

namespace {

struct Sweep {
  std::vector<std::int64_t> input;                        // [source], remaining tokens of the expert
  std::vector<std::pair<RankId, std::int64_t>> replicas;  // ranks ascending, remaining tokens

  template <class Reaches>
  void run(ExpertId e, const Reaches& reaches, std::vector<Shipment>& shipments) {
    for (std::size_t g = 0; g < input.size(); ++g) {
      const RankId source{g};
      for (auto& [rank, left] : replicas) {
        if (!reaches(source, rank)) continue;
        const std::int64_t tokens = std::min(input[g], left);
        if (tokens == 0) continue;
        shipments.push_back({.expert = e, .source = source, .replica = rank, .rows = Tokens{tokens}});
        input[g] -= tokens;
        left -= tokens;
      }
    }
  }
};

}  // namespace

std::vector<Shipment> route_by_algorithm_1(const RoutingProblem& problem, Locality locality) {
  std::vector<Shipment> shipments;
  const auto& [slot_expert, slot_tokens] = problem.quotas;
  for (int e = 0; e < static_cast<int>(problem.load.extent(1)); ++e) {
    Sweep sweep;
    for (std::size_t r = 0; r < problem.load.extent(0); ++r) {
      sweep.input.push_back(problem.load(r, e).value);
      const auto held = std::ranges::find(slot_expert.row(r), ExpertId{e});
      if (held == slot_expert.row(r).end()) continue;
      sweep.replicas.emplace_back(r, slot_tokens(r, held - slot_expert.row(r).begin()).value);
    }
    if (locality != Locality::kNone) sweep.run(ExpertId{e}, std::equal_to<>{}, shipments);
    if (locality == Locality::kNode) {
      sweep.run(
          ExpertId{e}, [&](RankId a, RankId b) { return problem.topology.same_node(a, b); }, shipments);
    }
    sweep.run(
        ExpertId{e}, [](RankId, RankId) { return true; }, shipments);
  }
  return shipments;
}

CommunicationVolume communication_volume(std::span<const Shipment> shipments, const Topology& topology) {
  std::vector<std::int64_t> rank_sends(topology.num_ranks);
  std::vector<std::int64_t> rank_receives(topology.num_ranks);
  std::vector<std::int64_t> node_sends(topology.num_nodes());
  std::vector<std::int64_t> node_receives(topology.num_nodes());
  for (const Shipment& s : shipments) {
    if (s.source == s.replica) continue;
    rank_sends[s.source.index()] += s.rows.value;
    rank_receives[s.replica.index()] += s.rows.value;
    if (topology.same_node(s.source, s.replica)) continue;
    node_sends[topology.node_of(s.source).index()] += s.rows.value;
    node_receives[topology.node_of(s.replica).index()] += s.rows.value;
  }
  return {.ranks = std::max(std::ranges::max(rank_sends), std::ranges::max(rank_receives)),
          .nodes = std::max(std::ranges::max(node_sends), std::ranges::max(node_receives))};
}

}  // namespace foremoe::finemoe
