#include "foremoe/evaluate/engine_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/policy/next_window.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_statistics.h"

namespace foremoe {
namespace {

using Json = nlohmann::ordered_json;

std::vector<int> expert_ids_of(ArrayView<const ExpertId, 2> slots) {
  std::vector<int> experts;
  for (const ExpertId e : slots.flat()) experts.push_back(e.value);
  return experts;
}

std::string sglang_file(const EngineMap& map, int dense_layers) {
  Json rows = Json::array();
  std::vector<int> in_order = expert_ids_of(map.slot_expert.view()[0]);
  for (std::size_t i = 0; i < in_order.size(); ++i) in_order[i] = static_cast<int>(i) % map.num_experts;
  for (int l = 0; l < dense_layers; ++l) rows.push_back(in_order);
  for (std::size_t l = 0; l < map.slot_expert.extent(0); ++l) rows.push_back(expert_ids_of(map.slot_expert.view()[l]));
  return Json{{"physical_to_logical_map", rows}}.dump() + "\n";
}

std::string tensorrt_llm_file(const EngineMap& map, int dense_layers) {
  std::string text = "initial_global_assignments:\n";
  for (std::size_t l = 0; l < map.slot_expert.extent(0); ++l) {
    const std::vector<int> experts = expert_ids_of(map.slot_expert.view()[l]);
    text += fmt::format("  {}: [{}]\n", dense_layers + static_cast<int>(l), fmt::join(experts, ", "));
  }
  return text + fmt::format("layer_updates_per_iter: 0\nnum_slots: {}\n",
                            map.slot_expert.extent(1) * map.slot_expert.extent(2));
}

std::string vllm_ascend_file(const EngineMap& map, int dense_layers) {
  if (dense_layers != 0) throw InputError({.field = "dense_layers"}, "must be 0 for vllm-ascend, which skips them");
  Json layers = Json::array();
  for (std::size_t l = 0; l < map.slot_expert.extent(0); ++l) {
    Json devices = Json::array();
    for (std::size_t r = 0; r < map.slot_expert.extent(1); ++r) {
      Json experts = Json::array();
      for (const ExpertId e : map.slot_expert.row(l, r)) {
        if (std::ranges::count(map.slot_expert.row(l, r), e) > 1) {
          throw InputError({}, fmt::format("layer {}, rank {}: expert {} is placed twice, but vllm-ascend accepts it "
                                           "once per rank. Use fewer guest slots",
                                           l, r, e.value));
        }
        experts.push_back(e.value);
      }
      devices.push_back({{"device_id", r}, {"device_expert", experts}});
    }
    layers.push_back({{"layer_id", l}, {"device_count", map.slot_expert.extent(1)}, {"device_list", devices}});
  }
  return Json{{"moe_layer_count", map.slot_expert.extent(0)}, {"layer_list", layers}}.dump() + "\n";
}

// Gives empty slots of one layer to experts. `tokens` is [expert].
void fill_empty(ArrayView<ExpertId, 2> slots, std::span<const std::int64_t> tokens) {
  std::vector<double> replicas(tokens.size());
  for (const ExpertId e : slots.flat()) {
    if (e != kNoExpert) ++replicas[e.index()];
  }
  for (std::size_t r = 0; r < slots.extent(0); ++r) {
    const auto row = slots.row(r);
    for (ExpertId& slot : row) {
      if (slot != kNoExpert) continue;
      double most = -1;
      for (int e = 0; e < static_cast<int>(tokens.size()); ++e) {
        const double each = static_cast<double>(tokens[e]) / replicas[e];
        if (each <= most || std::ranges::count(row, ExpertId{e}) > 0) continue;
        most = each;
        slot = ExpertId{e};
      }
      if (slot == kNoExpert) throw InputError({}, fmt::format("rank {} has more slots than there are experts", r));
      ++replicas[slot.index()];
    }
  }
}

}  // namespace

std::vector<Option> options_of(EngineMapOptions& o) {
  return {word_option({.name = "to",
                       .value = "ENGINE",
                       .help = "Inference engine. sglang: JSON for --init-expert-location. tensorrt-llm: YAML for "
                               "moe_config.load_balancer. vllm-ascend: JSON for expert_map_path. vllm: reads no file; "
                               "use foremoe.eplb.vllm_policy()",
                       .main = true,
                       .required = true},
                      o.engine,
                      {{"vllm", Engine::kVllm},
                       {"sglang", Engine::kSglang},
                       {"tensorrt-llm", Engine::kTensorRtLlm},
                       {"vllm-ascend", Engine::kVllmAscend}}),
          integer_option({.name = "ranks",
                          .value = "R",
                          .help = "Expert-parallel ranks of the engine",
                          .initial = "those of the load",
                          .main = true},
                         o.ranks, {1, kMaxRanks}),
          integer_option({.name = "guest_slots",
                          .letter = 'G',
                          .value = "G",
                          .help = "Replicas per rank beyond one of each expert",
                          .main = true},
                         o.guest_slots, {0, kMaxExperts}),
          integer_option({.name = "expert_groups",
                          .value = "N",
                          .help = "Groups of consecutive experts. If the number of nodes divides it, each group is "
                                  "placed on one node"},
                         o.expert_groups, {1, kMaxExperts}),
          integer_option({.name = "dense_layers",
                          .value = "N",
                          .help = "Layers of the model before its first MoE layer",
                          .main = true},
                         o.dense_layers, {0, 1 << 16})};
}

EngineMap place_for_engine(const LoadTable& load, const EngineMapOptions& options) {
  const int num_ranks = options.ranks.value_or(load.num_ranks());
  const Topology topology{.num_ranks = num_ranks, .ranks_per_node = load.ranks_per_node};
  const EplbShape shape{.num_experts = load.num_experts(),
                        .num_replicas = load.num_experts() + options.guest_slots * num_ranks,
                        .num_ranks = num_ranks,
                        .num_nodes = topology.num_nodes(),
                        .num_groups = options.expert_groups};
  if (const auto reason = eplb_shape_error(shape)) {
    const bool groups = load.num_experts() % options.expert_groups != 0;
    throw InputError({.field = groups ? "expert_groups" : options.ranks ? "ranks" : "guest_slots"}, *reason);
  }
  if (!load.experts_of_layer.empty()) {
    throw InputError({.file = load.name, .field = "experts_of_layer"},
                     "differ by layer, but an engine's map has the same number of experts in all layers");
  }
  if (num_assignments(load) == 0)
    throw InputError({.file = load.name}, "has no tokens, so nothing determines where experts are placed");
  const int others = load.num_experts() - load.num_experts() / num_ranks;
  if (options.guest_slots > others) {
    throw InputError({.field = "guest_slots"}, fmt::format("{}, expected at most {}: every rank then has every expert",
                                                           options.guest_slots, others));
  }
  Array<double, 3> windows({load.load.extent(0), load.load.extent(1), load.load.extent(3)});
  std::vector<std::int64_t> tokens(load.load.extent(3));
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    for (int l = 0; l < load.num_layers(); ++l) {
      load.expert_loads(MicroStepId{m}, LayerId{l}, tokens);
      std::ranges::copy(tokens, windows.row(m, l).begin());
    }
  }
  const bool distinct = options.engine == Engine::kVllmAscend;
  return {.slot_expert = place_for_next_window(windows, shape, distinct).slot_expert,
          .num_experts = load.num_experts()};
}

EngineMap place_for_engine(const StepPlan& plan, const std::string& path) {
  EngineMap map{.slot_expert = Array<ExpertId, 3>(
                    {plan.slot_expert.extent(1), plan.slot_expert.extent(2), plan.slot_expert.extent(3)}),
                .num_experts = plan.num_experts()};
  for (std::size_t l = 0; l < map.slot_expert.extent(0); ++l) {
    std::vector<std::int64_t> tokens(map.num_experts);
    for (std::size_t event = 0; event < plan.slot_expert.extent(0); ++event) {
      for (std::size_t r = 0; r < map.slot_expert.extent(1); ++r) {
        for (std::size_t s = 0; s < map.slot_expert.extent(2); ++s) {
          const ExpertId e = plan.slot_expert(event, l, r, s);
          if (e != plan.slot_expert(0, l, r, s)) {
            throw InputError(
                {.file = path, .field = "slot_expert", .index = fmt::format("[{}, {}, {}, {}]", event, l, r, s)},
                "changes within the step, and engines place experts once. Plan with --residency static, or "
                "give the load");
          }
          map.slot_expert(l, r, s) = e;
          if (e != kNoExpert) tokens[e.index()] += plan.slot_tokens(event, l, r, s).value;
        }
      }
    }
    fill_empty(map.slot_expert[l], tokens);
  }
  return map;
}

std::string engine_file(const EngineMap& map, const EngineMapOptions& options) {
  switch (options.engine) {
    case Engine::kVllm:
      throw InputError({.field = "to"},
                       "vLLM reads no file of placements. Register foremoe.eplb.vllm_policy() in its workers instead");
    case Engine::kSglang:
      return sglang_file(map, options.dense_layers);
    case Engine::kTensorRtLlm:
      return tensorrt_llm_file(map, options.dense_layers);
    case Engine::kVllmAscend:
      return vllm_ascend_file(map, options.dense_layers);
  }
  return {};
}

void expect_extension(Engine engine, const std::string& path) {
  const bool is_yaml = path.ends_with(".yaml") || path.ends_with(".yml");
  if (engine == Engine::kTensorRtLlm ? is_yaml : path.ends_with(".json")) return;
  throw InputError({.field = "out"},
                   fmt::format("{} must end in {} for {}", path, engine == Engine::kTensorRtLlm ? ".yaml" : ".json",
                               to_string(engine)));
}

std::string_view to_string(Engine engine) {
  switch (engine) {
    case Engine::kVllm:
      return "vLLM";
    case Engine::kSglang:
      return "SGLang";
    case Engine::kTensorRtLlm:
      return "TensorRT-LLM";
    case Engine::kVllmAscend:
      return "vllm-ascend";
  }
  return {};
}

std::string engine_settings(const EngineMap& map, Engine engine, const std::string& path) {
  const std::size_t num_ranks = map.slot_expert.extent(1);
  const std::size_t redundant = num_ranks * map.slot_expert.extent(2) - static_cast<std::size_t>(map.num_experts);
  switch (engine) {
    case Engine::kVllm:
      return {};
    case Engine::kSglang:
      return fmt::format("--init-expert-location {} --ep-size {} --ep-num-redundant-experts {}", path, num_ranks,
                         redundant);
    case Engine::kTensorRtLlm:
      return fmt::format("moe_config: {{backend: WideEP, load_balancer: {}}}", path);
    case Engine::kVllmAscend:
      return "--additional-config '" + Json{{"eplb_config", {{"expert_map_path", path}}}}.dump() + "'";
  }
  return {};
}

}  // namespace foremoe
