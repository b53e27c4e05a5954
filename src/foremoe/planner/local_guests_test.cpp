// Tests local guests and their price.

#include "foremoe/planner/local_guests.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "foremoe/testing/planner_steps.h"

namespace foremoe::planner {
namespace {

// What guests bring and cost, counted slot by slot.
struct Counted {
  double tokens = 0;  // of nodes that hold their expert, in mean rank loads
  int busiest = 0;    // copies of the rank that sends or receives the most

  Counted(const LayerProblem& p, const ReplicaGraph& graph) {
    std::vector<int> sent(p.num_ranks());
    std::vector<int> received(p.num_ranks());
    std::vector<std::vector<char>> held(p.num_experts, std::vector<char>(p.topology.num_nodes()));
    for (int s = 0; s < graph.num_slots(); ++s) {
      const int e = graph.expert_in(s);
      if (e < 0) continue;
      held[e][p.topology.node_of(RankId{graph.rank_of(s)}).index()] = 1;
      if (s == p.home_slot[e]) continue;
      busiest = std::max({busiest, ++sent[p.home[e]], ++received[graph.rank_of(s)]});
    }
    for (int m = 0; m < p.num_micro_steps; ++m) {
      for (int e = 0; e < p.num_experts; ++e) {
        for (int n = 0; n < p.topology.num_nodes(); ++n) {
          if (held[e][n]) tokens += static_cast<double>(p.node_load(m, e, n)) * p.per_mean[m];
        }
      }
    }
  }
};

class PricedGuests : public testing::TestWithParam<std::uint64_t> {
 protected:
  // Guests added at a price; price < 0: with Prefer::kLinks.
  ReplicaGraph added(double price, double free = 0) const {
    PlannerOptions options{.prefer = Prefer::kLinks};
    if (price >= 0) options = {.prefer = Prefer::kTime, .copy_price = price, .free_copies = free};
    ReplicaGraph graph = homes_only(problem_);
    LocalGuests(problem_, options).add(0, graph);
    return graph;
  }
  Counted counted(const ReplicaGraph& graph) const { return {problem_, graph}; }
  double worth(const ReplicaGraph& graph, double price) const {
    const Counted of = counted(graph);
    return of.tokens / problem_.topology.num_nodes() - price * of.busiest;
  }

  const LayerProblem problem_ = test::problem_of(
      test::bursty_load({.ranks = 8, .experts = 32, .ranks_per_node = 2}, GetParam()), {.guest_slots = 2});
};

TEST_P(PricedGuests, AreThoseOfLinksIfCopiesCostNothing) {
  const Counted links = counted(added(-1));
  const Counted free = counted(added(0));
  EXPECT_EQ(free.tokens, links.tokens);
  EXPECT_EQ(counted(added(1e6, 1e6)).tokens, links.tokens);
  EXPECT_GT(links.busiest, 2) << "a rank sends more copies than it has slots";
}

TEST_P(PricedGuests, AreWorthMoreThanNoneThanAllAndThanThoseOfAnyOtherPrice) {
  const std::vector<double> prices{0, 0.02, 0.1, 0.3, 1, 3, 10, 1000};
  int before = kNoLimit;
  for (const double price : prices) {
    const ReplicaGraph graph = added(price);
    const double own = worth(graph, price);
    EXPECT_GE(own, worth(homes_only(problem_), price) - 1e-4);
    EXPECT_GE(own, worth(added(-1), price) - 1e-4);
    for (const double other : prices) EXPECT_GE(own, worth(added(other), price) - 1e-4) << price << " " << other;
    EXPECT_LE(counted(graph).busiest, before);
    before = counted(graph).busiest;
  }
  EXPECT_EQ(before, 0) << "copies at any price";
}

TEST_P(PricedGuests, UseOnlyFreeCopiesIfOthersAreTooExpensive) {
  for (const int free : {0, 1, 2}) EXPECT_EQ(counted(added(1e6, free)).busiest, free);
}

TEST_P(PricedGuests, RenewNoGuestThatWouldDelayTheLayer) {
  const ReplicaGraph found = added(-1);
  Assignment assignment;
  serve_at_homes(problem_, 0, assignment);
  for (const int free : {0, 1}) {
    ReplicaGraph graph = found;
    LocalGuests(problem_, {.prefer = Prefer::kTime, .copy_price = 1e6, .free_copies = free})
        .renew(0, assignment, found, graph);
    std::vector<int> received(problem_.num_ranks());
    std::vector<int> sent(problem_.num_ranks());
    for (int s = 0; s < graph.num_slots(); ++s) {
      const int e = graph.expert_in(s);
      if (e < 0 || found.find(e, graph.rank_of(s)) >= 0) continue;
      EXPECT_LE(++sent[problem_.home[e]], free);
      EXPECT_LE(++received[graph.rank_of(s)], free);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, PricedGuests, testing::Range<std::uint64_t>(1, 6));

}  // namespace
}  // namespace foremoe::planner
