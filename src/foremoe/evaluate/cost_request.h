#pragma once

// On which cluster, and for which model, time is modelled: names or files, made into a cost model that fits a load.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/option.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct CostRequest {
  std::string cluster;              // a preset's name, or a file; empty: none
  std::string model;                // likewise, the file a config.json
  std::optional<Cluster> changed;   // that cluster, with other values
  std::optional<ModelShape> shape;  // the model, in place of a name
  CostOptions options;
};

std::vector<Option> options_of(CostRequest& request);

// A model that is no preset, key by key. Attention has as many heads of keys as of queries until kv_heads is set.
std::vector<Option> options_of(ModelShape& shape);

// All throw InputError, with field `cluster` or `model`.

// What a request names, read before there is a load.
struct NamedCost {
  std::optional<Cluster> cluster;
  std::optional<ModelShape> model;
  CostOptions options;
};
NamedCost read_cost(const CostRequest& request);

// The model must fit the load; where none is named, the one known model that fits is taken.
CostModel find_cost_model(const NamedCost& named, const LoadTable& load);

// None when neither cluster nor model is named; both must be where one is.
std::optional<CostModel> find_cost_model_if_asked(const NamedCost& named, const LoadTable& load);

// "h100 × Qwen3-30B-A3B".
std::string describe(const CostModel& cost);

}  // namespace foremoe
