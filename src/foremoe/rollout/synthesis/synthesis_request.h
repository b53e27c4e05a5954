#pragma once

// A user's specification of a synthesis: the name of a model's shape, numbers that override the shape, and the name and
// parameters of a routing model.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/rollout/synthesis/synthesis.h"

namespace foremoe {

struct SynthesisRequest {
  SynthesisOptions options;
  std::optional<int> layers, experts, top_k;           // none: from the shape, otherwise from the options
  std::optional<int> expert_groups, groups_per_token;  // both or none
  std::string shape;                                   // name of a model; empty: none
  std::string routing = "grpo";                        // or zipf, dirichlet, w0 … w7
  GrpoRouting grpo;
  ZipfRouting zipf;
  DirichletRouting dirichlet;
};

std::vector<Option> options_of(SynthesisRequest& request);

// Throw InputError, field `shape` or `routing`, for an unknown name. synthesis_options() also throws if only one of
// `groups_per_token` and `expert_groups` is given; the field is the missing option.
SynthesisOptions synthesis_options(const SynthesisRequest& request);
RoutingModel routing_model(const SynthesisRequest& request);

}  // namespace foremoe
