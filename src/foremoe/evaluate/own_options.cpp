#include "foremoe/evaluate/own_options.h"

#include <optional>

#include "foremoe/evaluate/evaluate.h"
#include "foremoe/policy/feplb.h"
#include "foremoe/policy/finemoe.h"
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

PolicyWithOptions finemoe_policy(std::unique_ptr<Policy> (*make)(const FineMoeOptions&)) {
  struct Chosen {
    FineMoeOptions options;
    std::optional<double> alpha_ranks, alpha_nodes;  // either makes it LP 4
  };
  const auto chosen = std::make_shared<Chosen>();
  constexpr NumberRange kWeight{.least = 0, .most = 1e9};
  return {.options = {number_option({.name = "alpha_ranks", .help = "LP 4's weight of traffic between ranks"},
                                    chosen->alpha_ranks, kWeight),
                      number_option({.name = "alpha_nodes", .help = "LP 4's weight of traffic between nodes"},
                                    chosen->alpha_nodes, kWeight),
                      number_option({.name = "scheduled_fraction", .help = "Part of the tokens that is scheduled"},
                                    chosen->options.scheduler.scheduled_fraction, {.least = 0, .most = 1})},
          .make = [chosen, make]() -> std::shared_ptr<const Policy> {
            FineMoeOptions options = chosen->options;
            if (chosen->alpha_ranks || chosen->alpha_nodes) {
              options.scheduler.solver = finemoe::Solver::kCommunicationAware;
              options.scheduler.weights = {.ranks = chosen->alpha_ranks.value_or(0),
                                           .nodes = chosen->alpha_nodes.value_or(0)};
            }
            return make(options);
          }};
}

}  // namespace

PolicyWithOptions policy_with_options(const std::string& name) {
  const Policy* const plain = &policy_named(name);
  if (name == "feplb") return feplb_policy();
  if (name == "ultraep") return ultraep_policy();
  if (name == "finemoe") return finemoe_policy(make_finemoe);
  if (name == "finemoe-random") return finemoe_policy(make_finemoe_random);
  if (name == "finemoe-symmetric") return finemoe_policy(make_finemoe_symmetric);
  return {.options = {}, .make = [plain]() -> std::shared_ptr<const Policy> {
            return {plain, [](const Policy*) {}};  // lives as long as the program
          }};
}

}  // namespace foremoe
