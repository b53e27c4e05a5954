#pragma once

// What of a model's shape load balancing depends on, and the models that people post-train.

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "foremoe/core/units.h"

namespace foremoe {

struct ModelShape {
  std::string name;
  int moe_layers = 0;
  int dense_layers = 0;    // layers with an ordinary feed-forward block, before the MoE layers
  int experts = 0;         // routed experts per MoE layer
  int top_k = 0;           // routed experts per token
  int shared_experts = 0;  // that every token visits on its own rank, besides top_k
  int hidden = 0;          // width of a token
  int intermediate = 0;    // width inside one routed expert

  // Gate, up and down projections of one routed expert: 3 · hidden · intermediate.
  std::int64_t expert_parameters() const { return std::int64_t{3} * hidden * intermediate; }
  Bytes expert_bytes(int bytes_per_parameter = 2) const { return Bytes{expert_parameters() * bytes_per_parameter}; }

  // Multiply and add of one token in one routed expert, forward.
  std::int64_t flops_per_assignment() const { return 2 * expert_parameters(); }
};

std::span<const ModelShape> model_shapes();

// By name, whatever the case: "qwen3-30b-a3b". None when unknown.
std::optional<ModelShape> find_model_shape(std::string_view name);

}  // namespace foremoe
