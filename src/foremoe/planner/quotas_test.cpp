// Tests that stage T's quotas in a plan are exact for one and several nodes, and local where balance allows. Also tests
// the equal split used without stage T.

#include "foremoe/planner/quotas.h"

#include <gtest/gtest.h>

#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/testing/complete_assignment.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe::planner {
namespace {

struct Instance {
  LoadTable table;
  LayerProblem problem;
  ReplicaGraph graph;
};

// Random guests; at least a quarter of the guest slots are empty on average. Loads differ by source.
Instance random_instance(Random& random, const PlannerOptions& options, int ranks, int ranks_per_node) {
  const test::Shape shape{.micro_steps = 1,
                          .layers = 1,
                          .ranks = ranks,
                          .experts = ranks * (1 + static_cast<int>(random.below(3))),
                          .ranks_per_node = ranks_per_node};
  Instance i{.table = test::random_load(shape, random.bits(), 1 + static_cast<int>(random.below(200)))};
  i.problem = test::problem_of(i.table, options);
  i.graph = homes_only(i.problem);
  for (int r = 0; r < ranks; ++r) {
    for (int g = 0; g < options.guest_slots; ++g) {
      const int e = static_cast<int>(random.below(shape.experts));
      if (random.below(4) > 0 && i.graph.find(e, r) < 0) {
        i.graph.put(i.graph.first_slot(r) + i.problem.homes_per_rank() + g, e);
      }
    }
  }
  return i;
}

int random_ranks(Random& random) { return 1 + static_cast<int>(random.below(9)); }

TEST(ExactQuotas, ReachTheOptimumForAnyNumberOfNodes) {
  Random random(1);
  for (int n = 0; n < 1500; ++n) {
    const PlannerOptions options{.guest_slots = static_cast<int>(random.below(4))};
    const int ranks = random_ranks(random);
    Instance i = random_instance(random, options, ranks, 1 + static_cast<int>(random.below(ranks + 1)));
    Assignment a;
    const std::int64_t level = Quotas(i.problem, options, i.problem.home_slot).exact(0, i.graph, a);
    test::expect_complete(i.graph, i.problem.load(0), a);
    ASSERT_EQ(level, *std::ranges::max_element(a.rank_load));
    ASSERT_EQ(level, test::optimum_on(i.graph, i.problem.load(0))) << "instance " << n;
  }
}

TEST(ExactQuotas, StayWithinTheTargetIfLinksArePreferred) {
  Random random(2);
  for (int n = 0; n < 500; ++n) {
    const PlannerOptions options{.guest_slots = 2, .prefer = Prefer::kLinks, .tolerance = 0.2};
    Instance i = random_instance(random, options, 6, 2);
    Assignment a;
    const std::int64_t level = Quotas(i.problem, options, i.problem.home_slot).exact(0, i.graph, a);
    test::expect_complete(i.graph, i.problem.load(0), a);
    ASSERT_LE(level, std::max(test::optimum_on(i.graph, i.problem.load(0)), i.problem.target[0])) << "instance " << n;
  }
}

// Tokens that ranks send to other nodes, over all experts and nodes.
std::int64_t tokens_away(const Instance& i, const Assignment& a) {
  std::int64_t away = 0;
  for (int e = 0; e < i.problem.num_experts; ++e) {
    for (int node = 0; node < i.problem.topology.num_nodes(); ++node) {
      std::int64_t here = 0;
      for (int s = i.graph.first_holder(e); s >= 0; s = i.graph.next_holder(s)) {
        if (i.problem.topology.node_of(RankId{i.graph.rank_of(s)}) == NodeId{node}) here += a.quota[s];
      }
      away += std::max<std::int64_t>(0, i.problem.node_load(0, e, node) - here);
    }
  }
  return away;
}

// Every expert has a replica on both nodes and all ranks have equal loads, so balance and locality agree.
TEST(ExactQuotas, SendNothingAwayIfEveryNodeCanServeItself) {
  const PlannerOptions options{.guest_slots = 2};
  Instance i{.table = test::load_of(4, {std::vector<std::int64_t>(8, 40)}, 2)};
  i.problem = test::problem_of(i.table, options);
  i.graph = homes_only(i.problem);
  for (int r = 0; r < 4; ++r) {
    for (int g = 0; g < 2; ++g) i.graph.put(i.graph.first_slot(r) + 2 + g, (r + 2) % 4 * 2 + g);
  }
  Assignment a;
  EXPECT_EQ(Quotas(i.problem, options, i.problem.home_slot).exact(0, i.graph, a), 80);
  EXPECT_EQ(tokens_away(i, a), 0);
}

TEST(ExactQuotas, SaveTrafficComparedWithTheFirstOptimum) {
  Random random(3);
  std::int64_t saved = 0;
  std::int64_t before = 0;
  const PlannerOptions options{.guest_slots = 2};
  AssignmentSearch search;
  for (int n = 0; n < 300; ++n) {
    Instance i = random_instance(random, options, 8, 4);
    Assignment first;
    serve_at_homes(i.problem, 0, first);
    assign_tokens(i.graph, i.problem.lower_bound[0], first, search);
    Assignment a;
    Quotas(i.problem, options, i.problem.home_slot).exact(0, i.graph, a);
    before += tokens_away(i, first);
    saved += tokens_away(i, first) - tokens_away(i, a);
  }
  EXPECT_GT(saved, before / 10);
}

TEST(ExactQuotas, SendFewerTokensAwayIfLinksArePreferred) {
  Random random(4);
  std::int64_t balance = 0;
  std::int64_t links = 0;
  for (int n = 0; n < 300; ++n) {
    PlannerOptions options{.guest_slots = 2, .tolerance = 0.1};
    Instance i = random_instance(random, options, 8, 4);
    Assignment a;
    Quotas(i.problem, options, i.problem.home_slot).exact(0, i.graph, a);
    balance += tokens_away(i, a);
    options.prefer = Prefer::kLinks;
    Quotas(i.problem, options, i.problem.home_slot).exact(0, i.graph, a);
    links += tokens_away(i, a);
  }
  EXPECT_LT(links, balance);
}

TEST(ExactQuotas, LeaveNoGuestWithTooFewTokens) {
  Random random(5);
  for (int n = 0; n < 1000; ++n) {
    const int ranks = random_ranks(random);
    PlannerOptions options{.guest_slots = 1 + static_cast<int>(random.below(3))};
    options.min_tokens_per_guest = 1 + static_cast<std::int64_t>(random.below(60));
    Instance i = random_instance(random, options, ranks, 1 + static_cast<int>(random.below(ranks)));
    Assignment at_homes;
    serve_at_homes(i.problem, 0, at_homes);
    Assignment a;
    const std::int64_t level = Quotas(i.problem, options, i.problem.home_slot).exact(0, i.graph, a);
    test::expect_complete(i.graph, i.problem.load(0), a);
    ASSERT_LE(level, *std::ranges::max_element(at_homes.rank_load)) << "worse than no guest at all";
    for (int s = 0; s < i.graph.num_slots(); ++s) {
      const int e = i.graph.expert_in(s);
      if (e < 0 || s == i.problem.home_slot[e] || a.quota[s] == 0) continue;
      ASSERT_GE(a.quota[s], options.min_tokens_per_guest) << "instance " << n;
    }
  }
}

TEST(EqualQuotas, DifferByAtMostOneTokenInFavourOfTheLowestRanks) {
  Random random(6);
  for (int n = 0; n < 500; ++n) {
    const PlannerOptions options{.guest_slots = static_cast<int>(random.below(4))};
    Instance i = random_instance(random, options, random_ranks(random), 8);
    std::vector<char> rests(i.problem.num_experts);
    for (char& rest : rests) rest = random.below(4) == 0 ? 1 : 0;
    Assignment a;
    const std::int64_t level = Quotas(i.problem, options, i.problem.home_slot).equal(0, i.graph, rests, a);
    test::expect_complete(i.graph, i.problem.load(0), a);
    ASSERT_EQ(level, *std::ranges::max_element(a.rank_load));
    for (int e = 0; e < i.problem.num_experts; ++e) {
      std::vector<std::int64_t> quotas;  // by ascending rank
      for (int s = 0; s < i.graph.num_slots(); ++s) {
        if (i.graph.expert_in(s) != e) continue;
        if (rests[e] && i.graph.num_holders(e) > 1 && s == i.problem.home_slot[e]) {
          ASSERT_EQ(a.quota[s], 0) << "the home of a relocated expert rests";
        } else {
          quotas.push_back(a.quota[s]);
        }
      }
      ASSERT_TRUE(std::ranges::is_sorted(quotas, std::greater<>()));
      ASSERT_LE(quotas.front() - quotas.back(), 1);
    }
  }
}

}  // namespace
}  // namespace foremoe::planner
