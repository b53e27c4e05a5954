#pragma once

// Plans and their phases, for tests of schedules.

#include <array>
#include <string>
#include <vector>

#include "foremoe/testing/random_plans.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe::test {

// Returns a plan for two ranks on one node, with experts 0 and 1 at home on rank 0, 2 and 3 on rank 1, and one guest
// slot. guests[event][layer] is the guest of rank 0, or −1. Every slot with an expert has a quota.
inline StepPlan plan_with_guests(Residency residency, int in_flight, const std::vector<std::vector<int>>& guests) {
  const std::size_t layers = guests[0].size();
  const auto events = static_cast<int>(guests.size());
  const ExecutionOrder order = make_execution_order(in_flight == 1 ? events : events / 2, in_flight);
  StepPlan plan{.residency = residency, .guest_slots = 1, .ranks_per_node = 2, .in_flight = in_flight};
  plan.slot_expert = Array<ExpertId, 4>({guests.size(), layers, 2, 3}, kNoExpert);
  plan.event_micro_step = order.micro_step;
  plan.event_pass = order.pass;
  plan.home = Array<RankId, 2>({layers, 4});
  for (std::size_t l = 0; l < layers; ++l) {
    for (int e = 0; e < 4; ++e) plan.home(l, e) = RankId{e / 2};
    for (int t = 0; t < events; ++t) {
      for (int e = 0; e < 4; ++e) plan.slot_expert(t, l, e / 2, e % 2) = ExpertId{e};
      plan.slot_expert(t, l, 0, 2) = ExpertId{guests[t][l]};
    }
  }
  plan.slot_tokens = Array<Tokens, 4>(plan.slot_expert.shape());
  for (std::size_t i = 0; i < plan.slot_tokens.size(); ++i) {
    if (plan.slot_expert.flat()[i] != kNoExpert) plan.slot_tokens.flat()[i] = Tokens{1};
  }
  return plan;
}

// Like the plan above, but without guest slots. slots[event]: the experts in the two slots of rank 0, then of rank 1.
inline StepPlan free_plan(const std::vector<std::array<int, 4>>& slots) {
  StepPlan plan = plan_with_guests(Residency::kFree, 1, std::vector<std::vector<int>>(slots.size(), {-1}));
  plan.guest_slots = 0;
  plan.slot_expert = Array<ExpertId, 4>({slots.size(), 1, 2, 2});
  plan.slot_tokens = Array<Tokens, 4>(plan.slot_expert.shape(), Tokens{1});
  for (std::size_t t = 0; t < slots.size(); ++t) {
    for (int i = 0; i < 4; ++i) plan.slot_expert(t, 0, i / 2, i % 2) = ExpertId{slots[t][i]};
  }
  return plan;
}

struct ScheduleCase {
  std::string name;
  StepPlan plan;
  ScheduleOptions options;
};

// Like random_plan(), but guest slots are empty at some events.
inline StepPlan random_plan_with_gaps(const LoadTable& load, const PlanShape& shape, std::uint64_t seed) {
  StepPlan plan = random_plan(load, shape, seed);
  Random random(seed + 1000);
  if (shape.residency == Residency::kStatic) return plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = plan.num_slots() - plan.guest_slots; s < plan.num_slots(); ++s) {
          if (random.uniform() < 0.2) plan.slot_expert(t, l, r, s) = kNoExpert;
        }
      }
    }
  }
  for (Tokens& quota : plan.slot_tokens.flat()) quota = Tokens{0};
  draw_random_quotas(plan, load, random);
  return plan;
}

// Returns every valid combination of residency, phase, number in flight and path, on nodes of every size.
inline std::vector<ScheduleCase> random_cases(std::uint64_t num_seeds) {
  std::vector<ScheduleCase> cases;
  for (std::uint64_t seed = 0; seed < num_seeds; ++seed) {
    for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}) {
      for (const int in_flight : {1, 2, 3}) {
        if (residency == Residency::kFree && in_flight > 1) continue;
        const int ranks_per_node = 1 + static_cast<int>(seed % 4);
        const LoadTable load = random_load(
            {.micro_steps = 4, .layers = 3, .ranks = 4, .experts = 8, .ranks_per_node = ranks_per_node}, seed);
        const StepPlan plan =
            random_plan_with_gaps(load, {.residency = residency, .guest_slots = 2, .in_flight = in_flight}, seed);
        for (const Phase phase : {Phase::kRecompute, Phase::kPolicyUpdate}) {
          if (phase == Phase::kRecompute && in_flight > 1) continue;
          if (phase == Phase::kPolicyUpdate && residency == Residency::kFree) continue;
          for (const PathChoice path : {PathChoice::kAuto, PathChoice::kHost, PathChoice::kPeer}) {
            const int depth = 1 + static_cast<int>((seed + static_cast<std::uint64_t>(in_flight)) % 3);
            cases.push_back({.name = std::string(to_string(residency)) + ", " + std::string(to_string(phase)) + ", " +
                                     std::to_string(in_flight) + " in flight, path " +
                                     std::to_string(static_cast<int>(path)) + ", depth " + std::to_string(depth) +
                                     ", nodes of " + std::to_string(ranks_per_node) + ", seed " + std::to_string(seed),
                             .plan = plan,
                             .options = {.phase = phase, .path = path, .depth = depth}});
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace foremoe::test
