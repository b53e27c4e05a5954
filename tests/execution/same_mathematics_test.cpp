// Tests every residency, phase, path and order on several seeds: results equal the float64 reference, and bits do not
// depend on the timing of copies.

#include "execution.h"

namespace foremoe::test {
namespace {

constexpr double kFloat32Bound = 1e-5;

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (const Phase phase : {Phase::kRecompute, Phase::kPolicyUpdate}) {
    for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}) {
      for (const PathChoice path : {PathChoice::kAuto, PathChoice::kHost, PathChoice::kPeer}) {
        for (const int in_flight : {1, 2, 3}) {
          if (residency == Residency::kFree && phase == Phase::kPolicyUpdate) continue;
          if (phase == Phase::kRecompute && in_flight > 1) continue;
          all.push_back({.residency = residency, .phase = phase, .in_flight = in_flight, .path = path});
        }
      }
    }
  }
  return all;
}

TEST(ExecutionOnThreads, EqualsTheReferenceForEveryResidencyPhasePathAndOrder) {
  for (Scenario scenario : scenarios()) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      scenario.seed = seed;
      const Execution execution = execute(scenario);
      const ReferenceResult reference = reference_of(scenario, execution);
      EXPECT_LE(largest_error(execution, reference, scenario), kFloat32Bound) << scenario.name();
      if (scenario.phase == Phase::kPolicyUpdate) {
        EXPECT_NEAR(execution.ranks[0].loss, reference.loss, 1e-5 * reference.loss) << scenario.name();
      }
      for (const RankResult& rank : execution.ranks) EXPECT_EQ(rank.figures.fallbacks, 0);
    }
  }
}

TEST(ExecutionOnThreads, RowsWithoutARouteFindTheirExpertsUnderFree) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Scenario scenario{
        .seed = seed, .missing = 0.5, .residency = Residency::kFree, .phase = Phase::kRecompute, .guest_slots = 1};
    const Execution execution = execute(scenario);
    EXPECT_LE(largest_error(execution, reference_of(scenario, execution), scenario), kFloat32Bound) << scenario.name();
  }
}

TEST(ExecutionOnThreads, PlansOfTheseTestsContainCopies) {
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared}) {
    const Execution execution = execute({.residency = residency});
    EXPECT_GT(execution.schedule->copies.size(), 0U) << to_string(residency);
  }
}

TEST(ExecutionOnThreads, ProducesTheSameBitsWithAndWithoutOverlap) {
  for (Scenario scenario : scenarios()) {
    const Execution with = execute(scenario);
    scenario.overlap = false;
    expect_same_bits(with, execute(scenario), scenario.name());
    scenario.overlap = true;
    scenario.depth = 4;
    if (scenario.residency != Residency::kShared) expect_same_bits(with, execute(scenario), scenario.name());
  }
}

TEST(ExecutionOnThreads, VanillaEqualsTheReference) {
  for (const Phase phase : {Phase::kRecompute, Phase::kPolicyUpdate}) {
    const Scenario scenario{.policy = "vanilla", .phase = phase};
    const Execution execution = execute(scenario);
    EXPECT_LE(largest_error(execution, reference_of(scenario, execution), scenario), kFloat32Bound);
    EXPECT_EQ(execution.schedule->copies.size(), 0U);
  }
}

TEST(ExecutionOnThreads, OutputsEqualVanillaBitwiseWithPositionIndependentRows) {
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared}) {
    Scenario scenario{.residency = residency, .phase = Phase::kRecompute, .position_independent = true};
    const Execution balanced = execute(scenario);
    scenario.policy = "vanilla";
    const Execution vanilla = execute(scenario);
    for (std::size_t r = 0; r < vanilla.ranks.size(); ++r) {
      EXPECT_EQ(balanced.ranks[r].output, vanilla.ranks[r].output) << to_string(residency) << ", rank " << r;
    }
  }
}

TEST(ExecutionOnThreads, RunsOnAnyNumberOfRanksAndNodes) {
  for (const Topology topology : {Topology{1, 1}, Topology{2, 1}, Topology{4, 4}, Topology{8, 3}}) {
    const Scenario scenario{.topology = topology};
    const Execution execution = execute(scenario);
    EXPECT_LE(largest_error(execution, reference_of(scenario, execution), scenario), kFloat32Bound)
        << topology.num_ranks << " ranks";
  }
}

TEST(ExecutionOnThreads, RowsComputedEqualThePlansQuotas) {
  const Scenario scenario{.missing = 0};
  const Execution execution = execute(scenario);
  for (int t = 0; t < execution.schedule->order.size(); ++t) {
    const Turn& turn = execution.schedule->order[TurnId{t}];
    for (int r = 0; r < scenario.topology.num_ranks; ++r) {
      std::int64_t quota = 0;
      for (const Tokens n : execution.plan.slot_tokens.row(turn.event, turn.layer, r)) quota += n.value;
      EXPECT_EQ(execution.ranks[static_cast<std::size_t>(r)].figures.turns[static_cast<std::size_t>(t)].rows, quota);
    }
  }
}

TEST(ExecutionOnThreads, GuestMemoryEqualsThePrediction) {
  for (const Scenario& scenario : scenarios()) {
    const Execution execution = execute(scenario);
    const GuestMemory predicted =
        guest_memory(execution.plan, swiglu_layout(scenario.hidden, scenario.intermediate), *execution.schedule);
    for (const RankResult& rank : execution.ranks) {
      EXPECT_EQ(rank.figures.guest_weights, predicted.weights) << scenario.name();
      EXPECT_EQ(rank.figures.guest_gradients, predicted.gradients) << scenario.name();
    }
  }
}

}  // namespace
}  // namespace foremoe::test
