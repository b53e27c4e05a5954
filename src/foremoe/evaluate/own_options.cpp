#include "foremoe/evaluate/own_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/policy/eplb.h"
#include "foremoe/policy/feplb.h"
#include "foremoe/policy/finemoe.h"
#include "foremoe/policy/foremoe_review.h"
#include "foremoe/policy/ultraep.h"

namespace foremoe {

namespace {

constexpr int kMany = 1 << 30;

PolicyWithOptions feplb_policy() {
  struct Chosen {
    FeplbOptions options;
    int try_smaller = 0;
    int first_experts = 0;
  };
  const auto chosen = std::make_shared<Chosen>();
  FeplbOptions& o = chosen->options;
  return {
      .options = {integer_option({.name = "dyn", .help = "Dynamic experts of a rank"}, o.dyn, {0, kMany}),
                  integer_option({.name = "min_tokens", .help = "Experts of so few tokens stay"}, o.min_tokens,
                                 {0, std::int64_t{1} << 40}),
                  integer_option({.name = "max_num_dyn", .help = "Buffers of a rank"}, o.max_num_dyn, {0, kMany}),
                  integer_option({.name = "try_smaller", .help = "1: the greedy goes on with smaller experts"},
                                 chosen->try_smaller, {0, 1}),
                  integer_option({.name = "first_experts", .help = "1: those of the lowest ids are the dynamic ones"},
                                 chosen->first_experts, {0, 1})},
      .make = [chosen]() -> std::shared_ptr<const Policy> {
        FeplbOptions options = chosen->options;
        options.try_smaller = chosen->try_smaller != 0;
        if (chosen->first_experts != 0) options.dynamic = DynamicExperts::kFirst;
        return make_feplb(options);
      }};
}

PolicyWithOptions ultraep_policy() {
  const auto chosen = std::make_shared<UltraEpOptions>(UltraEpOptions{.min_tokens_per_replica = 1});  // as registered
  return {.options = {integer_option({.name = "min_tokens_per_replica", .help = "The fewest tokens of a replica"},
                                     chosen->min_tokens_per_replica, {1, std::int64_t{1} << 40})},
          .make = [chosen]() -> std::shared_ptr<const Policy> { return make_ultraep(*chosen); }};
}

// `replaces`: placements are replaced adaptively.
PolicyWithOptions finemoe_policy(std::unique_ptr<Policy> (*make)(const FineMoeOptions&), bool replaces) {
  struct Chosen {
    FineMoeOptions options;
    std::optional<double> alpha_ranks, alpha_nodes;  // either makes it LP 4
    bool exact = false;
  };
  const auto chosen = std::make_shared<Chosen>();
  constexpr NumberRange kWeight{.least = 0, .most = 1e9};
  std::vector<Option> options{
      word_option<bool>({.name = "solver", .help = "Who solves LP 1: CLP, or our exact assignment"}, chosen->exact,
                        {{"lp", false}, {"exact", true}}),
      number_option({.name = "alpha_ranks", .help = "LP 4's weight of traffic between ranks"}, chosen->alpha_ranks,
                    kWeight),
      number_option({.name = "alpha_nodes", .help = "LP 4's weight of traffic between nodes"}, chosen->alpha_nodes,
                    kWeight),
      number_option({.name = "scheduled_fraction", .help = "Part of the tokens that is scheduled"},
                    chosen->options.scheduler.scheduled_fraction, {.least = 0, .most = 1})};
  if (replaces) {
    finemoe::ReplacementOptions& o = chosen->options.replacement;
    options.push_back(number_option(
        {.name = "threshold", .help = "Predicted largest rank load ÷ mean above which placements are replaced"},
        o.threshold, {.least = 1, .most = 1e9}));
    options.push_back(
        integer_option({.name = "interval", .help = "Micro-steps from one look at the placement to the next"},
                       o.interval, {1, kMany}));
    options.push_back(integer_option({.name = "window", .help = "Micro-steps of the moving average that predicts"},
                                     o.window, {1, kMany}));
    options.push_back(integer_option({.name = "samples", .help = "Random placements of which the best is taken"},
                                     o.num_samples, {1, 1 << 20}));
  }
  return {.options = std::move(options), .make = [chosen, make]() -> std::shared_ptr<const Policy> {
            FineMoeOptions with = chosen->options;
            if (chosen->exact) with.scheduler.solver = finemoe::Solver::kExact;
            if (chosen->alpha_ranks || chosen->alpha_nodes) {
              if (chosen->exact)
                throw InputError({.field = "solver"}, "exact is of LP 1, which has no alpha_… weights");
              with.scheduler.solver = finemoe::Solver::kCommunicationAware;
              with.scheduler.weights = {.ranks = chosen->alpha_ranks.value_or(0),
                                        .nodes = chosen->alpha_nodes.value_or(0)};
            }
            return make(with);
          }};
}

PolicyWithOptions eplb_ema_policy() {
  const auto chosen = std::make_shared<EplbEmaOptions>();
  return {.options = {number_option({.name = "alpha", .help = "Weight of the newest micro-step in the moving average"},
                                    chosen->decay, {.least = 0, .most = 1, .above = true}),
                      integer_option({.name = "period", .help = "Micro-steps from one placement to the next"},
                                     chosen->period, {1, kMany})},
          .make = [chosen]() -> std::shared_ptr<const Policy> { return make_eplb_ema(*chosen); }};
}

// BPO (base), MDA (adjust) or both, each with its options.
PolicyWithOptions review_policy(bool base, bool adjust) {
  struct Chosen {
    ForeMoeReviewOptions options;
    int try_smaller = 0;
  };
  const auto chosen = std::make_shared<Chosen>(Chosen{.options = {.base = base, .adjust = adjust}});
  review::AdjustOptions& moves = chosen->options.moves;
  constexpr NumberRange kBand{.least = 0, .most = 1e9};
  std::vector<Option> options;
  if (base) {
    options.push_back(
        number_option({.name = "base_epsilon", .help = "ε of BPO: ranks within ε of the mean are balanced"},
                      chosen->options.base_epsilon, kBand));
  }
  if (adjust) {
    options.push_back(number_option({.name = "epsilon", .help = "ε of MDA and its verifier"}, moves.epsilon, kBand));
    options.push_back(
        number_option({.name = "overshoot", .help = "Largest tokens of a move ÷ what its rank has above the mean"},
                      moves.overshoot, kBand));
    options.push_back(integer_option(
        {.name = "try_smaller", .help = "1: where the largest expert would over-correct, the next one is tried"},
        chosen->try_smaller, {0, 1}));
    options.push_back(
        integer_option({.name = "rounds", .help = "Rounds of MDA, the first included"}, moves.rounds, {1, 1 << 20}));
  }
  return {.options = std::move(options), .make = [chosen]() -> std::shared_ptr<const Policy> {
            ForeMoeReviewOptions with = chosen->options;
            with.moves.try_smaller = chosen->try_smaller != 0;
            return make_foremoe_review(with);
          }};
}

PolicyWithOptions unnamed(const Policy& policy) {
  const std::string_view name = policy.name();
  if (name == "feplb") return feplb_policy();
  if (name == "ultraep") return ultraep_policy();
  if (name == "finemoe") return finemoe_policy(make_finemoe, true);
  if (name == "finemoe-random") return finemoe_policy(make_finemoe_random, false);
  if (name == "finemoe-symmetric") return finemoe_policy(make_finemoe_symmetric, false);
  if (name == "eplb-ema") return eplb_ema_policy();
  if (name == "foremoe-review") return review_policy(true, true);
  if (name == "foremoe-review-bpo") return review_policy(true, false);
  if (name == "foremoe-review-mda") return review_policy(false, true);
  return {.options = {}, .make = [plain = &policy]() -> std::shared_ptr<const Policy> {
            return {plain, [](const Policy*) {}};  // lives as long as the program
          }};
}

}  // namespace

PolicyWithOptions policy_with_options(const std::string& name) {
  PolicyWithOptions policy = unnamed(policy_named(name));
  policy.name = name;
  return policy;
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
  for (const PolicyWithOptions& policy : policies) who.push_back(policy.name);
  const std::string whose = fmt::format("{} {}", who.size() == 1 ? "policy" : "policies", fmt::join(who, ", "));
  const bool one = who.size() == 1;
  throw InputError({.field = name},
                   known.empty()
                       ? fmt::format("{} {} no options of {} own", whose, one ? "has" : "have", one ? "its" : "their")
                       : fmt::format("{} {} {}", whose, one ? "has" : "have", fmt::join(known, ", ")));
}

std::vector<PolicyWithOptions> policies_with_options(const std::vector<const Policy*>& policies,
                                                     const std::vector<std::string>& assignments) {
  std::vector<PolicyWithOptions> with;
  for (const Policy* policy : policies) with.push_back(policy_with_options(std::string(policy->name())));
  for (const std::string& assignment : assignments) {
    const std::size_t equals = assignment.find('=');
    if (equals == std::string::npos) {
      throw InputError({.field = assignment}, "expected NAME=VALUE");
    }
    for (const Option& option : own_options_named(with, assignment.substr(0, equals))) {
      option.set(assignment.substr(equals + 1));
    }
  }
  return with;
}

std::string list_of_own_options() {
  std::string list;
  for (const Policy* policy : all_policies()) {
    for (const Option& o : policy_with_options(std::string(policy->name())).options) {
      const std::string range = o.range.empty() ? fmt::format("{}", fmt::join(o.words, " or ")) : o.range;
      list += fmt::format("  {:<18} {:<22} {}: {}{}\n", policy->name(), o.name, range, o.help,
                          o.initial.empty() ? "" : fmt::format(" (default {})", o.initial));
    }
  }
  return list;
}

}  // namespace foremoe
