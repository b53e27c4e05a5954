#include "foremoe/reference/run_reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "foremoe/runtime/threads/threads_communicator.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

constexpr ModelSize kTiny{.layers = 2, .experts = 3, .top_k = 2, .shape = {.hidden = 3, .intermediate = 2}, .seed = 7};
constexpr std::size_t kMicroSteps = 2, kRanks = 2, kLayers = 2;

// Three tokens: one with two experts, one without a route, one with one expert.
class TinyRoutes final : public ReplayRoutes {
 public:
  int top_k() const override { return kTiny.top_k; }
  std::int64_t num_tokens(MicroStepId, RankId) const override { return 3; }
  void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const override {
    const auto e = [&](int i) { return ExpertId{(i + m.value + source.value + l.value) % 3}; };
    routes = {e(0), e(1), kNoExpert, kNoExpert, e(2), kUnassigned};
  }
};

// Outcome of a correct run: the reference itself, rounded to float32.
PhaseOutcome faultless(const Optimizer& optimizer, int steps) {
  PhaseOutcome outcome;
  RoutesUsed used({kMicroSteps, kRanks, kLayers});
  for (std::size_t m = 0; m < kMicroSteps; ++m) {
    for (std::size_t r = 0; r < kRanks; ++r) {
      for (std::size_t l = 0; l < kLayers; ++l) {
        TinyRoutes().gather(MicroStepId{m}, RankId{r}, LayerId{l}, used(m, r, l));
        used(m, r, l)[2] = ExpertId{1};  // the router's choice
        used(m, r, l)[3] = ExpertId{2};
      }
    }
  }
  outcome.routes = {used};

  ThreadPool pool(1);
  ReferenceModel model(kTiny, pool);
  const auto in_floats = [](const auto& from, auto& to) {
    to = Array<std::vector<float>, 2>(from.shape());
    for (std::size_t i = 0; i < from.size(); ++i) to.flat()[i] = {from.flat()[i].begin(), from.flat()[i].end()};
  };
  for (int step = 0; step < steps; ++step) {
    const ReferenceResult result =
        model.run({.micro_steps = kMicroSteps,
                   .ranks = kRanks,
                   .routes = [&](MicroStepId m, RankId r, LayerId l) { return used(m, r, l); },
                   .backward = true},
                  pool);
    outcome.losses.push_back(result.loss);
    if (step == 0) {
      in_floats(result.output, outcome.result.output);
      in_floats(result.input_gradient, outcome.result.input_gradient);
      in_floats(result.expert_gradient, outcome.result.expert_gradient);
      outcome.result.router_gradient = Array<std::vector<float>, 2>({kLayers, kRanks});
      for (std::size_t l = 0; l < kLayers; ++l) {  // one rank holds the whole gradient
        outcome.result.router_gradient(l, 1) = {result.router_gradient[l].begin(), result.router_gradient[l].end()};
      }
    }
    model.optimize(result, optimizer, pool);
  }
  return outcome;
}

Agreement compare(const PhaseOutcome& outcome, const Optimizer& optimizer = {}) {
  ThreadPool pool(1);
  return ReferenceRuns(kTiny, optimizer, true).compare(outcome, TinyRoutes(), pool);
}

TEST(RunReference, ACorrectRunMatchesItsReference) {
  const Agreement agreement = compare(faultless({}, 3));
  EXPECT_TRUE(agreement.equal(Optimizer::Kind::kSgd));
  EXPECT_LT(agreement.max_relative_error, 1e-7);
  EXPECT_LT(agreement.max_loss_error, 1e-12);
}

TEST(RunReference, ADifferenceInAnyTensorIsFoundAndNamed) {
  const auto expect_found = [](const char* name, const std::function<std::vector<float>&(StepResult&)>& tensor) {
    for (const float fault : {1e-3F, std::numeric_limits<float>::quiet_NaN()}) {
      PhaseOutcome outcome = faultless({}, 1);
      tensor(outcome.result).front() += fault;
      const Agreement agreement = compare(outcome);
      EXPECT_FALSE(agreement.equal(Optimizer::Kind::kSgd)) << name;
      EXPECT_THAT(agreement.worst, HasSubstr(name));
    }
    PhaseOutcome outcome = faultless({}, 1);
    tensor(outcome.result).pop_back();
    EXPECT_FALSE(compare(outcome).equal(Optimizer::Kind::kSgd)) << name;
  };
  expect_found(
      "output of micro-step 1, rank 0", [](StepResult & r) -> auto& { return r.output(1, 0); });
  expect_found(
      "input gradient of micro-step 0, rank 1", [](StepResult & r) -> auto& { return r.input_gradient(0, 1); });
  expect_found(
      "gradient of layer 1, expert 2", [](StepResult & r) -> auto& { return r.expert_gradient(1, 2); });
  expect_found(
      "router gradient of layer 0", [](StepResult & r) -> auto& { return r.router_gradient(0, 1); });
}

TEST(RunReference, ARouteThatWasNotReplayedIsAMismatch) {
  PhaseOutcome outcome = faultless({}, 1);
  outcome.routes[0](0, 1, 1)[0] = ExpertId{0};
  EXPECT_FALSE(compare(outcome).routes_replayed);
  outcome = faultless({}, 1);
  outcome.routes[0](0, 1, 1)[2] = kNoExpert;  // the router chose no expert
  EXPECT_FALSE(compare(outcome).routes_replayed);
}

TEST(RunReference, LaterLossesAreCheckedForSgdAndReportedForAdam) {
  for (const Optimizer::Kind kind : {Optimizer::Kind::kSgd, Optimizer::Kind::kAdam}) {
    const Optimizer optimizer{.kind = kind, .rate = 0.01F};
    PhaseOutcome outcome = faultless(optimizer, 3);
    outcome.losses[2] *= 1.001;
    const Agreement agreement = compare(outcome, optimizer);
    EXPECT_NEAR(agreement.max_loss_error, 1e-3, 1e-9);
    EXPECT_EQ(agreement.equal(kind), kind == Optimizer::Kind::kAdam);
  }
}

TEST(RunReference, ACachedReferenceServesOtherPoliciesAndForwardOnlyPhases) {
  ThreadPool pool(1);
  ReferenceRuns reference(kTiny, {}, true);
  PhaseOutcome outcome = faultless({}, 1);
  EXPECT_TRUE(reference.compare(outcome, TinyRoutes(), pool).equal(Optimizer::Kind::kSgd));
  outcome.losses.clear();
  outcome.result.expert_gradient = {};
  EXPECT_TRUE(reference.compare(outcome, TinyRoutes(), pool).equal(Optimizer::Kind::kSgd));
  for (auto& routes : outcome.routes[0].flat()) routes[2] = ExpertId{0};  // a different choice changes the reference
  EXPECT_FALSE(reference.compare(outcome, TinyRoutes(), pool).equal(Optimizer::Kind::kSgd));
}

// A run of a narrow model on two ranks: its outcome, and the routes that it replays.
struct NarrowRun {
  LoadTable load;
  std::unique_ptr<ReplayRoutes> routes;
  ModelSize model;
  PhaseOutcome outcome;
};

std::unique_ptr<NarrowRun> run_narrow(ExpertShape shape, std::uint64_t seed) {
  auto narrow = std::make_unique<NarrowRun>();
  narrow->load = test::random_load({.micro_steps = 2, .layers = 2, .ranks = 2, .experts = 8}, seed, 40);
  narrow->load.top_k = 2;
  narrow->routes = dealt_routes(narrow->load);
  narrow->model = {.layers = 2, .experts = 8, .top_k = 2, .shape = shape, .seed = seed};
  const StepPlan plan = test::random_plan(narrow->load, {.guest_slots = 1}, seed);
  const auto schedule = std::make_shared<const TransferSchedule>(
      make_transfer_schedule(plan, swiglu_layout(shape.hidden, shape.intermediate), {.phase = Phase::kPolicyUpdate}));
  const PhaseRun run{.load = narrow->load,
                     .plan = plan,
                     .schedule = schedule,
                     .routes = *narrow->routes,
                     .model = narrow->model,
                     .home_memory = HomeMemory::kPrivate,
                     .initial_home = plan.home};
  const auto communicators = make_threads_communicators(narrow->load.topology(), std::chrono::seconds(60));
  run_ranks(2, [&](RankId rank) {
    PhaseOutcome outcome = run_phase(run, *communicators[rank.index()]);
    if (rank == RankId{0}) narrow->outcome = std::move(outcome);
  });
  return narrow;
}

// In small tensors, every element may be a sum that nearly cancels, which leaves fewer than five correct digits.
TEST(RunReferenceThread, NarrowModelsAcceptCorrectAndRejectWrongResults) {
  ThreadPool pool(1);
  int beyond_five_digits = 0;
  for (const ExpertShape shape : {ExpertShape{1, 1}, ExpertShape{1, 2}, ExpertShape{2, 1}, ExpertShape{2, 2}}) {
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
      const std::unique_ptr<NarrowRun> narrow = run_narrow(shape, seed);
      ReferenceRuns reference(narrow->model, {}, true);
      const auto compare_now = [&] { return reference.compare(narrow->outcome, *narrow->routes, pool); };
      const Agreement right = compare_now();
      EXPECT_TRUE(right.equal(Optimizer::Kind::kSgd))
          << shape.hidden << " by " << shape.intermediate << ", seed " << seed << ": " << right.worst << " is off by "
          << right.max_relative_error;
      beyond_five_digits += right.max_relative_error > kMaxRelativeError ? 1 : 0;

      for (const bool of_router : {false, true}) {
        auto& gradients = of_router ? narrow->outcome.result.router_gradient : narrow->outcome.result.expert_gradient;
        float* greatest = nullptr;
        for (std::vector<float>& tensor : gradients.flat()) {
          for (float& v : tensor) {
            if (greatest == nullptr || std::abs(v) > std::abs(*greatest)) greatest = &v;
          }
        }
        const float before = *greatest;
        *greatest *= 1.001F;
        const Agreement wrong = compare_now();
        EXPECT_FALSE(wrong.equal(Optimizer::Kind::kSgd)) << wrong.max_relative_error;
        EXPECT_THAT(wrong.worst, HasSubstr(of_router ? "router gradient" : "gradient of layer"));
        *greatest = before;
      }
    }
  }
  EXPECT_GT(beyond_five_digits, 0) << "this test shows nothing";
}

}  // namespace
}  // namespace foremoe
