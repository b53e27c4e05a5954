#include "foremoe/planner/planner_options.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/rollout/limits.h"

namespace foremoe {

namespace {

[[noreturn]] void refuse(const char* field, const std::string& why) {
  throw InputError({.file = {}, .field = field, .index = {}}, why);
}

template <class T>
void expect_at_least(T least, T value, const char* field) {
  if (value < least) refuse(field, fmt::format("{} is less than {}", value, least));
}

}  // namespace

void check_options(const PlannerOptions& o) {
  if (o.guest_slots < 0 || o.guest_slots > kMaxExperts) {
    refuse("guest_slots", fmt::format("{} is not in 0 … {}", o.guest_slots, kMaxExperts));
  }
  expect_at_least(1, o.in_flight, "in_flight");
  expect_at_least(0, o.rehome, "rehome");
  if (o.tolerance && !(*o.tolerance >= 0 && *o.tolerance <= 1)) {
    refuse("tolerance", fmt::format("{} is not in 0 … 1", *o.tolerance));
  }
  expect_at_least(0, o.max_copies_per_rank.value_or(0), "max_copies_per_rank");
  expect_at_least(0, o.max_copies_per_source, "max_copies_per_source");
  expect_at_least<std::int64_t>(0, o.min_tokens_per_guest, "min_tokens_per_guest");
}

std::string to_json(const PlannerOptions& o) {
  std::string stages;
  if (o.stages.base) stages += 'B';
  if (o.stages.relocation) stages += 'L';
  if (o.stages.replication) stages += 'P';
  if (o.stages.tokens) stages += 'T';
  nlohmann::ordered_json j = {{"guest-slots", o.guest_slots},
                              {"residency", to_string(o.residency)},
                              {"in-flight", o.in_flight},
                              {"stages", stages},
                              {"prefer", o.prefer == Prefer::kLinks ? "links" : "balance"},
                              {"tolerance", o.tolerance.value_or(default_tolerance(o.residency))},
                              {"min-tokens-per-guest", o.min_tokens_per_guest},
                              {"seed", o.seed}};
  if (o.rehome == kNoLimit) {
    j["rehome"] = "free";
  } else {
    j["rehome"] = o.rehome;
  }
  if (o.max_copies_per_rank) j["max-copies-per-rank"] = *o.max_copies_per_rank;
  if (o.max_copies_per_source != kNoLimit) j["max-copies-per-source"] = o.max_copies_per_source;
  return j.dump();
}

}  // namespace foremoe
