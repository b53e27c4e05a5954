#include "foremoe/sim/layer_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "foremoe/plan/assign_rows.h"
#include "foremoe/policy/policy.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/simulated_plans.h"

namespace foremoe {
namespace {

// Random quotas that sum to the loads, on all replicas that fit.
StepPlan scattered(const LoadTable& load, Random& random) {
  StepPlan plan = sim_test::homes_plan(load, 2);
  const int homes = load.num_experts() / load.num_ranks();
  for (int l = 0; l < load.num_layers(); ++l) {
    for (int r = 0; r < load.num_ranks(); ++r) {
      for (int g = 0; g < 2; ++g) {
        const ExpertId e{random.below(static_cast<std::uint64_t>(load.num_experts()))};
        const int home = e.value / homes;
        if (home == r || (g == 1 && plan.slot_expert(0, l, r, homes) == e)) continue;
        Tokens& left = plan.slot_tokens(0, l, home, e.value % homes);
        const Tokens part{static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(left.value) + 1))};
        left -= part;
        plan.slot_expert(0, l, r, homes + g) = e;
        plan.slot_tokens(0, l, r, homes + g) = part;
      }
    }
  }
  return plan;
}

void expect_ranks(const std::vector<RankRows>& actual, const std::vector<RankRows>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t r = 0; r < expected.size(); ++r) {
    EXPECT_EQ(actual[r].sent_to_peers, expected[r].sent_to_peers) << "rank " << r;
    EXPECT_EQ(actual[r].received_from_peers, expected[r].received_from_peers) << "rank " << r;
    EXPECT_EQ(actual[r].sent_to_nodes, expected[r].sent_to_nodes) << "rank " << r;
    EXPECT_EQ(actual[r].received_from_nodes, expected[r].received_from_nodes) << "rank " << r;
  }
}

TEST(LayerRowsTest, EqualTheSumsOfTheDispatchTable) {
  Random random(4);
  RowWorkspace workspace;
  LayerRows rows;
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks_per_node = static_cast<int>(1 + random.below(5));  // of 6: the last node may have fewer
    const LoadTable load = sim_test::random_load(
        {.micro_steps = 1, .layers = 1, .ranks = 6, .experts = 12, .ranks_per_node = ranks_per_node}, random);
    const StepPlan plan = scattered(load, random);
    const RoutingProblem problem{
        .load = load.load[0][0], .quotas = layer_quotas(plan, EventId{0}, LayerId{0}), .topology = load.topology()};
    count_rows(problem, workspace, rows);

    const Array<Tokens, 2> table = dispatch_table(route_tokens(problem));
    std::vector<RankRows> expected(6);
    Array<std::int64_t, 2> between(rows.between_nodes.shape());
    for (int s = 0; s < 6; ++s) {
      for (int d = 0; d < 6; ++d) {
        const std::int64_t count = table(s, d).value;
        if (s == d) continue;
        RankRows& from = expected[static_cast<std::size_t>(s)];
        RankRows& to = expected[static_cast<std::size_t>(d)];
        if (load.topology().same_node(RankId{s}, RankId{d})) {
          from.sent_to_peers += count;
          to.received_from_peers += count;
        } else {
          from.sent_to_nodes += count;
          to.received_from_nodes += count;
          between(load.topology().node_of(RankId{s}), load.topology().node_of(RankId{d})) += count;
        }
      }
    }
    expect_ranks(rows.ranks, expected);
    EXPECT_EQ(rows.between_nodes, between);
  }
}

StepPlan plan_of(const char* policy, const LoadTable& load) {
  ThreadPool pool(1);
  const auto home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  PlannerOptions options;
  options.guest_slots = 1;
  PolicyResult result = find_policy(policy)->plan({.load = load, .home = home, .options = options}, pool);
  return std::move(std::get<PlannedStep>(result).plan);
}

// One layer at one event of a plan with known tokens.
struct TokenLayer {
  RoutingProblem problem;
  TokenDispatchProblem tokens;
};

// Visits every layer and event of vanilla's and our plans for random traces on two to four nodes.
template <class Visit>
void for_token_layers(const Visit& visit) {
  const std::vector<Topology> topologies{{.num_ranks = 4, .ranks_per_node = 2},
                                         {.num_ranks = 4, .ranks_per_node = 1},
                                         {.num_ranks = 8, .ranks_per_node = 4},
                                         {.num_ranks = 8, .ranks_per_node = 3},  // the last node has two
                                         {.num_ranks = 8, .ranks_per_node = 2}};
  Random random(7);
  for (const Topology& topology : topologies) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      test::CountedTrace batched = test::random_trace(seed, 60);
      batched.batching.num_ranks = topology.num_ranks;
      batched.batching.ranks_per_node = topology.ranks_per_node;
      const auto ranks = static_cast<std::uint64_t>(topology.num_ranks);
      for (RankId& rank : batched.batching.rank) rank = RankId{random.below(ranks)};
      batched.load = test::load_of(batched.trace, batched.batching);
      const SourceTokens tokens(batched.trace, batched.batching);
      for (const char* const policy : {"vanilla", "foremoe"}) {
        SCOPED_TRACE(std::string(policy) + ", " + std::to_string(topology.num_ranks) + " ranks, nodes of " +
                     std::to_string(topology.ranks_per_node) + ", seed " + std::to_string(seed));
        const StepPlan plan = plan_of(policy, batched.load);
        for (int t = 0; t < plan.num_events(); ++t) {
          for (int l = 0; l < plan.num_layers(); ++l) {
            const MicroStepId m = plan.event_micro_step[static_cast<std::size_t>(t)];
            visit(TokenLayer{.problem = {.load = batched.load.load[m][l],
                                         .quotas = layer_quotas(plan, EventId{t}, LayerId{l}),
                                         .topology = topology},
                             .tokens = {tokens, m, LayerId{l}, topology}});
          }
        }
      }
    }
  }
}

// The rank through which a source's tokens enter a node: on the source's own node the source itself, on any other node
// the rank with the same local index.
RankId entry(RankId source, NodeId node, const Topology& topology) {
  if (topology.node_of(source) == node) return source;
  const int size = topology.ranks_per_node;
  const int first = node.value * size;
  return RankId{first + source.value % size % std::min(size, topology.num_ranks - first)};
}

// Reference: sends one token at a time.
class Carrier {
 public:
  explicit Carrier(const Topology& topology)
      : topology_(topology),
        between_({static_cast<std::size_t>(topology.num_nodes()), static_cast<std::size_t>(topology.num_nodes())}),
        ranks_(static_cast<std::size_t>(topology.num_ranks)) {}

  void carry_token(RankId source, std::span<const RankId> replicas) {
    std::map<NodeId, std::set<RankId>> serving;
    for (const RankId r : replicas) {
      if (r != kNoReplica) serving[topology_.node_of(r)].insert(r);
    }
    for (const auto& [node, ranks] : serving) {
      const RankId gate = entry(source, node, topology_);
      if (gate != source) {
        ++ranks_[source.index()].sent_to_nodes;
        ++ranks_[gate.index()].received_from_nodes;
        ++between_(topology_.node_of(source), node);
      }
      for (const RankId r : ranks) {
        if (r == gate) continue;
        ++ranks_[gate.index()].sent_to_peers;
        ++ranks_[r.index()].received_from_peers;
      }
    }
  }

  const Array<std::int64_t, 2>& between() const { return between_; }
  const std::vector<RankRows>& ranks() const { return ranks_; }

 private:
  Topology topology_;
  Array<std::int64_t, 2> between_;
  std::vector<RankRows> ranks_;
};

TEST(TokenRowsTest, CountATokenOncePerNodeAndOncePerServingRank) {
  LayerRows rows;
  RouteWorkspace workspace;
  std::vector<ExpertId> routes;
  std::vector<RankId> replicas;
  for_token_layers([&](const TokenLayer& layer) {
    count_token_rows(layer.problem, token_dispatch(route_tokens(layer.problem), layer.tokens), rows);

    const TokenDispatchProblem& tokens = layer.tokens;
    const RoutedLayer routed = route_tokens(layer.problem);
    const auto top_k = static_cast<std::size_t>(tokens.tokens.top_k());
    Carrier carrier(tokens.topology);
    for (int s = 0; s < tokens.topology.num_ranks; ++s) {
      tokens.tokens.gather(tokens.micro_step, RankId{s}, tokens.layer, routes);
      replicas.resize(routes.size());
      assign_rows(routed, {RankId{s}, routes}, workspace, replicas);
      for (std::size_t i = 0; i < replicas.size(); i += top_k) {
        carrier.carry_token(RankId{s}, std::span(replicas).subspan(i, top_k));
      }
      const auto held = std::ranges::count_if(routes, [](ExpertId e) { return e != kNoExpert; });
      EXPECT_EQ(rows.assignments[static_cast<std::size_t>(s)], held);
    }
    expect_ranks(rows.ranks, carrier.ranks());
    EXPECT_EQ(rows.between_nodes, carrier.between());
  });
}

TEST(TokenRowsTest, SumToTheTokenDispatchWithEqualSentAndReceived) {
  LayerRows rows;
  LayerRows of_assignments;
  RowWorkspace workspace;
  std::int64_t saved = 0;  // rows between nodes, over all layers
  for_token_layers([&](const TokenLayer& layer) {
    count_token_rows(layer.problem, token_dispatch(route_tokens(layer.problem), layer.tokens), rows);
    count_rows(layer.problem, workspace, of_assignments);
    const Topology& topology = layer.tokens.topology;
    const TokenDispatch dispatch = token_dispatch(route_tokens(layer.problem), layer.tokens);
    const auto num_nodes = static_cast<std::size_t>(topology.num_nodes());
    std::vector<std::int64_t> entering(num_nodes);  // [node]
    RankRows total;
    for (int r = 0; r < topology.num_ranks; ++r) {
      const RankRows& own = rows.ranks[static_cast<std::size_t>(r)];
      std::int64_t to_other_nodes = 0;
      for (int n = 0; n < topology.num_nodes(); ++n) {
        if (topology.node_of(RankId{r}) != NodeId{n}) to_other_nodes += dispatch.to_node(r, n).value;
      }
      std::int64_t from_gates = 0;
      for (int s = 0; s < topology.num_ranks; ++s) {
        const RankId gate = entry(RankId{s}, topology.node_of(RankId{r}), topology);
        if (gate != RankId{r}) from_gates += dispatch.to_rank(s, r).value;
      }
      EXPECT_EQ(own.sent_to_nodes, to_other_nodes) << "rank " << r;
      EXPECT_EQ(own.received_from_peers, from_gates) << "rank " << r;
      entering[topology.node_of(RankId{r}).index()] += own.received_from_nodes;
      total.sent_to_peers += own.sent_to_peers;
      total.received_from_peers += own.received_from_peers;
      total.sent_to_nodes += own.sent_to_nodes;
      total.received_from_nodes += own.received_from_nodes;
      saved += of_assignments.ranks[static_cast<std::size_t>(r)].sent_to_nodes - own.sent_to_nodes;
    }
    for (std::size_t n = 0; n < num_nodes; ++n) {
      std::int64_t to_node = 0;
      std::int64_t between = 0;
      for (int s = 0; s < topology.num_ranks; ++s) {
        if (topology.node_of(RankId{s}).index() != n) to_node += dispatch.to_node(s, n).value;
      }
      for (std::size_t from = 0; from < num_nodes; ++from) between += rows.between_nodes(from, n);
      EXPECT_EQ(entering[n], to_node) << "node " << n;
      EXPECT_EQ(between, to_node) << "node " << n;
    }
    EXPECT_EQ(total.sent_to_peers, total.received_from_peers);
    EXPECT_EQ(total.sent_to_nodes, total.received_from_nodes);
    EXPECT_EQ(rows.assignments, of_assignments.assignments);
  });
  EXPECT_GT(saved, 0);
}

}  // namespace
}  // namespace foremoe
