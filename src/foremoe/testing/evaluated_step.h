#pragma once

// A small step on a cluster, for tests of evaluate().

#include <gtest/gtest.h>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/rollout/synthesis/synthesis.h"

namespace foremoe::test {

class EvaluatedStep : public testing::Test {
 protected:
  static CostModel cost_of(const LoadTable& load) {
    Cluster cluster = find_cluster("h100");
    cluster.ranks_per_node = load.ranks_per_node;
    return {cluster, *find_model_shape("Qwen3-30B-A3B"), {}};
  }

  ThreadPool pool_{1};
  Workload input_ = make_workload(synthesize_load(
      {.num_layers = 2, .num_experts = 128, .top_k = 8, .num_micro_steps = 4, .num_ranks = 8, .tokens_per_rank = 2048},
      GrpoRouting{}));
  CostModel cost_ = cost_of(input_.load);
};

}  // namespace foremoe::test
