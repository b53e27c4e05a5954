#include "foremoe/plan/rank_dispatch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr test::Shape kShape{.micro_steps = 2, .layers = 2, .ranks = 8, .experts = 16, .ranks_per_node = 3};

// A source's routes, one expert per row, in random order. Some rows have no route.
std::vector<ExpertId> routes_of(std::span<const Tokens> load, Random& random) {
  std::vector<ExpertId> routes;
  for (std::size_t e = 0; e < load.size(); ++e) routes.insert(routes.end(), load[e].value, ExpertId{e});
  for (int i = 0; i < 3; ++i) routes.push_back(kNoExpert);
  for (std::size_t i = routes.size(); i > 1; --i) std::swap(routes[i - 1], routes[random.below(i)]);
  return routes;
}

struct Layer {
  Layer(const LoadTable& load, const StepPlan& plan, int event, int layer, Random& random)
      : problem{load.load[plan.event_micro_step[event]][layer], layer_quotas(plan, EventId{event}, LayerId{layer}),
                load.topology()} {
    for (int s = 0; s < load.num_ranks(); ++s) routes.push_back(routes_of(problem.load.row(s), random));
  }

  RankDispatch rows(int rank) const {
    RankDispatchWorkspace workspace;
    RankDispatch rows;
    rank_dispatch(problem, RankId{rank}, workspace, rows);
    return rows;
  }
  std::vector<std::int32_t> slots(const RankDispatch& rows, int rank) const {
    RankDispatchWorkspace workspace;
    std::vector<std::int32_t> slots(routes[rank].size());
    row_slots(rows, routes[rank], 1, workspace, slots);
    return slots;
  }
  std::vector<std::int32_t> order(const RankDispatch& rows, int rank) const {
    RankDispatchWorkspace workspace;
    std::vector<std::int32_t> order(static_cast<std::size_t>(rows.sent), -1);
    row_order(rows, slots(rows, rank), workspace, order);
    return order;
  }

  RoutingProblem problem;
  std::vector<std::vector<ExpertId>> routes;  // [source][row]
};

// A sent row: its index and expert at the source, and the replica and slot that serve it.
struct Row {
  int source, row, expert, replica, slot;
};

// The rows of all shipments of route_tokens. Each shipment takes the source's next rows of its expert.
std::vector<Row> all_rows(const Layer& layer) {
  std::vector<Row> all;
  std::vector<std::size_t> next(layer.routes.size() * kShape.experts);  // [source][expert], where the search continues
  for (const Shipment& shipment : route_tokens(layer.problem).shipments) {
    const std::vector<ExpertId>& routes = layer.routes[shipment.source.index()];
    const auto slots = layer.problem.quotas.slot_expert.row(shipment.replica);
    const auto slot = static_cast<int>(std::ranges::find(slots, shipment.expert) - slots.begin());
    std::size_t& row = next[shipment.source.index() * kShape.experts + shipment.expert.index()];
    for (Tokens left = shipment.rows; left > Tokens{0}; ++row) {
      if (routes.at(row) != shipment.expert) continue;
      all.push_back(
          {shipment.source.value, static_cast<int>(row), shipment.expert.value, shipment.replica.value, slot});
      left -= Tokens{1};
    }
  }
  return all;
}

class RankDispatchOfRandomPlans : public testing::TestWithParam<Residency> {};

TEST_P(RankDispatchOfRandomPlans, HaveTheDocumentedOrder) {
  Random random(3);
  for (int seed = 1; seed <= 10; ++seed) {
    const LoadTable load = test::random_load(kShape, seed);
    const StepPlan plan = test::random_plan(load, {.residency = GetParam(), .guest_slots = 2}, seed);
    for (int t = 0; t < plan.num_events(); ++t) {
      const Layer layer(load, plan, t, t % 2, random);
      const std::vector<Row> all = all_rows(layer);
      for (int r = 0; r < kShape.ranks; ++r) {
        const RankDispatch rows = layer.rows(r);

        std::vector<Row> sent;
        std::ranges::copy_if(all, std::back_inserter(sent), [&](const Row& x) { return x.source == r; });
        std::ranges::sort(sent, {}, [](const Row& x) { return std::tuple(x.replica, x.expert, x.row); });
        std::vector<std::int32_t> order;
        for (const Row& x : sent) order.push_back(x.row);
        EXPECT_EQ(layer.order(rows, r), order);
        std::vector<std::int32_t> slots(layer.routes[r].size(), -1);
        for (const Row& x : sent) slots[x.row] = x.replica * plan.num_slots() + x.slot;
        EXPECT_EQ(layer.slots(rows, r), slots);
        for (int q = 0; q < kShape.ranks; ++q) {
          EXPECT_EQ(rows.send[q], std::ranges::count(sent, q, &Row::replica));
        }

        std::vector<Row> received;
        std::ranges::copy_if(all, std::back_inserter(received), [&](const Row& x) { return x.replica == r; });
        std::ranges::sort(received, {}, [](const Row& x) { return std::tuple(x.source, x.expert, x.row); });
        for (int q = 0; q < kShape.ranks; ++q) {
          EXPECT_EQ(rows.recv[q], std::ranges::count(received, q, &Row::source));
        }
        std::vector<std::int32_t> to_slots(received.size());
        std::iota(to_slots.begin(), to_slots.end(), 0);
        std::ranges::stable_sort(to_slots, {}, [&](int i) { return received[i].slot; });
        EXPECT_EQ(rows.to_slots, to_slots);
        for (int s = 0; s < plan.num_slots(); ++s) {
          EXPECT_EQ(rows.slot_offsets[s + 1] - rows.slot_offsets[s], plan.slot_tokens(t, t % 2, r, s).value);
          for (int q = 0; q < kShape.ranks; ++q) {
            const auto from_there = [&](const Row& x) { return x.slot == s && x.source == q; };
            EXPECT_EQ(rows.received[s * kShape.ranks + q], std::ranges::count_if(received, from_there));
          }
        }
        std::ranges::sort(sent, {}, [](const Row& x) { return std::tuple(x.expert, x.row); });
        auto next = sent.begin();
        for (const Shipment& b : rows.blocks) {
          for (Tokens i; i < b.rows; i += Tokens{1}, ++next) {
            EXPECT_EQ(std::tuple(next->expert, next->replica, next->slot),
                      std::tuple(b.expert.value, b.replica.value, b.slot.value));
          }
        }
        EXPECT_TRUE(next == sent.end());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, RankDispatchOfRandomPlans,
                         testing::Values(Residency::kStatic, Residency::kResident, Residency::kShared,
                                         Residency::kFree),
                         [](const auto& residency) { return std::string(to_string(residency.param)); });

TEST(RankDispatch, HaveTheShipmentsFromAndToTheRank) {
  const LoadTable load = test::random_load(kShape, 5);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 3}, 6);
  const RoutingProblem problem{load.load[0][1], layer_quotas(plan, EventId{0}, LayerId{1}), load.topology()};
  RouteWorkspace workspace;
  RoutedRank own;
  const RoutedLayer routed = route_tokens(problem);
  for (int r = 0; r < kShape.ranks; ++r) {
    route_tokens_of(problem, RankId{r}, workspace, own);
    EXPECT_TRUE(std::ranges::equal(own.sent, routed.of_source(RankId{r})));
    Tokens received;
    for (const Shipment& s : own.received) {
      EXPECT_EQ(s.replica, RankId{r});
      EXPECT_EQ(std::ranges::count(routed.shipments, s), 1);
      received += s.rows;
    }
    Tokens quota;
    for (const Tokens tokens : plan.slot_tokens.row(0, 1, r)) quota += tokens;
    EXPECT_EQ(received, quota);
  }
}

TEST(RankDispatch, ByTokenServeEachTokenOnTheNodesThatTheSimulatorCounts) {
  const test::CountedTrace recorded = test::random_trace(5, 200);
  const SourceTokens tokens(recorded.trace, recorded.batching);
  const Topology topology = recorded.load.topology();
  const StepPlan plan = test::random_plan(recorded.load, {.guest_slots = 2}, 6);
  std::int64_t by_token = 0, in_order = 0;  // pairs of token and other node
  for (const auto& [m, l] : {std::pair(0, 0), std::pair(0, 1), std::pair(1, 0), std::pair(1, 1)}) {
    const RoutingProblem problem{recorded.load.load[m][l], layer_quotas(plan, EventId{m}, LayerId{l}), topology,
                                 Rows::kToken};
    const TokenDispatch expected =
        token_dispatch(route_tokens(problem), {tokens, MicroStepId{m}, LayerId{l}, topology, Rows::kToken});
    const TokenDispatch ordered = token_dispatch(route_tokens({problem.load, problem.quotas, topology}),
                                                 {tokens, MicroStepId{m}, LayerId{l}, topology});
    RankDispatchWorkspace workspace;
    Array<std::int64_t, 2> sent({4, 4}), received({4, 4});
    for (int r = 0; r < topology.num_ranks; ++r) {
      RankDispatch rows;
      rank_dispatch(problem, RankId{r}, workspace, rows);
      std::vector<ExpertId> routes;
      tokens.gather(MicroStepId{m}, RankId{r}, LayerId{l}, routes);
      std::vector<std::int32_t> slots(routes.size());
      row_slots(rows, routes, tokens.top_k(), workspace, slots);
      std::vector<std::int64_t> to_node(2);
      for (std::size_t token = 0; token < slots.size(); token += 3) {
        std::set<int> nodes;
        for (const std::int32_t slot : std::span(slots).subspan(token, 3)) {
          if (slot >= 0) nodes.insert(topology.node_of(RankId{slot / plan.num_slots()}).value);
        }
        for (const int n : nodes) ++to_node[static_cast<std::size_t>(n)];
      }
      const int other = 1 - r / 2;
      for (int n = 0; n < 2; ++n) EXPECT_EQ(to_node[static_cast<std::size_t>(n)], expected.to_node(r, n).value);
      by_token += expected.to_node(r, other).value;
      in_order += ordered.to_node(r, other).value;
      for (int q = 0; q < 4; ++q) {
        sent(r, q) = rows.send[static_cast<std::size_t>(q)];
        received(q, r) = rows.recv[static_cast<std::size_t>(q)];
        std::int64_t to_rank = 0;
        for (const std::int32_t slot : slots) to_rank += slot >= 0 && slot / plan.num_slots() == q;
        EXPECT_EQ(to_rank, sent(r, q));
      }
    }
    EXPECT_TRUE(std::ranges::equal(sent.flat(), received.flat()));
  }
  EXPECT_LT(by_token, in_order);
}

TEST(RankDispatch, RejectQuotasThatDifferFromTheLoad) {
  const LoadTable load = test::random_load(kShape, 5);
  StepPlan plan = test::random_plan(load, {.guest_slots = 1}, 6);
  const RoutingProblem problem{load.load[0][0], layer_quotas(plan, EventId{0}, LayerId{0}), load.topology()};
  RankDispatchWorkspace workspace;
  RankDispatch rows;
  plan.slot_tokens(0, 0, 5, 1) += Tokens{1};
  for (int r = 0; r < kShape.ranks; ++r)
    EXPECT_THROW(rank_dispatch(problem, RankId{r}, workspace, rows), InputError) << r;
}

struct RowSlots : testing::Test {
  std::string refusal(const std::vector<ExpertId>& routes) {
    std::vector<std::int32_t> served(routes.size());
    try {
      row_slots(rows, routes, 1, workspace, served);
    } catch (const InputError& error) {
      EXPECT_EQ(error.where().field, "routes");
      return error.what();
    }
    return "nothing";
  }
  void SetUp() override {
    load(0, 0) = Tokens{2};
    load(0, 1) = Tokens{1};
    slots(0, 0) = ExpertId{0};
    slots(1, 0) = ExpertId{1};
    quotas(0, 0) = Tokens{2};
    quotas(1, 0) = Tokens{1};
    rank_dispatch({load, {slots, quotas}, {.num_ranks = 2, .ranks_per_node = 2}}, RankId{0}, workspace, rows);
  }

  Array<Tokens, 2> load{{2, 3}};
  Array<ExpertId, 2> slots{{2, 1}};
  Array<Tokens, 2> quotas{{2, 1}};
  RankDispatchWorkspace workspace;
  RankDispatch rows;
};

TEST_F(RowSlots, AreNegativeForRowsWithoutARoute) {
  std::vector<std::int32_t> served(4);
  row_slots(rows, std::vector{ExpertId{1}, kNoExpert, ExpertId{0}, ExpertId{0}}, 1, workspace, served);
  EXPECT_THAT(served, ElementsAre(1, -1, 0, 0));
  std::vector<std::int32_t> order(3);
  row_order(rows, served, workspace, order);
  EXPECT_THAT(order, ElementsAre(2, 3, 0));
}

TEST_F(RowSlots, RejectRoutesThatTheLoadDoesNotCount) {
  const ExpertId a{0}, b{1}, c{2};
  EXPECT_THAT(refusal({a, a}), HasSubstr("1 rows fewer of expert 1"));
  EXPECT_THAT(refusal({a, a, b, a}), HasSubstr("1 rows more of expert 0"));
  EXPECT_THAT(refusal({a, b, b}), HasSubstr("1 rows fewer of expert 0"));
  EXPECT_THAT(refusal({a, a, b, c}), HasSubstr("rank 0 has 1 rows more of expert 2"));
  EXPECT_THAT(refusal({a, a, b, ExpertId{3}}), HasSubstr("routes[3]: expert 3, but there are 3"));
}

TEST(RowOrder, FollowsFromAnySlotsOfAnExpertsRows) {
  const LoadTable load = test::random_load(kShape, 4);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 3}, 4);
  Random random(4);
  const Layer layer(load, plan, 0, 0, random);
  for (int r = 0; r < kShape.ranks; ++r) {
    const RankDispatch rows = layer.rows(r);
    std::vector<std::int32_t> slots = layer.slots(rows, r);
    const std::vector<ExpertId>& routes = layer.routes[r];
    for (std::size_t i = routes.size(); i > 1; --i) {  // swap rows of the same expert
      const std::size_t j = random.below(i);
      if (routes[i - 1] == routes[j]) std::swap(slots[i - 1], slots[j]);
    }
    std::vector<std::int32_t> expected;
    for (std::size_t row = 0; row < routes.size(); ++row) {
      if (slots[row] >= 0) expected.push_back(static_cast<std::int32_t>(row));
    }
    std::ranges::stable_sort(expected, {},
                             [&](std::int32_t row) { return std::tuple(slots[row] / plan.num_slots(), routes[row]); });
    std::vector<std::int32_t> order(expected.size());
    RankDispatchWorkspace workspace;
    row_order(rows, slots, workspace, order);
    EXPECT_EQ(order, expected);
  }
}

TEST(RankDispatch, AreEmptyWithoutTokens) {
  const Array<Tokens, 2> load({2, 2});
  const Array<ExpertId, 2> slots({2, 1}, kNoExpert);
  const Array<Tokens, 2> quotas({2, 1});
  RankDispatchWorkspace workspace;
  RankDispatch rows;
  rank_dispatch({load, {slots, quotas}, {.num_ranks = 2, .ranks_per_node = 2}}, RankId{1}, workspace, rows);
  EXPECT_EQ(rows.sent, 0);
  EXPECT_THAT(rows.send, ElementsAre(0, 0));
  EXPECT_THAT(rows.recv, ElementsAre(0, 0));
  EXPECT_THAT(rows.slot_offsets, ElementsAre(0, 0));
  EXPECT_TRUE(rows.to_slots.empty());
}

}  // namespace
}  // namespace foremoe
