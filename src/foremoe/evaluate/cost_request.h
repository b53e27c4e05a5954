#pragma once

// Builds the cost model from the names or files of a cluster and a model, and checks that it fits a load.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/option.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct CostRequest {
  std::string cluster;              // name of a preset, or a file; empty: none
  std::string model;                // name of a preset, or a config.json; empty: none
  std::optional<Cluster> changed;   // `cluster` with changed values
  std::optional<ModelShape> shape;  // replaces `model`
  CostOptions options;
};

std::vector<Option> options_of(CostRequest& request);

// Options that describe a model without a preset. Until kv_heads is set, attention has one key head per query head.
std::vector<Option> options_of(ModelShape& shape);

// All functions below throw InputError, with field `cluster` or `model`.

// Cluster and model of a request. They can be read before the load.
struct NamedCost {
  std::optional<Cluster> cluster;
  std::optional<ModelShape> model;
  CostOptions options;
};
NamedCost read_cost(const CostRequest& request);

// The model must fit the load. Without a model, uses the only preset that fits.
CostModel find_cost_model(const NamedCost& named, const LoadTable& load);

// Returns nullopt if neither cluster nor model is given. Throws if only one of them is given.
std::optional<CostModel> find_cost_model_if_asked(const NamedCost& named, const LoadTable& load);

// "h100 × Qwen3-30B-A3B".
std::string describe(const CostModel& cost);

}  // namespace foremoe
