#include "foremoe/planner/planner.h"

#include <fmt/format.h>

#include <chrono>
#include <memory>

#include "foremoe/core/error.h"
#include "foremoe/core/timeline.h"
#include "foremoe/planner/layer_planner.h"

namespace foremoe {

namespace {

void check(const PlanRequest& request) {
  const LoadTable& load = request.load;
  expect_valid(load, load.name);
  expect_in_range(request.options);
  if (request.options.residency == Residency::kFree && request.options.in_flight > 1) {
    throw InputError({.file = {}, .field = "residency", .index = {}},
                     "free moves experts away from their homes, so it serves forward-only phases, which have one "
                     "micro-step in flight");
  }
  if (load.num_experts() % load.num_ranks() != 0) {
    throw InputError({.file = load.name, .field = "load", .index = {}},
                     fmt::format("{} ranks must divide {} experts", load.num_ranks(), load.num_experts()));
  }
  expect_homes(request.home, request.load);
  if (request.previous == nullptr) return;
  const StepPlan& p = *request.previous;
  expect_valid(p);
  if (p.num_layers() != load.num_layers() || p.num_ranks() != load.num_ranks() ||
      p.num_experts() != load.num_experts()) {
    throw InputError(
        {.file = {}, .field = "previous", .index = {}},
        fmt::format("has {} layers, {} ranks and {} experts, the load has {}, {} and {}", p.num_layers(), p.num_ranks(),
                    p.num_experts(), load.num_layers(), load.num_ranks(), load.num_experts()));
  }
}

}  // namespace

void expect_homes(ArrayView<const RankId, 2> home, const LoadTable& load) {
  if (home.extent(0) != static_cast<std::size_t>(load.num_layers()) ||
      home.extent(1) != static_cast<std::size_t>(load.num_experts())) {
    throw InputError({.file = {}, .field = "homes", .index = {}},
                     fmt::format("has {} layers and {} experts, the load has {} and {}", home.extent(0), home.extent(1),
                                 load.num_layers(), load.num_experts()));
  }
  expect_homes(home, load.num_ranks());
}

Array<RankId, 2> contiguous_homes(int num_layers, int num_experts, int num_ranks,
                                  std::span<const int> experts_of_layer) {
  if (num_ranks < 1 || num_experts % num_ranks != 0) {
    throw InputError({.file = {}, .field = "ranks", .index = {}},
                     fmt::format("{} ranks must divide {} experts", num_ranks, num_experts));
  }
  if (!experts_of_layer.empty() && experts_of_layer.size() != static_cast<std::size_t>(num_layers)) {
    throw InputError({.field = "experts_of_layer"}, fmt::format("{} entries, expected one for each of {} layers",
                                                                experts_of_layer.size(), num_layers));
  }
  Array<RankId, 2> home({static_cast<std::size_t>(num_layers), static_cast<std::size_t>(num_experts)});
  for (int l = 0; l < num_layers; ++l) {
    const int experts = experts_of_layer.empty() ? num_experts : experts_of_layer[static_cast<std::size_t>(l)];
    if (experts % num_ranks != 0) {
      throw InputError({.file = {}, .field = "ranks", .index = {}},
                       fmt::format("{} ranks must divide the {} experts of layer {}", num_ranks, experts, l));
    }
    for (int e = 0; e < experts; ++e) home(l, e) = RankId{e / (experts / num_ranks)};
    const int absent = num_experts - experts;
    for (int i = 0; i < absent; ++i) home(l, experts + i) = RankId{i / (absent / num_ranks)};
  }
  return home;
}

Array<RankId, 2> contiguous_homes(const LoadTable& load) {
  return contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks(), load.experts_of_layer);
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

  PlanTimes& times = step.times;
  times.once_of_layer.resize(layers.size());
  times.first_of_layer.resize(layers.size());
  times.later_of_layer.resize(layers.size());
  pool.parts().begin(request.load.num_layers() * planner::LayerPlanner::parts_of_layer(request));
  pool.for_each_index(layers.size(), [&](std::size_t l, std::size_t) {
    const double layer_begin = thread_cpu_seconds();
    layers[l] = std::make_unique<planner::LayerPlanner>(request, order, LayerId{l}, &pool.parts());
    layers[l]->place(step.plan);
    times.once_of_layer[l] = layers[l]->base_cpu_seconds();
    times.first_of_layer[l] = thread_cpu_seconds() - layer_begin - times.once_of_layer[l];
  });
  for (int m = 0; m < request.load.num_micro_steps(); ++m) {
    std::vector<double>& seconds = m == 0 ? times.first_of_layer : times.later_of_layer;
    pool.for_each_index(layers.size(), [&](std::size_t l, std::size_t) {
      const double layer_begin = thread_cpu_seconds();
      layers[l]->lend(MicroStepId{m}, step.plan);
      layers[l]->finish(MicroStepId{m}, step.plan);
      seconds[l] += thread_cpu_seconds() - layer_begin;
    });
    if (request.on_micro_step) request.on_micro_step(step.plan, MicroStepId{m});
  }
  for (const auto& layer : layers) {
    times.base_cpu_seconds += layer->base_cpu_seconds();
    times.planning_cpu_seconds += layer->planning_cpu_seconds();
  }
  step.times.wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return step;
}

PlannedStep plan_step(const LoadTable& load, const PlannerOptions& options) {
  expect_valid(load, load.name);
  const Array<RankId, 2> home = contiguous_homes(load);
  ThreadPool pool;
  return plan_step({.load = load, .home = home, .options = options}, pool);
}

StepPlan recompute_quotas(StepPlan plan, const LoadTable& load) {
  expect_valid(plan, load);
  const PlanRequest request{
      .load = load,
      .home = plan.home,
      .options = {.guest_slots = plan.guest_slots, .residency = plan.residency, .in_flight = plan.in_flight}};
  const ExecutionOrder order = make_execution_order(load.num_micro_steps(), plan.in_flight);
  for (int l = 0; l < load.num_layers(); ++l) {
    planner::LayerPlanner layer(request, order, LayerId{l});
    for (int m = 0; m < load.num_micro_steps(); ++m) layer.finish(MicroStepId{m}, plan);
  }
  plan.load_digest = load_digest(load);
  return plan;
}

}  // namespace foremoe
