#pragma once

// On which cluster and for which model time is modelled: --cluster, --model and what the model takes for granted.

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/rollout/load_table.h"
#include "input_options.h"
#include "planner_arguments.h"

namespace foremoe::cli {

struct CostArguments {
  std::string cluster;  // a preset's name, or a file; empty: not given
  std::string model;    // likewise, the file a config.json
  CostOptions options;
};

enum class CostUse { kRequired, kOptional };

void add_cost_options(CLI::App& command, CostArguments& arguments, CostUse use);

// Throws InputError: an unknown cluster or model, or one of them given without the other.
CostModel cost_model(const CostArguments& arguments);
// None when neither was given.
std::optional<CostModel> cost_model_if_given(const CostArguments& arguments);

// Throws InputError when the load cannot be of this model: other experts, or more layers. A load of fewer layers is a
// part of the model.
void expect_model_fits(const CostModel& cost, const LoadTable& load);

// The ranks of a node are the cluster's where the user does not say otherwise.
void take_nodes_of(const Cluster& cluster, InputOptions& input);

// The planner's options, with --max-copies-per-rank hidden made a number: the copies that a rank receives while one
// layer of a mean micro-step of the load computes, from its host and, where all ranks are of one node, from peers too:
// a peer on another node is out of their reach, the host has every expert. Throws InputError when hidden was asked for
// without a cost model, and when the model does not fit the load.
PlannerOptions within_cost(const PlannerArguments& planner, const std::optional<CostModel>& cost,
                           const LoadTable& load);

// "h100 × Qwen3-30B-A3B": for tables and titles.
std::string describe(const CostModel& cost);

}  // namespace foremoe::cli
