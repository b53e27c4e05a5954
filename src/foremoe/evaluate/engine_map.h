#pragma once

// Initial placements of experts for inference engines, in the file formats that they read at start.
//
//   SGLang        JSON, --init-expert-location: {"physical_to_logical_map": [[expert, …], …]}, one row per layer of the
//                 model. Dense layers have rows, too, which are not used; they contain the experts in order.
//                 (srt/eplb/expert_location.py at 01fec5c)
//   TensorRT-LLM  YAML, moe_config.load_balancer: num_slots, initial_global_assignments by layer of the model, and
//                 layer_updates_per_iter, here 0: the placement is not changed. (llmapi/llm_args.py, and
//                 examples/wide_ep/ep_load_balancer at 2a595f8)
//   vllm-ascend   JSON, eplb_config.expert_map_path, of model runner V1: MoE layers, devices, experts. An expert must
//                 not occur twice on a device. (eplb/core/eplb_utils.py at 182b75e)
// vLLM reads no such file (pull request 41141 would add one).

#include <optional>
#include <string>
#include <string_view>

#include "foremoe/core/array.h"
#include "foremoe/core/option.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

enum class Engine : std::uint8_t { kVllm, kSglang, kTensorRtLlm, kVllmAscend };

struct EngineMapOptions {
  Engine engine = Engine::kSglang;
  std::optional<int> ranks;  // of the engine; none: as recorded
  int guest_slots = 1;       // replicas per rank beyond those of all experts
  int expert_groups = 1;     // of consecutive experts; a multiple of the nodes keeps each group on one node
  int dense_layers = 0;      // before the first MoE layer
};
std::vector<Option> options_of(EngineMapOptions& options);

struct EngineMap {
  Array<ExpertId, 3> slot_expert;  // [MoE layer][rank][slot], none empty
  int num_experts = 0;
};

// Places experts by the counts of a load: each micro-step is a window of place_for_next_window(). Throws InputError if
// the replicas cannot be divided among the ranks.
EngineMap place_for_engine(const LoadTable& load, const EngineMapOptions& options);

// Returns the placement of a plan that never changes it. Gives each empty slot, in ascending order, to the expert with
// the most planned tokens per replica among those that its rank does not have. Throws InputError, with event, layer,
// rank and slot, if a slot's expert changes.
EngineMap place_for_engine(const StepPlan& plan, const std::string& path);

// Returns the contents of the engine's file. Throws InputError for kVllm, with the remedy, and for a placement or an
// option that the engine does not accept.
std::string engine_file(const EngineMap& map, const EngineMapOptions& options);

// Throws InputError, field `out`, unless the engine accepts the file's extension.
void expect_extension(Engine engine, const std::string& path);

std::string_view to_string(Engine engine);  // "SGLang", …

// Returns the settings with which the engine reads the file.
std::string engine_settings(const EngineMap& map, Engine engine, const std::string& path);

}  // namespace foremoe
