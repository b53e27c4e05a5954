#include "foremoe/rollout/batching.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

// Tokens per [micro_step * ranks + rank].
std::vector<std::int64_t> tokens_of(const Batching& batching, const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(batching.num_micro_steps * batching.num_ranks), 0);
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    tokens[batching.micro_step[s].index() * static_cast<std::size_t>(batching.num_ranks) + batching.rank[s].index()] +=
        lengths[s];
  }
  return tokens;
}

std::string complaint_of(const RoutingTrace& trace, const BatchingOptions& options) {
  try {
    make_batching(trace, options);
    return "";
  } catch (const InputError& error) {
    return error.what();
  }
}

RoutingTrace recorded_trace() {
  RoutingTrace trace = make_random_trace({.lengths = {5, 6, 7}}).first;
  trace.micro_step = {1, 0, 1};
  trace.rank = {0, 3, 2};
  trace.ranks = 4;
  trace.ranks_per_node = 2;
  return trace;
}

TEST(Batching, UsesTheRecordedBatchingForNoOrTheSameRankCount) {
  for (const int ranks : {0, 4}) {
    const Batching batching = make_batching(recorded_trace(), {.num_ranks = ranks, .tokens_per_rank = 1});
    EXPECT_TRUE(batching.recorded);
    EXPECT_EQ(batching.num_micro_steps, 2);
    EXPECT_EQ(batching.num_ranks, 4);
    EXPECT_EQ(batching.ranks_per_node, 2);
    EXPECT_THAT(batching.micro_step, ElementsAre(MicroStepId{1}, MicroStepId{0}, MicroStepId{1}));
    EXPECT_THAT(batching.rank, ElementsAre(RankId{0}, RankId{3}, RankId{2}));
  }
  EXPECT_EQ(make_batching(recorded_trace(), {.ranks_per_node = 1}).ranks_per_node, 1);
}

TEST(Batching, SumsSquaredLengthsOfEachBatch) {
  RoutingTrace trace = make_random_trace({.lengths = {5, 6, 7, 2}}).first;
  trace.micro_step = {1, 0, 1, 1};
  trace.rank = {0, 2, 2, 0};
  trace.ranks = 3;
  const Batching batching = make_batching(trace, {});
  const Array<double, 2> sums = squared_lengths({std::move(trace), batching});
  EXPECT_EQ(sums.shape(), (std::array<std::size_t, 2>{2, 3}));
  EXPECT_THAT(sums.flat(), ElementsAre(0, 0, 36, 25 + 4, 0, 49));
}

TEST(Batching, IsRecomputedForAnotherRankCount) {
  const Batching batching = make_batching(recorded_trace(), {.num_ranks = 2, .tokens_per_rank = 20});
  EXPECT_FALSE(batching.recorded);
  EXPECT_EQ(batching.num_micro_steps, 1);
  EXPECT_EQ(batching.ranks_per_node, 2);
}

TEST(Batching, NeverExceedsTheTokensOfARank) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    const std::int64_t limit = 1 + static_cast<std::int64_t>(random.below(100));
    std::vector<std::int64_t> lengths(1 + random.below(60));
    for (auto& length : lengths)
      length = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(limit + 1)));
    const int ranks = 1 + static_cast<int>(random.below(9));
    const Batching batching = balanced_batching(lengths, {.num_ranks = ranks, .tokens_per_rank = limit}, "random");
    EXPECT_LE(std::ranges::max(tokens_of(batching, lengths)), limit);
    EXPECT_EQ(batching.num_ranks, ranks);
    // Every micro-step has a sequence, and micro-steps are ordered by their first sequence.
    int known = 0;
    for (const MicroStepId m : batching.micro_step) {
      EXPECT_LE(m.value, known);
      known = std::max(known, m.value + 1);
    }
    EXPECT_EQ(known, batching.num_micro_steps);
  }
}

TEST(Batching, UsesNoMoreMicroStepsThanNecessary) {
  EXPECT_EQ(balanced_batching(std::vector<std::int64_t>(64, 128), {.num_ranks = 8, .tokens_per_rank = 256}, "")
                .num_micro_steps,
            4);
  // Two sequences of 129 do not fit in 256: half of each rank's capacity remains unused.
  EXPECT_EQ(balanced_batching(std::vector<std::int64_t>(64, 129), {.num_ranks = 8, .tokens_per_rank = 256}, "")
                .num_micro_steps,
            8);
}

TEST(Batching, SpreadsTokensEvenly) {
  Random random(6);
  std::vector<std::int64_t> lengths(512);
  for (auto& length : lengths) length = 100 + static_cast<std::int64_t>(random.below(900));
  const Batching batching = balanced_batching(lengths, {.num_ranks = 8, .tokens_per_rank = 8'192}, "");
  const auto [least, most] = std::ranges::minmax(tokens_of(batching, lengths));
  EXPECT_LE(static_cast<double>(most - least), 0.05 * static_cast<double>(most));
}

TEST(Batching, UsesOneSequencePerMicroStepIfNoTwoFit) {
  const Batching batching =
      balanced_batching(std::vector<std::int64_t>(5, 10), {.num_ranks = 1, .tokens_per_rank = 10}, "");
  EXPECT_EQ(batching.num_micro_steps, 5);
  EXPECT_THAT(batching.rank, Each(RankId{0}));
}

TEST(Batching, RejectsASequenceAboveTokensPerRank) {
  const RoutingTrace trace = make_random_trace({.lengths = {5, 60, 7}}).first;
  EXPECT_EQ(complaint_of(trace, {.num_ranks = 2, .tokens_per_rank = 59}),
            "random: cu_seqlens[1]: a sequence of 60 tokens exceeds the limit of 59 per rank and micro-step "
            "(`tokens_per_rank`); the longest has 60");
  EXPECT_EQ(complaint_of(trace, {.num_ranks = 2, .tokens_per_rank = 60}), "");
}

TEST(Batching, RejectsInvalidOptions) {
  const RoutingTrace trace = make_random_trace({.lengths = {5}}).first;
  EXPECT_THAT(complaint_of(trace, {}), HasSubstr("give the number of `ranks`"));
  EXPECT_THAT(complaint_of(trace, {.num_ranks = -1}), HasSubstr("ranks: must be an integer from 0 to 65536 (is -1)"));
  EXPECT_THAT(complaint_of(trace, {.num_ranks = 1, .ranks_per_node = -1}), HasSubstr("ranks_per_node: must be"));
  EXPECT_THAT(complaint_of(trace, {.num_ranks = 1, .tokens_per_rank = 0}), HasSubstr("tokens_per_rank: must be"));
}

TEST(TakenRanks, HaveTheirSequencesRoutesAndLoad) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const test::CountedTrace whole = test::random_trace(seed);
    for (const auto& [first, count] : {std::pair{0, 2}, {2, 2}, {3, 1}, {0, 4}}) {
      const BatchedTrace part = take_ranks(whole, first, count);
      EXPECT_NO_THROW(expect_valid(part.trace));
      EXPECT_EQ(part.batching.num_ranks, count);
      EXPECT_EQ(part.batching.ranks_per_node, std::min(2, count));
      EXPECT_EQ(part.batching.num_micro_steps, 2);
      EXPECT_EQ(test::load_of(part.trace, part.batching).load, take_ranks(whole.load, first, count).load);
    }
  }
}

TEST(TakenRanks, KeepWhatIsRecordedOfASequence) {
  RoutingTrace trace = recorded_trace();
  trace.prompt_lengths = {1, 2, 3};
  trace.group_ids = {7, 8, 9};
  const Batching batching = make_batching(trace, {});
  const BatchedTrace part = take_ranks({.trace = trace, .batching = batching}, 2, 2);
  EXPECT_THAT(part.trace.cu_seqlens, ElementsAre(0, 6, 13));
  EXPECT_THAT(part.trace.prompt_lengths, ElementsAre(2, 3));
  EXPECT_THAT(part.trace.group_ids, ElementsAre(8, 9));
  EXPECT_THAT(part.batching.rank, ElementsAre(RankId{1}, RankId{0}));
  EXPECT_THAT(part.batching.micro_step, ElementsAre(MicroStepId{0}, MicroStepId{1}));
  EXPECT_EQ(take_ranks({.trace = trace, .batching = batching}, 1, 1).trace.num_sequences(), 0);
}

TEST(BatchedTrace, LayersAndMoreMicroStepsCountLikeThoseOfTheLoad) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const test::CountedTrace whole = test::random_trace(seed);
    const int layers = whole.trace.num_layers;
    for (const auto& [first, count] : {std::pair{0, layers}, {layers - 1, 1}}) {
      const BatchedTrace part = take_layers(whole, first, count);
      EXPECT_NO_THROW(expect_valid(part.trace));
      EXPECT_EQ(test::load_of(part.trace, part.batching).load, take_layers(whole.load, first, count).load);
    }
    for (const int factor : {1, 2, 4}) {
      const BatchedTrace longer = in_more_micro_steps(whole, factor);
      EXPECT_NO_THROW(expect_valid(longer.batching, longer.trace));
      const LoadTable expected = in_more_micro_steps(whole.load, factor);
      EXPECT_EQ(test::load_of(longer.trace, longer.batching).load, expected.load);
      EXPECT_EQ(longer.batching.ranks_per_node, expected.ranks_per_node);
    }
  }
}

}  // namespace
}  // namespace foremoe
