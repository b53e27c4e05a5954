#include "foremoe/plan/check_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "foremoe/core/error.h"
#include "foremoe/core/message_text.h"
#include "foremoe/plan/check_rules.h"
#include "foremoe/plan/homes_file.h"

namespace foremoe {

// clang-format off
static constexpr std::array<std::string_view, kNumViolationKinds> kKindNames = {
    "shape", "events", "digest", "options", "homes", "home-moves", "unknown-expert", "home-slots",
    "duplicate", "unheld-expert", "moved-slot", "changed-guest", "forward-only", "quota", "passes",
    "copies-per-rank", "copies-per-source", "tokens-per-guest", "max-load", "lower-bound", "routes",
    "figure"};
// clang-format on

namespace check {

void shapes(const Subject& subject, Findings& findings) {
  const auto& [plan, load, options, tokens] = subject;
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
  expect(plan.event_micro_step.size() == plan.slot_expert.extent(0),
         "event_micro_step does not have one entry per event");
  expect(plan.event_pass.size() == plan.slot_expert.extent(0), "event_pass does not have one entry per event");
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
  const auto& initial = subject.options.initial_home;
  if (initial.data() == nullptr || subject.plan.homes_digest.empty()) return;
  if (const std::string given = homes_digest(initial); subject.plan.homes_digest != given) {
    findings.add({.kind = ViolationKind::kDigest,
                  .message = fmt::format("made from the homes {}, these are {}", subject.plan.homes_digest, given)});
  }
}

namespace {

// Result of validating a recorded option: an error message, or none if the value is valid.
using Complaint = std::optional<std::string>;

bool is_count(const nlohmann::json& value) {
  return value.is_number_unsigned() || (value.is_number_integer() && value.get<std::int64_t>() >= 0);
}

// Compares as unsigned: nlohmann would compare an unsigned value with a signed bound as signed numbers.
Complaint count(const nlohmann::json& value, std::uint64_t most = std::numeric_limits<std::int32_t>::max()) {
  if (is_count(value) && value.get<std::uint64_t>() <= most) return {};
  return fmt::format("not a count from 0 to {}", most);
}

// Accepts a count or `unlimited`.
Complaint limit(const nlohmann::json& value, std::string_view unlimited) {
  if (value == unlimited || !count(value)) return {};
  return fmt::format("neither a count nor {}", unlimited);
}

Complaint one_of(const nlohmann::json& value, std::initializer_list<std::string_view> words) {
  if (std::ranges::any_of(words, [&](std::string_view word) { return value == word; })) return {};
  return fmt::format("none of {}", fmt::join(words, ", "));
}

// Accepts any of B, L, P, T and S, in this order, or "".
Complaint stages(const nlohmann::json& value) {
  if (!value.is_string()) return "not a string";
  std::string rest = value.get<std::string>();
  for (const char stage : {'B', 'L', 'P', 'T', 'S'}) {
    if (!rest.empty() && rest.front() == stage) rest.erase(0, 1);
  }
  return rest.empty() ? Complaint() : "not some of B, L, P, T and S in this order";
}

// Accepts only the value that the plan's metadata has.
Complaint same(const nlohmann::json& value, const nlohmann::json& of_plan) {
  if (value == of_plan && !value.is_number_float()) return {};
  return fmt::format("but the plan has {}", of_plan.dump());
}

Complaint complaint(const StepPlan& plan, std::string_view option, const nlohmann::json& value) {
  if (option == "guest-slots") return same(value, plan.guest_slots);
  if (option == "residency") return same(value, to_string(plan.residency));
  if (option == "in-flight") return same(value, plan.in_flight);
  if (option == "stages") return stages(value);
  if (option == "prefer") return one_of(value, {"balance", "links", "time"});
  if (option == "tolerance") {
    return value.is_number() && value >= 0.0 && value <= 1.0 ? Complaint() : "not a number in 0 … 1";
  }
  if (option == "copy-price" || option == "free-copies") {
    return value.is_number() && value >= 0.0 ? Complaint() : "not a number of at least 0";
  }
  if (option == "max-copies-per-rank" || option == "max-copies-per-source") return limit(value, "none");
  if (option == "rehome") return limit(value, "free");
  if (option == "seed") return is_count(value) ? Complaint() : "not a count";
  if (option == "homes") return value.is_string() ? Complaint() : "not a string";
  if (option == "tokens-per-rank") return count(value, std::uint64_t{1} << 40);
  if (option == "min-tokens-per-guest" || option == "layers" || option == "micro-steps") return count(value);
  return {};  // an option of another planner
}

}  // namespace

// Checks that the recorded options, keyed by long option name, agree with the plan's metadata and are in range.
// budgets() checks that slots and quotas respect the recorded budgets.
void recorded_options(const Subject& subject, Findings& findings) {
  const auto options = nlohmann::json::parse(subject.plan.options, nullptr, /*allow_exceptions=*/false);
  if (!options.is_object()) {
    findings.add({.kind = ViolationKind::kOptions, .message = "the plan's options are not a JSON object"});
    return;
  }
  for (const char* option : {"guest-slots", "residency", "in-flight"}) {
    if (options.contains(option)) continue;
    findings.add({.kind = ViolationKind::kOptions, .message = fmt::format("option {} is not recorded", option)});
  }
  for (const auto& [option, value] : options.items()) {
    const Complaint wrong = complaint(subject.plan, option, value);
    if (!wrong) continue;
    findings.add({.kind = ViolationKind::kOptions,
                  .message = fmt::format("option {} is recorded as {}: {}", option,
                                         value.is_primitive() ? value.dump() : value.type_name(), *wrong)});
  }
}

// With K = 1 the micro-steps run one after the other. Otherwise the next event is a forward if forwards remain and
// fewer than K micro-steps await their backward. If not, it is the backward of the oldest such micro-step.
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

}  // namespace check

std::string_view to_string(ViolationKind kind) { return kKindNames[static_cast<std::size_t>(kind)]; }

std::string place_of(const Violation& v) {
  std::string place;
  const auto add = [&](const char* word, const auto& id) {
    if (id) place += fmt::format("{}{} {}", place.empty() ? "" : ", ", word, id->value);
  };
  add("event", v.event);
  add("layer", v.layer);
  add("rank", v.rank);
  add("slot", v.slot);
  add("expert", v.expert);
  return place;
}

std::int64_t CheckReport::num_violations() const {
  return std::accumulate(num_of_kind.begin(), num_of_kind.end(), std::int64_t{0});
}

void check::Findings::not_checked(std::string what) { report_.not_checked.push_back(shortened(std::move(what))); }

void check::Findings::add(Violation violation) {
  ++report_.num_of_kind[static_cast<std::size_t>(violation.kind)];
  if (static_cast<int>(report_.violations.size()) >= max_listed_) return;
  violation.message = shortened(std::move(violation.message));
  report_.violations.push_back(std::move(violation));
}

CheckReport check_plan(const StepPlan& plan, const LoadTable& load, const CheckOptions& given) {
  using enum ViolationKind;
  expect_valid(load, load.name);
  if (given.align < 1) throw InputError({.field = "align"}, "must be at least 1");
  const Array<RankId, 2>::Shape pairs{load.load.extent(1), load.load.extent(3)};
  if (given.initial_home.data() != nullptr && given.initial_home.shape() != pairs) {
    throw InputError({.field = "initial_home"}, "is not [layers, experts] of the load");
  }
  CheckReport report;
  CheckOptions options = given;
  check::Subject subject{plan, load, options};
  check::Findings findings(report, options.max_listed);

  using Rule = void(const check::Subject&, check::Findings&);
  const auto hold = [&](std::initializer_list<Rule*> rules) {
    for (Rule* const rule : rules) {
      subject.throw_if_cancelled();
      rule(subject, findings);
    }
  };

  hold({check::shapes});
  if (findings.has(kShape)) return report;
  hold({check::digest, check::recorded_options, check::expert_ids, check::homes, check::event_order});
  if (findings.has(kDigest)) {
    findings.not_checked("all other rules, because the plan is for another load or other homes");
    return report;
  }
  if (findings.has(kUnknownExpert) || findings.has(kHomes) || findings.has(kEvents)) {
    findings.not_checked("slots, quotas, budgets, routes and figures, because ids, homes or events are wrong");
    return report;
  }

  hold({check::home_slots, check::replicas, check::staying_experts, check::static_guests, check::forward_only,
        check::quotas, check::passes, check::budgets});
  if (findings.has(kQuota) || findings.has(kDuplicate) || findings.has(kPasses)) {
    findings.not_checked("bounds, routes and figures, because quotas or replicas are wrong");
    return report;
  }

  if (options.tokens && !check::trace_matches_load(subject)) {
    findings.not_checked("rows of tokens, because the batched trace does not have the rows that the load counts");
    options.tokens = nullptr;
  }
  std::optional<SourceTokens> tokens;
  if (options.tokens) subject.tokens = &tokens.emplace(options.tokens->trace, options.tokens->batching);
  hold({check::bounds, check::routes});
  report.figures = check::recompute_figures(subject);
  if (options.reported) check::reported_figures(*options.reported, *report.figures, findings);
  return report;
}

}  // namespace foremoe
