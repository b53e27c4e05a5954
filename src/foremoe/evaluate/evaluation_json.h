#pragma once

// Evaluations as JSON. docs/users/formats.md explains the keys.

#include <nlohmann/json_fwd.hpp>

#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/fit.h"
#include "foremoe/evaluate/groups.h"

namespace foremoe {

// Returns {policy, skipped} without a plan. Otherwise returns figures, planning times and the figures of the simulated
// step, if any. If `checked` is true, adds `ok` and any `violations`.
nlohmann::ordered_json to_json(const Evaluation& evaluation, bool checked);

// What `foremoe compare --json` and `simulate --json` print: an array of evaluations. If the job was split, they also
// have slowest_group, ep and groups: [{group, first_rank, …}], the evaluation of each group.
nlohmann::ordered_json to_json(const JobEvaluation& job, bool checked);

// One entry of `phases`.
nlohmann::ordered_json to_json(const SimulatedPhase& phase);

// What `foremoe fit --json` prints. If the job was split, also ep and groups, in which ranks count within the group.
nlohmann::ordered_json to_json(const JobFit& fit, std::optional<Bytes> budget);

// {micro_steps, layers, ranks, ranks_per_node, experts, top_k}.
nlohmann::ordered_json shape_json(const LoadTable& load);

}  // namespace foremoe
