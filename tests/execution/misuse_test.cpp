// A phase that is bound or called wrongly.

#include <gmock/gmock.h>

#include <chrono>

#include "execution.h"
#include "foremoe/core/error.h"
#include "foremoe/runtime/threads/threads_communicator.h"

namespace foremoe::test {
namespace {

// Everything that a rank needs to bind a phase of the scenario.
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

TEST(PhaseOnThreads, RefusesTheTurnsOfAnotherRank) {
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

#ifndef NDEBUG
TEST(PhaseDeathTest, DrainsNoLayerBeforeItsLastBackward) {
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
