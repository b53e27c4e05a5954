#include "foremoe/sim/reproduce/experiment_tables.h"

#include <fmt/format.h>

#include <array>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/own_options.h"

namespace foremoe {

namespace {

constexpr int kMany = 1 << 20;

std::string shown(const toml::node& value) {
  if (value.is_string()) return value.as_string()->get();
  if (value.is_integer()) return fmt::format("{}", value.as_integer()->get());
  if (value.is_floating_point()) return fmt::format("{}", value.as_floating_point()->get());
  return {};
}

// The tables that [[key]] stands for: what all have in common put in, lists multiplied out.
std::vector<toml::table> multiplied_out(const toml::table& root, std::string_view key, std::string_view every) {
  std::vector<toml::table> tables;
  const toml::array* const given = root.get_as<toml::array>(key);
  if (given == nullptr) return tables;
  const toml::table* const in_all = root.get_as<toml::table>(every);
  for (const toml::node& node : *given) {
    if (!node.is_table()) continue;
    toml::table table = *node.as_table();
    if (in_all != nullptr) {
      for (const auto& [name, value] : *in_all) {
        if (!table.contains(name)) table.insert(name, value);
      }
    }
    std::string list;
    for (const auto& [name, value] : table) {
      if (value.is_array()) list = name.str();
    }
    if (list.empty()) {
      tables.push_back(std::move(table));
      continue;
    }
    const toml::array values = *table.get_as<toml::array>(list);
    for (const toml::node& value : values) {
      toml::table one = table;
      one.insert_or_assign(list, value);
      if (const auto* label = one.get_as<std::string>("label")) {
        std::string text = label->get();
        const std::string place = fmt::format("{{{}}}", list);
        if (const auto at = text.find(place); at != std::string::npos) text.replace(at, place.size(), shown(value));
        one.insert_or_assign("label", text);
      }
      tables.push_back(std::move(one));
    }
  }
  return tables;
}

template <class Value>
void take(TomlFields& fields, std::string_view key, std::int64_t least, std::int64_t most, Value& value) {
  if (const auto given = fields.integer(key, least, most)) value = static_cast<Value>(*given);
}

void take(TomlFields& fields, std::string_view key, double most, double& value) {
  if (const auto given = fields.number(key, 0, most)) value = *given;
}

RoutingModel read_routing(TomlFields& fields) {
  const std::string name = fields.text("routing").value_or("grpo");
  GrpoRouting grpo;
  ZipfRouting zipf;
  DirichletRouting dirichlet;
  if (name == "grpo") {
    take(fields, "step_spread", 20, grpo.step_spread);
    take(fields, "group_spread", 20, grpo.group_spread);
    return grpo;
  }
  if (name == "zipf") {
    take(fields, "skew", 100, zipf.skew);
    take(fields, "permute_probability", 1, zipf.permute_probability);
    return zipf;
  }
  if (name == "dirichlet") {
    take(fields, "concentration", 1e9, dirichlet.concentration);
    take(fields, "sequence_concentration", 1e9, dirichlet.sequence_concentration);
    return dirichlet;
  }
  if (const auto workload = stress_workload_named(name)) return *workload;
  fields.fail("routing", fmt::format("'{}', expected grpo, zipf, dirichlet or w0 to w7", name));
}

// [shape]: a model that is none of the presets.
std::optional<ModelShape> read_shape(const toml::table& root, const std::string& file) {
  TomlFields fields(root, file, "");
  auto table = fields.table("shape");
  if (!table) return {};
  ModelShape shape;
  shape.name = table->required_text("name");
  take(*table, "moe_layers", 1, kMany, shape.moe_layers);
  take(*table, "experts", 1, kMany, shape.experts);
  take(*table, "top_k", 1, kMany, shape.top_k);
  take(*table, "shared_experts", 0, kMany, shape.shared_experts);
  take(*table, "hidden", 1, kMany, shape.hidden);
  take(*table, "intermediate", 1, kMany, shape.intermediate);
  take(*table, "vocabulary", 1, kMany, shape.vocabulary);
  take(*table, "heads", 1, kMany, shape.attention.heads);
  shape.attention.kv_heads = shape.attention.heads;
  take(*table, "kv_heads", 1, kMany, shape.attention.kv_heads);
  take(*table, "head_width", 1, kMany, shape.attention.key_width);
  shape.attention.value_width = shape.attention.key_width;
  table->finish();
  return shape;
}

ModelShape model_of(const TomlFields& fields, const std::string& name, const std::optional<ModelShape>& own) {
  if (own && own->name == name) return *own;
  const auto preset = find_model_shape(name);
  if (!preset) fields.fail("model", fmt::format("'{}' is neither a preset nor the name in [shape]", name));
  return *preset;
}

void expect_cluster(const TomlFields& fields, const std::string& name) {
  try {
    (void)find_cluster(name);
  } catch (const InputError& error) {
    fields.fail("cluster", error.what());
  }
}

// What the synthesis would refuse in the words of its options.
void expect_ranks(const TomlFields& fields, const SynthesisOptions& o) {
  if (o.num_experts % o.num_ranks != 0) {
    fields.fail("ranks", fmt::format("{} do not divide {} experts", o.num_ranks, o.num_experts));
  }
}

ExperimentInput read_input(TomlFields fields, const std::optional<ModelShape>& own) {
  ExperimentInput input;
  input.label = fields.required_text("label");
  input.file = fields.text("file").value_or("");
  SynthesisOptions& o = input.options;
  const auto model = fields.text("model");
  const auto cluster = fields.text("cluster");
  if (model) {
    ModelledCluster on{.cluster = cluster.value_or(""), .model = model_of(fields, *model, own), .cost = {}};
    o = with_shape(o, on.model);
    take(fields, "sequence_tokens", 1, kMany, on.cost.sequence_tokens);
    take(fields, "optimizer_shards", 1, kMany, on.cost.optimizer_shards);
    take(fields, "rollout_seconds", 1e9, on.rollout_seconds);
    if (const auto again = fields.truth("recompute_activations")) on.cost.recompute_activations = *again;
    if (cluster) {
      expect_cluster(fields, *cluster);
      input.on = on;
    }
  } else if (cluster) {
    fields.fail("model", "is missing beside cluster");
  }
  take(fields, "layers", 1, kMany, o.num_layers);
  take(fields, "experts", 1, kMany, o.num_experts);
  take(fields, "top_k", 1, kMany, o.top_k);
  take(fields, "micro_steps", 1, kMany, o.num_micro_steps);
  take(fields, "ranks", 1, kMany, o.num_ranks);
  take(fields, "ranks_per_node", 1, kMany, o.ranks_per_node);
  take(fields, "tokens_per_rank", 1, std::int64_t{1} << 40, o.tokens_per_rank);
  take(fields, "sequences_per_rank", 1, kMany, o.sequences_per_rank);
  take(fields, "length_spread", 10, o.length_spread);
  take(fields, "group_size", 1, kMany, o.group_size);
  take(fields, "seed", 0, std::numeric_limits<std::int64_t>::max(), o.seed);
  if (fields.one_of("layout", {"grouped", "shuffled"}, "grouped") == "shuffled") o.layout = Layout::kShuffled;
  if (fields.has("ranks")) input.file_ranks = o.num_ranks;
  input.former_step = fields.truth("former_step").value_or(false);
  if (input.former_step && !input.file.empty()) fields.fail("former_step", "a file has one step");
  take(fields, "steps", 1, kMany, input.steps);
  if (o.num_micro_steps % input.steps != 0) fields.fail("steps", "does not divide micro_steps");
  input.routing = read_routing(fields);
  if (input.file.empty()) expect_ranks(fields, o);
  if (input.on && input.file.empty() && o.num_layers > input.on->model.moe_layers) {
    fields.fail("layers", fmt::format("{}, but {} has {} MoE layers", o.num_layers, input.on->model.name,
                                      input.on->model.moe_layers));
  }
  fields.finish();
  return input;
}

ExperimentSystem read_system(TomlFields fields) {
  ExperimentSystem system;
  system.label = fields.required_text("label");
  system.policy = fields.required_text("policy");
  for (const Option& option : options_of(system.options)) fields.set(option);
  const std::string path = fields.one_of("path", {"auto", "host", "peer"}, "auto");
  if (path != "auto") system.path = path == "host" ? PathChoice::kHost : PathChoice::kPeer;
  for (const std::string_view key : own_options(system.policy)) {
    if (const auto value = fields.number(key)) system.own.emplace_back(key, *value);
  }
  try {
    (void)policy_with(system.policy, system.own);
  } catch (const InputError& error) {
    fields.fail("policy", error.problem());
  }
  fields.finish();
  return system;
}

}  // namespace

std::vector<ExperimentInput> read_inputs(const toml::table& root, const std::string& file) {
  const std::optional<ModelShape> own = read_shape(root, file);
  std::vector<ExperimentInput> inputs;
  for (const toml::table& table : multiplied_out(root, "input", "every_input")) {
    inputs.push_back(read_input(TomlFields(table, file, fmt::format("input[{}]", inputs.size())), own));
  }
  return inputs;
}

std::vector<ExperimentSystem> read_systems(const toml::table& root, const std::string& file) {
  std::vector<ExperimentSystem> systems;
  for (const toml::table& table : multiplied_out(root, "system", "every_system")) {
    systems.push_back(read_system(TomlFields(table, file, fmt::format("system[{}]", systems.size()))));
  }
  return systems;
}

}  // namespace foremoe
