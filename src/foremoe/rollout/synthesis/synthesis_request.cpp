#include "foremoe/rollout/synthesis/synthesis_request.h"

#include <fmt/format.h>

#include "foremoe/core/error.h"

namespace foremoe {

std::vector<Option> options_of(SynthesisRequest& r) {
  SynthesisOptions& o = r.options;
  using Limits = SynthesisLimits;
  const auto shaped = [&](const char* name, std::optional<int>& value, int initial, std::int64_t most,
                          const char* help) {
    return integer_option(
        {.name = name, .value = "N", .help = help, .initial = fmt::format("{}, or the shape's", initial), .main = true},
        value, {1, most});
  };
  const auto count = [&](const char* name, auto& value, std::int64_t most, const char* help) {
    return integer_option({.name = name, .value = "N", .help = help}, value, {1, most});
  };
  const auto groups = [&](const char* name, std::optional<int>& value, const char* help) {
    return integer_option({.name = name, .value = "N", .help = help, .initial = "1, no limit"}, value,
                          {1, Limits::kExperts});
  };
  const auto number = [&](const char* name, double& value, double most, const char* help) {
    return number_option({.name = name, .value = "X", .help = help}, value, {.least = 0, .most = most});
  };
  Option ranks = count("ranks", o.num_ranks, Limits::kRanks, "Ranks of the expert-parallel group");
  ranks.main = true;
  Option per_node = count("ranks_per_node", o.ranks_per_node, Limits::kRanks, "Ranks per node");
  per_node.initial = "8, or all if fewer";
  return {
      text_option({.name = "routing", .value = "NAME", .help = "Routing model; see --help-all", .main = true},
                  r.routing),
      text_option({.name = "shape",
                   .value = "NAME|FILE",
                   .help = "Use the layers, experts and top-k of a model, a preset or config.json; see --help-all",
                   .main = true},
                  r.shape),
      shaped("layers", r.layers, o.num_layers, Limits::kLayers, "MoE layers"),
      shaped("experts", r.experts, o.num_experts, Limits::kExperts, "Experts of a layer"),
      shaped("top_k", r.top_k, o.top_k, Limits::kExperts, "Experts that a token chooses"),
      groups("expert_groups", r.expert_groups,
             "Number of expert groups of a layer, for group-limited routing: equal runs of ids. Not set by "
             "--shape"),
      groups("groups_per_token", r.groups_per_token,
             "Largest number of groups per token: those whose best experts have the highest scores. A score is the "
             "popularity plus noise"),
      count("micro_steps", o.num_micro_steps, Limits::kMicroSteps, "Number of micro-steps"),
      std::move(ranks),
      std::move(per_node),
      count("tokens_per_rank", o.tokens_per_rank, Limits::kTokensPerRank,
            "Tokens per rank and micro-step. A token counts once"),
      count("sequences_per_rank", o.sequences_per_rank, Limits::kSequencesPerRank, "Sequences per rank and micro-step"),
      count("group_size", o.group_size, Limits::kGroupSize, "Sequences per GRPO group"),
      number("length_spread", o.length_spread, 10,
             "Spread σ of sequence lengths, which are proportional to exp(σ · normal)"),
      word_option<Layout>(
          {.name = "layout",
           .value = "grouped|shuffled",
           .help = "grouped: a group's sequences share a micro-step. shuffled: they are in random micro-steps"},
          o.layout, {{"grouped", Layout::kGrouped}, {"shuffled", Layout::kShuffled}}),
      number("step_spread", r.grpo.step_spread, 20, "grpo: skew of the whole step"),
      number("group_spread", r.grpo.group_spread, 20, "grpo: difference between groups"),
      number("skew", r.zipf.skew, 100, "zipf: exponent; 0 is uniform"),
      number("permute_probability", r.zipf.permute_probability, 1,
             "zipf: probability that a micro-step draws a new order of popularity"),
      number("concentration", r.dirichlet.concentration, 1e9, "dirichlet: concentration of a layer, above 0"),
      number("sequence_concentration", r.dirichlet.sequence_concentration, 1e9,
             "dirichlet: concentration of a sequence around its layer. 0: all sequences equal"),
      seed_option(
          {.name = "seed", .value = "N", .help = "Random seed. The same seed and options produce the same bytes"},
          o.seed)};
}

SynthesisOptions synthesis_options(const SynthesisRequest& request) {
  SynthesisOptions options = request.options;
  if (!request.shape.empty()) {
    options = with_shape(options, model_named(request.shape, "shape"));
  }
  options.num_layers = request.layers.value_or(options.num_layers);
  options.num_experts = request.experts.value_or(options.num_experts);
  options.top_k = request.top_k.value_or(options.top_k);
  if (request.expert_groups.has_value() != request.groups_per_token.has_value()) {
    const bool given = request.expert_groups.has_value();
    throw InputError({.field = given ? "groups_per_token" : "expert_groups"},
                     fmt::format("is required if `{}` is given", given ? "expert_groups" : "groups_per_token"));
  }
  options.groups = {.count = request.expert_groups.value_or(1), .per_token = request.groups_per_token.value_or(1)};
  if (options.num_experts % options.num_ranks != 0) {
    throw InputError({.field = "ranks"},
                     fmt::format("{} ranks do not divide the {} `experts`", options.num_ranks, options.num_experts));
  }
  return options;
}

RoutingModel routing_model(const SynthesisRequest& request) {
  if (request.routing == "grpo") return request.grpo;
  if (request.routing == "zipf") return request.zipf;
  if (request.routing == "dirichlet") return request.dirichlet;
  if (const auto workload = stress_workload_named(request.routing)) return *workload;
  throw InputError({.field = "routing"},
                   fmt::format("'{}', expected grpo, zipf, dirichlet or w0 to w7", request.routing));
}

}  // namespace foremoe
