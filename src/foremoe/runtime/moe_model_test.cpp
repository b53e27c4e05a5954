#include "foremoe/runtime/moe_model.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "foremoe/core/error.h"
#include "foremoe/reference/reference_model.h"
#include "foremoe/reference/tensor_error.h"
#include "foremoe/runtime/rank_run.h"
#include "foremoe/runtime/threads/threads_communicator.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

// Input of all ranks.
struct Training {
  const LoadTable& load;
  const ReplayRoutes& routes;
  ModelSize size;
  Phase phase = Phase::kPolicyUpdate;
  Optimizer optimizer;
  PathChoice path = PathChoice::kAuto;
};

// Result of a training on all ranks: tensors of the last step, and final weights.
struct Trained {
  Array<std::vector<float>, 2> output;             // [micro_step][rank]
  Array<std::vector<float>, 2> input_gradient;     // likewise
  Array<std::vector<ExpertId>, 3> routes;          // [micro_step][rank][layer]
  Array<std::vector<float>, 2> expert_gradient;    // [layer][expert]
  Array<std::vector<float>, 2> expert_weights;     // likewise
  Array<std::vector<float>, 2> router_gradient;    // [layer][rank]
  std::vector<std::vector<float>> router_weights;  // [layer]
  std::vector<double> loss;                        // [step]
  Bytes moved;
};

ModelSize small_size(const LoadTable& load, int top_k, std::uint64_t seed) {
  return {.layers = load.num_layers(),
          .experts = load.num_experts(),
          .top_k = top_k,
          .shape = {.hidden = 8, .intermediate = 6},
          .seed = seed};
}

// Runs one step per plan on this rank. Every rank writes its own entries of `result`.
void train_rank(const Training& training, const std::vector<const StepPlan*>& plans, Communicator& communicator,
                Trained& result) {
  const RankId rank = communicator.rank();
  const ModelSize& size = training.size;
  const int micro_steps = training.load.num_micro_steps();
  MoeModel model(size, plans.front()->home, communicator, HomeMemory::kPrivate);
  std::int64_t most_tokens = 0;
  for (int m = 0; m < micro_steps; ++m) {
    for (int r = 0; r < communicator.num_ranks(); ++r) {
      most_tokens = std::max(most_tokens, training.routes.num_tokens(MicroStepId{m}, RankId{r}));
    }
  }
  for (std::size_t step = 0; step < plans.size(); ++step) {
    const StepPlan& plan = *plans[step];
    const Bytes moved = model.move_homes(plan.home);
    const ExpertLayout layout = swiglu_layout(size.shape.hidden, size.shape.intermediate);
    const RankTurns turns(plan, training.load,
                          {.rank = rank, .schedule = {.phase = training.phase, .path = training.path}});
    model.zero_gradients();
    {
      PhaseExecutor phase({.turns = turns,
                           .layout = layout,
                           .shape = size.shape,
                           .without_route = rows_without_route(training.routes, training.load)},
                          model.homes(), communicator, {.engine = {.version = step + 1}, .most_tokens = most_tokens});
      const double loss = model.run(
          phase, {.routes = training.routes, .micro_steps = micro_steps, .keep_results = true}, MoeModel::Work());
      if (rank == RankId{0}) {
        result.loss.push_back(loss);
        result.moved += moved;
      }
    }
    if (training.phase == Phase::kPolicyUpdate) model.optimize(training.optimizer);
  }

  for (int m = 0; m < micro_steps; ++m) {
    const MicroStepId micro_step{m};
    result.output(m, rank) = model.output(micro_step);
    if (training.phase == Phase::kPolicyUpdate) result.input_gradient(m, rank) = model.input_gradient(micro_step);
    for (int l = 0; l < size.layers; ++l) result.routes(m, rank, l) = model.routes_used(micro_step, LayerId{l});
  }
  for (int l = 0; l < size.layers; ++l) {
    const LayerId layer{l};
    result.router_gradient(l, rank) = model.router_gradient(layer);
    if (rank == RankId{0}) result.router_weights[layer.index()] = model.router_weights(layer);
    for (int e = 0; e < size.experts; ++e) {
      if (model.home()(l, e) != rank) continue;
      result.expert_gradient(l, e) = model.expert_gradient(layer, ExpertId{e});
      result.expert_weights(l, e) = model.expert_weights(layer, ExpertId{e});
    }
  }
}

Trained train(const Training& training, const std::vector<const StepPlan*>& plans) {
  const Topology topology = training.load.topology();
  const auto communicators = make_threads_communicators(topology, std::chrono::milliseconds(20'000));

  const auto layers = static_cast<std::size_t>(training.size.layers);
  const auto experts = static_cast<std::size_t>(training.size.experts);
  const auto ranks = static_cast<std::size_t>(topology.num_ranks);
  const auto micro_steps = static_cast<std::size_t>(training.load.num_micro_steps());
  using Tensors = Array<std::vector<float>, 2>;
  Trained result{.output = Tensors({micro_steps, ranks}),
                 .input_gradient = Tensors({micro_steps, ranks}),
                 .routes = Array<std::vector<ExpertId>, 3>({micro_steps, ranks, layers}),
                 .expert_gradient = Tensors({layers, experts}),
                 .expert_weights = Tensors({layers, experts}),
                 .router_gradient = Tensors({layers, ranks}),
                 .router_weights = std::vector<std::vector<float>>(layers),
                 .loss = {},
                 .moved = {}};
  run_ranks(topology.num_ranks, [&](RankId rank) {
    try {
      train_rank(training, plans, *communicators[rank.index()], result);
    } catch (const std::exception& error) {
      communicators[rank.index()]->give_up(error.what());
      throw;
    }
  });
  return result;
}

ReferenceStep reference_step(const Trained& trained, bool backward) {
  return {.micro_steps = static_cast<int>(trained.routes.extent(0)),
          .ranks = static_cast<int>(trained.routes.extent(1)),
          .routes = [&](MicroStepId m, RankId r, LayerId l) { return trained.routes(m, r, l); },
          .backward = backward};
}

void expect_equal_to_reference(const Training& training, const Trained& trained) {
  const bool backward = training.phase == Phase::kPolicyUpdate;
  ThreadPool pool(1);
  const ReferenceResult reference = ReferenceModel(training.size, pool).run(reference_step(trained, backward), pool);
  for (int m = 0; m < training.load.num_micro_steps(); ++m) {
    for (int r = 0; r < training.load.num_ranks(); ++r) {
      EXPECT_LE(relative_error(trained.output(m, r), reference.output(m, r)), 1e-5) << "output " << m << " " << r;
      if (!backward) continue;
      EXPECT_LE(relative_error(trained.input_gradient(m, r), reference.input_gradient(m, r)), 1e-5)
          << "input gradient " << m << " " << r;
    }
  }
  if (!backward) return;
  for (int l = 0; l < training.size.layers; ++l) {
    for (int e = 0; e < training.size.experts; ++e) {
      EXPECT_LE(relative_error(trained.expert_gradient(l, e), reference.expert_gradient(l, e)), 1e-5)
          << "gradient of expert " << l << " " << e;
    }
    std::vector<float> router_gradient = trained.router_gradient(l, 0);
    for (int r = 1; r < training.load.num_ranks(); ++r) {
      for (std::size_t i = 0; i < router_gradient.size(); ++i) router_gradient[i] += trained.router_gradient(l, r)[i];
    }
    EXPECT_LE(relative_error(router_gradient, reference.router_gradient[static_cast<std::size_t>(l)]), 1e-5)
        << "router gradient " << l;
  }
  EXPECT_NEAR(trained.loss.back(), reference.loss, 1e-5 * reference.loss);
}

// Plan that serves every expert at its home only, for any placement of homes.
StepPlan plan_at_homes(const LoadTable& load, const Array<RankId, 2>& home) {
  StepPlan plan = test::random_plan(load, {.guest_slots = 0}, 0);
  plan.home = home;
  std::vector<std::int64_t> total(static_cast<std::size_t>(load.num_experts()));
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      load.expert_loads(plan.event_micro_step[static_cast<std::size_t>(t)], LayerId{l}, total);
      std::vector<std::size_t> next(static_cast<std::size_t>(plan.num_ranks()));
      for (int e = 0; e < plan.num_experts(); ++e) {
        const RankId owner = home(l, e);
        const std::size_t slot = next[owner.index()]++;
        plan.slot_expert(t, l, owner, slot) = ExpertId{e};
        plan.slot_tokens(t, l, owner, slot) = Tokens{total[static_cast<std::size_t>(e)]};
      }
    }
  }
  return plan;
}

// Reverses the homes in every layer except the first: the first expert's home becomes the last rank.
Array<RankId, 2> reversed_homes(const StepPlan& plan) {
  Array<RankId, 2> home = plan.home;
  for (std::size_t l = 1; l < home.extent(0); ++l) std::ranges::reverse(home.row(l));
  return home;
}

struct PlanKind {
  const char* name;
  test::PlanShape shape;
  Phase phase = Phase::kPolicyUpdate;
};

void PrintTo(const PlanKind& kind, std::ostream* out) { *out << kind.name; }

class MoeModelThread : public testing::TestWithParam<PlanKind> {};

std::string name_of(const testing::TestParamInfo<PlanKind>& kind) { return kind.param.name; }

INSTANTIATE_TEST_SUITE_P(Plans, MoeModelThread,
                         testing::Values(PlanKind{"vanilla", {.guest_slots = 0}},
                                         PlanKind{"static", {.residency = Residency::kStatic}},
                                         PlanKind{"resident", {.guest_slots = 2}},
                                         PlanKind{"shared", {.residency = Residency::kShared}},
                                         PlanKind{"vanilla_two_in_flight", {.guest_slots = 0, .in_flight = 2}},
                                         PlanKind{"resident_three_in_flight", {.guest_slots = 2, .in_flight = 3}},
                                         PlanKind{"vanilla_recompute", {.guest_slots = 0}, Phase::kRecompute},
                                         PlanKind{"resident_recompute", {.guest_slots = 2}, Phase::kRecompute}),
                         name_of);

TEST_P(MoeModelThread, DealtLoadsMatchTheReference) {
  LoadTable load = test::random_load({.micro_steps = 4, .layers = 3}, 11, 12);
  load.top_k = 2;
  const auto routes = dealt_routes(load);
  const Training training{
      .load = load, .routes = *routes, .size = small_size(load, 2, 5), .phase = GetParam().phase, .optimizer = {}};
  const StepPlan plan = test::random_plan(load, GetParam().shape, 3);
  expect_equal_to_reference(training, train(training, {&plan}));
}

TEST_P(MoeModelThread, RecordedRoutesWithMissingRowsMatchTheReference) {
  const test::CountedTrace batched = test::random_trace(4, 40);
  const auto routes = recorded_routes(batched.trace, batched.batching);
  const Training training{.load = batched.load,
                          .routes = *routes,
                          .size = small_size(batched.load, batched.trace.top_k, 6),
                          .phase = GetParam().phase,
                          .optimizer = {}};
  const StepPlan plan = test::random_plan(batched.load, GetParam().shape, 4);
  const Trained trained = train(training, {&plan});
  for (const std::vector<ExpertId>& used : trained.routes.flat()) {
    EXPECT_THAT(used, testing::Each(testing::Ge(ExpertId{0})));  // the router chose experts for rows without a route
  }
  expect_equal_to_reference(training, trained);
}

class TrainedModelThread : public testing::TestWithParam<Optimizer::Kind> {
 protected:
  TrainedModelThread() {
    load_.top_k = 2;
    routes_ = dealt_routes(load_);
  }
  Training training(Optimizer optimizer) {
    return {.load = load_, .routes = *routes_, .size = small_size(load_, 2, 9), .optimizer = optimizer};
  }

  LoadTable load_ = test::random_load({.micro_steps = 2}, 21, 16);
  std::unique_ptr<ReplayRoutes> routes_;
};

INSTANTIATE_TEST_SUITE_P(Optimizers, TrainedModelThread, testing::Values(Optimizer::Kind::kSgd, Optimizer::Kind::kAdam),
                         [](const auto& kind) { return kind.param == Optimizer::Kind::kSgd ? "Sgd" : "Adam"; });

TEST_P(TrainedModelThread, AMovedExpertTrainsIdentically) {
  const Training with = training({.kind = GetParam(), .rate = 0.02F});
  const StepPlan before = test::random_plan(load_, {.guest_slots = 0}, 0);
  const StepPlan after = plan_at_homes(load_, reversed_homes(before));
  const Trained stayed = train(with, {&before, &before, &before, &before});
  const Trained moved = train(with, {&before, &after, &after, &before});
  EXPECT_EQ(stayed.loss, moved.loss);
  EXPECT_EQ(stayed.expert_weights, moved.expert_weights);
  EXPECT_EQ(stayed.router_weights, moved.router_weights);
  EXPECT_EQ(stayed.output, moved.output);

  // The homes of one of two layers change twice. All experts of this layer move each time.
  const std::int64_t weights = 3 * with.size.shape.hidden * with.size.shape.intermediate * std::int64_t{sizeof(float)};
  EXPECT_EQ(stayed.moved, Bytes{0});
  EXPECT_EQ(moved.moved, Bytes{2 * load_.num_experts() * weights * (GetParam() == Optimizer::Kind::kAdam ? 3 : 1)});
}

TEST_P(TrainedModelThread, LossesFollowTheReferenceForAHundredSteps) {
  constexpr int kSteps = 100;
  const Training with = training({.kind = GetParam(), .rate = GetParam() == Optimizer::Kind::kSgd ? 0.02F : 0.002F});
  const StepPlan plan = test::random_plan(load_, {.guest_slots = 2}, 7);
  const Trained trained = train(with, std::vector<const StepPlan*>(kSteps, &plan));

  ThreadPool pool(1);
  ReferenceModel reference(with.size, pool);
  for (int step = 0; step < kSteps; ++step) {
    const ReferenceResult result = reference.run(reference_step(trained, true), pool);  // routes are constant
    // Adam divides by the root of the squared gradient: if that is close to 0, rounding dominates.
    const double bound = GetParam() == Optimizer::Kind::kSgd ? 1e-4 : 1e-2;
    EXPECT_NEAR(trained.loss[static_cast<std::size_t>(step)], result.loss, bound) << "step " << step;
    reference.optimize(result, with.optimizer, pool);
  }
  EXPECT_LT(trained.loss.back(), 0.9 * trained.loss.front());
}

TEST(MoeModelThreads, FreeResidencyInRecomputeMatchesTheReferenceAndRestoresHomes) {
  LoadTable load = test::random_load({.micro_steps = 4, .layers = 3}, 12, 12);
  load.top_k = 2;
  const auto routes = dealt_routes(load);
  const StepPlan plan = test::random_plan(load, {.residency = Residency::kFree}, 3);
  const StepPlan vanilla = test::random_plan(load, {.guest_slots = 0}, 0);
  for (const PathChoice path : {PathChoice::kHost, PathChoice::kPeer}) {
    const Training training{.load = load,
                            .routes = *routes,
                            .size = small_size(load, 2, 7),
                            .phase = Phase::kRecompute,
                            .optimizer = {},
                            .path = path};
    const Trained once = train(training, {&plan});
    expect_equal_to_reference(training, once);
    const Trained again = train(training, {&plan, &vanilla, &plan});
    EXPECT_EQ(again.output, once.output);
    EXPECT_EQ(again.expert_weights, train(training, {&vanilla}).expert_weights);
  }
}

TEST(MoeModelThreads, RefusesInconsistentArguments) {
  LoadTable load = test::random_load({.micro_steps = 2}, 1, 8);
  load.top_k = 2;
  const auto routes = dealt_routes(load);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 0}, 0);
  const auto refusal = [&](const ModelSize& size) {
    try {
      train({.load = load, .routes = *routes, .size = size, .optimizer = {}}, {&plan});
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  ModelSize size = small_size(load, 2, 1);
  EXPECT_EQ(refusal(size), "accepted");
  size.layers = 3;
  EXPECT_THAT(refusal(size), testing::HasSubstr("home: is [2, 8], the model has 3 layers of 8 experts"));
  EXPECT_THAT(refusal(small_size(load, 3, 1)),
              testing::HasSubstr("top_k: routes have 2 experts per token, the model takes 3"));
}

}  // namespace
}  // namespace foremoe
