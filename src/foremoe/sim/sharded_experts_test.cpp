// Tests gathers and scatters of experts that are sharded over all ranks.

#include "foremoe/sim/sharded_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "foremoe/testing/simulated_plans.h"

namespace foremoe {
namespace {

using sim_test::homes_plan;
using sim_test::random_load;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

struct Case {
  explicit Case(int ranks, int ranks_per_node, int micro_steps = 2, int layers = 2)
      : random(7),
        load(random_load({.micro_steps = micro_steps,
                          .layers = layers,
                          .ranks = ranks,
                          .experts = 2 * ranks,
                          .ranks_per_node = ranks_per_node},
                         random)),
        plan(homes_plan(load, 1, Residency::kFree)),
        cost(round_cluster(ranks_per_node), round_model(layers, 2 * ranks), round_options()) {}

  SimulationInput input() const { return {.load = load, .plan = plan, .cost = cost}; }
  ShardedTransfers transfers(Phase phase, int depth = 2) const {
    return sharded_transfers(input(), turns_of(plan, phase), depth);
  }
  SimulatedPhase simulate(Phase phase) const {
    return simulate_phase(input(), {.phase = phase, .online = {.shards_experts = true}});
  }

  Random random;
  LoadTable load;
  StepPlan plan;
  CostModel cost;
};

// Bytes of weights received or gradients sent by a rank, within its node and between nodes.
struct Carried {
  std::int64_t near = 0;
  std::int64_t far = 0;
};

TEST(ShardedExperts, ARankGathersEqualPartsFromAllRanks) {
  for (const int ranks_per_node : {1, 2, 3, 6}) {
    const Case c(6, ranks_per_node);
    std::map<std::tuple<int, int, bool>, Carried> carried;  // turn, rank, gradient
    for (const Transfer& t : c.transfers(Phase::kPolicyUpdate).transfers) {
      const int turn = t.gradient ? t.begins.value : t.deadline.value;
      Carried& rank = carried[{turn, (t.gradient ? t.way.from : t.way.to).value, t.gradient}];
      const bool near = t.way.from.value / ranks_per_node == t.way.to.value / ranks_per_node;
      (near ? rank.near : rank.far) += t.bytes.value;
      EXPECT_NE(t.way.from, t.way.to);
    }
    ASSERT_EQ(carried.size(), 8U * 6 + 4U * 6) << "each of 8 turns gathers, 4 backward ones scatter";
    for (const auto& [of, rank] : carried) {
      const bool gradient = std::get<bool>(of);
      const std::int64_t part = 2 * (gradient ? c.cost.expert_gradient() : c.cost.expert_weights()).value / 6;
      EXPECT_EQ(rank.near, (ranks_per_node - 1) * part);
      EXPECT_EQ(rank.far, (6 - ranks_per_node) * part);
    }
  }
}

TEST(ShardedExperts, ASmallerNodeReceivesMoreFromOtherNodes) {
  const Case c(5, 3);
  std::map<int, Carried> carried;
  for (const Transfer& t : c.transfers(Phase::kRecompute).transfers) {
    if (t.deadline != TurnId{0}) continue;
    const bool near = t.way.from.value / 3 == t.way.to.value / 3;
    (near ? carried[t.way.to.value].near : carried[t.way.to.value].far) += t.bytes.value;
  }
  const std::int64_t part = 2 * c.cost.expert_weights().value / 5;
  ASSERT_EQ(carried.size(), 5U);
  for (const auto& [rank, bytes] : carried) {
    EXPECT_EQ(bytes.near, (rank < 3 ? 2 : 1) * part) << "rank " << rank;
    EXPECT_EQ(bytes.far, (rank < 3 ? 2 : 3) * part) << "rank " << rank;
  }
}

TEST(ShardedExperts, GuestsAreGatheredAndEmptySlotsAreNot) {
  Case c(4, 2);
  const ShardedTransfers before = c.transfers(Phase::kRecompute);
  EXPECT_EQ(before.gathered, 4 * 4 * 2) << "four turns, four ranks, two homes";
  c.plan.slot_expert(1, 0, 3, 2) = ExpertId{0};
  EXPECT_EQ(c.transfers(Phase::kRecompute).gathered, before.gathered + 1);
}

TEST(ShardedExperts, DepthBuffersDetermineTheEarliestStart) {
  const Case c(4, 2, 1, 3);  // forward of layers 0, 1, 2, then backward of 2, 1, 0
  for (const Transfer& t : c.transfers(Phase::kPolicyUpdate, 2).transfers) {
    if (t.gradient) {
      const int deadline = std::min(t.begins.value + 2, 6);
      EXPECT_EQ(t.deadline, TurnId{deadline});
      EXPECT_EQ(t.moment, Moment::kExpertsDone);
    } else {
      EXPECT_EQ(t.begins, TurnId{std::max(0, t.deadline.value - 1)});
    }
  }
  // With one micro-step in flight, the next backward needs the same set of gradient buffers.
  const Case two(4, 2, 2, 2);  // forward, forward, backward, backward, twice
  for (const Transfer& t : two.transfers(Phase::kPolicyUpdate, 2).transfers) {
    if (!t.gradient || t.begins != TurnId{2}) continue;
    EXPECT_EQ(t.deadline, TurnId{6}) << "turns 4 and 5 are forward";
  }
}

TEST(ShardedExperts, ANewPlacementAddsNoTransfers) {
  Case c(4, 2, 4, 2);
  const SimulatedPhase stays = c.simulate(Phase::kPolicyUpdate);
  for (int l = 0; l < 2; ++l) {  // two ranks exchange experts from micro-step 1 on; equal loads, equal rows
    for (int t = 1; t < c.plan.num_events(); ++t) {
      std::swap(c.plan.slot_expert(t, l, 0, 0), c.plan.slot_expert(t, l, 3, 0));
      std::swap(c.plan.slot_tokens(t, l, 0, 0), c.plan.slot_tokens(t, l, 3, 0));
    }
  }
  const SimulatedPhase moves = c.simulate(Phase::kPolicyUpdate);
  ASSERT_EQ(stays.traffic.size(), moves.traffic.size());
  for (std::size_t i = 0; i < stays.traffic.size(); ++i) {
    EXPECT_EQ(stays.traffic[i].copies, moves.traffic[i].copies) << stays.traffic[i].link;
    EXPECT_EQ(stays.traffic[i].gradients, moves.traffic[i].gradients) << stays.traffic[i].link;
  }
  EXPECT_EQ(stays.memory.guest_weights, moves.memory.guest_weights);
  EXPECT_EQ(stays.arena, Bytes{0});
  EXPECT_EQ(stays.path, PathChoice::kPeer);
}

TEST(ShardedExperts, NeedMemoryForDepthTurnsOfWholeExperts) {
  const Case c(4, 2);
  const SimulatedPhase update = c.simulate(Phase::kPolicyUpdate);
  EXPECT_EQ(update.memory.guest_weights.value, 2 * 3 * c.cost.expert_weights().value);
  EXPECT_EQ(update.memory.guest_gradients.value, 2 * 3 * c.cost.expert_gradient().value);
  EXPECT_EQ(c.simulate(Phase::kRecompute).memory.guest_gradients, Bytes{0});
}

// Every rank serves only its own rows, so only the computation before the experts hides the first gather.
TEST(ShardedExperts, TheFirstGatherIsHiddenOnlyByConcurrentComputation) {
  std::vector<std::vector<int>> own(4, std::vector<int>(8));
  for (std::size_t r = 0; r < 4; ++r) own[r][2 * r] = own[r][2 * r + 1] = 3;
  const LoadTable load = sim_test::one_layer({own}, 4);
  const StepPlan plan = homes_plan(load, 0, Residency::kFree);
  const CostModel cost(round_cluster(4), round_model(1, 8), round_options());
  const SimulatedPhase phase = simulate_phase({.load = load, .plan = plan, .cost = cost},
                                              {.phase = Phase::kRecompute, .online = {.shards_experts = true}});
  const double gather = 2.0 * static_cast<double>(cost.expert_weights().value) * 3 / 4 / 8000;
  ASSERT_EQ(phase.parts.dispatch, 0);
  ASSERT_LT(phase.parts.dense, gather);
  EXPECT_NEAR(phase.parts.exposed_copies, gather - phase.parts.dense, 1e-12);
}

}  // namespace
}  // namespace foremoe
