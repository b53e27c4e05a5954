#include "foremoe/evaluate/cost_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"

namespace foremoe {
namespace {

[[noreturn]] void reject(const char* field, const std::string& what) { throw InputError({.field = field}, what); }

// The only preset with all of the load's layers, or else the only one with at least as many.
ModelShape model_of(const LoadTable& load) {
  const auto fitting = [&](bool whole) {
    std::vector<ModelShape> shapes;
    std::ranges::copy_if(model_shapes(), std::back_inserter(shapes), [&](const ModelShape& shape) {
      return shape.experts == load.num_experts() && shape.top_k == load.top_k &&
             (whole ? shape.moe_layers == load.num_layers() : shape.moe_layers >= load.num_layers() && shape.automatic);
    });
    return shapes;
  };
  if (const auto whole = fitting(true); whole.size() == 1) return whole.front();
  const auto part = fitting(false);
  if (part.size() == 1) return part.front();
  if (part.empty()) {
    reject("model", fmt::format("no known model has {} experts and top-{}, as {} has", load.num_experts(), load.top_k,
                                load.name));
  }
  std::vector<std::string> names;
  for (const ModelShape& shape : part) names.push_back(shape.name);
  reject("model", fmt::format("is needed: {} all fit {}", fmt::join(names, ", "), load.name));
}

// A load of fewer layers has the model's first. An empty list: the same number in all layers.
void expect_layers_fit(const ModelShape& model, const LoadTable& load) {
  const auto in_model = [](const std::vector<int>& of_layer, int l, int all) {
    return of_layer.empty() ? all : of_layer[static_cast<std::size_t>(l)];
  };
  for (int l = 0; l < load.num_layers(); ++l) {
    const int experts = in_model(model.experts_of_layer, l, model.experts);
    const int top_k = in_model(model.top_k_of_layer, l, model.top_k);
    const LayerId layer{l};
    if (experts == load.experts_in(layer) && top_k == load.top_k_in(layer)) continue;
    reject("model", fmt::format("{} has {} experts and top-{} in MoE layer {}, but {} has {} and top-{}", model.name,
                                experts, top_k, l, load.name, load.experts_in(layer), load.top_k_in(layer)));
  }
}

// A load may have fewer layers than the model, since it may cover only a part of the model.
void expect_model_fits(const ModelShape& model, const LoadTable& load) {
  if (load.num_experts() == model.experts && load.top_k == model.top_k && load.num_layers() <= model.moe_layers) {
    return expect_layers_fit(model, load);
  }
  reject("model", fmt::format("{} has {} MoE layers of {} experts, top-{}, but {} has {} of {}, top-{}", model.name,
                              model.moe_layers, model.experts, model.top_k, load.name, load.num_layers(),
                              load.num_experts(), load.top_k));
}

}  // namespace

std::vector<Option> options_of(CostRequest& r) {
  const std::string group = "Modelled time";
  return {
      text_option({.name = "cluster",
                   .value = "NAME|FILE",
                   .help = fmt::format("Cluster to model: {}, or a file written by foremoe calibrate. The node size is "
                                       "the cluster's unless --ranks-per-node is given",
                                       fmt::join(cluster_names(), ", ")),
                   .group = group,
                   .main = true},
                  r.cluster),
      text_option(
          {.name = "model",
           .value = "NAME|FILE",
           .help = fmt::format("Model: {}; or the path of a config.json, or of a TOML file that describes a model",
                               fmt::join(model_names(), ", ")),
           .group = group,
           .main = true},
          r.model),
      integer_option(
          {.name = "sequence_tokens",
           .value = "TOKENS",
           .help = "Length of all sequences, for attention's scores. A token attends to half of it on average",
           .initial = fmt::format("the lengths in the trace; {} for a load", kSequenceTokens),
           .group = group},
          r.options.sequence_tokens, {1, 1 << 24}),
      flag_option(
          {.name = "keep_activations",
           .help = "Keep all activations for the backward pass (default: keep layer inputs, recompute the rest)",
           .group = group},
          r.options.recompute_activations, false),
      flag_option({.name = "recompute_experts",
                   .help = "With keep_activations: recompute only the experts' activations in the backward pass",
                   .group = group},
                  r.options.recompute_experts),
      integer_option({.name = "bytes_per_parameter",
                      .value = "BYTES",
                      .help = "Bytes per weight and per element of a row: 2 for bf16, 4 for float32",
                      .group = group},
                     r.options.bytes_per_parameter, {1, 8}),
      integer_option({.name = "optimizer_shards",
                      .value = "N",
                      .help = "Data-parallel ranks that share one expert's optimizer state",
                      .initial = "the number of expert-parallel groups",
                      .group = group},
                     r.options.optimizer_shards, {1, 1 << 16}),
      word_option<Dispatch>(
          {.name = "dispatch",
           .value = "WORD",
           .help = "How rows are sent. token: a token once to each node that serves it and from there once to each "
                   "rank, as in DeepEP and HybridEP. row: every token–expert assignment directly to its rank, as in "
                   "Megatron-LM's alltoall and in foremoe.torch. A load does not record which experts a token chose "
                   "together, so for a load, token uses expected values",
           .group = group},
          r.options.dispatch, {{"token", Dispatch::kToken}, {"row", Dispatch::kRow}}),
      number_option({.name = "other_seconds_per_layer",
                     .value = "SECONDS",
                     .help = "Additional time per layer and pass for unmodelled work (parameter gathers, permutations, "
                             "launches), fitted to a measured step",
                     .group = group},
                    r.options.other_seconds_per_layer, {.least = 0}),
      flag_option({.name = "separate_uplinks",
                   .help = "Model host copies and network traffic on separate PCIe uplinks (default: shared)",
                   .group = group},
                  r.options.shares_uplink, false),
  };
}

std::vector<Option> options_of(ModelShape& s) {
  const auto count = [](const char* name, int& value, const char* help, int least = 1) {
    return integer_option({.name = name, .value = "N", .help = help}, value, {least, 1 << 24});
  };
  AttentionShape& attention = s.attention;
  return {text_option({.name = "name", .value = "NAME", .help = "Name of the model in tables"}, s.name),
          count("moe_layers", s.moe_layers, "MoE layers"),
          count("experts", s.experts, "Routed experts of a layer"),
          count("top_k", s.top_k, "Experts that a token chooses"),
          count("expert_groups", s.groups.count, "Expert groups, for group-limited routing"),
          count("groups_per_token", s.groups.per_token, "Largest number of expert groups per token"),
          count("shared_experts", s.shared_experts, "Shared experts, which serve every token", 0),
          count("hidden", s.hidden, "Hidden size"),
          count("intermediate", s.intermediate, "Intermediate size of an expert"),
          count("vocabulary", s.vocabulary, "Vocabulary size"),
          count("heads", attention.heads, "Attention heads"),
          count("kv_heads", attention.kv_heads, "Key and value heads. 0: as many as attention heads", 0),
          count("head_width", attention.key_width, "Width of an attention head")};
}

NamedCost read_cost(const CostRequest& request) {
  const auto refuse_safetensors = [](const char* field, const std::string& path, const char* expected) {
    if (path.ends_with(".safetensors")) reject(field, fmt::format("{} is no {}", path, expected));
  };
  refuse_safetensors("cluster", request.cluster, "TOML file of a cluster");
  refuse_safetensors("model", request.model, "config.json of a model");
  NamedCost named{.cluster = request.changed, .model = request.shape, .options = request.options};
  if (!named.cluster && !request.cluster.empty()) named.cluster = find_cluster(request.cluster);
  if (!named.model && !request.model.empty()) named.model = model_named(request.model);
  return named;
}

CostModel find_cost_model(const NamedCost& named, const LoadTable& load) {
  if (!named.cluster) reject("cluster", "is required if `model` is given");
  const ModelShape model = named.model ? *named.model : model_of(load);
  expect_model_fits(model, load);
  Cluster cluster = *named.cluster;
  cluster.ranks_per_node = load.ranks_per_node;
  return {cluster, model, named.options};
}

std::optional<CostModel> find_cost_model_if_asked(const NamedCost& named, const LoadTable& load) {
  if (!named.cluster && !named.model) return std::nullopt;
  if (!named.model) reject("model", "is required if `cluster` is given");
  return find_cost_model(named, load);
}

std::string describe(const CostModel& cost) {
  const ModelShape& model = cost.model();
  std::string text = fmt::format("{} × {}", cost.cluster().name, model.name);
  if (find_model_shape(model.name)) return text;
  std::vector<std::string> facts = model.notes;
  facts.insert(facts.begin(),
               fmt::format("{:.1f}e9 parameters, {:.1f}e9 per token", 1e-9 * static_cast<double>(model.parameters()),
                           1e-9 * static_cast<double>(model.active_parameters())));
  return fmt::format("{} ({})", text, fmt::join(facts, "; "));
}

}  // namespace foremoe
