#include "foremoe/policy/own_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"

namespace foremoe {

PolicyWithOptions policy_with_options(const Policy& policy) {
  if (std::shared_ptr<Policy> copy = policy.copy()) return {.policy = copy, .options = copy->options()};
  return {.policy = {&policy, [](const Policy*) {}}, .options = {}};  // registered objects live as long as the program
}

std::vector<Option> own_options_named(std::span<const PolicyWithOptions> policies, const std::string& name) {
  std::vector<Option> found;
  std::vector<std::string> known;
  for (const PolicyWithOptions& policy : policies) {
    for (const Option& option : policy.options) {
      if (option.name == name) found.push_back(option);
      if (std::ranges::find(known, option.name) == known.end()) known.push_back(option.name);
    }
  }
  if (!found.empty()) return found;
  std::vector<std::string> who;
  for (const PolicyWithOptions& policy : policies) who.emplace_back(policy.policy->name());
  const std::string whose = fmt::format("{} {}", who.size() == 1 ? "policy" : "policies", fmt::join(who, ", "));
  const bool one = who.size() == 1;
  throw InputError({.field = name}, known.empty() ? fmt::format("{} {} no options of {} own", whose,
                                                                one ? "has" : "have", one ? "its" : "their")
                                                  : fmt::format("{} {} {}{}", whose, one ? "has" : "have",
                                                                fmt::join(known, ", "), did_you_mean(name, known)));
}

namespace {

void set(const std::vector<PolicyWithOptions>& policies, const std::vector<std::string>& assignments) {
  std::vector<std::pair<Option, std::string>> chosen;  // resolve all names before setting a value
  for (const std::string& assignment : assignments) {
    const std::size_t equals = assignment.find('=');
    if (equals == std::string::npos) {
      throw InputError({.field = assignment}, "expected NAME=VALUE");
    }
    for (Option& option : own_options_named(policies, assignment.substr(0, equals))) {
      chosen.emplace_back(std::move(option), assignment.substr(equals + 1));
    }
  }
  for (const auto& [option, value] : chosen) option.set(value);
}

}  // namespace

std::vector<PolicyWithOptions> policies_with_options(const std::vector<const Policy*>& policies,
                                                     const std::vector<std::string>& assignments) {
  std::vector<PolicyWithOptions> with;
  for (const Policy* policy : policies) with.push_back(policy_with_options(*policy));
  try {
    set(with, assignments);
  } catch (const InputError& error) {
    throw InputError({.field = "policy_option"}, fmt::format("{}: {}", error.where().field, error.problem()));
  }
  return with;
}

std::string list_of_own_options() {
  std::string list;
  for (const Policy* policy : all_policies()) {
    for (const Option& o : policy_with_options(*policy).options) {
      const std::string range = o.range.empty() ? fmt::format("{}", fmt::join(o.words, " or ")) : o.range;
      list += fmt::format("  {:<18} {:<22} {}: {}{}\n", policy->name(), o.name, range, o.help,
                          o.initial.empty() ? "" : fmt::format(" (default {})", o.initial));
    }
  }
  return list;
}

}  // namespace foremoe
