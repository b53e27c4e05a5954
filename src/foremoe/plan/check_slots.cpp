// Checks the slots: ids, homes, replicas, changes between events, and the budgets in the plan's options (copies per
// rank and per source, tokens per guest, moved homes).

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "foremoe/plan/check_rules.h"
#include "foremoe/plan/homes_file.h"

namespace foremoe::check {

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
                        .message = fmt::format("holds expert {}, but there are {}", e.value, plan.num_experts())});
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

void home_slots(const Subject& subject, Findings& findings) {
  const StepPlan& plan = subject.plan;
  if (plan.residency == Residency::kFree) return;
  for (int l = 0; l < plan.num_layers(); ++l) {
    std::vector<int> next_slot(plan.num_ranks());  // experts fill their home's slots in ascending order from 0
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
        findings.add({.kind = ViolationKind::kUnheldExpert,
                      .event = EventId{t},
                      .layer = LayerId{l},
                      .expert = ExpertId{e},
                      .message = "the expert is in no slot"});
      }
    }
  }
}

// Before the first event, a rank's first slots hold its home experts in ascending order. Under `shared`, only home
// experts stay, and home_slots() checks their slots.
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
                        .message = "not the guest with which the step began"});
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

namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

struct Budgets {
  std::int64_t copies_per_rank = kUnlimited;
  std::int64_t copies_per_source = kUnlimited;
  std::int64_t tokens_per_guest = 0;
  std::int64_t home_moves = 0;  // per layer
  std::string homes = "contiguous";
};

// Reads the budgets from the plan's options. Missing options have defaults; recorded_options() reports invalid ones.
Budgets read_budgets(const StepPlan& plan) {
  Budgets budgets;
  if (plan.residency != Residency::kFree) budgets.copies_per_rank = plan.guest_slots;

  const auto options = nlohmann::json::parse(plan.options, nullptr, /*allow_exceptions=*/false);
  if (!options.is_object()) return budgets;
  const auto read = [&](const char* key, std::int64_t& out) {
    const auto at = options.find(key);
    if (at == options.end()) return;
    if (at->is_string()) {
      out = kUnlimited;
    } else if (at->is_number_integer()) {
      out = at->get<std::int64_t>();
    }
  };
  read("max-copies-per-rank", budgets.copies_per_rank);
  read("max-copies-per-source", budgets.copies_per_source);
  read("min-tokens-per-guest", budgets.tokens_per_guest);
  read("rehome", budgets.home_moves);
  const auto homes = options.find("homes");
  if (homes != options.end() && homes->is_string()) budgets.homes = homes->get<std::string>();
  return budgets;
}

void copies(const Subject& subject, const Budgets& budgets, Findings& findings) {
  const StepPlan& plan = subject.plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      std::vector<int> into(plan.num_ranks());
      std::vector<int> from(plan.num_ranks());  // [rank], copies of experts at home there, on any path
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          if (!is_copy(plan, EventId{t}, LayerId{l}, RankId{r}, SlotId{s})) continue;
          ++into[r];
          ++from[plan.home(l, plan.slot_expert(t, l, r, s)).index()];
        }
      }
      for (int r = 0; r < plan.num_ranks(); ++r) {
        const auto hold = [&](ViolationKind kind, std::string_view what, std::int64_t count, std::int64_t limit) {
          if (count <= limit) return;
          findings.add({.kind = kind,
                        .event = EventId{t},
                        .layer = LayerId{l},
                        .rank = RankId{r},
                        .message = fmt::format("{} copies {} the rank, the limit is {}", count, what, limit)});
        };
        hold(ViolationKind::kCopiesPerRank, "into", into[r], budgets.copies_per_rank);
        hold(ViolationKind::kCopiesPerSource, "of homes of", from[r], budgets.copies_per_source);
      }
    }
  }
}

void tokens_per_guest(const Subject& subject, const Budgets& budgets, Findings& findings) {
  const StepPlan& plan = subject.plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          const std::int64_t quota = plan.slot_tokens(t, l, r, s).value;
          const bool is_guest = e != kNoExpert && plan.home(l, e) != RankId{r};
          if (!is_guest || quota == 0 || quota >= budgets.tokens_per_guest) continue;
          findings.add({.kind = ViolationKind::kTokensPerGuest,
                        .event = EventId{t},
                        .layer = LayerId{l},
                        .rank = RankId{r},
                        .slot = SlotId{s},
                        .expert = e,
                        .message = fmt::format("a guest has quota {}, expected none or at least {}", quota,
                                               budgets.tokens_per_guest)});
        }
      }
    }
  }
}

void home_moves(const Subject& subject, const Budgets& budgets, Findings& findings) {
  const StepPlan& plan = subject.plan;
  const auto& initial = subject.options.initial_home;
  if (initial.data() == nullptr && budgets.home_moves == 0 && !plan.homes_digest.empty()) {
    if (homes_digest(plan.home) == plan.homes_digest) return;
    findings.add({.kind = ViolationKind::kHomeMoves,
                  .message = fmt::format("the homes are not those before planning, {}, and rehome permits no moves",
                                         plan.homes_digest)});
    return;
  }
  if (initial.data() == nullptr && !plan.homes_digest.empty()) {
    findings.not_checked(fmt::format("home moves, because the initial homes {} were not given", plan.homes_digest));
    return;
  }
  if (initial.data() == nullptr && budgets.homes != "contiguous") {
    findings.not_checked(
        fmt::format("home moves, because {}, which has the initial homes, was not given", budgets.homes));
    return;
  }
  for (int l = 0; l < plan.num_layers(); ++l) {
    int moves = 0;
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId before = initial.data() ? initial(l, e) : subject.load.contiguous_home(LayerId{l}, ExpertId{e});
      if (plan.home(l, e) != before) ++moves;
    }
    if (moves <= budgets.home_moves) continue;
    findings.add({.kind = ViolationKind::kHomeMoves,
                  .layer = LayerId{l},
                  .message = fmt::format("{} homes moved, rehome permits {}", moves, budgets.home_moves)});
  }
}

}  // namespace

bool is_copy(const StepPlan& plan, EventId t, LayerId l, RankId r, SlotId s) {
  const ExpertId e = plan.slot_expert(t, l, r, s);
  if (e == kNoExpert) return false;
  const bool is_home = plan.home(l, e) == r;
  if (plan.residency == Residency::kShared) return !is_home && plan.slot_tokens(t, l, r, s) > Tokens{0};
  if (t == EventId{0}) return !is_home;
  return std::ranges::count(plan.slot_expert.row(t.value - 1, l, r), e) == 0;
}

void budgets(const Subject& subject, Findings& findings) {
  const Budgets budgets = read_budgets(subject.plan);
  copies(subject, budgets, findings);
  tokens_per_guest(subject, budgets, findings);
  home_moves(subject, budgets, findings);
}

}  // namespace foremoe::check
