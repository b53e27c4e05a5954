// Every entry point throws InputError for loads, plans and spans in memory that do not fit, and never reads outside
// them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/fit_plan.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/plan/rank_dispatch.h"
#include "foremoe/planner/planner.h"
#include "foremoe/policy/policy.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/packing.h"
#include "foremoe/transfer/rank_turns.h"

namespace foremoe {
namespace {

LoadTable load_of(const std::array<std::size_t, 4>& shape, std::int64_t tokens = 5) {
  return {.load = Array<Tokens, 4>(shape, Tokens{tokens}), .ranks_per_node = 2};
}

const LoadTable kLoad = load_of({2, 2, 2, 8});

// Field of the InputError that the call throws; "" if it throws none.
std::string field_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.where().field.empty() ? error.what() : error.where().field;
  }
  return "";
}

struct BadLoad {
  const char* field;
  LoadTable load;
};

std::vector<BadLoad> bad_loads() {
  std::vector<BadLoad> bad{{"load", {}},
                           {"load", load_of({2, 2, 2, 8}, -5)},
                           {"load", load_of({2, 2, 2, 8}, std::numeric_limits<std::int64_t>::max() / 4)}};
  for (std::size_t axis = 0; axis < 4; ++axis) {
    std::array<std::size_t, 4> shape = kLoad.load.shape();
    shape[axis] = 0;
    bad.push_back({"load", load_of(shape)});
  }
  bad.push_back({"ranks_per_node", kLoad});
  bad.back().load.ranks_per_node = 0;
  bad.push_back({"top_k", kLoad});
  bad.back().load.top_k = 0;
  return bad;
}

TEST(InputErrors, EveryPolicyRejectsInvalidLoadsHomesAndFormerSteps) {
  ThreadPool pool(1);
  const auto homes = contiguous_homes(2, 8, 2);
  auto far = homes;
  far(1, 3) = RankId{9};
  auto crowded = homes;
  crowded(1, 3) = RankId{1};
  const auto other = contiguous_homes(1, 8, 2);
  StepPlan broken = plan_step(kLoad, {.guest_slots = 2}).plan;
  broken.slot_expert(0, 0, 0, 0) = ExpertId{1234};
  for (const Policy* policy : all_policies()) {
    SCOPED_TRACE(policy->name());
    const auto field = [&](const PolicyInput& input) { return field_of([&] { (void)policy->plan(input, pool); }); };
    const PolicyInput good{.load = kLoad, .home = homes, .options = {.guest_slots = 2}};
    EXPECT_EQ(field(good), "");
    for (const auto& [expected, load] : bad_loads()) {
      EXPECT_EQ(field({.load = load, .home = homes, .options = {.guest_slots = 2}}), expected);
      const std::string of_former =
          field({.load = kLoad, .home = homes, .options = {.guest_slots = 2}, .previous_load = &load});
      EXPECT_THAT(of_former, testing::AnyOf(expected, "")) << "some policies do not read it";
    }
    const auto of_homes = [&](const Array<RankId, 2>& home) {
      return field({.load = kLoad, .home = home, .options = {.guest_slots = 2}});
    };
    if (std::holds_alternative<Skipped>(policy->plan(good, pool))) continue;  // FineMoE needs other guest slots
    EXPECT_EQ(of_homes(far), "homes");
    EXPECT_EQ(of_homes(crowded), "homes");
    EXPECT_EQ(of_homes(other), "homes");
    broken.policy = policy->name();
    (void)field({.load = kLoad, .home = homes, .options = {.guest_slots = 2}, .previous = &broken});
  }
}

TEST(InputErrors, TheRestOfTheLibraryRejectsInvalidLoads) {
  ThreadPool pool(1);
  const StepPlan plan = plan_step(kLoad).plan;
  for (const auto& [expected, load] : bad_loads()) {
    EXPECT_EQ(field_of([&] { (void)plan_step(load); }), expected);
    EXPECT_EQ(field_of([&] { (void)recompute_quotas(plan, load); }), expected);
    EXPECT_EQ(field_of([&] { (void)check_plan(plan, load); }), expected);
    EXPECT_EQ(field_of([&] { (void)plan_figures(plan, load); }), expected);
    EXPECT_NE(field_of([&] { (void)fit_plan(plan, load); }), "");
    EXPECT_EQ(field_of([&] { (void)RankTurns(plan, load, {}); }), expected);
    Workload workload{.load = load, .homes = contiguous_homes(2, 8, 2)};
    EXPECT_EQ(field_of([&] { (void)evaluate(policy_named("foremoe"), workload, {}, {.pool = pool}); }), expected);
  }
}

TEST(InputErrors, InvalidPlansAreRejectedByTheMemberAtFault) {
  const StepPlan good = plan_step(kLoad, {.guest_slots = 1}).plan;
  const std::vector<std::pair<std::string, std::function<void(StepPlan&)>>> changes{
      {"slot_expert", [](StepPlan& p) { p.slot_expert(1, 1, 1, 4) = ExpertId{8}; }},
      {"slot_expert", [](StepPlan& p) { p.slot_expert(1, 1, 1, 4) = ExpertId{-2}; }},
      {"slot_expert", [](StepPlan& p) { p.slot_expert(1, 1, 1, 0) = ExpertId{0}; }},
      {"slot_expert", [](StepPlan& p) { p.slot_expert(1, 1, 1, 4) = ExpertId{7}; }},
      {"slot_expert", [](StepPlan& p) { p = {}; }},
      {"slot_tokens", [](StepPlan& p) { p.slot_tokens(1, 1, 1, 0) = Tokens{-1}; }},
      {"slot_tokens", [](StepPlan& p) { p.slot_tokens = {}; }},
      {"homes", [](StepPlan& p) { p.home(1, 2) = RankId{2}; }},
      {"homes", [](StepPlan& p) { p.home(1, 2) = RankId{-1}; }},
      {"homes", [](StepPlan& p) { p.home(1, 2) = RankId{1}; }},
      {"home",
       [](StepPlan& p) {
         p.home = Array<RankId, 2>({1, 8});
       }},
      {"guest_slots", [](StepPlan& p) { p.guest_slots = 2; }},
      {"guest_slots", [](StepPlan& p) { p.guest_slots = -1; }},
      {"ranks_per_node", [](StepPlan& p) { p.ranks_per_node = 0; }},
      {"in_flight", [](StepPlan& p) { p.in_flight = 0; }},
      {"event_micro_step", [](StepPlan& p) { p.event_micro_step[1] = MicroStepId{7}; }},
      {"event_micro_step", [](StepPlan& p) { p.event_micro_step.pop_back(); }},
      {"event_pass", [](StepPlan& p) { p.event_pass.clear(); }},
      {"max_load", [](StepPlan& p) {
         p.max_load = Array<Tokens, 2>({1, 1});
       }}};
  const ExpertLayout layout = swiglu_layout(8, 4);
  ThreadPool pool(1);
  const auto homes = contiguous_homes(2, 8, 2);
  const auto fields = [&](const StepPlan& plan) {
    return std::vector{field_of([&] { (void)make_transfer_schedule(plan, layout, {}); }),
                       field_of([&] { (void)RankTurns(plan, kLoad, {}); }),
                       field_of([&] { (void)plan_figures(plan, kLoad); }),
                       field_of([&] { (void)recompute_quotas(plan, kLoad); }),
                       field_of([&] { (void)planned_loads(plan); }),
                       field_of([&] { (void)take_first(plan, kLoad); }),
                       field_of([&] { (void)plan_step({.load = kLoad, .home = homes, .previous = &plan}, pool); })};
  };
  EXPECT_THAT(fields(good), testing::Each(""));
  EXPECT_EQ(field_of([&] { (void)fit_plan(good, kLoad); }), "");
  for (const auto& [expected, change] : changes) {
    StepPlan plan = good;
    change(plan);
    EXPECT_THAT(fields(plan), testing::Each(expected));
    EXPECT_NE(field_of([&] { (void)fit_plan(plan, kLoad); }), "") << expected;
    EXPECT_FALSE(check_plan(plan, kLoad).ok()) << expected;
  }
  EXPECT_EQ(field_of([&] { (void)take_first(good, load_of({3, 2, 2, 8})); }), "load");
  const Array<RankId, 2> other = contiguous_homes(1, 8, 2);
  EXPECT_EQ(field_of([&] { (void)plan_figures(good, kLoad, {.initial_home = other}); }), "initial_home");
  EXPECT_EQ(field_of([&] { (void)check_plan(good, kLoad, {.initial_home = other}); }), "initial_home");
  EXPECT_EQ(field_of([&] { (void)check_plan(good, kLoad, {.align = 0}); }), "align");
}

TEST(InputErrors, RowsOfARankRejectTurnsIdsAndSpansThatDoNotFit) {
  const StepPlan plan = plan_step(kLoad, {.guest_slots = 1}).plan;
  const RankTurns turns(plan, kLoad, {});
  RankDispatchWorkspace workspace;
  RankDispatch rows;
  for (const TurnId t : {TurnId{-1}, TurnId{400}}) {
    EXPECT_EQ(field_of([&] { turns.rows(t, workspace, rows); }), "turn");
    EXPECT_EQ(field_of([&] { turns.rows_at_homes(t, workspace, rows); }), "turn");
    EXPECT_EQ(field_of([&] { (void)turns.arriving(t); }), "turn");
    EXPECT_EQ(field_of([&] { (void)turns.starting(t); }), "turn");
    EXPECT_EQ(field_of([&] { (void)turns.returning(t); }), "turn");
    EXPECT_EQ(field_of([&] { (void)turns.slot_of_forward(t, SlotId{0}); }), "turn");
  }
  EXPECT_EQ(field_of([&] { (void)turns.slot_of_forward(TurnId{0}, SlotId{5}); }), "slot");
  turns.rows(TurnId{0}, workspace, rows);
  std::vector<ExpertId> routes;
  for (int i = 0; i < 40; ++i) routes.emplace_back(i / 5);
  std::vector<std::int32_t> slots(40);
  const auto of_routes = [&](std::span<const ExpertId> r, int top_k, std::span<std::int32_t> out) {
    return field_of([&] { row_slots(rows, r, top_k, workspace, out); });
  };
  EXPECT_EQ(of_routes(routes, 1, slots), "");
  EXPECT_EQ(of_routes(routes, 1, std::span(slots).first(10)), "routes");
  EXPECT_EQ(of_routes(routes, 0, slots), "top_k");
  EXPECT_EQ(of_routes(routes, 3, slots), "top_k");
  EXPECT_EQ(of_routes(std::vector(40, ExpertId{1000}), 1, slots), "routes");
  EXPECT_EQ(of_routes(std::vector(40, ExpertId{0}), 1, slots), "routes");
  row_slots(rows, routes, 1, workspace, slots);
  std::vector<std::int32_t> order(40);
  const auto of_order = [&](std::span<const std::int32_t> s, std::span<std::int32_t> out) {
    return field_of([&] { row_order(rows, s, workspace, out); });
  };
  EXPECT_EQ(of_order(slots, order), "");
  EXPECT_EQ(of_order(slots, std::span(order).first(39)), "order");
  EXPECT_EQ(of_order(std::vector<std::int32_t>(40, 10), order), "slots");
  EXPECT_EQ(of_order(std::vector<std::int32_t>(41, slots.back()), order), "slots");
  const LayerQuotas quotas = layer_quotas(plan, EventId{0}, LayerId{0});
  const auto of_problem = [&](const RoutingProblem& problem) { return field_of([&] { (void)route_tokens(problem); }); };
  const LoadTable negative = load_of({1, 1, 2, 8}, -1);
  const LoadTable wide = load_of({1, 1, 3, 8});
  EXPECT_EQ(of_problem({kLoad.load[0][0], quotas, {2, 2}}), "");
  EXPECT_EQ(of_problem({wide.load[0][0], quotas, {3, 2}}), "load");
  EXPECT_EQ(of_problem({kLoad.load[0][0], quotas, {2, 0}}), "load");
  EXPECT_EQ(of_problem({negative.load[0][0], quotas, {2, 2}}), "load");
  EXPECT_EQ(field_of([&] { rank_dispatch({kLoad.load[0][0], quotas, {2, 2}}, RankId{2}, workspace, rows); }), "rank");
}

RoutingTrace trace_of(int num_tokens) {
  const auto routes = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(num_tokens));
  return {.routes = routes->data(),
          .storage = routes,
          .num_tokens = num_tokens,
          .num_layers = 1,
          .num_experts = 4,
          .cu_seqlens = {0, num_tokens / 2, num_tokens}};
}

TEST(InputErrors, CollectorsAndBatchingsRejectIdsAndShapesThatDoNotFit) {
  using Shape = RolloutCollector::Shape;
  for (const Shape& shape : {Shape{0, 0, 0}, Shape{-1, 1, 4}, Shape{1, 5, 4}, Shape{1, 1, 1 << 20}}) {
    EXPECT_EQ(field_of([&] { RolloutCollector{shape}; }), "shape");
  }
  const RoutingTrace trace = trace_of(8);
  const Batching good{.num_micro_steps = 1,
                      .num_ranks = 2,
                      .ranks_per_node = 2,
                      .micro_step = {MicroStepId{0}, MicroStepId{0}},
                      .rank = {RankId{0}, RankId{1}}};
  const std::vector<std::function<void(Batching&)>> changes{[](Batching& b) { b = {}; },
                                                            [](Batching& b) { b.num_ranks = 1; },
                                                            [](Batching& b) { b.ranks_per_node = 0; },
                                                            [](Batching& b) { b.rank[1] = RankId{-1}; },
                                                            [](Batching& b) { b.micro_step[1] = MicroStepId{1}; },
                                                            [](Batching& b) { b.micro_step.pop_back(); }};
  ThreadPool pool(1);
  RolloutCollector collector({.num_layers = 1, .top_k = 1, .num_experts = 4});
  for (const int sequence : {0, 1}) collector.add(sequence, RouteType::kU8, std::vector<std::byte>(4));
  const auto fields = [&](const Batching& batching) {
    const BatchedTrace batched{trace, batching};
    return std::vector{field_of([&] { (void)collector.to_load_table(batching); }),
                       field_of([&] { (void)collect(trace, batching, pool); }),
                       field_of([&] { (void)squared_lengths(batched); }),
                       field_of([&] { (void)SourceTokens(trace, batching); })};
  };
  EXPECT_THAT(fields(good), testing::Each(""));
  for (const auto& change : changes) {
    Batching batching = good;
    change(batching);
    const auto found = fields(batching);
    EXPECT_THAT(std::span(found).subspan(1), testing::Each("batching"));
    EXPECT_NE(found.front(), "");
  }
  RoutingTrace backwards = trace;
  backwards.cu_seqlens = {0, 9, 8};
  EXPECT_EQ(field_of([&] { (void)collect(backwards, good, pool); }), "cu_seqlens");
  EXPECT_EQ(field_of([&] { (void)pack(backwards, {.num_ranks = 2, .tokens_per_rank = 8}, pool); }), "cu_seqlens");
  EXPECT_EQ(field_of([&] { (void)make_batching(backwards, {.num_ranks = 2}); }), "cu_seqlens");
  const SourceTokens tokens(trace, good);
  std::vector<ExpertId> routes;
  EXPECT_EQ(field_of([&] { tokens.gather(MicroStepId{1}, RankId{0}, LayerId{0}, routes); }), "micro_step");
  EXPECT_EQ(field_of([&] { tokens.gather(MicroStepId{0}, RankId{0}, LayerId{1}, routes); }), "layer");
  EXPECT_EQ(field_of([&] { (void)imbalance_ratios(kLoad, contiguous_homes(2, 8, 4)); }), "homes");
}

}  // namespace
}  // namespace foremoe
