#pragma once

// Describes the choice of a layout: the recommendation, the trainer's options, and the figures as JSON.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "foremoe/evaluate/layout.h"

namespace foremoe {

std::string describe_plan(const PlannerOptions& planner);  // "2 guest slots, resident, balance"
// The trainer's options for the best layout: those of Megatron-LM, and of ForeMoE if it is planned.
std::vector<std::string> trainer_options(const LayoutChoice& choice, const ModelShape& model);
std::string recommendation(const LayoutChoice& choice);  // one sentence
// Parts of a job that these seconds do not include, and whether the routes are synthetic.
std::vector<std::string> layout_remarks(const Workload& whole, const CostModel& cost);
// What `foremoe layout --json` prints.
nlohmann::ordered_json to_json(const LayoutChoice& choice, const Workload& whole, const CostModel& cost);

}  // namespace foremoe
