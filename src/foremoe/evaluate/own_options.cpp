#include "foremoe/evaluate/own_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/policy/feplb.h"
#include "foremoe/policy/finemoe.h"
#include "foremoe/policy/ultraep.h"

namespace foremoe {

namespace {

// LP 4's weights (either makes it LP 4), and the part of the tokens that is scheduled.
constexpr std::array<std::string_view, 3> kFineMoe{"alpha_ranks", "alpha_nodes", "scheduled_fraction"};
// dyn; τ; buffers; whether the greedy goes on with smaller experts, whether the lowest ids are the dynamic ones (0 or
// 1).
constexpr std::array<std::string_view, 5> kFeplb{"dyn", "min_tokens", "max_num_dyn", "try_smaller", "first_experts"};
constexpr std::array<std::string_view, 1> kUltraEp{"min_tokens_per_replica"};

FineMoeOptions finemoe_options(const OwnOptions& own) {
  FineMoeOptions options;
  for (const auto& [key, value] : own) {
    if (key == "scheduled_fraction") {
      options.scheduler.scheduled_fraction = value;
      continue;
    }
    if (options.scheduler.solver != finemoe::Solver::kCommunicationAware) {
      options.scheduler.weights = {.ranks = 0, .nodes = 0};
    }
    options.scheduler.solver = finemoe::Solver::kCommunicationAware;
    (key == "alpha_ranks" ? options.scheduler.weights.ranks : options.scheduler.weights.nodes) = value;
  }
  return options;
}

FeplbOptions feplb_options(const OwnOptions& own) {
  FeplbOptions options;
  for (const auto& [key, value] : own) {
    if (key == "dyn") options.dyn = static_cast<int>(value);
    if (key == "min_tokens") options.min_tokens = static_cast<std::int64_t>(value);
    if (key == "max_num_dyn") options.max_num_dyn = static_cast<int>(value);
    if (key == "try_smaller") options.try_smaller = value != 0;
    if (key == "first_experts") options.dynamic = value != 0 ? DynamicExperts::kFirst : DynamicExperts::kBusiest;
  }
  return options;
}

UltraEpOptions ultraep_options(const OwnOptions& own) {
  return {.min_tokens_per_replica = static_cast<std::int64_t>(own.front().second)};
}

}  // namespace

std::span<const std::string_view> own_options(std::string_view policy) {
  if (policy == "feplb") return kFeplb;
  if (policy == "ultraep") return kUltraEp;
  if (policy.starts_with("finemoe")) return kFineMoe;
  return {};
}

std::shared_ptr<const Policy> policy_with(const std::string& name, const OwnOptions& own) {
  const Policy* const plain = &policy_named(name);
  if (own.empty()) return {plain, [](const Policy*) {}};  // lives as long as the program
  const std::span<const std::string_view> known = own_options(name);
  for (const auto& [key, value] : own) {
    if (std::ranges::find(known, key) != known.end()) continue;
    throw InputError({.field = key}, known.empty() ? fmt::format("policy {} has no options of its own", name)
                                                   : fmt::format("policy {} has {}", name, fmt::join(known, ", ")));
  }
  if (name == "feplb") return make_feplb(feplb_options(own));
  if (name == "ultraep") return make_ultraep(ultraep_options(own));
  if (name == "finemoe-random") return make_finemoe_random(finemoe_options(own));
  if (name == "finemoe-symmetric") return make_finemoe_symmetric(finemoe_options(own));
  return make_finemoe(finemoe_options(own));
}

}  // namespace foremoe
