// What the slots hold: ids, homes, events, replicas, and what may change from one event to the next.

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/plan/check_rules.h"

namespace foremoe::check {

void shapes(const Subject& subject, Findings& findings) {
  const auto& [plan, load, options] = subject;
  const auto expect = [&](bool good, std::string message) {
    if (!good) findings.add({.kind = ViolationKind::kShape, .message = std::move(message)});
  };
  const auto same = [&](std::string_view what, auto of_plan, auto of_load) {
    expect(of_plan == of_load, fmt::format("the plan has {} {}, the load {}", of_plan, what, of_load));
  };
  same("layers", plan.num_layers(), load.num_layers());
  same("ranks", plan.num_ranks(), load.num_ranks());
  same("experts", plan.num_experts(), load.num_experts());
  expect(plan.home.extent(0) == plan.slot_expert.extent(1), "home and slot_expert differ in layers");
  expect(plan.slot_tokens.shape() == plan.slot_expert.shape(), "slot_tokens and slot_expert differ in shape");
  expect(plan.event_micro_step.size() == plan.slot_expert.extent(0), "event_micro_step has not one entry per event");
  expect(plan.event_pass.size() == plan.slot_expert.extent(0), "event_pass has not one entry per event");
  expect(plan.in_flight >= 1, fmt::format("in_flight is {}", plan.in_flight));
  expect(plan.ranks_per_node >= 1, fmt::format("ranks_per_node is {}", plan.ranks_per_node));
  expect(plan.guest_slots >= 0, fmt::format("guest_slots is {}", plan.guest_slots));
  expect(plan.num_ranks() > 0 && plan.num_experts() % plan.num_ranks() == 0,
         fmt::format("{} experts cannot be spread evenly over {} ranks", plan.num_experts(), plan.num_ranks()));
  if (plan.num_ranks() > 0) {
    const int expected = plan.num_experts() / plan.num_ranks() + plan.guest_slots;
    expect(plan.num_slots() == expected,
           fmt::format("{} slots per rank, but homes and guest slots are {}", plan.num_slots(), expected));
  }
  const Array<Tokens, 2>::Shape pairs{load.load.extent(0), load.load.extent(1)};
  expect(plan.max_load.empty() || plan.max_load.shape() == pairs, "max_load is not [micro_steps, layers]");
  expect(plan.lower_bound.empty() || plan.lower_bound.shape() == pairs, "lower_bound is not [micro_steps, layers]");
}

void digest(const Subject& subject, Findings& findings) {
  const std::string expected = load_digest(subject.load);
  if (subject.plan.load_digest != expected) {
    findings.add({.kind = ViolationKind::kDigest,
                  .message = fmt::format("made for the load {}, this one is {}", subject.plan.load_digest, expected)});
  }
}

void expert_ids(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          if (e == kNoExpert || (e.value >= 0 && e.value < plan.num_experts())) continue;
          findings.add({.kind = ViolationKind::kUnknownExpert,
                        .event = EventId{t},
                        .layer = LayerId{l},
                        .rank = RankId{r},
                        .slot = SlotId{s},
                        .message = fmt::format("holds expert {} of {}", e.value, plan.num_experts())});
        }
      }
    }
  }
}

void homes(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  const int expected = plan.num_experts() / plan.num_ranks();
  for (int l = 0; l < plan.num_layers(); ++l) {
    std::vector<int> num_homes(plan.num_ranks());
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId home = plan.home(l, e);
      if (home.value >= 0 && home.value < plan.num_ranks()) {
        ++num_homes[home.index()];
        continue;
      }
      findings.add({.kind = ViolationKind::kHomes,
                    .layer = LayerId{l},
                    .expert = ExpertId{e},
                    .message = fmt::format("home is rank {} of {}", home.value, plan.num_ranks())});
    }
    for (int r = 0; r < plan.num_ranks(); ++r) {
      if (num_homes[r] == expected) continue;
      findings.add({.kind = ViolationKind::kHomes,
                    .layer = LayerId{l},
                    .rank = RankId{r},
                    .message = fmt::format("home of {} experts, not of {}", num_homes[r], expected)});
    }
  }
}

// One micro-step after the other with K = 1; otherwise a forward whenever fewer than K micro-steps are between
// their passes and one is left, else the oldest backward.
void event_order(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  const int num_micro_steps = subject.load.num_micro_steps();
  const int num_events = plan.in_flight == 1 ? num_micro_steps : 2 * num_micro_steps;
  if (plan.num_events() != num_events) {
    findings.add({.kind = ViolationKind::kEvents,
                  .message = fmt::format("{} events, but {} micro-steps with {} in flight make {}", plan.num_events(),
                                         num_micro_steps, plan.in_flight, num_events)});
    return;
  }
  int forwards = 0;
  int backwards = 0;
  for (int t = 0; t < num_events; ++t) {
    const bool forward = plan.in_flight == 1 || (forwards < num_micro_steps && forwards - backwards < plan.in_flight);
    const int m = forward ? forwards++ : backwards++;
    if (plan.event_micro_step[t].value == m && (plan.event_pass[t] == Pass::kForward) == forward) continue;
    findings.add({.kind = ViolationKind::kEvents,
                  .event = EventId{t},
                  .message = fmt::format("should be the {} of micro-step {}", forward ? "forward" : "backward", m)});
  }
}

void home_slots(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  if (plan.residency == Residency::kFree) return;
  for (int l = 0; l < plan.num_layers(); ++l) {
    std::vector<int> next_slot(plan.num_ranks());  // experts ascending fill their home's slots from 0
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId home = plan.home(l, e);
      const SlotId slot{next_slot[home.index()]++};
      for (int t = 0; t < plan.num_events(); ++t) {
        const ExpertId held = plan.slot_expert(t, l, home, slot);
        if (held == ExpertId{e}) continue;
        findings.add({.kind = ViolationKind::kHomeSlots,
                      .event = EventId{t},
                      .layer = LayerId{l},
                      .rank = home,
                      .slot = slot,
                      .expert = ExpertId{e},
                      .message = fmt::format("the expert's home slot holds {}", held.value)});
      }
    }
  }
}

void replicas(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      std::vector<bool> held(plan.num_experts());
      for (int r = 0; r < plan.num_ranks(); ++r) {
        std::vector<bool> held_here(plan.num_experts());
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          if (e == kNoExpert) continue;
          if (held_here[e.index()]) {
            findings.add({.kind = ViolationKind::kDuplicate,
                          .event = EventId{t},
                          .layer = LayerId{l},
                          .rank = RankId{r},
                          .slot = SlotId{s},
                          .expert = e,
                          .message = "the rank holds the expert already in a lower slot"});
          }
          held_here[e.index()] = held[e.index()] = true;
        }
      }
      for (int e = 0; e < plan.num_experts(); ++e) {
        if (held[e]) continue;
        findings.add({.kind = ViolationKind::kNoReplica,
                      .event = EventId{t},
                      .layer = LayerId{l},
                      .expert = ExpertId{e},
                      .message = "the expert is in no slot"});
      }
    }
  }
}

// Before the first event a rank holds its homes, ascending, in its first slots. Under `shared` nothing stays but
// homes, which home_slots() has checked.
void staying_experts(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  if (plan.residency == Residency::kShared) return;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      std::vector<ExpertId> before;  // [slot]
      for (int e = 0; e < plan.num_experts(); ++e) {
        if (plan.home(l, e) == RankId{r}) before.push_back(ExpertId{e});
      }
      before.resize(plan.num_slots(), kNoExpert);
      for (int t = 0; t < plan.num_events(); ++t) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          if (e == kNoExpert || before[s] == e || std::ranges::count(before, e) == 0) continue;
          findings.add({.kind = ViolationKind::kMovedSlot,
                        .event = EventId{t},
                        .layer = LayerId{l},
                        .rank = RankId{r},
                        .slot = SlotId{s},
                        .expert = e,
                        .message = "the expert stays on the rank, but was in another slot before"});
        }
        for (int s = 0; s < plan.num_slots(); ++s) before[s] = plan.slot_expert(t, l, r, s);
      }
    }
  }
}

void static_guests(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  if (plan.residency != Residency::kStatic) return;
  for (int t = 1; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = plan.num_experts() / plan.num_ranks(); s < plan.num_slots(); ++s) {
          if (plan.slot_expert(t, l, r, s) == plan.slot_expert(0, l, r, s)) continue;
          findings.add({.kind = ViolationKind::kChangedGuest,
                        .event = EventId{t},
                        .layer = LayerId{l},
                        .rank = RankId{r},
                        .slot = SlotId{s},
                        .expert = plan.slot_expert(t, l, r, s),
                        .message = "not the guest that the step began with"});
        }
      }
    }
  }
}

void forward_only(const Subject& subject, Findings& findings) {
  if (subject.plan.residency != Residency::kFree || subject.plan.in_flight == 1) return;
  findings.add({.kind = ViolationKind::kForwardOnly,
                .message = "experts that leave their home have no backward pass, but the plan has backward events"});
}

}  // namespace foremoe::check
