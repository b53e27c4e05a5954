#include "cost_arguments.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "option_checks.h"

namespace foremoe::cli {
namespace {

std::string model_names() {
  std::string names;
  for (const ModelShape& shape : model_shapes()) names += (names.empty() ? "" : ", ") + shape.name;
  return names;
}

[[noreturn]] void reject(const char* option, const std::string& what) {
  throw InputError({.file = option, .field = {}, .index = {}}, what);
}

ModelShape model_named(const std::string& name) {
  if (auto shape = find_model_shape(name)) return *std::move(shape);
  std::error_code error;
  if (std::filesystem::exists(name, error)) return read_model_config(name);
  reject("--model", fmt::format("'{}' is no file and none of {}", name, model_names()));
}

}  // namespace

void add_cost_options(CLI::App& command, CostArguments& arguments, CostUse use) {
  const std::string group = "Modelled time";
  CostOptions& options = arguments.options;
  const bool required = use == CostUse::kRequired;
  command
      .add_option("--cluster", arguments.cluster,
                  fmt::format("A cluster: {}, or a file (see foremoe calibrate). Its nodes are taken unless "
                              "--ranks-per-node says otherwise",
                              fmt::join(cluster_names(), ", ")))
      ->type_name("NAME|FILE")
      ->required(required)
      ->group(group);
  command.add_option("--model", arguments.model, fmt::format("A model: {}, or its config.json", model_names()))
      ->type_name("NAME|FILE")
      ->required(required)
      ->group(group);
  command
      .add_option("--sequence-tokens", options.sequence_tokens,
                  "Of a sequence: a token attends to half as many in the mean")
      ->type_name("TOKENS")
      ->capture_default_str()
      ->check(in_range(1, 1 << 24))
      ->group(group);
  command
      .add_flag_callback(
          "--keep-activations", [&options] { options.recompute_activations = false; },
          "Activations are kept from forward to backward; else only layer inputs are, and the rest is computed anew")
      ->group(group);
  command.add_option("--bytes-per-parameter", options.bytes_per_parameter, "Of weights and rows: 2 is bf16, 4 float32")
      ->type_name("BYTES")
      ->capture_default_str()
      ->check(in_range(1, 8))
      ->group(group);
  command
      .add_option("--optimizer-shards", options.optimizer_shards,
                  "Data-parallel ranks that share one expert's optimizer state")
      ->type_name("N")
      ->capture_default_str()
      ->check(in_range(1, 1 << 16))
      ->group(group);
  command
      .add_flag_callback(
          "--separate-uplinks", [&options] { options.shares_uplink = false; },
          "Copies from host memory and network cards do not meet at a switch")
      ->group(group);
}

CostModel cost_model(const CostArguments& arguments) {
  if (arguments.cluster.empty()) reject("--cluster", "is needed beside --model");
  if (arguments.model.empty()) reject("--model", "is needed beside --cluster");
  return {find_cluster(arguments.cluster), model_named(arguments.model), arguments.options};
}

std::optional<CostModel> cost_model_if_given(const CostArguments& arguments) {
  if (arguments.cluster.empty() && arguments.model.empty()) return std::nullopt;
  return cost_model(arguments);
}

void expect_model_fits(const CostModel& cost, const LoadTable& load) {
  const ModelShape& model = cost.model();
  if (load.num_experts() == model.experts && load.top_k == model.top_k && load.num_layers() <= model.moe_layers) return;
  reject("--model", fmt::format("{} has {} MoE layers of {} experts, top-{}; {} has {} of {}, top-{}", model.name,
                                model.moe_layers, model.experts, model.top_k, load.name, load.num_layers(),
                                load.num_experts(), load.top_k));
}

void take_nodes_of(const Cluster& cluster, InputOptions& input) {
  if (input.ranks_per_node == 0) input.ranks_per_node = cluster.ranks_per_node;
}

PlannerOptions within_cost(const PlannerArguments& planner, const std::optional<CostModel>& cost,
                           const LoadTable& load) {
  if (cost) expect_model_fits(*cost, load);
  PlannerOptions options = planner.options;
  if (!planner.hidden_copies) return options;
  if (!cost) reject("--max-copies-per-rank", "hidden needs --cluster and --model");
  std::int64_t assignments = 0;
  for (const Tokens tokens : load.load.flat()) assignments += tokens.value;
  const std::int64_t meetings =
      std::int64_t{1} * load.num_micro_steps() * load.num_layers() * load.num_ranks() * load.top_k;
  const auto hidden = cost->hidden_copies(Tokens{meetings == 0 ? 0 : assignments / meetings});
  options.max_copies_per_rank = hidden.from_host + (load.topology().num_nodes() == 1 ? hidden.from_peers : 0);
  return options;
}

std::string describe(const CostModel& cost) { return fmt::format("{} × {}", cost.cluster().name, cost.model().name); }

}  // namespace foremoe::cli
