#include "foremoe/policy/systems/ema.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "foremoe/core/timeline.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

struct Exchange {
  std::int64_t larger = 0;  // of the two resulting rank loads
  std::size_t heavy = 0;    // expert of the most loaded rank
  std::size_t light = 0;    // expert of another rank
};

class Ema final : public Policy {
 public:
  std::string_view name() const override { return "ema"; }
  std::string_view summary() const override {
    return "experts relocated greedily once per step, by a moving average of previous steps";
  }
  bool plans_ahead(const PolicyInput& input) const override { return input.previous_load == nullptr; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable& load = input.load;
    expect_valid(load, load.name);
    const LoadTable* const former = former_load(input);
    if (load.num_experts() % load.num_ranks() != 0) {
      return Skipped{fmt::format("{} experts cannot be spread evenly over {} ranks: their number must be a multiple",
                                 load.num_experts(), load.num_ranks())};
    }
    check_policy_input(input);
    const auto begin = std::chrono::steady_clock::now();
    Array<RankId, 2> home(input.home.shape());
    std::vector<double> cpu_seconds(home.extent(0));  // [layer]
    pool.for_each_index(home.extent(0), [&](std::size_t l, std::size_t) {
      const double layer_begin = thread_cpu_seconds();
      const std::vector<std::int64_t> predicted =
          sum_over_micro_steps(layer_load(former != nullptr ? *former : load, LayerId{l}));
      std::ranges::copy(relocate_greedily(predicted, input.home.row(l), load.num_ranks()), home.row(l).begin());
      cpu_seconds[l] = thread_cpu_seconds() - layer_begin;
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

    PlannerOptions options;
    options.guest_slots = 0;
    options.in_flight = input.options.in_flight;
    options.residency = Residency::kStatic;
    options.rehome = kNoLimit;  // recorded only: the homes are chosen above
    options.stages = {.base = false, .relocation = false, .replication = false, .tokens = false};
    PlannedStep step = plan_step({.load = load, .home = home, .options = options}, pool);
    step.plan.policy = name();
    step.times.base_cpu_seconds += std::accumulate(cpu_seconds.begin(), cpu_seconds.end(), 0.0);
    for (std::size_t l = 0; l < cpu_seconds.size(); ++l) step.times.once_of_layer[l] += cpu_seconds[l];
    step.times.wall_seconds += seconds;
    return step;
  }

 private:
};

}  // namespace

std::vector<RankId> relocate_greedily(std::span<const std::int64_t> load, std::span<const RankId> home, int num_ranks) {
  std::vector<RankId> now(home.begin(), home.end());
  std::vector<std::int64_t> rank_load(num_ranks);
  for (std::size_t e = 0; e < load.size(); ++e) rank_load[now[e].index()] += load[e];
  for (;;) {
    const auto most = std::ranges::max_element(rank_load);
    const auto busiest = RankId{most - rank_load.begin()};
    Exchange best{.larger = *most};
    for (std::size_t a = 0; a < load.size(); ++a) {
      if (now[a] != busiest) continue;
      for (std::size_t b = 0; b < load.size(); ++b) {
        const std::int64_t moved = load[a] - load[b];
        if (now[b] == busiest || moved <= 0) continue;
        const std::int64_t larger = std::max(*most - moved, rank_load[now[b].index()] + moved);
        if (larger < best.larger) best = {.larger = larger, .heavy = a, .light = b};
      }
    }
    if (best.larger == *most) return now;
    const std::int64_t moved = load[best.heavy] - load[best.light];
    rank_load[busiest.index()] -= moved;
    rank_load[now[best.light].index()] += moved;
    std::swap(now[best.heavy], now[best.light]);
  }
}

std::unique_ptr<Policy> make_ema() { return std::make_unique<Ema>(); }

}  // namespace foremoe
