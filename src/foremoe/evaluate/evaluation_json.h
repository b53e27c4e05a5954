#pragma once

// Evaluations as JSON. docs/users/formats.md explains the keys.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// Without a plan: {policy, skipped}. Otherwise: figures and planning times, with `checked` also `ok` and any
// `violations`, and the figures of the simulated step, if any.
nlohmann::ordered_json to_json(const Evaluation& evaluation, bool checked);

// One entry of `phases`.
nlohmann::ordered_json to_json(const SimulatedPhase& phase);

// {micro_steps, layers, ranks, ranks_per_node, experts, top_k}.
nlohmann::ordered_json shape_json(const LoadTable& load);

}  // namespace foremoe
