#include "foremoe/policy/placed_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <numeric>
#include <optional>

#include "foremoe/core/timeline.h"

namespace foremoe {

namespace {

std::optional<Skipped> skipped(const FreePolicy& policy, const PolicyInput& input) {
  const int num_experts = input.load.num_experts();
  const int num_ranks = input.load.num_ranks();
  if (policy.residency == Residency::kFree && input.options.in_flight > 1) {
    return Skipped{
        "moves experts away from their homes, so it serves forward-only phases, which have one micro-step in flight"};
  }
  if (num_experts % num_ranks != 0) {
    return Skipped{fmt::format("{} experts and {} guest slots on each of {} ranks cannot be placed evenly", num_experts,
                               input.options.guest_slots, num_ranks)};
  }
  return std::nullopt;
}

// Plans one layer, event by event.
class FreeLayer {
 public:
  FreeLayer(const FreePolicy& policy, const PolicyInput& input, LayerId layer)
      : policy_(policy),
        layer_(layer),
        load_(layer_load(input.load, layer)),
        parts_({input.load.load.extent(2), input.load.load.extent(3)}),
        own_split_(policy.own_split ? policy.own_split(layer) : SplitTokens{}) {}

  // Returns the CPU seconds spent once per step.
  double plan_into(StepPlan& plan) {
    const double begin = thread_cpu_seconds();
    const Array<ExpertId, 3> placements = policy_.place(layer_, load_);
    const double placing = placements.extent(0) < load_.extent(0) ? thread_cpu_seconds() - begin : 0;
    assert(placements.extent(0) == 1 || placements.extent(0) == load_.extent(0));
    assert(policy_.residency == Residency::kFree || placements.extent(0) == 1);
    std::vector<int> forward(load_.extent(0));  // [micro_step], event; set before the backward reads it
    for (int t = 0; t < plan.num_events(); ++t) {
      const MicroStepId m = plan.event_micro_step[t];
      count_parts(placements.view()[placements.extent(0) == 1 ? 0 : m.index()]);
      fill_slots(t, plan);
      if (plan.event_pass[t] == Pass::kBackward) {  // slots are fixed, so quotas equal the forward's
        std::ranges::copy(plan.slot_tokens.view()[forward[m.index()]][layer_].flat(),
                          plan.slot_tokens.view()[t][layer_].flat().begin());
        continue;
      }
      forward[m.index()] = t;
      planner::ReplicaGraph graph(plan.num_ranks(), plan.num_slots(), plan.num_experts());
      for (int s = graph.num_slots() - 1; s >= 0; --s) {  // the graph lists the latest put() first
        const ExpertId e = plan.slot_expert(t, layer_, graph.rank_of(s), s - graph.first_slot(graph.rank_of(s)));
        if (e != kNoExpert) graph.put(s, e.value);
      }
      assign(m, graph);
      write_tokens(t, graph, plan);
    }
    return policy_.once_cpu_seconds.empty() ? placing : policy_.once_cpu_seconds[layer_.index()];
  }

 private:
  void count_parts(ArrayView<const ExpertId, 2> placement) {
    std::ranges::fill(parts_.flat(), 0);
    for (std::size_t r = 0; r < placement.extent(0); ++r) {
      for (const ExpertId e : placement.row(r)) {
        if (e != kNoExpert) ++parts_(r, e);
      }
    }
  }

  void fill_slots(int t, StepPlan& plan) const {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const std::vector<ExpertId> before = slots_before(t, r, plan);
      const std::span<ExpertId> slots = plan.slot_expert.row(t, layer_, r);
      std::vector<bool> stays(plan.num_experts());
      for (std::size_t s = 0; s < before.size(); ++s) {
        if (before[s] == kNoExpert || parts_(r, before[s]) == 0) continue;
        slots[s] = before[s];
        stays[before[s].index()] = true;
      }
      auto free = slots.begin();
      for (int e = 0; e < plan.num_experts(); ++e) {
        if (parts_(r, e) == 0 || stays[e]) continue;
        free = std::find(free, slots.end(), kNoExpert);
        *free = ExpertId{e};
      }
    }
  }

  std::vector<ExpertId> slots_before(int t, int r, const StepPlan& plan) const {
    std::vector<ExpertId> before;
    if (t > 0) {
      const auto row = plan.slot_expert.row(t - 1, layer_, r);
      before.assign(row.begin(), row.end());
      return before;
    }
    for (int e = 0; e < plan.num_experts(); ++e) {
      if (plan.home(layer_, e) == RankId{r}) before.push_back(ExpertId{e});
    }
    return before;
  }

  void assign(MicroStepId m, const planner::ReplicaGraph& graph) {
    const std::span<const std::int64_t> load = load_.row(m);
    const std::int64_t total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
    lower_bound_ = (total + graph.num_ranks() - 1) / graph.num_ranks();
    if (own_split_) {
      own_split_(m, graph, load, assignment_);
    } else if (policy_.split == Split::kExact) {
      planner::water_fill(graph, load, assignment_);
      planner::assign_tokens(graph, lower_bound_, assignment_, search_);
    } else {
      const auto parts_of = [&](int slot) { return parts_(graph.rank_of(slot), graph.expert_in(slot)); };
      planner::split_equally(graph, load, parts_of, assignment_);
    }
  }

  void write_tokens(int t, const planner::ReplicaGraph& graph, StepPlan& plan) const {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const std::span<Tokens> tokens = plan.slot_tokens.row(t, layer_, r);
      for (int s = 0; s < plan.num_slots(); ++s) tokens[s] = Tokens{assignment_.quota[graph.first_slot(r) + s]};
    }
    const MicroStepId m = plan.event_micro_step[t];
    plan.max_load(m, layer_) = Tokens{std::ranges::max(assignment_.rank_load)};
    plan.lower_bound(m, layer_) = Tokens{lower_bound_};
  }

  const FreePolicy& policy_;
  LayerId layer_;
  Array<std::int64_t, 2> load_;  // [micro_step][expert], tokens
  Array<int, 2> parts_;          // [rank][expert], replicas before merging
  SplitTokens own_split_;        // empty: split by policy_.split
  planner::Assignment assignment_;
  planner::AssignmentSearch search_;
  std::int64_t lower_bound_ = 0;  // ⌈mean⌉
};

}  // namespace

PolicyResult plan_freely(const FreePolicy& policy, const PolicyInput& input, ThreadPool& pool) {
  expect_valid(input.load, input.load.name);
  if (auto reason = skipped(policy, input)) return *std::move(reason);
  check_policy_input(input);
  std::vector<double> once(input.load.load.extent(1));  // [layer]
  PlannedStep step =
      plan_layers(empty_plan(policy.name, policy.residency, input), pool,
                  [&](LayerId l, StepPlan& plan) { once[l.index()] = FreeLayer(policy, input, l).plan_into(plan); });
  step.times.base_cpu_seconds = std::accumulate(once.begin(), once.end(), 0.0);
  step.times.planning_cpu_seconds -= step.times.base_cpu_seconds;
  for (std::size_t l = 0; l < once.size(); ++l) {
    const double of_first = once[l] / std::max(1, step.plan.num_micro_steps());
    step.times.first_of_layer[l] -= of_first;
    step.times.later_of_layer[l] -= once[l] - of_first;
  }
  step.times.once_of_layer = std::move(once);
  return step;
}

}  // namespace foremoe
