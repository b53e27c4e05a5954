#pragma once

// Loads and plans for tests: valid, seeded, and independent of the planner.

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe::test {

struct Shape {
  int micro_steps = 3;
  int layers = 2;
  int ranks = 4;
  int experts = 8;
  int ranks_per_node = 2;
};

// Draws a skewed load in which a fifth of the entries are zero.
inline LoadTable random_load(const Shape& shape, std::uint64_t seed, int largest = 40) {
  LoadTable table;
  table.load = Array<Tokens, 4>({std::size_t(shape.micro_steps), std::size_t(shape.layers), std::size_t(shape.ranks),
                                 std::size_t(shape.experts)});
  table.ranks_per_node = shape.ranks_per_node;
  Random random(seed);
  for (Tokens& tokens : table.load.flat()) {
    const double u = random.uniform();
    tokens = Tokens{u < 0.2 ? 0 : static_cast<int>(u * u * u * largest)};
  }
  return table;
}

struct PlanShape {
  Residency residency = Residency::kResident;
  int guest_slots = 1;
  int in_flight = 1;
};

// Returns the options that every plan records.
inline std::string recorded_options(const PlanShape& shape) {
  return fmt::format(R"({{"guest-slots": {}, "residency": "{}", "in-flight": {}}})", shape.guest_slots,
                     to_string(shape.residency), shape.in_flight);
}

inline Tokens expert_load(const LoadTable& load, MicroStepId m, int l, int e) {
  Tokens sum;
  for (int s = 0; s < load.num_ranks(); ++s) sum += load.load(m, l, s, e);
  return sum;
}

// Returns the events of this event's micro-step: the event itself and, if separate, the event of the other pass.
inline std::vector<int> passes_of(const StepPlan& plan, int event) {
  std::vector<int> passes;
  for (int t = 0; t < plan.num_events(); ++t) {
    if (plan.event_micro_step[t] == plan.event_micro_step[event]) passes.push_back(t);
  }
  return passes;
}

// Returns the slot of each expert on each rank in one layer at one event, [rank][expert]; −1 if it has none.
inline Array<SlotId, 2> slots_of(const StepPlan& plan, int event, int layer) {
  Array<SlotId, 2> slot({std::size_t(plan.num_ranks()), std::size_t(plan.num_experts())}, SlotId{-1});
  for (int r = 0; r < plan.num_ranks(); ++r) {
    for (int s = 0; s < plan.num_slots(); ++s) {
      const ExpertId e = plan.slot_expert(event, layer, r, s);
      if (e != kNoExpert) slot(r, e) = SlotId{s};
    }
  }
  return slot;
}

// Splits every expert's load at random over the ranks that hold it in all passes of the micro-step. Records max_load
// and lower_bound.
inline void draw_random_quotas(StepPlan& plan, const LoadTable& load, Random& random) {
  for (int t = 0; t < plan.num_events(); ++t) {
    const std::vector<int> passes = passes_of(plan, t);
    if (passes.front() != t) continue;
    const int last_pass = passes.back();
    const MicroStepId m = plan.event_micro_step[t];
    for (int l = 0; l < plan.num_layers(); ++l) {
      const Array<SlotId, 2> first = slots_of(plan, t, l);
      const Array<SlotId, 2> last = slots_of(plan, last_pass, l);
      std::vector<std::int64_t> rank_load(plan.num_ranks());
      for (int e = 0; e < plan.num_experts(); ++e) {
        std::vector<int> holders;
        for (int r = 0; r < plan.num_ranks(); ++r) {
          if (first(r, e).value >= 0 && last(r, e).value >= 0) holders.push_back(r);
        }
        Tokens left = expert_load(load, m, l, e);
        for (const int r : holders) {
          const Tokens quota = r == holders.back() ? left : Tokens{random.below(left.value + 1)};
          plan.slot_tokens(t, l, r, first(r, e)) = quota;
          plan.slot_tokens(last_pass, l, r, last(r, e)) = quota;
          rank_load[r] += quota.value;
          left -= quota;
        }
      }
      const std::int64_t total = std::accumulate(rank_load.begin(), rank_load.end(), std::int64_t{0});
      plan.max_load(m, l) = Tokens{*std::ranges::max_element(rank_load)};
      plan.lower_bound(m, l) = Tokens{(total + plan.num_ranks() - 1) / plan.num_ranks()};
    }
  }
}

// Returns a valid plan with contiguous homes, random quotas, and guests that change at random at every event, as far as
// the residency allows. Without guest slots, the plan has only homes.
inline StepPlan random_plan(const LoadTable& load, const PlanShape& shape, std::uint64_t seed) {
  Random random(seed);
  const int num_homes = load.num_experts() / load.num_ranks();
  const ExecutionOrder order = make_execution_order(load.num_micro_steps(), shape.in_flight);
  const auto layers = static_cast<std::size_t>(load.num_layers());
  const auto ranks = static_cast<std::size_t>(load.num_ranks());
  const auto micro_steps = static_cast<std::size_t>(load.num_micro_steps());
  const auto slots = static_cast<std::size_t>(num_homes + shape.guest_slots);

  StepPlan plan{.policy = "random",
                .residency = shape.residency,
                .guest_slots = shape.guest_slots,
                .ranks_per_node = load.ranks_per_node,
                .in_flight = shape.in_flight,
                .options = recorded_options(shape),
                .load_digest = load_digest(load)};
  plan.slot_expert = Array<ExpertId, 4>({order.micro_step.size(), layers, ranks, slots}, kNoExpert);
  plan.slot_tokens = Array<Tokens, 4>(plan.slot_expert.shape());
  plan.event_micro_step = order.micro_step;
  plan.event_pass = order.pass;
  plan.home = Array<RankId, 2>({layers, static_cast<std::size_t>(load.num_experts())});
  plan.max_load = Array<Tokens, 2>({micro_steps, layers});
  plan.lower_bound = Array<Tokens, 2>({micro_steps, layers});

  for (int l = 0; l < load.num_layers(); ++l) {
    for (int e = 0; e < load.num_experts(); ++e) plan.home(l, e) = RankId{e / num_homes};
    for (int t = 0; t < order.num_events(); ++t) {
      for (int r = 0; r < load.num_ranks(); ++r) {
        const auto now = plan.slot_expert.row(t, l, r);
        if (t > 0) {
          std::ranges::copy(plan.slot_expert.row(t - 1, l, r), now.begin());
        } else {
          for (int h = 0; h < num_homes; ++h) now[h] = ExpertId{r * num_homes + h};
        }
        const std::vector<ExpertId> before(now.begin(), now.end());
        for (std::size_t s = num_homes; s < slots; ++s) {
          if (t > 0 && (shape.residency == Residency::kStatic || random.uniform() < 0.5)) continue;
          const ExpertId guest{random.below(load.num_experts())};
          if (std::ranges::count(before, guest) + std::ranges::count(now, guest) == 0) now[s] = guest;
        }
      }
      if (shape.residency == Residency::kFree && load.num_ranks() > 1) {  // two ranks exchange an expert
        const auto a = plan.slot_expert.row(t, l, 0);
        const auto b = plan.slot_expert.row(t, l, 1);
        const std::size_t i = random.below(num_homes);
        const bool clash = std::ranges::count(a, b[i]) + std::ranges::count(b, a[i]) > 0;
        const bool moves = t > 0 && (std::ranges::count(plan.slot_expert.row(t - 1, l, 0), b[i]) +
                                     std::ranges::count(plan.slot_expert.row(t - 1, l, 1), a[i])) > 0;
        if (!clash && !moves) std::swap(a[i], b[i]);
      }
    }
  }
  draw_random_quotas(plan, load, random);
  return plan;
}

}  // namespace foremoe::test
