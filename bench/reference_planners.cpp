// Two simple planners that lab/performance.md compares with ForeMoE (run by bench/figures.py).
//
//   reference_planners static|dynamic LOAD GUEST_SLOTS
//
// Prints balance and copies as `foremoe plan --json` does: {"rho": {"mean": …, "max": …}, "copies_per_layer_event": …}.
//
// Both planners start from homes and split tokens exactly (planner/token_assignment.h). If the busiest rank is above
// the target level, the tight ranks prove that no split over these replicas helps (FineMoE, equation 3). A copy can
// help only if it brings an expert with replicas on tight ranks alone to another rank. This pair (expert, rank) moves
// at most the minimum of the expert's tokens, the tight ranks' tokens above the level, and the other rank's room below
// it.
//
//   static   Chooses guests once per step. The level is the mean. Every micro-step votes for its pairs: the tokens that
//            a pair moves × the busiest rank's tokens above the mean. The pair with most votes becomes a guest, and all
//            micro-steps are split again, until no pair with a free slot has a vote.
//   dynamic  Guests stay until their slot is needed. The level is 1 % above the mean. Each micro-step tries pairs in
//            order of the tokens that they move until one lowers the tokens above the level. The guest takes a free
//            slot, or the slot of the guest with the fewest tokens. Trials end when no rank is above the level or no
//            pair helps. Later micro-steps are ignored.

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <optional>
#include <string_view>
#include <vector>

#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/policy/placed_plan.h"
#include "foremoe/rollout/load_file.h"

namespace foremoe {
namespace {

using planner::Assignment;
using planner::AssignmentSearch;
using planner::ReplicaGraph;

// An expert and a rank where a copy of it could help.
struct Pair {
  int expert = -1;
  int rank = -1;
  std::int64_t tokens = 0;  // tokens that the copy could move; in a sum of votes, tokens × tokens
};

// One layer in one micro-step, with its tokens split over the replicas of the last graph.
class MicroStep {
 public:
  MicroStep(std::span<const std::int64_t> load, int num_ranks) : load_(load) {
    mean_ = (std::accumulate(load.begin(), load.end(), std::int64_t{0}) + num_ranks - 1) / num_ranks;
  }

  std::int64_t mean() const { return mean_; }  // tokens per rank, rounded up
  const Assignment& assignment() const { return assignment_; }

  // Minimizes the largest load and returns its excess over the mean.
  std::int64_t split(const ReplicaGraph& graph, AssignmentSearch& search) {
    water_fill(graph, load_, assignment_);
    return assign_tokens(graph, mean_, assignment_, search, &tight_) - mean_;
  }

  // Returns the tokens that remain above `level`.
  std::int64_t split_to(std::int64_t level, const ReplicaGraph& graph, AssignmentSearch& search) {
    water_fill(graph, load_, assignment_);
    const std::int64_t above = search.relieve(graph, level, assignment_);
    tight_.clear();
    if (above > 0) tight_.assign(search.closed_set().begin(), search.closed_set().end());
    return above;
  }

  // Calls `visit` with every pair that could bring the largest load closer to `level`.
  void for_each_pair(const ReplicaGraph& graph, std::int64_t level, const auto& visit) const {
    std::vector<char> is_tight(graph.num_ranks(), 0);
    std::int64_t above = 0;
    for (const int r : tight_) {
      is_tight[r] = 1;
      above += assignment_.rank_load[r] - level;
    }
    for (int e = 0; e < graph.num_experts(); ++e) {
      bool inside = load_[e] > 0;
      for (int s = graph.first_holder(e); s >= 0; s = graph.next_holder(s)) inside &= is_tight[graph.rank_of(s)] != 0;
      if (!inside) continue;
      for (int r = 0; r < graph.num_ranks(); ++r) {
        const std::int64_t tokens = std::min({load_[e], above, level - assignment_.rank_load[r]});
        if (is_tight[r] == 0 && tokens > 0) visit(Pair{e, r, tokens});
      }
    }
  }

 private:
  std::span<const std::int64_t> load_;  // [expert], tokens
  std::int64_t mean_ = 0;
  Assignment assignment_;
  std::vector<int> tight_;  // ranks
};

class Layer {
 public:
  Layer(ArrayView<const std::int64_t, 2> load, int num_ranks, int guest_slots)
      : homes_(static_cast<int>(load.extent(1)) / num_ranks),
        graph_(num_ranks, homes_ + guest_slots, static_cast<int>(load.extent(1))) {
    for (int e = 0; e < graph_.num_experts(); ++e) graph_.put(graph_.first_slot(e / homes_) + e % homes_, e);
    for (std::size_t m = 0; m < load.extent(0); ++m) micro_steps_.emplace_back(load.row(m), num_ranks);
  }

  Array<ExpertId, 3> place_static() {
    while (const std::optional<Pair> best = most_votes()) graph_.put(free_slot(best->rank), best->expert);
    return placements(1, [](std::size_t) {});
  }

  Array<ExpertId, 3> place_dynamic() {
    return placements(micro_steps_.size(), [&](std::size_t m) { relieve(micro_steps_[m]); });
  }

 private:
  std::optional<Pair> most_votes() {
    Array<std::int64_t, 2> votes(
        {static_cast<std::size_t>(graph_.num_experts()), static_cast<std::size_t>(graph_.num_ranks())});
    std::optional<Pair> best;
    for (MicroStep& m : micro_steps_) {
      const std::int64_t above = m.split(graph_, search_);
      m.for_each_pair(graph_, m.mean(), [&](const Pair& pair) {
        const std::int64_t sum = votes(pair.expert, pair.rank) += pair.tokens * above;
        if (free_slot(pair.rank) >= 0 && (!best || sum > best->tokens)) best = {pair.expert, pair.rank, sum};
      });
    }
    return best;
  }

  void relieve(MicroStep& m) {
    const std::int64_t level = m.mean() * 101 / 100;
    std::int64_t above = m.split_to(level, graph_, search_);
    bool helped = true;
    while (above > 0 && helped) {
      std::vector<Pair> pairs;
      m.for_each_pair(graph_, level, [&](const Pair& pair) { pairs.push_back(pair); });
      std::ranges::stable_sort(pairs, std::greater{}, &Pair::tokens);
      const Assignment before = m.assignment();
      helped = false;
      for (std::size_t i = 0; i < pairs.size() && !helped; ++i) {
        const int slot = least_used_slot(pairs[i].rank, before);
        const int evicted = graph_.expert_in(slot);
        if (evicted >= 0) graph_.drop(slot);
        graph_.put(slot, pairs[i].expert);
        const std::int64_t now = m.split_to(level, graph_, search_);
        helped = now < above;
        if (helped) {
          above = now;
        } else {
          graph_.drop(slot);
          if (evicted >= 0) graph_.put(slot, evicted);
        }
      }
    }
  }

  int free_slot(int rank) const {
    for (int s = graph_.first_slot(rank) + homes_; s < graph_.first_slot(rank + 1); ++s) {
      if (graph_.expert_in(s) < 0) return s;
    }
    return -1;
  }

  // Returns a free slot, or the slot of the guest with the fewest tokens.
  int least_used_slot(int rank, const Assignment& assignment) const {
    if (const int slot = free_slot(rank); slot >= 0) return slot;
    int least = graph_.first_slot(rank) + homes_;
    for (int s = least; s < graph_.first_slot(rank + 1); ++s) {
      if (assignment.quota[s] < assignment.quota[least]) least = s;
    }
    return least;
  }

  // Returns the experts in the slots after prepare(placement), for each placement: [placement][rank][slot].
  Array<ExpertId, 3> placements(std::size_t count, const auto& prepare) {
    Array<ExpertId, 3> held(
        {count, static_cast<std::size_t>(graph_.num_ranks()), static_cast<std::size_t>(graph_.slots_per_rank())});
    for (std::size_t p = 0; p < count; ++p) {
      prepare(p);
      for (int s = 0; s < graph_.num_slots(); ++s) {
        const int e = graph_.expert_in(s);
        held(p, graph_.rank_of(s), s % graph_.slots_per_rank()) = e < 0 ? kNoExpert : ExpertId{e};
      }
    }
    return held;
  }

  int homes_;  // per rank
  ReplicaGraph graph_;
  AssignmentSearch search_;
  std::vector<MicroStep> micro_steps_;
};

int run(std::string_view name, const std::string& path, int guest_slots) {
  const bool is_static = name == "static";
  const LoadTable load = read_load(path);
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  const FreePolicy policy{.name = name,
                          .split = Split::kExact,
                          .place =
                              [&](LayerId, ArrayView<const std::int64_t, 2> of_layer) {
                                Layer layer(of_layer, load.num_ranks(), guest_slots);
                                return is_static ? layer.place_static() : layer.place_dynamic();
                              },
                          .residency = is_static ? Residency::kResident : Residency::kFree};
  PlannerOptions options;
  options.guest_slots = guest_slots;
  ThreadPool pool;
  const PolicyResult result = plan_freely(policy, {.load = load, .home = home, .options = options}, pool);
  const StepPlan& plan = std::get<PlannedStep>(result).plan;
  const CheckReport report = check_plan(plan, load);
  for (const Violation& violation : report.violations)
    fmt::print(stderr, "reference_planners: {}\n", violation.message);
  const PlanFigures figures = plan_figures(plan, load);
  fmt::print("{{\"rho\": {{\"mean\": {}, \"max\": {}}}, \"copies_per_layer_event\": {}}}\n", figures.rho.mean,
             figures.rho.max, figures.copies_per_layer_event);
  return report.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace foremoe

int main(int argc, char** argv) {
  const std::string_view name = argc == 4 ? argv[1] : "";
  const int guest_slots = argc == 4 ? std::atoi(argv[3]) : 0;
  if ((name != "static" && name != "dynamic") || guest_slots < 1) {
    fmt::print(stderr, "usage: reference_planners static|dynamic LOAD GUEST_SLOTS\n");
    return 2;
  }
  try {
    return foremoe::run(name, argv[2], guest_slots);
  } catch (const std::exception& error) {
    fmt::print(stderr, "reference_planners: {}\n", error.what());
    return 2;
  }
}
