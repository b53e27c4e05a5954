// Compares LPLB's token split with its linear program, solved by CLP.

#include <gtest/gtest.h>

#include <cmath>

#include "foremoe/policy/systems/finemoe/replica_load_lp.h"
#include "foremoe/policy/systems/lplb.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/testing/finemoe_instances.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using lplb::Edges;

StepPlan planned(const test::PolicyRun& run, Edges edges = Edges::kAutomatic) {
  return test::plan_of(*make_lplb({.edges = edges}), run);
}

// Compares our exact assignment with the linear program: the flows on edges that minimise the largest rank load.
void expect_as_clp(const StepPlan& plan, const LoadTable& load) {
  for (int l = 0; l < plan.num_layers(); ++l) {
    const planner::ReplicaGraph graph = finemoe::test::graph_of(
        plan.num_ranks(), finemoe::test::holders_of(plan.slot_expert.view()[0][l], load.load.extent(3)));
    finemoe::ReplicaLoadLp lp(graph, load.topology(), std::nullopt);
    Array<std::int64_t, 2> input({load.load.extent(2), load.load.extent(3)});
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      std::ranges::transform(load.load.view()[m][l].flat(), input.flat().begin(), [](Tokens t) { return t.value; });
      ASSERT_TRUE(lp.solve(input));
      EXPECT_EQ(std::llround(std::ceil(lp.objective() - 1e-6)), plan.max_load(m, l).value);
    }
  }
}

TEST(Lplb, ReachesTheOptimumOfItsLinearProgram) {
  for (const auto& [edges, ranks, guest_slots] : {std::tuple{Edges::kRing, 8, 1},
                                                  {Edges::kCube, 8, 2},
                                                  {Edges::kCube, 16, 4},
                                                  {Edges::kHypercube, 16, 2},
                                                  {Edges::kTorus, 16, 2}}) {
    const LoadTable load =
        test::random_load({.micro_steps = 4, .ranks = ranks, .experts = 4 * ranks, .ranks_per_node = 4}, 5, 4000);
    expect_as_clp(planned({.load = load, .guest_slots = guest_slots}, edges), load);
  }
}

TEST(Lplb, PlansTables) {
  for (const char* table : {"q30-ep8", "q30-ep16-bursty", "v3-ep64"}) {
    const std::string path = std::string("data/load-") + table + ".safetensors";
    const LoadTable load = take_first(read_load(path), 4, 1);
    for (const int guest_slots : {1, 2}) expect_as_clp(planned({.load = load, .guest_slots = guest_slots}), load);
  }
}

}  // namespace
}  // namespace foremoe
