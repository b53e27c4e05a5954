#include "foremoe/runtime/replay_routes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

std::vector<ExpertId> routes_of(const ReplayRoutes& replay, int m, int source, int l) {
  std::vector<ExpertId> routes(3, ExpertId{99});  // gather() must replace old contents
  replay.gather(MicroStepId{m}, RankId{source}, LayerId{l}, routes);
  return routes;
}

// Checks that each expert's count equals the load in every (micro-step, layer, source) and that every row is valid.
void expect_rows_of(const ReplayRoutes& replay, const LoadTable& load) {
  const auto k = static_cast<std::size_t>(replay.top_k());
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    for (int l = 0; l < load.num_layers(); ++l) {
      for (int s = 0; s < load.num_ranks(); ++s) {
        const std::vector<ExpertId> routes = routes_of(replay, m, s, l);
        ASSERT_EQ(routes.size(), static_cast<std::size_t>(replay.num_tokens(MicroStepId{m}, RankId{s})) * k);
        std::map<int, std::int64_t> count;
        for (std::size_t token = 0; token < routes.size() / k; ++token) {
          std::set<int> seen;
          for (std::size_t j = 0; j < k; ++j) {
            const int e = routes[token * k + j].value;
            if (e < 0) continue;
            EXPECT_TRUE(seen.insert(e).second) << "token " << token << " has expert " << e << " twice";
            ++count[e];
          }
        }
        for (int e = 0; e < load.num_experts(); ++e) {
          EXPECT_EQ(count[e], load.load(m, l, s, e).value) << m << " " << l << " " << s << " " << e;
        }
      }
    }
  }
}

TEST(ReplayRoutes, RecordedRoutesMatchTheLoadWithoutRepeatedExperts) {
  const test::CountedTrace batched = test::random_trace(5);
  const auto replay = recorded_routes(batched.trace, batched.batching);
  EXPECT_EQ(replay->top_k(), batched.trace.top_k);
  expect_rows_of(*replay, batched.load);
}

TEST(ReplayRoutes, RecordedRoutesIncludeTokensWithoutARoute) {
  const test::CountedTrace batched = test::random_trace(6);
  const auto replay = recorded_routes(batched.trace, batched.batching);
  std::int64_t tokens = 0;
  std::int64_t missing = 0;
  for (int m = 0; m < 2; ++m) {
    for (int s = 0; s < 4; ++s) {
      tokens += replay->num_tokens(MicroStepId{m}, RankId{s});
      missing += std::ranges::count(routes_of(*replay, m, s, 0), kNoExpert);
    }
  }
  EXPECT_EQ(tokens, batched.trace.num_tokens);
  EXPECT_EQ(missing, std::int64_t{batched.trace.num_sequences()} * batched.trace.top_k);  // last token of each sequence
}

TEST(ReplayRoutes, DealtRoutesMatchTheLoad) {
  for (int seed = 0; seed < 20; ++seed) {
    LoadTable load = test::random_load({.micro_steps = 2, .layers = 3, .ranks = 3, .experts = 6}, seed, 30);
    load.top_k = 1 + seed % 4;
    expect_rows_of(*dealt_routes(load), load);
  }
}

TEST(ReplayRoutes, DealtRoutesUseTheFewestTokensThatFitTheLargestLayer) {
  LoadTable load{.load = Array<Tokens, 4>({1, 2, 2, 3}), .top_k = 2};
  const auto set = [&](int l, int s, std::vector<int> tokens) {
    for (int e = 0; e < 3; ++e) load.load(0, l, s, e) = Tokens{tokens[e]};
  };
  set(0, 0, {3, 3, 1});  // ⌈7/2⌉ = 4
  set(1, 0, {0, 0, 3});  // 3
  set(0, 1, {5, 0, 1});  // the largest: 5
  const auto replay = dealt_routes(load);
  EXPECT_EQ(replay->num_tokens(MicroStepId{0}, RankId{0}), 4);
  EXPECT_EQ(replay->num_tokens(MicroStepId{0}, RankId{1}), 5);
}

TEST(ReplayRoutes, DealtRoutesHaveTheTokensOfALoadWithFewerExpertsPerToken) {
  LoadTable load{.load = Array<Tokens, 4>({1, 2, 1, 3}), .top_k = 2, .top_k_of_layer = {2, 1}};
  for (const int e : {0, 1, 2}) load.load(0, 0, 0, e) = Tokens{2};
  load.load(0, 1, 0, 2) = Tokens{4};
  EXPECT_EQ(dealt_routes(load)->num_tokens(MicroStepId{0}, RankId{0}), 4) << "of the layer with top-1";
  load.tokens = Array<Tokens, 2>({1, 1}, Tokens{7});
  load.missing_rows = 7;  // 14 rows, 7 of them with a route
  EXPECT_EQ(dealt_routes(load)->num_tokens(MicroStepId{0}, RankId{0}), 4) << "the others have no route";
  load.missing_rows = 2;
  EXPECT_EQ(dealt_routes(load)->num_tokens(MicroStepId{0}, RankId{0}), 7) << "the others have fewer experts";
}

TEST(ReplayRoutes, DealtAssignmentsContinueAfterThePreviousExpert) {
  LoadTable load{.load = Array<Tokens, 4>({1, 1, 1, 3}), .top_k = 2};
  for (const int e : {0, 1, 2}) load.load(0, 0, 0, e) = Tokens{std::vector{3, 3, 1}[e]};
  // Expert 0 on tokens 0 1 2, expert 1 on 3 0 1, expert 2 on 2. Token 3 has only one expert.
  const ExpertId none = kUnassigned;
  EXPECT_EQ(routes_of(*dealt_routes(load), 0, 0, 0),
            (std::vector<ExpertId>{ExpertId{0}, ExpertId{1}, ExpertId{0}, ExpertId{1}, ExpertId{0}, ExpertId{2},
                                   ExpertId{1}, none}));
}

TEST(ReplayRoutes, ASourceWithoutLoadHasNoTokens) {
  const LoadTable load{.load = Array<Tokens, 4>({1, 1, 2, 3}), .top_k = 2};
  EXPECT_EQ(dealt_routes(load)->num_tokens(MicroStepId{0}, RankId{1}), 0);
  EXPECT_TRUE(routes_of(*dealt_routes(load), 0, 1, 0).empty());
}

TEST(ReplayRoutes, ThreadsCanGatherConcurrently) {
  const test::CountedTrace batched = test::random_trace(7);
  LoadTable load = test::random_load({}, 8);
  load.top_k = 2;
  const auto recorded = recorded_routes(batched.trace, batched.batching);
  const auto dealt = dealt_routes(load);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&] {
      expect_rows_of(*recorded, batched.load);
      expect_rows_of(*dealt, load);
    });
  }
}

}  // namespace
}  // namespace foremoe
