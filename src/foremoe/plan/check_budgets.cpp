// What the plan's own options permit: copies per rank and per source, tokens per guest, moved homes.

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "foremoe/plan/check_rules.h"

namespace foremoe::check {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

struct Budgets {
  std::int64_t copies_per_rank = kUnlimited;
  std::int64_t copies_per_source = kUnlimited;
  std::int64_t tokens_per_guest = 0;
  std::int64_t home_moves = 0;  // per layer
  std::string homes = "contiguous";
};

// The options as the plan records them, keyed by long option name; what is missing or null is at its default.
Budgets read_budgets(const StepPlan& plan, Findings& findings) {
  Budgets budgets;
  if (plan.residency != Residency::kFree) budgets.copies_per_rank = plan.guest_slots;

  const auto options = nlohmann::json::parse(plan.options, nullptr, /*allow_exceptions=*/false);
  if (!options.is_object()) {
    findings.add({.kind = ViolationKind::kOptions, .message = "the plan's options are not a JSON object"});
    return budgets;
  }
  const auto read = [&](const char* key, std::int64_t none, std::int64_t& out) {
    const auto at = options.find(key);
    if (at == options.end() || at->is_null()) return;
    if (*at == "none") {
      out = none;
    } else if (*at == "free") {
      out = kUnlimited;
    } else if (at->is_number_integer() && *at >= 0 && *at <= kUnlimited) {
      out = at->get<std::int64_t>();
    } else {
      findings.add({.kind = ViolationKind::kOptions,
                    .message = fmt::format("option {} is {}", key, at->is_primitive() ? at->dump() : at->type_name())});
    }
  };
  read("max-copies-per-rank", kUnlimited, budgets.copies_per_rank);
  read("max-copies-per-source", kUnlimited, budgets.copies_per_source);
  read("min-tokens-per-guest", 0, budgets.tokens_per_guest);
  read("rehome", 0, budgets.home_moves);
  const auto homes = options.find("homes");
  if (homes != options.end() && homes->is_string()) budgets.homes = homes->get<std::string>();
  return budgets;
}

void copies(const Subject& subject, const Budgets& budgets, Findings& findings) {
  const StepPlan& plan = subject.plan;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      std::vector<int> into(plan.num_ranks());
      std::vector<int> from(plan.num_ranks());  // at the home of the copied expert, whatever path it takes
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
                        .message = fmt::format("a guest with quota {}, at least {} or none is permitted", quota,
                                               budgets.tokens_per_guest)});
        }
      }
    }
  }
}

void home_moves(const Subject& subject, const Budgets& budgets, Findings& findings) {
  const StepPlan& plan = subject.plan;
  const auto& initial = subject.options.initial_home;
  if (initial.data() == nullptr && budgets.homes != "contiguous") {
    findings.not_checked(fmt::format("home moves: the homes before the plan are those of {}", budgets.homes));
    return;
  }
  const int experts_per_rank = plan.num_experts() / plan.num_ranks();
  for (int l = 0; l < plan.num_layers(); ++l) {
    int moves = 0;
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId before = initial.data() ? initial(l, e) : RankId{e / experts_per_rank};
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
  const Budgets budgets = read_budgets(subject.plan, findings);
  copies(subject, budgets, findings);
  tokens_per_guest(subject, budgets, findings);
  home_moves(subject, budgets, findings);
}

}  // namespace foremoe::check
