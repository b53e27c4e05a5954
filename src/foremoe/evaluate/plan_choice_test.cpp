// Tests which plan is chosen, by trials with known results, and on inputs where planning pays and where it does not.

#include "foremoe/evaluate/plan_choice.h"

#include <gmock/gmock.h>

#include <limits>

#include "foremoe/testing/evaluated_step.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

std::vector<PlanTrial> trials() {
  return {{.planned = false, .seconds = 10, .memory = Bytes{80}},
          {.residency = Residency::kStatic, .seconds = 8, .memory = Bytes{100}},
          {.residency = Residency::kResident, .seconds = 9, .memory = Bytes{60}},
          {.residency = Residency::kShared, .prefer = Prefer::kTime, .seconds = 9, .memory = Bytes{50}}};
}

TEST(ChoosePlan, ReturnsTheQuickestWithinTheBudget) {
  EXPECT_EQ(to_string(choose_plan(trials(), std::nullopt).best()), "static, balance");
  EXPECT_EQ(to_string(choose_plan(trials(), Bytes{100}).best()), "static, balance");
  EXPECT_EQ(to_string(choose_plan(trials(), Bytes{99}).best()), "shared, time") << "the smaller of two equals";
  EXPECT_TRUE(choose_plan(trials(), Bytes{50}).fits);
}

TEST(ChoosePlan, ReturnsTheSmallestIfNoneFits) {
  const PlanChoice choice = choose_plan(trials(), Bytes{49});
  EXPECT_EQ(to_string(choice.best()), "shared, time");
  EXPECT_FALSE(choice.fits);
}

TEST(ChoosePlan, ReturnsNoPlanIfNoneIsQuicker) {
  std::vector<PlanTrial> slow = trials();
  for (PlanTrial& trial : slow) trial = {.planned = trial.planned, .seconds = 10, .memory = Bytes{80}};
  EXPECT_EQ(to_string(choose_plan(slow, std::nullopt).best()), "no plan");
}

std::vector<std::string> names(ChooseAmong among, const PlannerOptions& options) {
  std::vector<std::string> all;
  for (const PlanTrial& trial : trials_among(among, options)) all.push_back(to_string(trial));
  return all;
}

TEST(TrialsAmong, AreNoPlanAndTheOnesThatTheOptionsPermit) {
  EXPECT_THAT(names(ChooseAmong::kDefault, {.copy_price = 1}),
              ElementsAre("no plan", "resident, time", "resident, links", "static, time"));
  EXPECT_THAT(names(ChooseAmong::kDefault, {.prefer = Prefer::kBalance}),
              ElementsAre("no plan", "resident, balance", "static, balance"));
  EXPECT_THAT(names(ChooseAmong::kGiven, {.copy_price = 1}), ElementsAre("no plan", "resident, time"));
  EXPECT_THAT(names(ChooseAmong::kAll, {.copy_price = 1}),
              ElementsAre("no plan", "static, balance", "static, links", "static, time", "resident, balance",
                          "resident, links", "resident, time", "shared, balance", "shared, links", "shared, time"));
  EXPECT_THAT(names(ChooseAmong::kAll, {.prefer = Prefer::kLinks}),
              ElementsAre("no plan", "static, links", "resident, links", "shared, links"));
  EXPECT_THAT(names(ChooseAmong::kPlans, {.prefer = Prefer::kLinks}),
              ElementsAre("static, links", "resident, links", "shared, links"));
}

class Choices : public test::EvaluatedStep {
 protected:
  Evaluation evaluated(EvaluateOptions options, const Workload& input) {
    return evaluate(policy_named("foremoe"), input, options, {.pool = pool_, .cost = &cost_});
  }
  Evaluation evaluated(const EvaluateOptions& options) { return evaluated(options, input_); }
};

// A plan of each kind, made by naming its options. Planning is estimated as in the choice.
TEST_F(Choices, AmongAllAreAsQuickAsTheBestOfTheSame) {
  const Evaluation chosen = evaluated({.choose = ChooseAmong::kAll});
  ASSERT_TRUE(chosen.choice);
  double least = std::numeric_limits<double>::max();
  for (const PlanTrial& trial : chosen.choice->trials) {
    least = std::min(least, trial.seconds);
    if (!trial.planned) continue;
    EvaluateOptions same{.choose = ChooseAmong::kGiven};
    same.planner.residency = trial.residency;
    same.planner.prefer = trial.prefer;
    const Evaluation one = evaluated(same);
    EXPECT_FALSE(one.choice);
    EXPECT_NEAR(one.step->step_seconds, trial.seconds, 0.1) << to_string(trial);
    EXPECT_LT(one.step->step_seconds, trial.seconds) << to_string(trial) << ": planning is not free";
  }
  EXPECT_EQ(chosen.choice->best().seconds, least);
}

TEST_F(Choices, AreTheSameInEveryRun) {
  const PlanChoice first = *evaluated({.choose = ChooseAmong::kAll}).choice;
  const PlanChoice second = *evaluated({.choose = ChooseAmong::kAll}).choice;
  EXPECT_EQ(first.why(), second.why());
  EXPECT_EQ(first.chosen, second.chosen);
}

TEST_F(Choices, PreferTimeByDefaultWhereCopiesHaveAPrice) {
  const Evaluation e = evaluated({});
  EXPECT_EQ(to_string(e.choice->best()), "resident, time");
  EXPECT_THAT(e.plan.options, testing::HasSubstr("\"copy-price\""));
  const Evaluation without = evaluate(policy_named("foremoe"), input_, {}, {.pool = pool_});
  EXPECT_FALSE(without.choice);
  EXPECT_THAT(without.plan.options, testing::HasSubstr("\"prefer\":\"balance\""));
}

// With 16 tokens per rank, planning and copies take longer than the imbalance.
TEST_F(Choices, AreNoPlanWhereItDoesNotPay) {
  const Workload short_steps = make_workload(synthesize_load(
      {.num_layers = 2, .num_experts = 128, .top_k = 8, .num_micro_steps = 4, .num_ranks = 8, .tokens_per_rank = 16},
      GrpoRouting{}));
  for (const ChooseAmong among : {ChooseAmong::kDefault, ChooseAmong::kAll}) {
    const Evaluation e = evaluated({.choose = among}, short_steps);
    EXPECT_EQ(to_string(e.choice->best()), "no plan");
    EXPECT_EQ(e.policy, "foremoe");
    EXPECT_EQ(e.plan.policy, "vanilla");
    EXPECT_EQ(e.placement_seconds, 0);
    EXPECT_TRUE(e.check.ok());
  }
  EXPECT_EQ(evaluated({.choose = ChooseAmong::kGiven}, short_steps).plan.policy, "foremoe");
}

TEST_F(Choices, DoNotChangePoliciesThatPlanInOneWay) {
  for (const char* name : {"static", "eplb"}) {
    const Evaluation e =
        evaluate(policy_named(name), input_, {.choose = ChooseAmong::kAll}, {.pool = pool_, .cost = &cost_});
    EXPECT_FALSE(e.choice) << name;
    EXPECT_EQ(e.plan.policy, name);
  }
}

}  // namespace
}  // namespace foremoe
