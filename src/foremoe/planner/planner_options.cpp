#include "foremoe/planner/planner_options.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {
namespace {

constexpr IntegerRange kGuestSlots{0, kMaxExperts};
constexpr IntegerRange kInFlight{1, std::numeric_limits<int>::max()};
constexpr NumberRange kToleranceRange{.least = 0, .most = 1};
constexpr NumberRange kPrice{.least = 0, .most = kMostCopyPrice};
constexpr IntegerRange kCount{0, std::numeric_limits<int>::max() - 1};  // less than kNoLimit
constexpr IntegerRange kMinTokens{0, std::numeric_limits<std::int32_t>::max()};

PlannerStages parse_stages(const std::string& text) {
  PlannerStages stages{.base = false, .relocation = false, .replication = false, .tokens = false, .sweeps = false};
  if (text == "none") return stages;
  for (const char c : text) {
    bool* const stage = c == 'B'   ? &stages.base
                        : c == 'L' ? &stages.relocation
                        : c == 'P' ? &stages.replication
                        : c == 'T' ? &stages.tokens
                        : c == 'S' ? &stages.sweeps
                                   : nullptr;
    if (stage == nullptr || *stage) {
      throw InputError({.field = "stages"},
                       fmt::format("'{}', expected some of B, L, P, T and S, each once, or none", text));
    }
    *stage = true;
  }
  return stages;
}

[[noreturn]] void refuse(const char* field, const std::string& why) {
  throw InputError({.file = {}, .field = field, .index = {}}, why);
}

void expect_at_least(std::int64_t least, std::int64_t value, const char* field) {
  if (value < least) refuse(field, fmt::format("{} is less than {}", value, least));
}

template <class T, class Range>
void expect_in(Range range, T value, const char* field) {
  if (!(value >= range.least && value <= range.most)) {
    refuse(field, fmt::format("{} is not in {} … {}", value, range.least, range.most));
  }
}

}  // namespace

std::vector<Option> options_of(PlannerOptions& o) {
  const std::string group = "Planning";
  Option stages{.name = "stages",
                .value = "BLPT",
                .help =
                    "Planner stages that run. B: base placement. L: relocation. P: replication. T: exact token "
                    "assignment. S: B revises its choice even if more copies are expected to be hidden. none: no stage",
                .initial = "BLPT",
                .group = group,
                .type = "text"};
  stages.set = [&o](const std::string& text) { o.stages = parse_stages(text); };
  return {
      integer_option({.name = "guest_slots",
                      .letter = 'G',
                      .value = "G",
                      .help = "Guest slots per rank and layer. Each has room for a copy of one expert",
                      .group = group,
                      .main = true},
                     o.guest_slots, kGuestSlots),
      word_option<Residency>(
          {.name = "residency",
           .value = "WORD",
           .help =
               "How long guests stay. static: the whole step. resident: until they are replaced, at any micro-step. "
               "shared: one layer; layers share the guest slots, so copies are fetched at every use. free: any "
               "expert on any rank (forward-only phases)",
           .group = group,
           .main = true},
          o.residency,
          {{"static", Residency::kStatic},
           {"resident", Residency::kResident},
           {"shared", Residency::kShared},
           {"free", Residency::kFree}}),
      integer_or_word_option(
          {.name = "rehome",
           .value = "N|free",
           .help = "Number of homes per layer that may move to another rank",
           .initial = "0",
           .group = group},
          kCount, {"free"},
          [&o](std::optional<std::int64_t> n, const std::string&) { o.rehome = n ? static_cast<int>(*n) : kNoLimit; }),
      integer_option({.name = "in_flight",
                      .value = "K",
                      .help = "Largest number of micro-steps between forward and backward (1F1B)",
                      .group = group,
                      .main = true},
                     o.in_flight, kInFlight),
      std::move(stages),
      word_option<std::optional<Prefer>>(
          {.name = "prefer",
           .value = "WORD",
           .help = "Objective. balance: the smallest load of the busiest rank. links: also less traffic "
                   "between nodes, within --tolerance. time: as links, with copies only where they pay off. Needs "
                   "--copy-price, or --cluster and --model where they are accepted",
           .initial = "time with a price, else balance",
           .group = group},
          o.prefer, {{"balance", Prefer::kBalance}, {"links", Prefer::kLinks}, {"time", Prefer::kTime}}),
      number_option(
          {.name = "copy_price",
           .value = "X",
           .help = "For --prefer time: tokens of a node, in mean rank loads, whose way to other nodes and back takes "
                   "as long as one copy",
           .initial = "of --cluster and --model",
           .group = group},
          o.copy_price, kPrice),
      number_option(
          {.name = "free_copies",
           .value = "N",
           .help = "For --prefer time: copies per rank and layer without a price, because computation hides them",
           .initial = "of --cluster and --model",
           .group = group},
          o.free_copies, kPrice),
      number_option({.name = "tolerance",
                     .value = "X",
                     .help = "A micro-step is balanced if its busiest rank is at most this fraction above the mean",
                     .initial = fmt::format("{}; {} where residency is shared", default_tolerance(Residency::kResident),
                                            default_tolerance(Residency::kShared)),
                     .group = group},
                    o.tolerance, kToleranceRange),
      integer_or_word_option({.name = "max_copies_per_rank",
                              .value = "N|WORD",
                              .help = "Largest number of copies into a rank per event (one pass of one micro-step) and "
                                      "layer. none: no limit",
                              .initial = "G",
                              .group = group},
                             kCount, {"none"},
                             [&o](std::optional<std::int64_t> n, const std::string&) {
                               o.max_copies_per_rank = n ? static_cast<int>(*n) : kNoLimit;
                             }),
      integer_or_word_option({.name = "max_copies_per_source",
                              .value = "N|none",
                              .help = "Largest number of copies of one rank's home experts per event and layer",
                              .initial = "none",
                              .group = group},
                             kCount, {"none"},
                             [&o](std::optional<std::int64_t> n, const std::string&) {
                               o.max_copies_per_source = n ? static_cast<int>(*n) : kNoLimit;
                             }),
      integer_option(
          {.name = "min_tokens_per_guest",
           .value = "TOKENS",
           .help = "A guest serves no tokens or at least this many. Above 0, the assignment is no longer exact",
           .group = group},
          o.min_tokens_per_guest, kMinTokens),
      seed_option(
          {.name = "seed", .value = "N", .help = "Random seed. The same seed produces the same plan", .group = group},
          o.seed),
  };
}

void expect_in_range(const PlannerOptions& o) {
  expect_in(kGuestSlots, o.guest_slots, "guest_slots");
  expect_at_least(kInFlight.least, o.in_flight, "in_flight");
  expect_at_least(kCount.least, o.rehome, "rehome");
  if (o.copy_price) expect_in(kPrice, *o.copy_price, "copy_price");
  if (o.free_copies) expect_in(kPrice, *o.free_copies, "free_copies");
  if (o.prefer == Prefer::kTime && !o.copy_price) {
    throw InputError({.field = "prefer"}, "time needs `copy_price`, or `cluster` and `model` where they are accepted");
  }
  if (preference(o) != Prefer::kTime && (o.copy_price || o.free_copies)) {
    throw InputError({.field = o.copy_price ? "copy_price" : "free_copies"}, "needs `prefer` time");
  }
  if (o.tolerance) expect_in(kToleranceRange, *o.tolerance, "tolerance");
  expect_at_least(kCount.least, o.max_copies_per_rank.value_or(0), "max_copies_per_rank");
  expect_at_least(kCount.least, o.max_copies_per_source, "max_copies_per_source");
  expect_at_least(kMinTokens.least, o.min_tokens_per_guest, "min_tokens_per_guest");
}

std::string without_base_guests(const PlannerOptions& o) {
  if (!o.stages.base) return "stage B, which chooses the first guests, is off";
  if (o.residency == Residency::kStatic) return "";
  if (o.residency != Residency::kResident) {
    return fmt::format("under residency {} a step begins with homes alone", to_string(o.residency));
  }
  const bool limited =
      o.max_copies_per_rank.value_or(o.guest_slots) < o.guest_slots || o.max_copies_per_source != kNoLimit;
  return limited ? "with these limits on copies a step begins with homes alone" : "";
}

std::string_view to_string(Prefer prefer) {
  switch (prefer) {
    case Prefer::kLinks:
      return "links";
    case Prefer::kTime:
      return "time";
    default:
      return "balance";
  }
}

std::string to_json(const PlannerOptions& o) {
  std::string stages;
  if (o.stages.base) stages += 'B';
  if (o.stages.relocation) stages += 'L';
  if (o.stages.replication) stages += 'P';
  if (o.stages.tokens) stages += 'T';
  if (o.stages.sweeps) stages += 'S';
  nlohmann::ordered_json j = {{"guest-slots", o.guest_slots},
                              {"residency", to_string(o.residency)},
                              {"in-flight", o.in_flight},
                              {"stages", stages},
                              {"prefer", to_string(preference(o))},
                              {"tolerance", o.tolerance.value_or(default_tolerance(o.residency))},
                              {"min-tokens-per-guest", o.min_tokens_per_guest},
                              {"seed", o.seed}};
  if (o.rehome == kNoLimit) {
    j["rehome"] = "free";
  } else {
    j["rehome"] = o.rehome;
  }
  if (o.copy_price) j["copy-price"] = *o.copy_price;
  if (o.free_copies) j["free-copies"] = *o.free_copies;
  if (o.max_copies_per_rank) j["max-copies-per-rank"] = *o.max_copies_per_rank;
  if (o.max_copies_per_source != kNoLimit) j["max-copies-per-source"] = o.max_copies_per_source;
  return j.dump();
}

}  // namespace foremoe
