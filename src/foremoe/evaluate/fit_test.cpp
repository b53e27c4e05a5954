// Compares fit() with the simulator and with sums over the plan, and tests the search for guest slots and break-even.

#include "foremoe/evaluate/fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/testing/evaluated_step.h"

namespace foremoe {
namespace {

class FitTest : public test::EvaluatedStep {
 protected:
  Fit fit_with(EvaluateOptions options, const std::string& policy = "foremoe") {
    return fit({.policy = policy_named(policy), .workload = input_}, options, {.pool = pool_, .cost = &cost_});
  }

  // A step whose activations weigh more than its guests.
  void keep_activations() {
    input_ = make_workload(synthesize_load({.num_layers = 2,
                                            .num_experts = 128,
                                            .top_k = 8,
                                            .num_micro_steps = 4,
                                            .num_ranks = 8,
                                            .tokens_per_rank = 8192},
                                           GrpoRouting{.group_spread = 1}));
    cost_ = {cost_.cluster(), cost_.model(), {.recompute_activations = false}};
  }
};

// The rows of a rank, from the slots.
std::int64_t rows_of(const StepPlan& plan, int event, int layer, int rank) {
  std::int64_t rows = 0;
  for (const Tokens tokens : plan.slot_tokens.row(event, layer, rank)) rows += tokens.value;
  return rows;
}

TEST_F(FitTest, PeaksOfRowsAreThoseOfThePlan) {
  for (const int in_flight : {1, 3}) {
    const Fit f = fit_with({.planner = {.guest_slots = 1, .in_flight = in_flight}});
    for (const FitOfPlan* of : {&f.now, &f.planned}) {
      std::vector<std::int64_t> ranks(8);
      std::int64_t most = 0;
      for (const Phase phase : {Phase::kRecompute, Phase::kPolicyUpdate}) {
        const StepPlan& plan = of->evaluation.plan_of(phase);
        for (int t = 0; t < plan.num_events(); ++t) {
          for (int l = 0; l < 2; ++l) {
            for (int r = 0; r < 8; ++r) {
              const std::int64_t rows = rows_of(plan, t, l, r);
              ranks[static_cast<std::size_t>(r)] = std::max(ranks[static_cast<std::size_t>(r)], rows);
              most = std::max(most, rows);
              EXPECT_LE(Tokens{rows}, of->layers[static_cast<std::size_t>(l)].rows);
              EXPECT_LE(Tokens{rows}, of->micro_steps[plan.event_micro_step[EventId{t}.index()].index()].rows);
            }
          }
        }
      }
      EXPECT_EQ(of->most_rows.rows, Tokens{most});
      EXPECT_EQ(of->most_rows.rows, of->evaluation.step->peak_tokens_per_rank);
      for (std::size_t r = 0; r < 8; ++r) EXPECT_EQ(of->ranks[r].rows, Tokens{ranks[r]});
      for (const auto* peaks : {&of->ranks, &of->layers, &of->micro_steps}) {
        EXPECT_EQ(std::ranges::max(*peaks, {}, &FitPeak::rows).rows, Tokens{most});
      }
    }
    EXPECT_LT(f.planned.most_rows.rows, f.now.most_rows.rows);
  }
}

TEST_F(FitTest, MemoryIsTheSimulatorsAndTheSumOfItsTerms) {
  keep_activations();
  for (const std::string policy : {"foremoe", "eplb", "ultraep", "feplb"}) {
    for (const int in_flight : {1, 2}) {
      if (policy == "eplb" && in_flight > 1) continue;  // forward only
      const Fit f = fit_with({.planner = {.guest_slots = 1, .in_flight = in_flight}}, policy);
      for (const FitOfPlan* of : {&f.now, &f.planned}) {
        EXPECT_EQ(of->most_memory.memory, of->evaluation.step->memory_bytes_per_rank) << policy;
        EXPECT_EQ(of->terms.state + of->terms.guest_weights + of->terms.guest_gradients + of->activations.sum(),
                  of->most_memory.memory);
        EXPECT_EQ(of->activations.working.value,
                  of->most_memory.rows.value * cost_.working_memory_per_row(Pass::kBackward).value);
      }
      EXPECT_EQ(f.now.terms.guest_weights, Bytes{0});
    }
  }
}

TEST_F(FitTest, KeptActivationsAreThoseOfTheMicroStepsInFlight) {
  keep_activations();
  const Fit f = fit_with({.planner = {.in_flight = 2}}, "vanilla");
  const FitOfPlan& of = f.now;
  ASSERT_EQ(of.most_memory.phase, Phase::kPolicyUpdate);
  // F0 F1 B0 F2 B1 F3 B2 B3: two consecutive micro-steps, 48 layers of which 2 are in the load.
  const StepPlan& plan = of.evaluation.plan;
  std::int64_t most = 0;
  for (int m = 0; m < 3; ++m) {
    std::int64_t kept = 0;
    for (const int step : {m, m + 1}) {
      const int forward =
          static_cast<int>(std::ranges::find(plan.event_micro_step, MicroStepId{step}) - plan.event_micro_step.begin());
      std::int64_t rows = 0;
      std::int64_t own = 0;
      for (int l = 0; l < 2; ++l) rows += rows_of(plan, forward, l, of.most_memory.rank.value);
      for (const Tokens tokens : input_.load.load.row(step, 0, of.most_memory.rank)) own += tokens.value;
      kept += own / 8 * 48 * cost_.activations_per_token().value + 24 * rows * cost_.activations_per_row().value;
    }
    most = std::max(most, kept);
  }
  EXPECT_EQ(of.activations.kept, Bytes{most});
}

TEST_F(FitTest, TheLimitIsExceededFirstWhereMemoryPassesIt) {
  keep_activations();
  const auto at = [&](Bytes limit) {
    return fit_with({.memory_budget_gigabytes = static_cast<double>(limit.value) / kBytesPerGigabyte}).now;
  };
  const FitOfPlan peak = at(Bytes{1});
  ASSERT_TRUE(peak.exceeds);
  EXPECT_EQ(peak.exceeds->phase, Phase::kRecompute);
  EXPECT_EQ(peak.exceeds->micro_step, MicroStepId{0});
  EXPECT_EQ(peak.largest_micro_batch, Tokens{0});

  const Bytes most = peak.most_memory.memory;
  EXPECT_FALSE(at(most + Bytes{1'000'000}).exceeds);
  const FitOfPlan last = at(most - Bytes{1'000'000});
  ASSERT_TRUE(last.exceeds);
  EXPECT_EQ(last.exceeds->rank, peak.most_memory.rank);
  EXPECT_EQ(last.exceeds->layer, peak.most_memory.layer);
  EXPECT_EQ(last.exceeds->micro_step, peak.most_memory.micro_step);
  EXPECT_LT(last.largest_micro_batch, Tokens{8192});
  EXPECT_GE(at(most + Bytes{1'000'000}).largest_micro_batch, mean_tokens_per_rank(input_.load));
}

TEST_F(FitTest, FindsTheFewestGuestSlotsThatFit) {
  keep_activations();
  const Fit free = fit_with({.memory_budget_gigabytes = 1000});
  EXPECT_EQ(free.fewest_guest_slots, 0) << "vanilla fits";
  const auto gigabytes = [](Bytes bytes) { return static_cast<double>(bytes.value) / kBytesPerGigabyte; };
  const Bytes one = free.planned.most_memory.memory;
  ASSERT_LT(one, free.now.most_memory.memory);

  const Fit f = fit_with({.planner = {.guest_slots = 2}, .memory_budget_gigabytes = gigabytes(one) + 0.001});
  EXPECT_EQ(f.fewest_guest_slots, 1);
  ASSERT_EQ(f.tried.size(), 2);
  EXPECT_EQ(f.tried[1].memory, one);

  const Fit none = fit_with({.memory_budget_gigabytes = 1});
  EXPECT_FALSE(none.fewest_guest_slots);
  EXPECT_EQ(none.tried.size(), 5);
}

TEST_F(FitTest, RefusesAPolicyWithoutAPlan) {
  class Skips final : public Policy {
   public:
    std::string_view name() const override { return "skips"; }
    std::string_view summary() const override { return "has no plan"; }
    bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
    PolicyResult plan(const PolicyInput& /*input*/, ThreadPool& /*pool*/) const override {
      return Skipped{"not today"};
    }
  };
  const Skips skips;
  try {
    fit({.policy = skips, .workload = input_}, {}, {.pool = pool_, .cost = &cost_});
    FAIL() << "expected an InputError";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("policy skips cannot plan it: not today"));
  }
}

TEST_F(FitTest, BreakEvenIsTheFewestRowsThatTakeAsLongAsTheCopy) {
  const Topology two_nodes{.num_ranks = 16, .ranks_per_node = 8};
  EXPECT_EQ(break_even(cost_, {.num_ranks = 8, .ranks_per_node = 8}).size(), 2) << "peers and host";
  const std::vector<BreakEven> paths = break_even(cost_, two_nodes);
  ASSERT_EQ(paths.size(), 3);
  EXPECT_LT(paths[0].recompute_rows, paths[2].recompute_rows) << "peers are faster than the host";
  EXPECT_FALSE(paths[1].hiding_tokens) << "unknown for the network";
  for (const BreakEven& even : paths) {
    const auto update = [&](Tokens rows) {
      return cost_.experts({&rows, 1}, Pass::kForward) + cost_.experts({&rows, 1}, Pass::kBackward);
    };
    const auto forward = [&](Tokens rows) { return cost_.experts({&rows, 1}, Pass::kForward); };
    EXPECT_GE(forward(even.recompute_rows), even.copy_seconds);
    EXPECT_GE(update(even.policy_update_rows), even.copy_seconds + even.return_seconds);
    if (even.recompute_rows > Tokens{1}) {
      EXPECT_LT(forward(even.recompute_rows - Tokens{1}), even.copy_seconds);
    }
    if (even.policy_update_rows > Tokens{1}) {
      EXPECT_LT(update(even.policy_update_rows - Tokens{1}), even.copy_seconds + even.return_seconds);
    }
  }
  const Tokens hiding = *paths[0].hiding_tokens;
  EXPECT_GE(cost_.hidden_copies(hiding).from_peers, 1);
  EXPECT_EQ(cost_.hidden_copies(hiding - Tokens{1}).from_peers, 0);
}

}  // namespace
}  // namespace foremoe
