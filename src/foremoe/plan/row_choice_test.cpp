// Tests Rows::kToken: the shares of a node's quota. Compares the choice of a source's tokens with exhaustive search.

#include "foremoe/plan/row_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "foremoe/core/random.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

// One source's routes and shipments. Three nodes of one rank each; the source is rank 0.
struct Source {
  std::vector<ExpertId> routes;  // [token][top_k]
  std::vector<Shipment> sent;
  int top_k = 2;
  Topology topology{.num_ranks = 3, .ranks_per_node = 1};
};

// Random routes over `experts` experts, each with its rows divided among one to three replicas.
Source random_source(Random& random, int tokens, int experts) {
  Source source;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(experts));
  for (int t = 0; t < tokens; ++t) {
    const int first = static_cast<int>(random.below(experts));
    const int second = static_cast<int>((first + 1 + random.below(experts - 1)) % experts);
    for (const int e : {first, second}) {
      source.routes.emplace_back(random.below(8) == 0 ? -1 : e);
      if (source.routes.back() >= ExpertId{0}) ++rows[static_cast<std::size_t>(e)];
    }
  }
  for (int e = 0; e < experts; ++e) {
    std::int64_t left = rows[static_cast<std::size_t>(e)];
    for (int r = 0; r < 3 && left > 0; ++r) {
      const std::int64_t part = r == 2 ? left : static_cast<std::int64_t>(random.below(left + 1));
      if (part > 0) source.sent.push_back({ExpertId{e}, RankId{0}, RankId{r}, Tokens{part}, SlotId{e}});
      left -= part;
    }
  }
  return source;
}

std::vector<std::int32_t> chosen(const Source& s) {
  std::vector<std::int32_t> of_row(s.routes.size());
  RowChoiceWorkspace workspace;
  EXPECT_TRUE(choose_rows({s.sent, s.routes, s.top_k, RankId{0}, s.topology}, workspace, of_row));
  return of_row;
}

std::vector<std::int32_t> in_order(const Source& s) {
  std::vector<std::int32_t> of_row(s.routes.size());
  RouteWorkspace workspace;
  EXPECT_TRUE(assign_shipments(s.sent, s.routes, workspace, of_row));
  return of_row;
}

// (token, other node) pairs.
int pairs(const Source& s, const std::vector<std::int32_t>& of_row) {
  std::set<std::pair<std::size_t, int>> found;
  for (std::size_t row = 0; row < of_row.size(); ++row) {
    if (of_row[row] < 0) continue;
    const NodeId node = s.topology.node_of(s.sent[static_cast<std::size_t>(of_row[row])].replica);
    if (node != NodeId{0}) found.emplace(row / static_cast<std::size_t>(s.top_k), node.value);
  }
  return static_cast<int>(found.size());
}

// The fewest pairs over all assignments of one expert's rows to its shipments, with all other rows unchanged.
int fewest_pairs(const Source& s, std::vector<std::int32_t> of_row, ExpertId e) {
  std::vector<std::size_t> rows;
  std::vector<std::int32_t> shipments;
  for (std::size_t row = 0; row < s.routes.size(); ++row) {
    if (s.routes[row] != e) continue;
    rows.push_back(row);
    shipments.push_back(of_row[row]);
  }
  std::ranges::sort(shipments);
  int fewest = pairs(s, of_row);
  do {
    for (std::size_t i = 0; i < rows.size(); ++i) of_row[rows[i]] = shipments[i];
    fewest = std::min(fewest, pairs(s, of_row));
  } while (std::ranges::next_permutation(shipments).found);
  return fewest;
}

TEST(RowChoice, KeepsEveryShipmentAndServesEveryRow) {
  Random random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const Source source = random_source(random, 20, 6);
    const std::vector<std::int32_t> of_row = chosen(source);
    std::vector<std::int64_t> rows(source.sent.size());
    for (std::size_t row = 0; row < of_row.size(); ++row) {
      ASSERT_EQ(of_row[row] < 0, source.routes[row] < ExpertId{0});
      if (of_row[row] < 0) continue;
      const Shipment& shipment = source.sent[static_cast<std::size_t>(of_row[row])];
      EXPECT_EQ(shipment.expert, source.routes[row]);
      ++rows[static_cast<std::size_t>(of_row[row])];
    }
    for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i], source.sent[i].rows.value);
  }
}

TEST(RowChoice, NeverHasMorePairsThanRowOrder) {
  Random random(2);
  int fewer = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const Source source = random_source(random, 20, 6);
    const int before = pairs(source, in_order(source));
    const int after = pairs(source, chosen(source));
    EXPECT_LE(after, before);
    fewer += after < before;
  }
  EXPECT_GT(fewer, 150);
}

TEST(RowChoice, IsOptimalForEachExpertGivenTheOthers) {
  Random random(3);
  int converged = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const Source source = random_source(random, 7, 3);
    const std::vector<std::int32_t> of_row = chosen(source);
    const int found = pairs(source, of_row);
    bool optimal = true;
    for (int e = 0; e < 3; ++e) optimal &= fewest_pairs(source, of_row, ExpertId{e}) == found;
    converged += optimal;
  }
  EXPECT_EQ(converged, 200);
}

TEST(RowChoice, RejectsRoutesThatTheShipmentsDoNotCount) {
  Random random(4);
  Source source = random_source(random, 5, 3);
  source.sent.back().rows += Tokens{1};
  std::vector<std::int32_t> of_row(source.routes.size());
  RowChoiceWorkspace workspace;
  EXPECT_FALSE(choose_rows({source.sent, source.routes, 2, RankId{0}, source.topology}, workspace, of_row));
}

// One layer of random loads and plans on two nodes of four ranks and one of two.
struct Layer {
  LoadTable load;
  StepPlan plan;

  explicit Layer(std::uint64_t seed)
      : load(test::random_load({.ranks = 10, .experts = 20, .ranks_per_node = 4}, seed)),
        plan(test::random_plan(load, {.guest_slots = 3}, seed + 1)) {}

  RoutingProblem problem(Rows rows) const {
    return {load.load[0][0], layer_quotas(plan, EventId{0}, LayerId{0}), load.topology(), rows};
  }
};

TEST(RowsByToken, MeetQuotasAndCrossNodesNoMoreThanRowOrder) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Layer layer(seed);
    const Topology topology = layer.load.topology();
    std::map<Rows, std::array<std::int64_t, 3>> rows;  // kept on the rank, sent within the node, sent to other nodes
    for (const Rows by : {Rows::kOrder, Rows::kToken}) {
      Array<Tokens, 2> sent({10, 20});
      Array<Tokens, 2> received({10, 20});
      std::set<std::tuple<ExpertId, RankId, RankId>> pairs;
      for (const Shipment& s : route_tokens(layer.problem(by)).shipments) {
        EXPECT_GT(s.rows, Tokens{0});
        EXPECT_TRUE(pairs.emplace(s.expert, s.source, s.replica).second);
        EXPECT_EQ(layer.plan.slot_expert(0, 0, s.replica, s.slot), s.expert);
        sent(s.source, s.expert) += s.rows;
        received(s.replica, s.expert) += s.rows;
        rows[by][s.source == s.replica ? 0 : topology.same_node(s.source, s.replica) ? 1 : 2] += s.rows.value;
      }
      EXPECT_TRUE(std::ranges::equal(sent.flat(), layer.problem(by).load.flat()));
      for (int r = 0; r < 10; ++r) {
        for (int s = 0; s < layer.plan.num_slots(); ++s) {
          const ExpertId e = layer.plan.slot_expert(0, 0, r, s);
          if (e == kNoExpert) continue;
          EXPECT_EQ(received(r, e), layer.plan.slot_tokens(0, 0, r, s));
        }
      }
    }
    EXPECT_EQ(rows[Rows::kOrder], rows[Rows::kToken]);
  }
}

class SharesOfSources : public testing::TestWithParam<Rows> {};

TEST_P(SharesOfSources, AreInProportionToTheirRows) {
  double largest = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Layer layer(seed);
    const Topology topology = layer.load.topology();
    const RoutedLayer routed = route_tokens(layer.problem(GetParam()));
    std::vector<double> deviation(10);
    for (int e = 0; e < 20; ++e) {
      Array<std::int64_t, 2> rows({10, 10});  // [source][replica]
      for (const Shipment& s : routed.shipments) {
        if (s.expert == ExpertId{e}) rows(s.source, s.replica) = s.rows.value;
      }
      for (int n = 0; n < topology.num_nodes(); ++n) {
        const RankRange ranks = topology.ranks_of(NodeId{n});
        std::vector<double> left(10);  // after the sweep over own ranks
        std::vector<double> kept(10);
        double quota = 0;
        double total = 0;
        for (int s = ranks.first; s < ranks.last; ++s) {
          left[s] = static_cast<double>(layer.load.load(0, 0, s, e).value - rows(s, s));
          for (int r = ranks.first; r < ranks.last; ++r) kept[s] += r == s ? 0 : static_cast<double>(rows(s, r));
          quota += kept[s];
          total += left[s];
        }
        if (total == quota) continue;  // all rows stay on the node
        for (int s = ranks.first; s < ranks.last; ++s) {
          const double share = quota * left[s] / total;
          EXPECT_GE(kept[s], std::floor(share));
          EXPECT_LE(kept[s], std::ceil(share));
          deviation[s] += kept[s] - share;
          largest = std::max(largest, std::abs(deviation[s]));
        }
      }
    }
  }
  EXPECT_LT(largest, 1.5);
}

INSTANTIATE_TEST_SUITE_P(Rows, SharesOfSources, testing::Values(Rows::kOrder, Rows::kToken),
                         [](const auto& rows) { return std::string(to_string(rows.param)); });

TEST(RowsByToken, OfATraceHaveFewerRowsBetweenNodes) {
  const test::CountedTrace batched = test::random_trace(1, 400);
  const SourceTokens tokens(batched.trace, batched.batching);
  const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 2}, 1);
  std::map<Rows, std::int64_t> between;
  for (const Rows rows : {Rows::kOrder, Rows::kToken}) {
    for (int m = 0; m < 2; ++m) {
      for (int l = 0; l < 2; ++l) {
        const Topology topology = batched.load.topology();
        const RoutedLayer routed =
            route_tokens({batched.load.load[m][l], layer_quotas(plan, EventId{m}, LayerId{l}), topology, rows});
        const TokenDispatch dispatch = token_dispatch(routed, {tokens, MicroStepId{m}, LayerId{l}, topology, rows});
        for (int s = 0; s < 4; ++s) between[rows] += dispatch.to_node(s, 1 - s / 2).value;
      }
    }
  }
  EXPECT_LT(between[Rows::kToken], between[Rows::kOrder]);
}

}  // namespace
}  // namespace foremoe
