#pragma once

// Steps for tests of the planner: loads that are easy to write, and plans that check_plan has accepted before a test
// uses them.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "foremoe/plan/check_plan.h"
#include "foremoe/planner/layer_problem.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/synthesis/synthesis.h"
#include "foremoe/testing/density_bound.h"

namespace foremoe::test {

using ExpertLoads = std::vector<std::vector<std::int64_t>>;  // [micro_step][expert], tokens of all sources

// Makes a load of one layer. Every source sends the same amount; the lowest sources send the remainder.
inline LoadTable load_of(int num_ranks, const ExpertLoads& loads, int ranks_per_node = 8) {
  LoadTable table;
  table.load = Array<Tokens, 4>({loads.size(), 1, static_cast<std::size_t>(num_ranks), loads.front().size()});
  table.ranks_per_node = ranks_per_node;
  for (std::size_t m = 0; m < loads.size(); ++m) {
    for (std::size_t e = 0; e < loads[m].size(); ++e) {
      for (int r = 0; r < num_ranks; ++r) {
        table.load(m, 0, r, e) = Tokens{loads[m][e] / num_ranks + (r < loads[m][e] % num_ranks ? 1 : 0)};
      }
    }
  }
  return table;
}

struct StepShape {
  int micro_steps = 6;
  int layers = 1;
  int ranks = 4;
  int experts = 16;
  int ranks_per_node = 2;
};

// Draws a load with popular experts for the whole step, and topics that make micro-steps differ as in a bursty rollout.
inline LoadTable bursty_load(const StepShape& shape, std::uint64_t seed) {
  return synthesize_load({.num_layers = shape.layers,
                          .num_experts = shape.experts,
                          .top_k = std::min(4, shape.experts),
                          .num_micro_steps = shape.micro_steps,
                          .num_ranks = shape.ranks,
                          .ranks_per_node = shape.ranks_per_node,
                          .tokens_per_rank = 512,
                          .sequences_per_rank = 1,
                          .group_size = 4,
                          .seed = seed},
                         GrpoRouting{.step_spread = 0.7, .group_spread = 1.0});
}

struct Planned {
  StepPlan plan;
  PlanFigures figures;
};

struct PlanInputs {
  const StepPlan* previous = nullptr;
  const Array<RankId, 2>* home = nullptr;  // null: contiguous blocks
  std::size_t threads = 1;
};

// Plans the step and expects that check_plan finds no violation in the plan or its figures.
inline Planned plan_checked(const LoadTable& load, const PlannerOptions& options, const PlanInputs& inputs = {}) {
  SCOPED_TRACE(to_json(options));
  ThreadPool pool(inputs.threads);
  const Array<RankId, 2> home =
      inputs.home ? *inputs.home : contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  StepPlan plan = plan_step({.load = load, .home = home, .options = options, .previous = inputs.previous}, pool).plan;
  const PlanFigures figures = plan_figures(plan, load, {.initial_home = home});
  const CheckReport report = check_plan(plan, load, {.initial_home = home, .reported = &figures, .max_listed = 3});
  for (const Violation& v : report.violations) ADD_FAILURE() << to_string(v.kind) << ": " << v.message;
  EXPECT_EQ(plan.residency, options.residency);
  return {std::move(plan), figures};
}

inline constexpr Residency kAllResidencies[] = {Residency::kStatic, Residency::kResident, Residency::kShared,
                                                Residency::kFree};
inline constexpr Residency kPinnedResidencies[] = {Residency::kStatic, Residency::kResident, Residency::kShared};

// Returns the layer problem that plan_step solves, for tests of single stages.
inline planner::LayerProblem problem_of(const LoadTable& load, const PlannerOptions& options) {
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  return planner::make_layer_problem(load, LayerId{0}, home.row(0), options);
}

// Returns the minimal largest rank load over all assignments of `expert_load` to the replicas. At most 20 ranks.
inline std::int64_t optimum_on(const planner::ReplicaGraph& graph, std::span<const std::int64_t> expert_load) {
  std::vector<Tokens> load(expert_load.size());
  std::vector<std::uint32_t> holders(expert_load.size());
  for (std::size_t e = 0; e < load.size(); ++e) load[e] = Tokens{expert_load[e]};
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) >= 0) holders[graph.expert_in(s)] |= 1U << graph.rank_of(s);
  }
  return density_lower_bound(load, holders, graph.num_ranks()).value;
}

// State of for_all_guests(): fills guest slot `guest` of `rank` next, with an expert ≥ `first`.
struct NextGuest {
  int rank = 0;
  int guest = 0;
  int first = 0;
};

// Calls visit(graph) for every choice of guests. A rank's guests are distinct, and any number of slots may be empty.
template <class Visit>
void for_all_guests(const planner::LayerProblem& problem, planner::ReplicaGraph& graph, const Visit& visit,
                    const NextGuest& next = {}) {
  if (next.rank == problem.num_ranks()) {
    visit(graph);
    return;
  }
  for_all_guests(problem, graph, visit, {.rank = next.rank + 1});  // leaves the other guest slots of this rank empty
  if (next.guest == problem.guest_slots) return;
  const int slot = graph.first_slot(next.rank) + problem.homes_per_rank() + next.guest;
  for (int e = next.first; e < problem.num_experts; ++e) {
    if (problem.home[e] == next.rank) continue;
    graph.put(slot, e);
    for_all_guests(problem, graph, visit, {.rank = next.rank, .guest = next.guest + 1, .first = e + 1});
    graph.drop(slot);
  }
}

}  // namespace foremoe::test
