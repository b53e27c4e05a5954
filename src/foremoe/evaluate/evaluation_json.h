#pragma once

// Evaluations as JSON: the keys that docs/users/formats.md explains.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// {policy, skipped} where there is no plan. Otherwise the figures and planning times; `ok` and, if any, `violations`
// with `checked`; and, of a simulated step, its figures.
nlohmann::ordered_json to_json(const Evaluation& evaluation, bool checked);

// One phase, as `phases` of a simulated step has two.
nlohmann::ordered_json to_json(const SimulatedPhase& phase);

// {micro_steps, layers, ranks, ranks_per_node, experts, top_k}.
nlohmann::ordered_json shape_json(const LoadTable& load);

}  // namespace foremoe
