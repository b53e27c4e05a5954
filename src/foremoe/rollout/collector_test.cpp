#include "foremoe/rollout/collector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "foremoe/core/error.h"
#include "foremoe/testing/limited_memory.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

const std::vector<std::int64_t> kLengths{30, 1, 12, 300, 7, 0, 44, 21};

RoutingTrace some_trace() {
  return make_random_trace({.lengths = kLengths, .num_layers = 5, .top_k = 8, .num_experts = 40}).first;
}

Batching some_batching(const RoutingTrace& trace) {
  return make_batching(trace, {.num_ranks = 3, .tokens_per_rank = 300});
}

std::span<const std::byte> routes_of(const RoutingTrace& trace, int s) {
  const std::size_t token = shape_of(trace).token_bytes();
  return {trace.routes + static_cast<std::size_t>(trace.cu_seqlens[static_cast<std::size_t>(s)]) * token,
          static_cast<std::size_t>(trace.sequence_length(s)) * token};
}

RolloutCollector collector_for(const RoutingTrace& trace) {
  return RolloutCollector({.num_layers = trace.num_layers, .top_k = trace.top_k, .num_experts = trace.num_experts},
                          trace.name);
}

std::string complaint_of(const std::function<void()>& act) {
  try {
    act();
    return "";
  } catch (const InputError& error) {
    return error.what();
  }
}

TEST(Collect, CountsEveryChosenExpertAtItsMicroStepLayerAndRank) {
  const RoutingTrace trace = some_trace();
  const Batching batching = some_batching(trace);
  ThreadPool pool(1);
  const LoadTable table = collect(trace, batching, pool);
  Array<Tokens, 4> expected(table.load.shape());
  std::vector<ExpertId> row(8);
  for (std::size_t s = 0; s < kLengths.size(); ++s) {
    for (std::int64_t t = trace.cu_seqlens[s]; t < trace.cu_seqlens[s + 1]; ++t) {
      for (int l = 0; l < trace.num_layers; ++l) {
        trace.route(t, LayerId{l}, row);
        for (const ExpertId e : row) {
          if (e != kNoExpert) expected(batching.micro_step[s], l, batching.rank[s], e) += Tokens{1};
        }
      }
    }
  }
  EXPECT_EQ(table.load, expected);
  EXPECT_EQ(table.top_k, 8);
  EXPECT_EQ(table.num_micro_steps(), batching.num_micro_steps);
  EXPECT_EQ(table.ranks_per_node, 3);
}

TEST(Collect, CountsTokensAndRowsWithoutARoute) {
  auto [trace, bytes] = make_random_trace({.lengths = kLengths, .num_layers = 5, .top_k = 8, .num_experts = 40});
  trace.weightless_experts = 10;
  (*bytes)[0] = std::byte{45};       // token 0, layer 0: one weightless id,
  (*bytes)[8 * 5] = std::byte{255};  // token 1: one expert fewer
  const Batching batching = some_batching(trace);
  Array<Tokens, 2> tokens({static_cast<std::size_t>(batching.num_micro_steps), 3});
  for (std::size_t s = 0; s < kLengths.size(); ++s) {
    tokens(batching.micro_step[s], batching.rank[s]) += Tokens{kLengths[s]};
  }
  ThreadPool pool(2);
  const LoadTable table = collect(trace, batching, pool);
  EXPECT_EQ(table.tokens, tokens);
  EXPECT_EQ(table.missing_rows, 7 * 5) << "the last token of each sequence with tokens";
  EXPECT_TRUE(has_short_rows(table));
  EXPECT_EQ(tokens_of_ranks(table), tokens);

  RolloutCollector collector({.num_layers = 5, .top_k = 8, .num_experts = 40, .weightless_experts = 10});
  for (int s = 0; s < trace.num_sequences(); ++s) collector.add(s, trace.type, routes_of(trace, s));
  const LoadTable same = collector.to_load_table(batching);
  EXPECT_EQ(same.load, table.load);
  EXPECT_EQ(same.tokens, table.tokens);
  EXPECT_EQ(same.missing_rows, table.missing_rows);

  const LoadTable folded = fold_ranks(table, 1);
  EXPECT_EQ(folded.tokens.flat()[0], tokens.flat()[0] + tokens.flat()[1] + tokens.flat()[2]);
  EXPECT_EQ(folded.missing_rows, 35);
}

TEST(Collect, CutsTokensAndRowsWithoutARouteWithTheLoad) {
  const RoutingTrace trace = some_trace();
  ThreadPool pool(1);
  const LoadTable table = collect(trace, some_batching(trace), pool);
  EXPECT_FALSE(has_short_rows(table));
  EXPECT_EQ(table.missing_rows, 7 * 5);
  const LoadTable cut = take_first(table, table.num_micro_steps(), 2);
  EXPECT_EQ(cut.tokens, table.tokens);
  EXPECT_EQ(cut.missing_rows, 7 * 2);
  EXPECT_FALSE(has_short_rows(cut));
}

TEST(Collect, DoesNotDependOnTheNumberOfThreads) {
  const RoutingTrace trace = some_trace();
  const Batching batching = some_batching(trace);
  ThreadPool one(1);
  const LoadTable expected = collect(trace, batching, one);
  for (const std::size_t threads : {2, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(collect(trace, batching, pool).load, expected.load) << threads;
  }
}

TEST(Collect, NamesTheFirstMalformedRowForAnyNumberOfThreads) {
  auto [trace, bytes] = make_random_trace({.lengths = {10, 10, 10, 10}, .num_layers = 2, .top_k = 2});
  const Batching batching = make_batching(trace, {.num_ranks = 4, .tokens_per_rank = 10});
  for (const std::size_t token : {15, 23, 35}) (*bytes)[token * 4 + 3] = std::byte{200};
  for (const std::size_t threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(complaint_of([&, &trace = trace] { collect(trace, batching, pool); }),
              "random: routed_experts[15, 1, 1]: expert 200, but there are 8");
  }
}

TEST(Collect, RejectsATableAboveTheLimits) {
  const RoutingTrace trace = make_random_trace({.lengths = {1, 1}}).first;
  ThreadPool pool(1);
  Batching batching = make_batching(trace, {.num_ranks = 1});
  batching.num_ranks = 1 << 16;
  batching.num_micro_steps = 1 << 16;
  const test::LimitedMemory limited;
  EXPECT_THAT(complaint_of([&] { collect(trace, batching, pool); }), HasSubstr("needs 824.6 GB of memory"));
}

TEST(RolloutCollector, MatchesTheTraceForAnyOrderOfArrival) {
  const RoutingTrace trace = some_trace();
  const Batching batching = some_batching(trace);
  ThreadPool pool(1);
  const LoadTable expected = collect(trace, batching, pool);
  std::vector<int> order{0, 1, 2, 3, 4, 5, 6, 7};
  std::mt19937 engine(3);
  for (int round = 0; round < 5; ++round) {
    std::shuffle(order.begin(), order.end(), engine);
    RolloutCollector collector = collector_for(trace);
    for (const int s : order) collector.add(s, trace.type, routes_of(trace, s));
    EXPECT_EQ(collector.to_load_table(batching).load, expected.load);
    EXPECT_EQ(collector.sequence_lengths(), kLengths);
  }
}

TEST(RolloutCollector, AcceptsSequencesFromSeveralThreads) {
  const RoutingTrace trace = some_trace();
  const Batching batching = some_batching(trace);
  RolloutCollector collector = collector_for(trace);
  {
    std::vector<std::jthread> threads;
    for (int first = 0; first < 3; ++first) {
      threads.emplace_back([&, first] {
        for (int s = first; s < trace.num_sequences(); s += 3) collector.add(s, trace.type, routes_of(trace, s));
      });
    }
  }
  ThreadPool pool(1);
  EXPECT_EQ(collector.num_sequences(), 8U);
  EXPECT_EQ(collector.to_load_table(batching).load, collect(trace, batching, pool).load);
}

TEST(RolloutCollector, KeepsCountsInTheNarrowestType) {
  RolloutCollector collector({.num_layers = 1, .top_k = 1, .num_experts = 4});
  collector.add(0, RouteType::kU8, std::vector<std::byte>(255, std::byte{1}));
  EXPECT_EQ(collector.bytes_of_counts(), 4U);
  collector.add(1, RouteType::kU8, std::vector<std::byte>(256, std::byte{1}));
  EXPECT_EQ(collector.bytes_of_counts(), 4U + 8U);
  collector.add(2, RouteType::kU8, std::vector<std::byte>(65'536, std::byte{1}));
  EXPECT_EQ(collector.bytes_of_counts(), 4U + 8U + 16U);
}

TEST(RolloutCollector, BatchesCollectedSequencesByTokens) {
  const RoutingTrace trace = some_trace();
  RolloutCollector collector = collector_for(trace);
  for (int s = 0; s < trace.num_sequences(); ++s) collector.add(s, trace.type, routes_of(trace, s));
  const Batching streamed =
      balanced_batching(collector.sequence_lengths(), {.num_ranks = 3, .tokens_per_rank = 300}, "rollout");
  EXPECT_EQ(streamed.rank, some_batching(trace).rank);
  EXPECT_EQ(streamed.micro_step, some_batching(trace).micro_step);
}

TEST(RolloutCollector, RejectsInvalidSequences) {
  RolloutCollector collector({.num_layers = 2, .top_k = 2, .num_experts = 300}, "rollout");
  const std::vector<std::uint16_t> good{0, 299, 5, 6};
  const std::vector<std::uint16_t> twice{0, 299, 6, 6};
  const auto add = [&](int s, RouteType type, const std::vector<std::uint16_t>& routes) {
    return complaint_of([&] { collector.add(s, type, std::as_bytes(std::span(routes))); });
  };
  EXPECT_EQ(add(4, RouteType::kU16, good), "");
  EXPECT_EQ(add(4, RouteType::kU16, good), "rollout: sequence 4: finished twice");
  EXPECT_EQ(add(5, RouteType::kU16, twice), "rollout: sequence 5[0, 1, 1]: expert 6 appears twice in a row");
  EXPECT_EQ(add(-1, RouteType::kU16, good), "rollout: sequence -1: sequences are numbered from 0");
  EXPECT_THAT(add(6, RouteType::kU8, good), HasSubstr("cannot represent 300 experts and rows without a route"));
  EXPECT_THAT(add(6, RouteType::kU16, {1, 2, 3}),
              HasSubstr("has 6 bytes; expected a multiple of the 8 bytes of a token"));
  EXPECT_EQ(collector.num_sequences(), 1U);
}

TEST(RolloutCollector, NamesTheSequenceThatDoesNotMatchTheBatching) {
  RolloutCollector collector({.num_layers = 1, .top_k = 1, .num_experts = 4}, "rollout");
  const std::vector<std::byte> routes(3, std::byte{1});
  collector.add(0, RouteType::kU8, routes);
  collector.add(2, RouteType::kU8, routes);
  const auto batching_of = [](std::size_t n) {
    return balanced_batching(std::vector<std::int64_t>(n, 3), {.num_ranks = 1}, "rollout");
  };
  EXPECT_EQ(complaint_of([&] { collector.to_load_table(batching_of(3)); }), "rollout: sequence 1: has not finished");
  EXPECT_EQ(complaint_of([&] { collector.sequence_lengths(); }), "rollout: sequence 1: has not finished");
  collector.add(1, RouteType::kU8, routes);
  EXPECT_EQ(complaint_of([&] { collector.to_load_table(batching_of(2)); }),
            "rollout: sequence 2: is not among the 2 of the batching");
  EXPECT_EQ(complaint_of([&] { collector.to_load_table(batching_of(3)); }), "");
}

}  // namespace
}  // namespace foremoe
