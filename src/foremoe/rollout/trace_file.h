#pragma once

// foremoe.trace/1 or 2: a recorded rollout as a safetensors file (docs/users/formats.md).
//
//   routed_experts  [tokens, layers, top_k]  U8, U16, I16 or I32
//   cu_seqlens      [sequences + 1]  I64
//   prompt_lengths, group_ids, micro_step, rank  [sequences]  I32, each optional; the last two together
//   metadata: num_experts, top_k; optional layer_ids (default 0, 1, …), model, origin, ranks, ranks_per_node;
//     version 2: weightless_experts, experts_of_layer, top_k_of_layer

#include <string>

#include "foremoe/core/safetensors.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

// Checks everything except routes, which remain in the mapped file and are checked when they are counted
// (count_routes.h). Throws InputError with file, field and index.
RoutingTrace read_trace(const Safetensors& file);
RoutingTrace read_trace(const std::string& path);

// Writes entries in their current type; version 2 only if a field needs it. `extra` metadata cannot override entries of
// the format.
void write_trace(const RoutingTrace& trace, const std::string& path, const Metadata& extra = {});

}  // namespace foremoe
