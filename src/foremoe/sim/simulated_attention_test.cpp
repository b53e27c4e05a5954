// Tests the scores of attention, from the lengths of sequences or from their mean.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/testing/simulated_steps.h"

namespace foremoe {
namespace {

using sim_test::homes_plan;
using sim_test::kNear;
using sim_test::one_layer;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

// One micro-step. Both ranks have 50 tokens, and experts compute 50 rows on each.
struct Attended {
  LoadTable load = one_layer({{{25, 25}, {25, 25}}});
  StepPlan plan = homes_plan(load, 0);
  ModelShape model = round_model(1, 2);
  CostOptions options = round_options();

  Attended() { options.sequence_tokens = std::nullopt; }

  // squares: [rank], Σ length²; empty: unknown.
  SimulatedPhase phase(Phase phase, std::vector<double> squares = {}) const {
    const CostModel cost(round_cluster(), model, options);
    ArrayView<const double, 2> lengths;
    if (!squares.empty()) lengths = {squares.data(), {1, squares.size()}};
    return simulate_phase({.load = load, .plan = plan, .cost = cost, .squared_lengths = lengths}, {.phase = phase});
  }
};

constexpr double kOneOf50 = 50 * 50;
constexpr double kTwoOf25 = 2 * 25 * 25;

TEST(SimulatedAttention, TheRankWithTheLongestSequencesDelaysTheOther) {
  const Attended step;
  // One head, keys and values of width 1: 2 · (1 + 1) · Σ length² / 2 FLOPs, at 60,000 per second. A backward repeats
  // the forward and computes 2.5 times as much.
  const double once = 2 * (kOneOf50 - kTwoOf25) / 60'000;
  for (const auto& [phase, passes] : {std::pair{Phase::kRecompute, 1.0}, {Phase::kPolicyUpdate, 1 + 1 + 2.5}}) {
    const SimulatedPhase even = step.phase(phase, {kTwoOf25, kTwoOf25});
    const SimulatedPhase uneven = step.phase(phase, {kOneOf50, kTwoOf25});
    EXPECT_EQ(uneven.attention, Attention::kSequences);
    EXPECT_NEAR(uneven.seconds - even.seconds, passes * once, kNear);
    EXPECT_NEAR(uneven.parts.dense - even.parts.dense, passes * once, kNear);
    EXPECT_EQ(uneven.seconds, step.phase(phase, {kTwoOf25, kOneOf50}).seconds) << "either rank waits for the other";
    EXPECT_NEAR(uneven.utilisation * uneven.seconds - even.utilisation * even.seconds, passes * once / 2, kNear)
        << "one of two ranks computes more";
  }
}

TEST(SimulatedAttention, DenseLayersOfTheModelAttendToo) {
  Attended step;
  step.model.dense_layers = 3;
  step.model.dense_intermediate = 10;
  const double more = step.phase(Phase::kRecompute, {kOneOf50, kTwoOf25}).seconds -
                      step.phase(Phase::kRecompute, {kTwoOf25, kTwoOf25}).seconds;
  EXPECT_NEAR(more, (1 + 3) * 2 * (kOneOf50 - kTwoOf25) / 60'000, kNear);
}

TEST(SimulatedAttention, SequencesOfEqualLengthTakeTheTimeOfTheirMean) {
  Attended step;
  const double by_sequence = step.phase(Phase::kPolicyUpdate, {kTwoOf25, kTwoOf25}).seconds;
  step.options.sequence_tokens = 25;
  EXPECT_EQ(step.phase(Phase::kPolicyUpdate).seconds, by_sequence);
}

TEST(SimulatedAttention, AGivenMeanOverridesLengths) {
  Attended step;
  const SimulatedPhase unknown = step.phase(Phase::kPolicyUpdate);
  EXPECT_EQ(unknown.attention, Attention::kMean);
  EXPECT_NE(step.phase(Phase::kPolicyUpdate, {kOneOf50, kTwoOf25}).seconds, unknown.seconds);
  step.options.sequence_tokens = 4096;
  const SimulatedPhase given = step.phase(Phase::kPolicyUpdate, {kOneOf50, kTwoOf25});
  EXPECT_EQ(given.attention, Attention::kMean);
  EXPECT_EQ(given.seconds, unknown.seconds);
}

TEST(SimulatedAttention, BothPhasesOfAStepUseLengths) {
  const Attended step;
  const CostModel cost(round_cluster(), step.model, step.options);
  const std::vector<double> squares{kOneOf50, kTwoOf25};
  const SimulatedStep whole = simulate_step(
      {.load = step.load, .plan = step.plan, .cost = cost, .squared_lengths = {squares.data(), {1, 2}}}, nullptr, {});
  EXPECT_EQ(whole.recompute.seconds, step.phase(Phase::kRecompute, squares).seconds);
  EXPECT_EQ(whole.policy_update.seconds, step.phase(Phase::kPolicyUpdate, squares).seconds);
}

TEST(SimulatedAttention, LengthsRepeatWithTheLoad) {
  const LoadTable once = one_layer({{{25, 25}, {25, 25}}, {{5, 5}, {5, 5}}});
  const LoadTable twice = one_layer({{{25, 25}, {25, 25}}, {{5, 5}, {5, 5}}, {{25, 25}, {25, 25}}, {{5, 5}, {5, 5}}});
  const StepPlan plan = homes_plan(twice, 0);
  const CostModel cost(round_cluster(), round_model(1, 2), {.dispatch = Dispatch::kRow});
  const auto seconds = [&](const LoadTable& load, const std::vector<double>& squares) {
    return simulate_phase({.load = load,
                           .plan = plan,
                           .cost = cost,
                           .squared_lengths = {squares.data(), {squares.size() / 2, 2}},
                           .repeat_load = true},
                          {})
        .seconds;
  };
  const double whole = seconds(twice, {2500, 1250, 50, 100, 2500, 1250, 50, 100});
  EXPECT_EQ(seconds(once, {2500, 1250, 50, 100}), whole);
  EXPECT_EQ(seconds(once, {2500, 1250, 50, 100, 0, 0, 0, 0}), whole) << "the load was cut to its first micro-steps";
}

TEST(SimulatedAttention, RejectsLengthsOfOtherRanks) {
  EXPECT_THAT(
      [] {
        (void)Attended().phase(Phase::kRecompute, {1, 2, 3});
      },
      testing::ThrowsMessage<InputError>("squared_lengths: [1, 3], the load has 1 micro-steps and 2 ranks"));
}

}  // namespace
}  // namespace foremoe
