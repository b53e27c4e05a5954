#include "foremoe/policy/placed_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>

#include "foremoe/core/error.h"
#include "foremoe/core/timeline.h"

namespace foremoe {

void check_policy_input(const PolicyInput& input) {
  expect_in_range(input.options);
  expect_homes(input.home, input.load);
}

const LoadTable* former_load(const PolicyInput& input) {
  const LoadTable* const former = input.previous_load;
  if (former != nullptr) expect_valid(*former, former->name);
  if (former != nullptr &&
      (former->num_layers() != input.load.num_layers() || former->num_experts() != input.load.num_experts())) {
    throw InputError({.file = former->name, .field = "load", .index = {}},
                     fmt::format("has {} layers and {} experts, the load to plan has {} and {}", former->num_layers(),
                                 former->num_experts(), input.load.num_layers(), input.load.num_experts()));
  }
  return former;
}

const StepPlan* former_plan(const PolicyInput& input, std::string_view policy) {
  const StepPlan* const former = input.previous;
  const LoadTable& load = input.load;
  if (former != nullptr) expect_valid(*former);
  const bool fits = former != nullptr && former->policy == policy && former->guest_slots == input.options.guest_slots &&
                    former->num_events() > 0 && former->num_layers() == load.num_layers() &&
                    former->num_ranks() == load.num_ranks() && former->num_experts() == load.num_experts();
  return fits ? former : nullptr;
}

Array<ExpertId, 2> last_placement(const StepPlan& plan, LayerId layer) {
  Array<ExpertId, 2> last({plan.slot_expert.extent(2), plan.slot_expert.extent(3)});
  std::ranges::copy(plan.slot_expert.view()[plan.num_events() - 1][layer].flat(), last.flat().begin());
  return last;
}

Array<std::int64_t, 2> layer_load(const LoadTable& load, LayerId layer) {
  Array<std::int64_t, 2> of_layer({load.load.extent(0), load.load.extent(3)});
  for (int m = 0; m < load.num_micro_steps(); ++m) load.expert_loads(MicroStepId{m}, layer, of_layer.row(m));
  return of_layer;
}

std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load, std::size_t first,
                                               std::size_t count) {
  assert(first + count <= load.extent(0));
  std::vector<std::int64_t> sum(load.extent(1));
  for (std::size_t m = first; m < first + count; ++m) {
    std::ranges::transform(load.row(m), sum, sum.begin(), std::plus<>{});
  }
  return sum;
}

std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load) {
  return sum_over_micro_steps(load, 0, load.extent(0));
}

StepPlan empty_plan(std::string_view policy, Residency residency, const PolicyInput& input) {
  const int guest_slots = input.options.guest_slots;
  const int in_flight = input.options.in_flight;
  const nlohmann::ordered_json options = {
      {"guest-slots", guest_slots}, {"residency", to_string(residency)}, {"in-flight", in_flight}};
  StepPlan plan = empty_plan({.policy = std::string(policy),
                              .residency = residency,
                              .guest_slots = guest_slots,
                              .in_flight = in_flight,
                              .options = options.dump()},
                             input.load);
  std::ranges::copy(input.home.flat(), plan.home.flat().begin());
  return plan;
}

PlannedStep plan_layers(StepPlan plan, ThreadPool& pool,
                        const std::function<void(LayerId layer, StepPlan& plan)>& plan_layer) {
  const auto begin = std::chrono::steady_clock::now();
  PlannedStep step{.plan = std::move(plan), .times = {}};
  std::vector<double> cpu_seconds(step.plan.num_layers());  // [layer]
  pool.parts().begin(step.plan.num_layers());
  pool.for_each_index(cpu_seconds.size(), [&](std::size_t l, std::size_t) {
    const double layer_begin = thread_cpu_seconds();
    plan_layer(LayerId{l}, step.plan);
    cpu_seconds[l] = thread_cpu_seconds() - layer_begin;
    pool.parts().add();
  });
  step.times.planning_cpu_seconds = std::accumulate(cpu_seconds.begin(), cpu_seconds.end(), 0.0);
  step.times.once_of_layer.assign(cpu_seconds.size(), 0);
  for (const double seconds : cpu_seconds) {
    const double first = seconds / std::max(1, step.plan.num_micro_steps());
    step.times.first_of_layer.push_back(first);
    step.times.later_of_layer.push_back(seconds - first);
  }
  step.times.wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return step;
}

}  // namespace foremoe
