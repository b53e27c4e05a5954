#include "foremoe/planner/planner.h"

#include <chrono>
#include <memory>

#include "foremoe/core/error.h"
#include "foremoe/plan/empty_plan.h"
#include "foremoe/planner/layer_planner.h"

namespace foremoe {

static void check(const PlanRequest& request) {
  const LoadTable& load = request.load;
  const PlannerOptions& o = request.options;
  const auto refuse = [](const char* option, const std::string& why) { throw InputError({.field = option}, why); };
  if (o.guest_slots < 0) refuse("--guest-slots", "must not be negative");
  if (o.in_flight < 1) refuse("--in-flight", "must be at least 1");
  if (o.rehome < 0) refuse("--rehome", "must not be negative");
  if (o.min_tokens_per_guest < 0) refuse("--min-tokens-per-guest", "must not be negative");
  if (o.max_copies_per_rank.value_or(0) < 0) refuse("--max-copies-per-rank", "must not be negative");
  if (o.max_copies_per_source < 0) refuse("--max-copies-per-source", "must not be negative");
  if (o.tolerance && !(*o.tolerance >= 0 && *o.tolerance <= 1)) refuse("--tolerance", "must be between 0 and 1");
  if (o.residency == Residency::kFree && o.in_flight > 1) {
    refuse("--residency",
           "free moves experts away from their homes, so it serves forward-only stages: --in-flight must be 1");
  }
  if (load.num_experts() % load.num_ranks() != 0) {
    throw InputError({.file = load.name, .field = "load"}, std::to_string(load.num_ranks()) + " ranks must divide " +
                                                               std::to_string(load.num_experts()) + " experts");
  }
  if (request.home.extent(0) != static_cast<std::size_t>(load.num_layers()) ||
      request.home.extent(1) != static_cast<std::size_t>(load.num_experts())) {
    refuse("--homes", "must give a rank for every layer and expert of the load");
  }
  for (int l = 0; l < load.num_layers(); ++l) {
    std::vector<int> homes_on(load.num_ranks(), 0);
    for (int e = 0; e < load.num_experts(); ++e) {
      const RankId home = request.home(l, e);
      const std::string at = "[" + std::to_string(l) + ", " + std::to_string(e) + "]";
      if (home.value < 0 || home.value >= load.num_ranks()) {
        throw InputError({.field = "--homes", .index = at},
                         "rank " + std::to_string(home.value) + " is not one of " + std::to_string(load.num_ranks()));
      }
      if (++homes_on[home.index()] > load.num_experts() / load.num_ranks()) {
        throw InputError({.field = "--homes", .index = at}, "rank " + std::to_string(home.value) + " has more than " +
                                                                std::to_string(load.num_experts() / load.num_ranks()) +
                                                                " homes in this layer");
      }
    }
  }
  if (request.previous != nullptr) {
    const StepPlan& p = *request.previous;
    if (p.num_layers() != load.num_layers() || p.num_ranks() != load.num_ranks() ||
        p.num_experts() != load.num_experts()) {
      refuse("--previous", "must be a plan for as many layers, ranks and experts as the load has");
    }
  }
}

Array<RankId, 2> contiguous_homes(int num_layers, int num_experts, int num_ranks) {
  if (num_ranks < 1 || num_experts % num_ranks != 0) {
    throw InputError({.field = "--ranks"},
                     std::to_string(num_ranks) + " ranks must divide " + std::to_string(num_experts) + " experts");
  }
  Array<RankId, 2> home({static_cast<std::size_t>(num_layers), static_cast<std::size_t>(num_experts)});
  for (int l = 0; l < num_layers; ++l) {
    for (int e = 0; e < num_experts; ++e) home(l, e) = RankId{e / (num_experts / num_ranks)};
  }
  return home;
}

PlannedStep plan_step(const PlanRequest& request, ThreadPool& pool) {
  const auto begin = std::chrono::steady_clock::now();
  check(request);
  const ExecutionOrder order = make_execution_order(request.load.num_micro_steps(), request.options.in_flight);
  PlannedStep step{.plan = empty_plan({.policy = "foremoe",
                                       .residency = request.options.residency,
                                       .guest_slots = request.options.guest_slots,
                                       .in_flight = request.options.in_flight,
                                       .options = to_json(request.options)},
                                      request.load)};
  std::vector<std::unique_ptr<planner::LayerPlanner>> layers(request.load.num_layers());

  pool.for_each_index(layers.size(), [&](std::size_t l, std::size_t) {
    layers[l] = std::make_unique<planner::LayerPlanner>(request, order, LayerId{l});
    layers[l]->place(step.plan);
  });
  for (int m = 0; m < request.load.num_micro_steps(); ++m) {
    pool.for_each_index(layers.size(),
                        [&](std::size_t l, std::size_t) { layers[l]->finish(MicroStepId{m}, step.plan); });
    if (request.on_micro_step) request.on_micro_step(step.plan, MicroStepId{m});
  }
  for (const auto& layer : layers) {
    step.times.base_cpu_seconds += layer->base_cpu_seconds();
    step.times.planning_cpu_seconds += layer->planning_cpu_seconds();
  }
  step.times.wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return step;
}

PlannedStep plan_step(const LoadTable& load, const PlannerOptions& options) {
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  ThreadPool pool;
  return plan_step({.load = load, .home = home, .options = options}, pool);
}

}  // namespace foremoe
