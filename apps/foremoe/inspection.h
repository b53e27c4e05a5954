#pragma once

// What `inspect` tells of a file: printed unless JSON is asked for, and returned as JSON.

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "foremoe/core/safetensors.h"
#include "input_options.h"
#include "planner_arguments.h"

namespace foremoe::cli {

struct InspectArguments {
  InputOptions input;
  std::optional<int> layer;  // to draw; none: the most uneven
  int rows = 64;             // micro-steps to draw
  std::string homes{kContiguous};
  bool json = false;
};

nlohmann::ordered_json inspect_rollout(const Safetensors& file, bool is_trace, const InspectArguments& arguments);
nlohmann::ordered_json inspect_plan(const Safetensors& file, const InspectArguments& arguments);

// The layer to draw. Throws InputError when --layer is none of the file's.
int layer_to_draw(const InspectArguments& arguments, int num_layers, int most_uneven);

// One layer of rank_loads: [micro_step][layer][rank], tokens.
void print_picture(const Array<Tokens, 3>& rank_loads, int layer, const InspectArguments& arguments);

}  // namespace foremoe::cli
