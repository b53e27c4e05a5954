// What the slots owe: quotas, the agreement of both passes, and the recorded bounds.

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/plan/check_rules.h"
#include "foremoe/plan/lower_bound.h"

namespace foremoe::check {
namespace {

// Quota of an expert on a rank, wherever it sits there.
std::int64_t quota_of(const StepPlan& plan, int t, int l, int r, int e) {
  std::int64_t sum = 0;
  for (int s = 0; s < plan.num_slots(); ++s) {
    if (plan.slot_expert(t, l, r, s) == ExpertId{e}) sum += plan.slot_tokens(t, l, r, s).value;
  }
  return sum;
}

bool holds(const StepPlan& plan, int t, int l, int r, int e) {
  return std::ranges::count(plan.slot_expert.row(t, l, r), ExpertId{e}) > 0;
}

// The least possible largest rank load when each expert may use the ranks that hold it in all of these events.
Tokens optimum(const Subject& subject, const std::vector<int>& events, MicroStepId m, LayerId l) {
  const StepPlan& plan = subject.plan;
  std::vector<Tokens> loads;
  std::vector<std::uint32_t> holders;
  for (int e = 0; e < plan.num_experts(); ++e) {
    loads.push_back(Tokens{load_of(subject, m, l, ExpertId{e})});
    std::uint32_t set = 0;
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const bool always = std::ranges::all_of(events, [&](int t) { return holds(plan, t, l.value, r, e); });
      if (always) set |= std::uint32_t{1} << r;
    }
    holders.push_back(set);
  }
  return density_lower_bound(loads, holders, plan.num_ranks());
}

}  // namespace

std::int64_t load_of(const Subject& subject, MicroStepId m, LayerId l, ExpertId e) {
  std::int64_t sum = 0;
  for (int s = 0; s < subject.load.num_ranks(); ++s) sum += subject.load.load(m, l, s, e).value;
  return sum;
}

void quotas(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      std::vector<std::int64_t> left(plan.num_experts());  // load that no quota has covered yet
      for (int e = 0; e < plan.num_experts(); ++e) {
        left[e] = load_of(subject, plan.event_micro_step[t], LayerId{l}, ExpertId{e});
      }
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          const std::int64_t quota = plan.slot_tokens(t, l, r, s).value;
          const bool fits = e == kNoExpert ? quota == 0 : quota >= 0 && quota <= left[e.index()];
          if (fits) {
            if (e != kNoExpert) left[e.index()] -= quota;
            continue;
          }
          Violation violation{.kind = ViolationKind::kQuota,
                              .event = EventId{t},
                              .layer = LayerId{l},
                              .rank = RankId{r},
                              .slot = SlotId{s}};
          if (e == kNoExpert) {
            violation.message = fmt::format("the slot is empty, but has a quota of {}", quota);
          } else {
            violation.expert = e;
            violation.message =
                quota < 0 ? fmt::format("the quota is {}", quota)
                          : fmt::format("the quota is {}, but lower slots and ranks leave {} of the expert's load",
                                        quota, left[e.index()]);
          }
          findings.add(std::move(violation));
        }
      }
      for (int e = 0; e < plan.num_experts(); ++e) {
        if (left[e] == 0) continue;
        findings.add({.kind = ViolationKind::kQuota,
                      .event = EventId{t},
                      .layer = LayerId{l},
                      .expert = ExpertId{e},
                      .message = fmt::format("{} tokens of the expert's load are in no quota", left[e])});
      }
    }
  }
}

void passes(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  if (plan.in_flight == 1) return;
  for (int backward = 0; backward < plan.num_events(); ++backward) {
    if (plan.event_pass[backward] != Pass::kBackward) continue;
    int forward = 0;
    while (plan.event_micro_step[forward] != plan.event_micro_step[backward]) ++forward;
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int e = 0; e < plan.num_experts(); ++e) {
          const std::int64_t before = quota_of(plan, forward, l, r, e);
          const std::int64_t after = quota_of(plan, backward, l, r, e);
          if (before == after) continue;
          findings.add({.kind = ViolationKind::kPasses,
                        .event = EventId{backward},
                        .layer = LayerId{l},
                        .rank = RankId{r},
                        .expert = ExpertId{e},
                        .message = fmt::format("quota {}, but {} in the forward at event {}", after, before, forward)});
        }
      }
    }
  }
}

void bounds(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  const bool certify = plan.num_ranks() <= std::min(subject.options.certificate_ranks, kMaxDensityRanks);
  for (int m = 0; m < subject.load.num_micro_steps(); ++m) {
    std::vector<int> events;  // of this micro-step; all have the same quotas
    for (int t = 0; t < plan.num_events(); ++t) {
      if (plan.event_micro_step[t] == MicroStepId{m}) events.push_back(t);
    }
    for (int l = 0; l < plan.num_layers(); ++l) {
      Tokens largest;
      Tokens total;
      for (int r = 0; r < plan.num_ranks(); ++r) {
        Tokens of_rank;
        for (const Tokens quota : plan.slot_tokens.row(events.front(), l, r)) of_rank += quota;
        largest = std::max(largest, of_rank);
        total += of_rank;
      }
      const auto wrong = [&](ViolationKind kind, std::string message) {
        findings.add(
            {.kind = kind, .event = EventId{events.front()}, .layer = LayerId{l}, .message = std::move(message)});
      };
      if (!plan.max_load.empty() && plan.max_load(m, l) != largest) {
        wrong(ViolationKind::kMaxLoad, fmt::format("max_load is recorded as {}, the largest rank load is {}",
                                                   plan.max_load(m, l).value, largest.value));
      }
      if (plan.lower_bound.empty()) continue;
      const Tokens bound = plan.lower_bound(m, l);
      const Tokens mean = mean_lower_bound(total, plan.num_ranks());
      if (bound < mean) {
        wrong(ViolationKind::kLowerBound, fmt::format("lower_bound is {}, below ⌈mean⌉ = {}", bound.value, mean.value));
      }
      if (bound > largest) {
        wrong(ViolationKind::kLowerBound,
              fmt::format("lower_bound is {}, but the largest rank load is {}", bound.value, largest.value));
      } else if (certify) {
        const Tokens best = optimum(subject, events, MicroStepId{m}, LayerId{l});
        if (bound > best) {
          wrong(ViolationKind::kLowerBound,
                fmt::format("lower_bound is {}, but the placement permits {}", bound.value, best.value));
        }
      }
    }
  }
}

}  // namespace foremoe::check
