// Compares the pipeline with its parts, and tests invalid and missing plans.

#include "foremoe/evaluate/evaluate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <semaphore>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/running_plan.h"
#include "foremoe/policy/own_options.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/testing/evaluated_step.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

// Plans like vanilla, then skips or corrupts the plan.
class Broken final : public Policy {
 public:
  explicit Broken(bool skips) : skips_(skips) {}
  std::string_view name() const override { return "broken"; }
  std::string_view summary() const override { return "wrong on purpose"; }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    if (skips_) return Skipped{"not today"};
    PolicyResult result = find_policy("vanilla")->plan(input, pool);
    std::get<PlannedStep>(result).plan.slot_tokens.flat()[0] += Tokens{1};
    return result;
  }

 private:
  bool skips_;
};

using Evaluations = test::EvaluatedStep;

TEST_F(Evaluations, EqualTheResultsOfPlannerCheckFiguresAndSimulator) {
  const Policy& policy = policy_named("foremoe");
  const PlannerOptions planner{.guest_slots = 2, .prefer = Prefer::kBalance};
  const EvaluateOptions options{
      .planner = planner, .choose = ChooseAmong::kGiven, .path = PathChoice::kPeer, .depth = 3};
  const Evaluation e = evaluate(policy, input_, options, {.pool = pool_, .cost = &cost_});

  const PolicyResult result = policy.plan(input_.for_policy(planner), pool_);
  const StepPlan& plan = std::get<PlannedStep>(result).plan;
  EXPECT_EQ(e.plan.slot_expert, plan.slot_expert);
  EXPECT_EQ(e.plan.slot_tokens, plan.slot_tokens);
  const PlanFigures figures = plan_figures(plan, input_.load);
  EXPECT_EQ(e.figures.rho.mean, figures.rho.mean);
  EXPECT_EQ(e.figures.copies, figures.copies);
  EXPECT_TRUE(e.check.ok());
  EXPECT_TRUE(e.check.figures.has_value()) << "it was checked";
  const SimulationInput phase{.load = input_.load, .plan = plan, .cost = cost_};
  const SimulatedStep step = simulate_step(
      phase, nullptr,
      {.phase = {
           .path = PathChoice::kPeer, .depth = 3, .online = policy.online(), .plans_ahead = true, .pool = &pool_}});
  ASSERT_TRUE(e.step);
  EXPECT_EQ(e.step->step_seconds, step.step_seconds);
  EXPECT_EQ(e.step->memory_bytes_per_rank, step.memory_bytes_per_rank);
}

TEST_F(Evaluations, LimitHiddenCopiesToTheBusierEndOfALink) {
  const EvaluateOptions options{.planner = {.guest_slots = 2}, .hidden_copies = true};
  Cluster slow = find_cluster("h100");
  slow.ranks_per_node = input_.load.ranks_per_node;
  slow.host.bytes_per_second = 1;
  slow.peers = {.bytes_per_second = 100e9, .latency_seconds = 0};
  const auto planner = [&] { return planner_options(options, input_.load, &cost_); };
  cost_ = {slow, *find_model_shape("Qwen3-30B-A3B"), {}};
  const int hidden = cost_.hidden_copies(mean_tokens_per_rank(input_.load)).from_peers;
  ASSERT_GT(hidden, 0);
  ASSERT_LT(hidden, 8 * 2) << "eight ranks with two guests each may all want experts of one home";
  EXPECT_EQ(planner().max_copies_per_rank, hidden);
  EXPECT_EQ(planner().max_copies_per_source, hidden);

  slow.peers.bytes_per_second = 100e12;
  cost_ = {slow, *find_model_shape("Qwen3-30B-A3B"), {}};
  EXPECT_EQ(planner().max_copies_per_source, kNoLimit) << "its link carries all that there can be";

  input_.load.ranks_per_node = 4;
  EXPECT_EQ(planner().max_copies_per_rank, 0) << "between nodes the host path alone hides copies";
  EXPECT_EQ(planner().max_copies_per_source, kNoLimit);
}

TEST_F(Evaluations, HaveNoSimulatedStepWithoutACluster) {
  EXPECT_FALSE(evaluate(policy_named("foremoe"), input_, {}, {.pool = pool_}).step);
}

TEST_F(Evaluations, OfAWrongPlanListViolationsAndSimulateNothing) {
  const Evaluation e = evaluate(Broken(/*skips=*/false), input_, {}, {.pool = pool_, .cost = &cost_});
  EXPECT_TRUE(e.planned());
  EXPECT_FALSE(e.check.ok());
  EXPECT_FALSE(e.step);
}

TEST_F(Evaluations, SkipTheCheckIfAsked) {
  const Evaluation e = evaluate(policy_named("foremoe"), input_, {.check = false}, {.pool = pool_});
  EXPECT_FALSE(e.check.figures) << "check_plan recomputes them";
}

TEST_F(Evaluations, EndDuringTheCheckWhenThePoolIsCancelled) {
  const auto cancel_in_the_check = [&](const std::string& what) {
    if (what.starts_with("checking")) pool_.cancel();
  };
  EXPECT_THROW(evaluate(policy_named("foremoe"), input_, {}, {.pool = pool_, .progress = cancel_in_the_check}),
               Cancelled);
}

TEST_F(Evaluations, AnnounceTheirPlaceAmongAll) {
  std::vector<std::string> said;
  evaluate_all(policies_named({"static", "foremoe"}), input_, {},
               {.pool = pool_, .cost = &cost_, .progress = [&](const std::string& what) { said.push_back(what); }});
  EXPECT_EQ(said.front(), "planning with vanilla");  // the baseline
  EXPECT_THAT(said, testing::Contains("1 of 2, planning with static"));
  EXPECT_EQ(said.back(), "2 of 2, simulating foremoe");
}

TEST_F(Evaluations, CountTheirParts) {
  const auto expect_complete = [&] {
    EXPECT_GT(pool_.parts().read().total, 0);
    EXPECT_EQ(pool_.parts().read().done, pool_.parts().read().total);
  };
  for (const Policy* policy : all_policies()) {
    pool_.parts().begin(0);
    const Evaluation planned = evaluate(*policy, input_, {.planner = {.guest_slots = 1}}, {.pool = pool_});
    if (planned.planned()) expect_complete();
  }
  pool_.parts().begin(0);
  evaluate(policy_named("vanilla"), input_, {}, {.pool = pool_, .cost = &cost_});
  expect_complete();
}

TEST_F(Evaluations, OfASkippedPolicyGiveTheReason) {
  const Evaluation e = evaluate(Broken(/*skips=*/true), input_, {}, {.pool = pool_, .cost = &cost_});
  EXPECT_EQ(e.skipped, "not today");
  EXPECT_FALSE(e.planned());
}

TEST_F(Evaluations, AreComparedWithVanillaEvenIfItIsNotRequested) {
  const std::vector<const Policy*> policies = policies_named({"static", "foremoe"});
  const std::vector<Evaluation> all = evaluate_all(policies, input_, {}, {.pool = pool_, .cost = &cost_});
  const Evaluation vanilla = evaluate(policy_named("vanilla"), input_, {}, {.pool = pool_, .cost = &cost_});
  ASSERT_EQ(all.size(), 2U);
  for (const Evaluation& e : all) {
    EXPECT_DOUBLE_EQ(e.speedup_over_vanilla, vanilla.step->step_seconds / e.step->step_seconds) << e.policy;
    EXPECT_GT(e.speedup_over_vanilla, 1) << e.policy;
  }
}

TEST_F(Evaluations, PlanRecomputeSeparatelyWithSeveralMicroStepsInFlight) {
  EvaluateOptions options{.planner = {.in_flight = 2}};
  const Evaluation e = evaluate(policy_named("foremoe"), input_, options, {.pool = pool_, .cost = &cost_});
  ASSERT_TRUE(e.recompute_plan);
  EXPECT_EQ(e.recompute_plan->in_flight, 1);
  EXPECT_EQ(e.plan.in_flight, 2);
  EXPECT_EQ(&e.plan_of(Phase::kRecompute), &*e.recompute_plan);
  EXPECT_EQ(&e.plan_of(Phase::kPolicyUpdate), &e.plan);
}

TEST_F(Evaluations, RejectOptionsThatNeedACluster) {
  const auto refused = [&](const EvaluateOptions& options) -> std::string {
    try {
      (void)evaluate(policy_named("foremoe"), input_, options, {.pool = pool_});
    } catch (const InputError& error) {
      return error.where().field + ": " + error.problem();
    }
    return "not refused";
  };
  EXPECT_THAT(refused({.choose = ChooseAmong::kAll}), HasSubstr("residency: auto needs"));
  EXPECT_THAT(refused({.hidden_copies = true}), HasSubstr("max_copies_per_rank: hidden needs"));
}

TEST_F(Evaluations, OfFewerLayersRepresentTheWholeModel) {
  const Workload one_layer = make_workload(take_first(input_.load, 4, 1));
  const EvaluationContext context{.pool = pool_, .cost = &cost_};
  const Evaluation of_one = evaluate(policy_named("vanilla"), one_layer, {}, context);
  const Evaluation of_two = evaluate(policy_named("vanilla"), input_, {}, context);
  EXPECT_NEAR(of_one.step->step_seconds / of_two.step->step_seconds, 1, 0.25) << "both are of 48 layers";
}

TEST_F(Evaluations, OfAPolicyWithDefaultOptionsEqualThoseOfTheRegisteredPolicy) {
  const PolicyInput input = input_.for_policy({.guest_slots = 2});
  for (const Policy* const named : all_policies()) {
    const PolicyResult expected = named->plan(input, pool_);
    const PolicyResult made = policy_with_options(*named).policy->plan(input, pool_);
    ASSERT_EQ(made.index(), expected.index()) << named->name();
    if (std::holds_alternative<Skipped>(expected)) continue;
    EXPECT_EQ(std::get<PlannedStep>(made).plan.slot_tokens, std::get<PlannedStep>(expected).plan.slot_tokens)
        << named->name();
  }
}

TEST(InputsAsPlanned, RestoreEveryTokenBoundThatAPlanCanRecord) {
  StepPlan plan;
  plan.options = R"({"tokens-per-rank": 1099511627776, "layers": 2147483647})";
  const InputOptions options = input_as_planned(plan, {});
  EXPECT_EQ(options.tokens_per_rank, std::int64_t{1} << 40);
  EXPECT_EQ(options.wanted_layers, std::numeric_limits<int>::max());
  plan.options = R"({"tokens-per-rank": 1099511627777, "layers": 2147483648})";
  EXPECT_EQ(input_as_planned(plan, {}).tokens_per_rank, InputOptions{}.tokens_per_rank);
  EXPECT_EQ(input_as_planned(plan, {}).wanted_layers, 0);
}

TEST(PolicyNames, ThatAreUnknownAreRejectedWithAListOfKnownOnes) {
  try {
    (void)policies_named({"vanilla", "magic"});
    FAIL();
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().field, "policy");
    EXPECT_THAT(error.problem(), testing::AllOf(HasSubstr("'magic'"), HasSubstr("vanilla, ")));
  }
  EXPECT_EQ(policies_named({"all"}).size(), all_systems().size());
  EXPECT_THROW((void)policies_named({}), InputError);
}

TEST(OptionTables, ListAddedWordsInErrorsForOtherTexts) {
  EvaluateOptions options;
  std::vector<Option> table = planning_options_of(options);
  const auto problem = [&](const char* name, const char* text) {
    try {
      option_named(table, name).set(text);
    } catch (const InputError& error) {
      EXPECT_EQ(error.where().field, name);
      return error.problem();
    }
    return std::string();
  };
  EXPECT_EQ(problem("residency", "loose"), "'loose', expected static, resident, shared or free, or auto");
  EXPECT_EQ(problem("residency", "statc"),
            "'statc', expected static, resident, shared or free, or auto; did you mean static?");
  EXPECT_THAT(problem("max_copies_per_rank", "few"), testing::EndsWith(", nor none, nor hidden"));
  EXPECT_THAT(problem("max_copies_per_rank", "-1"), testing::EndsWith(", nor hidden"));
}

// Plans with residency static, and blocks after the first micro-step until released.
class Held final : public Policy {
 public:
  explicit Held(std::binary_semaphore& go) : go_(go) {}
  std::string_view name() const override { return "held"; }
  std::string_view summary() const override { return "waits"; }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    PolicyInput held = input;
    held.on_micro_step = [&](const StepPlan& plan, MicroStepId m) {
      input.on_micro_step(plan, m);
      if (m == MicroStepId{0}) go_.acquire();
    };
    PolicyResult result = find_policy("static")->plan(held, pool);
    std::get<PlannedStep>(result).plan.policy = name();
    return result;
  }

 private:
  std::binary_semaphore& go_;
};

TEST_F(Evaluations, OfARunningPlanNamePolicyAndInputFromTheStart) {
  input_.asked.micro_steps = 4;
  std::binary_semaphore go(0);
  const Held policy(go);
  ThreadPool pool(1);
  RunningPlan running({.policy = policy, .input = input_, .options = {}}, pool);
  EXPECT_EQ(running.wait_to_begin(), std::nullopt);
  EXPECT_EQ(running.plan().policy, "held");
  EXPECT_THAT(running.plan().options, HasSubstr("\"micro-steps\":4"));
  go.release();
  running.finish();
  EXPECT_EQ(running.plan().policy, "held");
  EXPECT_THAT(running.plan().options, HasSubstr("\"micro-steps\":4"));
}

TEST(OptionTables, SetTheirDeclaredFields) {
  EvaluateOptions options;
  std::vector<Option> table = planning_options_of(options);
  option_named(table, "residency").set("auto");
  EXPECT_EQ(options.choose, ChooseAmong::kAll);
  option_named(table, "residency").set("shared");
  EXPECT_EQ(options.choose, ChooseAmong::kGiven);
  EXPECT_EQ(options.planner.residency, Residency::kShared);
  option_named(table, "max_copies_per_rank").set("hidden");
  EXPECT_TRUE(options.hidden_copies);
  option_named(table, "max_copies_per_rank").set("none");
  EXPECT_FALSE(options.hidden_copies);
  EXPECT_EQ(options.planner.max_copies_per_rank, kNoLimit);
  option_named(table, "rehome").set("free");
  EXPECT_EQ(options.planner.rehome, kNoLimit);
  option_named(table, "stages").set("BT");
  EXPECT_TRUE(options.planner.stages.base && options.planner.stages.tokens);
  EXPECT_FALSE(options.planner.stages.relocation || options.planner.stages.replication);
  for (const char* const wrong : {"BB", "X", "b"}) {
    EXPECT_THROW(option_named(table, "stages").set(wrong), InputError) << wrong;
  }
}

}  // namespace
}  // namespace foremoe
