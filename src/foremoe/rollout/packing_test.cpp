#include "foremoe/rollout/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

// A trace whose sequences use experts unevenly: sequence s prefers a third of the experts, which depends on s.
RoutingTrace uneven_trace(std::uint64_t seed, const std::vector<std::int64_t>& lengths) {
  Random random(seed);
  RoutingTrace shape{.name = "uneven", .num_layers = 2, .top_k = 2, .num_experts = 12, .cu_seqlens = {0}};
  std::vector<std::uint8_t> routes;
  for (const std::int64_t length : lengths) {
    shape.cu_seqlens.push_back(shape.cu_seqlens.back() + length);
    const std::uint64_t topic = random.below(3);
    for (std::int64_t row = 0; row < length * shape.num_layers; ++row) {
      const auto first = static_cast<std::uint8_t>(4 * topic + random.below(4));
      const auto second = static_cast<std::uint8_t>((first + 1 + random.below(11)) % 12);
      routes.insert(routes.end(), {first, second});
    }
  }
  return test::trace_of(std::move(routes), std::move(shape));
}

std::vector<std::int64_t> random_lengths(Random& random, std::size_t n, std::uint64_t longest) {
  std::vector<std::int64_t> lengths(n);
  for (std::int64_t& length : lengths) length = 1 + static_cast<std::int64_t>(random.below(longest));
  return lengths;
}

// The objective as defined in the header, in floating point from the routes.
double objective_of(const RoutingTrace& trace, const Batching& batching) {
  const auto deviations_of = [&](const std::vector<std::vector<double>>& counts, const std::vector<double>& step) {
    const auto experts = static_cast<std::size_t>(trace.num_experts);
    double sum = 0;
    for (const std::vector<double>& count : counts) {
      for (std::size_t l = 0; l < static_cast<std::size_t>(trace.num_layers); ++l) {
        double own = 0;
        double all = 0;
        for (std::size_t e = 0; e < experts; ++e) {
          own += count[l * experts + e];
          all += step[l * experts + e];
        }
        for (std::size_t e = 0; e < experts; ++e) {
          if (all > 0) sum += std::pow(count[l * experts + e] - own * step[l * experts + e] / all, 2);
        }
      }
    }
    return sum;
  };
  const auto cells = static_cast<std::size_t>(trace.num_layers * trace.num_experts);
  std::vector<double> step(cells, 0);
  std::vector<std::vector<double>> sequences(batching.rank.size(), step);
  std::vector<std::vector<double>> micro_steps(static_cast<std::size_t>(batching.num_micro_steps), step);
  std::vector<ExpertId> route(static_cast<std::size_t>(trace.top_k));
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    for (std::int64_t token = trace.cu_seqlens[s]; token < trace.cu_seqlens[s + 1]; ++token) {
      for (int l = 0; l < trace.num_layers; ++l) {
        trace.route(token, LayerId{l}, route);
        for (const ExpertId e : route) {
          if (e == kNoExpert) continue;
          const auto cell = static_cast<std::size_t>(l * trace.num_experts + e.value);
          ++step[cell];
          ++sequences[s][cell];
          ++micro_steps[batching.micro_step[s].index()][cell];
        }
      }
    }
  }
  double largest = 0;
  double all = 0;
  for (int m = 0; m < batching.num_micro_steps; ++m) {
    std::vector<double> ranks(static_cast<std::size_t>(batching.num_ranks), 0);
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      const double length = static_cast<double>(trace.sequence_length(static_cast<int>(s)));
      if (batching.micro_step[s] == MicroStepId{m}) ranks[batching.rank[s].index()] += length * length + 4096 * length;
    }
    largest += std::ranges::max(ranks);
    for (const double rank : ranks) all += rank;
  }
  return deviations_of(micro_steps, step) / deviations_of(sequences, step) + largest * batching.num_ranks / all;
}

// Tokens per [micro_step * ranks + rank].
std::vector<std::int64_t> tokens_of(const RoutingTrace& trace, const Batching& batching) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(batching.num_micro_steps * batching.num_ranks), 0);
  for (std::size_t s = 0; s < batching.rank.size(); ++s) {
    tokens[batching.micro_step[s].index() * static_cast<std::size_t>(batching.num_ranks) + batching.rank[s].index()] +=
        trace.sequence_length(static_cast<int>(s));
  }
  return tokens;
}

std::string complaint_of(const RoutingTrace& trace, const PackingOptions& options) {
  ThreadPool pool(1);
  try {
    pack(trace, options, pool);
    return "";
  } catch (const InputError& error) {
    return error.what();
  }
}

TEST(Packing, KeepsTokenLimitsMiniBatchesAndEveryRankBusy) {
  Random random(1);
  ThreadPool pool(2);
  for (int round = 0; round < 40; ++round) {
    const std::size_t n = 4 + random.below(40);
    const RoutingTrace trace = uneven_trace(random.bits(), random_lengths(random, n, 30));
    const int mini_batches = 1 + static_cast<int>(random.below(4));
    const PackingOptions options{.num_ranks = 1 + static_cast<int>(random.below(4)),
                                 .tokens_per_rank = 30 + static_cast<std::int64_t>(random.below(40)),
                                 .num_mini_batches = mini_batches};
    const auto [batching, micro_steps, objective] = pack(trace, options, pool);
    EXPECT_LE(std::ranges::max(tokens_of(trace, batching)), options.tokens_per_rank);
    ASSERT_EQ(batching.micro_step.size(), n);
    ASSERT_EQ(micro_steps.size(), static_cast<std::size_t>(mini_batches));
    for (std::size_t s = 0; s < n; ++s) {
      const std::size_t k = s * static_cast<std::size_t>(mini_batches) / n;
      const int first = std::accumulate(micro_steps.begin(), micro_steps.begin() + static_cast<std::ptrdiff_t>(k), 0);
      EXPECT_GE(batching.micro_step[s].value, first);
      EXPECT_LT(batching.micro_step[s].value, first + micro_steps[k]);
      EXPECT_LT(batching.rank[s].value, options.num_ranks);
    }
    EXPECT_EQ(std::accumulate(micro_steps.begin(), micro_steps.end(), 0), batching.num_micro_steps);
    // As many ranks have sequences as in the batching by tokens.
    if (mini_batches > 1) continue;
    std::vector<std::int64_t> lengths;
    for (std::size_t s = 0; s < n; ++s) lengths.push_back(trace.sequence_length(static_cast<int>(s)));
    const Batching by_tokens =
        balanced_batching(lengths, {.num_ranks = options.num_ranks, .tokens_per_rank = options.tokens_per_rank}, "");
    EXPECT_EQ(batching.num_micro_steps, by_tokens.num_micro_steps);
    EXPECT_LE(std::ranges::count(tokens_of(trace, batching), 0), std::ranges::count(tokens_of(trace, by_tokens), 0));
  }
}

TEST(Packing, ReportsTheObjectiveWhichNeverRisesWithEffort) {
  Random random(2);
  ThreadPool pool(1);
  for (int round = 0; round < 20; ++round) {
    const RoutingTrace trace = uneven_trace(random.bits(), random_lengths(random, 40, 30));
    PackingOptions options{.num_ranks = 2, .tokens_per_rank = 70, .num_mini_batches = 1 + round % 2};
    const double best = pack(trace, options, pool).objective;
    double last = 100;
    for (options.effort = 1; options.effort < 20; ++options.effort) {
      const Packing packing = pack(trace, options, pool);
      EXPECT_NEAR(packing.objective, objective_of(trace, packing.batching), 1e-6);
      EXPECT_LE(packing.objective, last);
      last = packing.objective;
    }
    EXPECT_EQ(last, best) << "20 sweeps reach the local optimum";
  }
}

TEST(Packing, NoMoveOrExchangeImprovesTheResult) {
  Random random(3);
  ThreadPool pool(1);
  for (int round = 0; round < 20; ++round) {
    const RoutingTrace trace = uneven_trace(random.bits(), random_lengths(random, 12, 20));
    const PackingOptions options{.num_ranks = 2, .tokens_per_rank = 40};
    const Batching packed = pack(trace, options, pool).batching;
    const double objective = objective_of(trace, packed);
    const auto is_allowed = [&](const Batching& changed) {
      const std::vector<std::int64_t> tokens = tokens_of(trace, changed);
      return std::ranges::max(tokens) <= 40 &&
             std::ranges::count(tokens, 0) <= std::ranges::count(tokens_of(trace, packed), 0);
    };
    for (std::size_t s = 0; s < 12; ++s) {
      for (std::size_t t = 0; t < s; ++t) {
        Batching changed = packed;
        std::swap(changed.micro_step[s], changed.micro_step[t]);
        std::swap(changed.rank[s], changed.rank[t]);
        EXPECT_TRUE(!is_allowed(changed) || objective_of(trace, changed) >= objective - 1e-6);
      }
      for (int cell = 0; cell < 2 * packed.num_micro_steps; ++cell) {
        Batching changed = packed;
        changed.micro_step[s] = MicroStepId{cell / 2};
        changed.rank[s] = RankId{cell % 2};
        EXPECT_TRUE(!is_allowed(changed) || objective_of(trace, changed) >= objective - 1e-6);
      }
    }
  }
}

// Two ranks, two micro-steps and six sequences: all 4^6 packings are enumerated.
TEST(Packing, IsNearTheOptimumOfTinyInstances) {
  Random random(4);
  ThreadPool pool(1);
  int num_tried = 0;
  int num_optimal = 0;
  for (int round = 0; round < 30; ++round) {
    const RoutingTrace trace = uneven_trace(random.bits(), random_lengths(random, 6, 20));
    std::int64_t longest_two = 0;
    for (int s = 0; s < 6; ++s) longest_two = std::max(longest_two, 2 * trace.sequence_length(s));
    const PackingOptions options{.num_ranks = 2, .tokens_per_rank = longest_two};
    const Packing packing = pack(trace, options, pool);
    if (packing.batching.num_micro_steps != 2) continue;
    double optimum = packing.objective;
    for (int code = 0; code < 4096; ++code) {
      Batching all = packing.batching;
      for (std::size_t s = 0; s < 6; ++s) {
        all.micro_step[s] = MicroStepId{code >> (2 * s) & 1};
        all.rank[s] = RankId{code >> (2 * s + 1) & 1};
      }
      const std::vector<std::int64_t> tokens = tokens_of(trace, all);
      if (std::ranges::max(tokens) > longest_two || std::ranges::min(tokens) == 0) continue;
      optimum = std::min(optimum, objective_of(trace, all));
    }
    EXPECT_LE(packing.objective, 1.25 * optimum);
    ++num_tried;
    num_optimal += packing.objective <= optimum + 1e-6;
  }
  EXPECT_GE(num_tried, 10);
  EXPECT_GE(2 * num_optimal, num_tried);
}

TEST(Packing, MixesTopicsAndBalancesDenseWork) {
  // Micro-steps of one rank and two equal sequences: each must have one sequence of each topic.
  RoutingTrace shape{.name = "topics", .num_layers = 1, .top_k = 1, .num_experts = 2, .cu_seqlens = {0, 3, 6, 9, 12}};
  const RoutingTrace topics = test::trace_of({0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}, shape);
  ThreadPool pool(1);
  const Packing packing = pack(topics, {.num_ranks = 1, .tokens_per_rank = 6}, pool);
  EXPECT_EQ(packing.objective, 1) << "deviation 0, dense work balanced";
  EXPECT_NE(packing.batching.micro_step[0], packing.batching.micro_step[1]);
  EXPECT_NE(packing.batching.micro_step[2], packing.batching.micro_step[3]);
}

TEST(Packing, LeavesARankItsLastSequence) {
  // Sequences 1, 2 and 3 together use both experts equally, as sequence 0 does, and the rank of 2 has room for 3. But 3
  // is the only sequence of its rank.
  RoutingTrace shape{.name = "last", .num_layers = 1, .top_k = 1, .num_experts = 2, .cu_seqlens = {0, 6, 12, 17, 18}};
  const RoutingTrace trace = test::trace_of({0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0}, shape);
  ThreadPool pool(1);
  const Packing packing = pack(trace, {.num_ranks = 2, .tokens_per_rank = 6}, pool);
  EXPECT_EQ(packing.batching.num_micro_steps, 2);
  EXPECT_GT(std::ranges::min(tokens_of(trace, packing.batching)), 0);
}

TEST(Packing, DoesNotDependOnTheThreads) {
  Random random(5);
  const RoutingTrace trace = uneven_trace(5, random_lengths(random, 60, 40));
  const PackingOptions options{.num_ranks = 4, .tokens_per_rank = 80, .num_mini_batches = 2};
  ThreadPool one(1);
  ThreadPool many(7);
  const Packing a = pack(trace, options, one);
  const Packing b = pack(trace, options, many);
  EXPECT_EQ(a.batching.micro_step, b.batching.micro_step);
  EXPECT_EQ(a.batching.rank, b.batching.rank);
  EXPECT_EQ(a.objective, b.objective);
}

TEST(Packing, TakesMiniBatchesFromRecordedMicroSteps) {
  RoutingTrace trace = uneven_trace(6, {4, 4, 4, 4});
  trace.micro_step = {3, 0, 2, 1};
  trace.rank = {0, 0, 0, 0};
  infer_ranks(trace);
  ThreadPool pool(1);
  const Packing packing = pack(trace, {.num_ranks = 1, .tokens_per_rank = 8, .num_mini_batches = 2}, pool);
  EXPECT_THAT(packing.micro_steps, ElementsAre(1, 1));
  EXPECT_THAT(packing.batching.micro_step, ElementsAre(MicroStepId{1}, MicroStepId{0}, MicroStepId{1}, MicroStepId{0}));
  EXPECT_EQ(packing.batching.ranks_per_node, 1);
  EXPECT_EQ(complaint_of(trace, {.num_ranks = 1, .tokens_per_rank = 8, .num_mini_batches = 3}),
            "mini_batches: 3 does not divide the 4 micro-steps recorded in uneven");
}

TEST(Packing, AcceptsSequencesWithoutTokensAndTracesWithoutRoutes) {
  const RoutingTrace trace = make_random_trace({.lengths = {0, 1, 0, 1}}).first;  // the last token has no route
  ThreadPool pool(1);
  const Packing packing = pack(trace, {.num_ranks = 2, .tokens_per_rank = 1}, pool);
  EXPECT_EQ(packing.batching.num_micro_steps, 1);
  EXPECT_EQ(packing.objective, 1);
}

TEST(Packing, RejectsInvalidInput) {
  const RoutingTrace trace = uneven_trace(7, {5, 60, 7});
  EXPECT_EQ(complaint_of(trace, {.num_ranks = 2, .tokens_per_rank = 59, .num_mini_batches = 2}),
            "uneven: cu_seqlens[1]: a sequence of 60 tokens exceeds the limit of 59 per rank and micro-step "
            "(`tokens_per_rank`); the longest has 60");
  EXPECT_EQ(complaint_of(trace, {.num_ranks = 5, .tokens_per_rank = 60}),
            "uneven: 12 experts cannot be divided evenly among 5 ranks (`ranks`)");
  EXPECT_EQ(complaint_of(trace, {.num_ranks = 2, .tokens_per_rank = 60, .num_mini_batches = 4}),
            "mini_batches: 4; must be from 1 to the number of sequences, 3");
  EXPECT_EQ(complaint_of(make_random_trace({.lengths = std::vector<std::int64_t>(32'769, 0)}).first,
                         {.num_ranks = 2, .tokens_per_rank = 1}),
            "mini_batches: a mini-batch has 32769 sequences; at most 32768 are possible");
  auto [broken, storage] = make_random_trace({.lengths = {5, 6}});
  (*storage)[3] = (*storage)[2];  // token 0, layer 1
  EXPECT_EQ(complaint_of(broken, {.num_ranks = 2, .tokens_per_rank = 60}).substr(0, 33),
            "random: routed_experts[0, 1, 1]: ");
}

TEST(PackingFigures, AreThoseOfHandCountedLoads) {
  // Micro-step 0: rank 0 has 3 tokens for expert 0, rank 1 one for expert 1. Micro-step 1: rank 1 has 2 for expert 1.
  RoutingTrace shape{.name = "hand", .num_layers = 1, .top_k = 1, .num_experts = 2, .cu_seqlens = {0, 3, 4, 6}};
  const RoutingTrace trace = test::trace_of({0, 0, 0, 1, 1, 1}, shape);
  const Batching batching{.num_micro_steps = 2,
                          .num_ranks = 2,
                          .ranks_per_node = 2,
                          .micro_step = {MicroStepId{0}, MicroStepId{0}, MicroStepId{1}},
                          .rank = {RankId{0}, RankId{1}, RankId{1}}};
  Array<RankId, 2> home({1, 2});
  home(0, 1) = RankId{1};
  ThreadPool pool(1);
  const PackingFigures figures = packing_figures({.trace = trace, .batching = batching}, home, pool);
  EXPECT_DOUBLE_EQ(figures.rho_mean, (1.5 + 2) / 2);
  EXPECT_DOUBLE_EQ(figures.rho_max, 2);
  EXPECT_DOUBLE_EQ(figures.attention.mean, (9 + 1) / 2.0 + 4 / 2.0);
  EXPECT_DOUBLE_EQ(figures.attention.max, 9 + 4);
  EXPECT_DOUBLE_EQ(figures.dense.mean, (9 + 1 + 4 + 4096 * 6) / 2.0);
  EXPECT_DOUBLE_EQ(figures.dense.max, 9 + 4 + 4096 * 5);
}

}  // namespace
}  // namespace foremoe
