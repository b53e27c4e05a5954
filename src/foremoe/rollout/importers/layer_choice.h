#pragma once

// Which recorded layers a trace keeps. Engines record all decoder layers or only those with experts, and zeros where
// they have no routes: in dense layers, but also in hash-routed layers, which have experts. Only the model can tell. If
// it is not named, its routes may fit exactly one preset.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct LayerChoice {
  std::vector<bool> kept;    // [recorded layers]
  std::vector<int> numbers;  // [recorded layers], in the model; empty: 0, 1, …
  std::vector<std::string> notes;
};

// `empty`: [recorded layers], without any route; hash_layers: what find_hash_layers() says of an unknown model. Throws
// InputError at `where` if the model has other layers, or if drop_empty would drop layers with experts.
LayerChoice choose_layers(const std::vector<bool>& empty, const std::optional<ModelShape>& model, bool drop_empty,
                          const Where& where, const std::string& hash_layers);

// Says which preset's hash-routed layers the empty ones are; empty if those of none or several.
std::string find_hash_layers(const std::vector<bool>& empty, int experts, int top_k);
inline constexpr const char* kRecordThem =
    "record them (the experts of tid2eid[token]), or give another model (a preset or config.json) as --model";

// If num_experts is the largest id + 1, and among the ids without weights of one preset, sets num_experts and
// weightless_experts to its numbers and says so; otherwise returns an empty string.
std::string find_weightless_experts(RoutingTrace& trace);

}  // namespace foremoe
