#include "foremoe/evaluate/unused_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

namespace foremoe {
namespace {

// Options of the planner that only its stages read.
constexpr std::array<std::string_view, 7> kOfStages{
    "prefer", "tolerance", "rehome", "max_copies_per_rank", "max_copies_per_source", "min_tokens_per_guest", "seed"};

bool runs_none(const PlannerStages& stages) {
  return !stages.base && !stages.relocation && !stages.replication && !stages.tokens;
}

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

std::vector<std::string> remarks_on_planner(const Policy& policy, const PolicyInput& asked, const GivenNames& given) {
  std::vector<std::string> remarks;
  const bool no_stage = contains(policy.uses(), "stages") && runs_none(asked.options.stages);
  PlannerOptions any;
  for (const Option& option : options_of(any)) {
    if (!given.contains(option.name) || option.name == "residency") continue;
    if (!contains(policy.uses(), option.name)) {
      remarks.push_back(fmt::format("`{}` has no effect: policy {} does not use it", option.name, policy.name()));
    } else if (no_stage && contains(kOfStages, option.name)) {
      remarks.push_back(fmt::format("`{}` has no effect: `stages` is none", option.name));
    }
  }
  if (asked.previous_load != nullptr && !contains(policy.uses(), "previous_load")) {
    remarks.push_back(fmt::format("`previous_load` has no effect: policy {} does not use it", policy.name()));
  }
  std::string on_previous = asked.previous != nullptr ? policy.note_on_previous(asked) : "";
  if (!on_previous.empty()) remarks.push_back(std::move(on_previous));
  return remarks;
}

}  // namespace

std::vector<std::string> remarks_on_batching(const StepInput& input, const GivenNames& given) {
  if (!given.contains("tokens_per_rank") || (input.batching && !input.batching->recorded)) return {};
  return {fmt::format("`tokens_per_rank` has no effect: {} is {}", input.load.name,
                      input.batching ? "batched as it was recorded" : "a load, which is batched already")};
}

std::vector<std::string> remarks_on_all(std::span<const Option> options, const GivenNames& given,
                                        std::string_view why) {
  std::vector<std::string> remarks;
  for (const Option& option : options) {
    if (given.contains(option.name)) remarks.push_back(fmt::format("`{}` has no effect{}", option.name, why));
  }
  return remarks;
}

std::vector<std::string> remarks_on_unused(const StepInput& input, const std::vector<const Policy*>& policies,
                                           const PolicyInput& asked, const GivenNames& given) {
  const Policy* const policy = policies.size() == 1 ? policies.front() : nullptr;
  const int micro_steps = input.load.num_micro_steps();
  std::vector<std::string> remarks = remarks_on_batching(input, given);
  if (given.contains("prefer") && (policy == nullptr || contains(policy->uses(), "prefer")) &&
      asked.options.prefer == Prefer::kLinks && input.load.topology().num_nodes() == 1) {
    remarks.emplace_back("`prefer` links has no effect: all ranks are on one node");
  }
  if (given.contains("in_flight") && asked.options.in_flight > micro_steps) {
    remarks.push_back(fmt::format("`in_flight` {}: there are only {}, so {} are in flight", asked.options.in_flight,
                                  counted(micro_steps, "micro-step"), micro_steps));
  }
  if (policy != nullptr) std::ranges::move(remarks_on_planner(*policy, asked, given), std::back_inserter(remarks));
  return remarks;
}

}  // namespace foremoe
