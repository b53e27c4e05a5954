#include "foremoe/homes/choose_homes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "foremoe/core/error.h"
#include "foremoe/testing/batched_traces.h"

namespace foremoe {
namespace {

using test::random_trace;
using testing::HasSubstr;

Where refused(const std::vector<BatchedTrace>& traces, const Holdout& holdout, std::string_view words) {
  ThreadPool pool(1);
  try {
    choose_homes(traces, holdout, {}, pool);
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr(words));
    return error.where();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

TEST(ChooseHomes, JudgesFittedAndHeldOutRoutesSeparately) {
  ThreadPool pool(1);
  const std::vector<BatchedTrace> traces{random_trace(1)};
  const BatchedTrace other = random_trace(2);
  const ChosenHomes chosen = choose_homes(traces, {.trace = &other}, {}, pool);
  const auto by_definition = [&](const BatchedTrace& batched, const Array<RankId, 2>& home) {
    std::int64_t pairs = 0;
    std::vector<ExpertId> route(3);
    for (int s = 0; s < batched.trace.num_sequences(); ++s) {
      for (auto t = batched.trace.cu_seqlens[s]; t < batched.trace.cu_seqlens[s + 1]; ++t) {
        for (int l = 0; l < 2; ++l) {
          batched.trace.route(t, LayerId{l}, route);
          std::set<int> nodes;
          for (const ExpertId e : route) {
            if (e != kNoExpert) nodes.insert(home(l, e).value / 2);
          }
          nodes.erase(batched.batching.rank[s].value / 2);
          pairs += std::ssize(nodes);
        }
      }
    }
    return pairs;
  };
  EXPECT_EQ(chosen.fitted.chosen.pairs, by_definition(traces[0], chosen.homes.home));
  ASSERT_TRUE(chosen.held_out);
  EXPECT_EQ(chosen.held_out->chosen.pairs, by_definition(other, chosen.homes.home));
  EXPECT_EQ(chosen.held_out->num_sequences, other.trace.num_sequences());
  Array<RankId, 2> contiguous({2, 8});
  for (int l = 0; l < 2; ++l) {
    for (int e = 0; e < 8; ++e) contiguous(l, e) = RankId{e / 2};
  }
  EXPECT_EQ(chosen.held_out->contiguous.pairs, by_definition(other, contiguous));
}

TEST(ChooseHomes, HoldsOutWholeGroups) {
  ThreadPool pool(1);
  std::vector<BatchedTrace> traces{random_trace(1, 24)};
  for (int s = 0; s < 24; ++s) traces[0].trace.group_ids.push_back(s / 6);  // four groups
  const ChosenHomes chosen = choose_homes(traces, {.fraction = 0.25}, {}, pool);
  EXPECT_EQ(chosen.fitted.num_sequences, 18);
  EXPECT_EQ(chosen.held_out->num_sequences, 6);
  traces[0].trace.group_ids.clear();
  EXPECT_EQ(choose_homes(traces, {.fraction = 0.5}, {}, pool).held_out->num_sequences, 12);
}

TEST(ChooseHomes, DoesNotDependOnTheNumberOfThreads) {
  ThreadPool one(1);
  ThreadPool four(4);
  const std::vector<BatchedTrace> traces{random_trace(1), random_trace(2)};
  const ChosenHomes a = choose_homes(traces, {.fraction = 0.3}, {}, one);
  const ChosenHomes b = choose_homes(traces, {.fraction = 0.3}, {}, four);
  EXPECT_EQ(a.homes, b.homes);
  EXPECT_EQ(a.held_out->chosen, b.held_out->chosen);
}

TEST(ChooseHomes, RefusesTracesThatDoNotFit) {
  EXPECT_EQ(refused({}, {}, "there is none").field, "traces");
  BatchedTrace far = random_trace(1);
  far.batching.rank[0] = RankId{99};
  EXPECT_EQ(refused({far}, {}, "sequence 0 is in micro-step").field, "batching");
  const BatchedTrace good = random_trace(1);
  BatchedTrace other = random_trace(2);
  other.trace.name = "other";
  other.batching.ranks_per_node = 4;
  EXPECT_EQ(refused({good, other}, {}, "ranks per node").file, "other");
  EXPECT_EQ(refused({good}, {.trace = &other}, "ranks per node").file, "other");
  BatchedTrace uneven = random_trace(1);
  uneven.batching.num_ranks = 3;
  for (RankId& r : uneven.batching.rank) r = RankId{0};
  refused({uneven}, {}, "spread evenly");
  EXPECT_EQ(refused({good}, {.fraction = 1e-3}, "none or all").field, "holdout");
  BatchedTrace repeated = random_trace(1);
  std::vector<std::uint8_t> routes(repeated.trace.num_tokens * 2 * 3, 5);
  repeated.trace = test::trace_of(routes, repeated.trace);
  EXPECT_EQ(refused({repeated}, {}, "").index, "[0, 0, 1]");
}

}  // namespace
}  // namespace foremoe
