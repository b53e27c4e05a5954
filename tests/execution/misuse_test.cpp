// Tests invalid construction and invalid calls of a phase.

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <cmath>

#include "execution.h"
#include "foremoe/core/error.h"
#include "foremoe/runtime/threads/threads_communicator.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe::test {
namespace {

// A rank's arguments for constructing a phase of the scenario.
struct Parts {
  explicit Parts(const Scenario& scenario)
      : routes(scenario),
        load(routes.load()),
        plan(make_plan(scenario, load)),
        size(model_size(scenario)),
        schedule({.phase = scenario.phase}),
        communicators(make_threads_communicators(scenario.topology, std::chrono::seconds(20))) {}

  PhaseParts of(const RankTurns& turns) const {
    return {.turns = turns,
            .layout = swiglu_layout(size.shape.hidden, size.shape.intermediate),
            .shape = size.shape,
            .without_route = rows_without_route(routes, load)};
  }

  RandomRoutes routes;
  LoadTable load;
  StepPlan plan;
  ModelSize size;
  ScheduleOptions schedule;
  std::vector<std::unique_ptr<Communicator>> communicators;
};

TEST(PhaseOnThreads, RejectsTurnsOfAnotherRank) {
  const Parts parts(Scenario{.phase = Phase::kRecompute});
  run_ranks(parts.plan.num_ranks(), [&](RankId rank) {
    Communicator& communicator = *parts.communicators[rank.index()];
    const MoeModel model(parts.size, parts.plan.home, communicator);
    const RankId other{(rank.value + 1) % parts.plan.num_ranks()};
    const RankTurns turns(parts.plan, parts.load, {.rank = other, .schedule = parts.schedule});
    try {
      const PhaseExecutor phase(parts.of(turns), model.homes(), communicator, {});
      ADD_FAILURE() << "accepted";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("turns: of rank " + std::to_string(other.value)));
    }
  });
}

// A link that fails after a given number of copies.
class DyingLink final : public CopyLink {
 public:
  explicit DyingLink(int copies) : left_(copies) {}
  void submit(const CopyRequest& request) override {
    if (left_-- > 0) MemcpyLink().submit(request);
  }
  CopyState poll(CopyId) override { return left_ >= 0 ? CopyState::kDone : CopyState::kFailed; }
  void cancel(CopyId) override {}
  void progress() override {}

 private:
  int left_;
};

TEST(PhaseOnThreads, SetsHomesThatPeersCannotRestoreToNaN) {
  Parts parts(Scenario{.micro_steps = 6, .residency = Residency::kFree, .phase = Phase::kRecompute});
  parts.plan = random_plan(parts.load, {.residency = Residency::kFree}, 3);  // every event exchanges homes
  parts.schedule.path = PathChoice::kPeer;
  std::atomic<int> spoiled = 0;
  std::atomic<int> kept = 0;
  run_ranks(parts.plan.num_ranks(), [&](RankId rank) {
    Communicator& communicator = *parts.communicators[rank.index()];
    MoeModel model(parts.size, parts.plan.home, communicator);
    const auto weights = [&] {
      std::vector<std::vector<float>> of_homes;
      for (int l = 0; l < parts.size.layers; ++l) {
        for (int e = 0; e < parts.size.experts; ++e) {
          if (parts.plan.home(l, e) == rank) of_homes.push_back(model.expert_weights(LayerId{l}, ExpertId{e}));
        }
      }
      return of_homes;
    };
    const auto before = weights();
    const RankTurns turns(parts.plan, parts.load, {.rank = rank, .schedule = parts.schedule});
    try {
      PhaseExecutor phase(parts.of(turns), model.homes(), communicator,
                          {.engine = {.attempts = 1, .timeout = std::chrono::milliseconds(50), .verify = false},
                           .decorate = [](auto, RankId, Path) { return std::make_unique<DyingLink>(9); },
                           .most_tokens = 14});
      model.run(phase, {.routes = parts.routes, .micro_steps = 6}, MoeModel::Work());
      ADD_FAILURE() << "nothing failed";
    } catch (const std::runtime_error& error) {  // PhaseFailed, or PeerFailed if another rank failed first
      communicator.give_up(error.what());
    }
    const auto after = weights();
    for (std::size_t i = 0; i < before.size(); ++i) {
      const bool is_nan = std::ranges::all_of(after[i], [](float value) { return std::isnan(value); });
      EXPECT_TRUE(is_nan || after[i] == before[i]) << "a home holds another expert";
      ++(is_nan ? spoiled : kept);
    }
  });
  EXPECT_GT(spoiled, 0);
  EXPECT_GT(kept, 0);
}

#ifndef NDEBUG
TEST(PhaseDeathTest, AssertsThatDrainFollowsTheLastBackward) {
  const Parts parts(Scenario{.topology = {.num_ranks = 1, .ranks_per_node = 1}, .policy = "vanilla"});
  Communicator& communicator = *parts.communicators[0];
  const MoeModel model(parts.size, parts.plan.home, communicator);
  const RankTurns turns(parts.plan, parts.load, {.rank = RankId{0}, .schedule = parts.schedule});
  PhaseExecutor phase(parts.of(turns), model.homes(), communicator, {});
  const LayerId layer{0};
  EXPECT_DEATH(phase.drain({&layer, 1}), "backwards_left");
}
#endif

}  // namespace
}  // namespace foremoe::test
