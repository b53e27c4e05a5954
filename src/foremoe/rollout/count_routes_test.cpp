#include "foremoe/rollout/count_routes.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

// Counts one row at a time with route(): [layer][expert].
std::vector<std::int64_t> count_one_by_one(const RoutingTrace& trace) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(trace.num_layers * trace.num_experts), 0);
  std::vector<ExpertId> row(static_cast<std::size_t>(trace.top_k));
  for (std::int64_t t = 0; t < trace.num_tokens; ++t) {
    for (int l = 0; l < trace.num_layers; ++l) {
      trace.route(t, LayerId{l}, row);
      for (const ExpertId e : row) {
        if (e >= ExpertId{0}) ++counts[static_cast<std::size_t>(l * trace.num_experts + e.value)];
      }
    }
  }
  return counts;
}

constexpr RouteKernel kKernels[] = {RouteKernel::kAny, RouteKernel::kVectors, RouteKernel::kPortable};

bool count(const RoutingTrace& trace, std::vector<std::int64_t>& counts, RouteKernel kernel) {
  counts.assign(static_cast<std::size_t>(trace.num_layers * trace.num_experts), 0);
  return RouteCounter(shape_of(trace), kernel)
      .count(trace.routes, trace.num_tokens, counts.data(), static_cast<std::size_t>(trace.num_experts));
}

std::vector<RandomTrace> shapes() {
  std::vector<RandomTrace> all;
  for (const RouteType type : {RouteType::kU8, RouteType::kU16, RouteType::kI16, RouteType::kI32}) {
    for (const int top_k : {1, 2, 4, 6, 8, 16}) {
      for (const int layers : {1, 3, 8, 13, 48}) {
        for (const int experts : {top_k, 64, 100, 128, 255}) {
          all.push_back({.type = type,
                         .lengths = {1, 5, 0, 37},
                         .num_layers = layers,
                         .top_k = top_k,
                         .num_experts = experts,
                         .seed = all.size()});
        }
      }
    }
  }
  return all;
}

void expect_every_kernel_right(const RandomTrace& shape) {
  const auto trace = make_random_trace(shape).first;
  const std::vector<std::int64_t> expected = count_one_by_one(trace);
  for (const RouteKernel kernel : kKernels) {
    std::vector<std::int64_t> counts;
    EXPECT_TRUE(count(trace, counts, kernel));
    EXPECT_EQ(counts, expected) << "top-" << shape.top_k << ", " << shape.num_layers << " layers, " << shape.num_experts
                                << " experts";
  }
  EXPECT_EQ(find_fault(shape_of(trace), trace.routes, trace.num_tokens), std::nullopt);
}

TEST(CountRoutes, MatchesCountingOneByOneForEveryTypeAndShape) {
  for (const RandomTrace& shape : shapes()) expect_every_kernel_right(shape);
}

TEST(CountRoutes, MatchesCountingOneByOneOverManyBlocks) {
  for (const int experts : {9, 64, 65, 128}) {
    for (const int layers : {8, 13, 16}) {
      expect_every_kernel_right(
          {.lengths = {252, 253, 1, 520}, .num_layers = layers, .top_k = 8, .num_experts = experts});
    }
  }
}

TEST(CountRoutes, AddsToExistingCountsWithTheCallersStride) {
  const auto trace = make_random_trace({.lengths = {9}, .num_layers = 2}).first;
  std::vector<std::int64_t> counts(2 * 20, 100);
  EXPECT_TRUE(RouteCounter(shape_of(trace)).count(trace.routes, trace.num_tokens, counts.data(), 20));
  const std::vector<std::int64_t> expected = count_one_by_one(trace);
  for (std::size_t l = 0; l < 2; ++l) {
    for (std::size_t e = 0; e < 20; ++e) EXPECT_EQ(counts[l * 20 + e], 100 + (e < 8 ? expected[l * 8 + e] : 0));
  }
}

TEST(CountRoutes, CountsBeyondTheRangeOf16BitCounters) {
  constexpr std::int64_t kTokens = 200'000;  // one expert gets all of them
  const std::vector<std::byte> routes(kTokens, std::byte{3});
  std::vector<std::int64_t> counts(4, 0);
  EXPECT_TRUE(RouteCounter({.num_experts = 4}).count(routes.data(), kTokens, counts.data(), 4));
  EXPECT_THAT(counts, testing::ElementsAre(0, 0, 0, kTokens));
}

// A small trace with one damaged entry at a time.
class DamagedRoutes : public testing::TestWithParam<RouteType> {
 protected:
  static constexpr int kLayers = 11;
  static constexpr int kTokens = 60;

  // Sets entry i to `value`. Every kernel must reject the trace, and the fault must be at `entry` of the same row.
  void expect_fault(std::size_t i, std::int32_t value, std::size_t entry) {
    const std::size_t bytes_each = size_of(GetParam());
    const std::vector<std::byte> saved = *bytes_;
    std::memcpy(bytes_->data() + i * bytes_each, &value, bytes_each);
    std::vector<std::int64_t> counts;
    for (const RouteKernel kernel : kKernels) EXPECT_FALSE(count(trace_, counts, kernel));
    const auto fault = find_fault(shape_of(trace_), trace_.routes, trace_.num_tokens);
    ASSERT_TRUE(fault.has_value());
    const auto row = static_cast<int>(i / static_cast<std::size_t>(trace_.top_k));
    EXPECT_EQ(fault->token, row / kLayers);
    EXPECT_EQ(fault->layer, row % kLayers);
    EXPECT_EQ(fault->entry, static_cast<int>(entry));
    std::ranges::copy(saved, bytes_->begin());
  }

  // Calls f with the index of every entry of the first two tokens. The only missing token is far from these two, so
  // that its row-by-row check does not cover them.
  void for_each_entry(int top_k, const std::function<void(std::size_t)>& f) {
    std::tie(trace_, bytes_) = make_random_trace(
        {.type = GetParam(), .lengths = {kTokens}, .num_layers = kLayers, .top_k = top_k, .num_experts = 20});
    const std::size_t entries = bytes_->size() / size_of(GetParam());
    for (std::size_t i = 0; i < entries / kTokens * 2; ++i) f(i);
  }

  RoutingTrace trace_;
  std::shared_ptr<std::vector<std::byte>> bytes_;
};

TEST_P(DamagedRoutes, AreRejectedForAnIdOutOfRangeAtAnyEntry) {
  for (const int top_k : {2, 6, 8}) {
    for_each_entry(top_k, [&](std::size_t i) {
      for (const std::int32_t value : {20, -2}) expect_fault(i, value, i % static_cast<std::size_t>(top_k));
    });
  }
}

TEST_P(DamagedRoutes, AreRejectedForAnyTwoEqualEntries) {
  for (const std::size_t top_k : {2U, 4U, 6U, 8U}) {
    for_each_entry(static_cast<int>(top_k), [&](std::size_t i) {
      const std::size_t k = i % top_k;
      for (std::size_t j = 0; j < top_k; ++j) {
        if (j == k) continue;
        std::int32_t twin = 0;
        std::memcpy(&twin, bytes_->data() + (i - k + j) * size_of(GetParam()), size_of(GetParam()));
        expect_fault(i, twin, std::max(j, k));
      }
    });
  }
}

std::string name_of(const testing::TestParamInfo<RouteType>& type) {
  constexpr std::array kNames{"U8", "U16", "I16", "I32"};
  return kNames[static_cast<std::size_t>(type.param)];
}

INSTANTIATE_TEST_SUITE_P(EveryType, DamagedRoutes,
                         testing::Values(RouteType::kU8, RouteType::kU16, RouteType::kI16, RouteType::kI32), name_of);

// Another thread alternates one entry of a block between two values. Counting must use what it validated: a route of
// whole rows has the same number of entries whichever value is read.
TEST(CountRoutes, CountsWhatItValidatedWhileAnotherThreadChangesTheRoutes) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the race is intended";
#endif
  std::vector<std::int32_t> ids(4 * 8 * 4);
  for (int i = 0; i < std::ssize(ids); ++i) ids[static_cast<std::size_t>(i)] = i % 4;
  const std::atomic_ref<std::int32_t> changing(ids.back());
  std::jthread other([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      changing.store(0x7000'0000, std::memory_order_relaxed);
      changing.store(3, std::memory_order_relaxed);
    }
  });
  RouteCounter counter({.type = RouteType::kI32, .num_layers = 8, .top_k = 4, .num_experts = 32});
  std::vector<std::int64_t> counts(8 * 32);
  for (int i = 0; i < 200'000; ++i) {
    std::ranges::fill(counts, 0);
    if (!counter.count(reinterpret_cast<const std::byte*>(ids.data()), 4, counts.data(), 32)) continue;
    ASSERT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), std::ssize(ids));
  }
}

TEST(CountRoutes, RefusesRoutesThatWereMalformedOnlyWhileTheyWereCounted) {
  const auto trace = make_random_trace({.lengths = {4}}).first;
  try {
    refuse_routes(trace);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("routed_experts: changed while they were counted"));
  }
}

TEST(CountRoutes, DescribesTheFaultOfARow) {
  auto [trace, bytes] = make_random_trace({.lengths = {4}, .num_layers = 2, .num_experts = 8});
  const auto complaint = [&, &trace = trace, &bytes = bytes](std::size_t at, int value) -> std::string {
    const std::byte saved = (*bytes)[at];
    (*bytes)[at] = static_cast<std::byte>(value);
    std::string what;
    try {
      check_routes(trace);
    } catch (const InputError& error) {
      what = error.what();
    }
    (*bytes)[at] = saved;
    return what;
  };
  EXPECT_EQ(complaint(7, 8), "random: routed_experts[1, 1, 1]: expert 8, but there are 8");
  EXPECT_EQ(complaint(7, 255), "") << "the row has one expert";
  const int twin = std::to_integer<int>((*bytes)[6]);
  EXPECT_THAT(complaint(7, twin), HasSubstr("routed_experts[1, 1, 1]: expert"));
  EXPECT_THAT(complaint(7, twin), HasSubstr("appears twice in a row"));
}

TEST(CountRoutes, CountsRowsOfFewerExpertsInEveryKernel) {
  for (const RouteType type : {RouteType::kU8, RouteType::kU16, RouteType::kI16, RouteType::kI32}) {
    for (const int top_k : {2, 6, 8}) {
      auto [trace, bytes] =
          make_random_trace({.type = type, .lengths = {300, 41}, .num_layers = 11, .top_k = top_k, .num_experts = 100});
      std::vector<std::int64_t> expected = count_one_by_one(trace);
      Random random(7);
      std::int64_t removed = 0;
      std::vector<ExpertId> row(static_cast<std::size_t>(top_k));
      for (int i = 0; i < 60; ++i) {  // removes one expert of a row
        const std::size_t token = random.below(340);
        const std::size_t layer = random.below(11);
        const std::size_t k = random.below(static_cast<std::size_t>(top_k) - 1);  // one entry always remains
        trace.route(static_cast<std::int64_t>(token), LayerId{layer}, row);
        if (row[k] < ExpertId{0}) continue;
        const std::size_t entry = (token * 11 + layer) * static_cast<std::size_t>(top_k) + k;
        std::fill_n(bytes->begin() + static_cast<std::ptrdiff_t>(entry * size_of(type)), size_of(type), std::byte{255});
        --expected[layer * 100 + row[k].index()];
        ++removed;
      }
      for (const RouteKernel kernel : kKernels) {
        RouteCounter counter(shape_of(trace), kernel);
        std::vector<std::int64_t> counts(expected.size());
        EXPECT_TRUE(counter.count(trace.routes, trace.num_tokens, counts.data(), 100));
        EXPECT_EQ(counts, expected);
        EXPECT_EQ(counter.uncounted(), removed);
        RouteShape whole = shape_of(trace);
        whole.partial_rows = false;
        EXPECT_FALSE(RouteCounter(whole, kernel).count(trace.routes, trace.num_tokens, counts.data(), 100));
      }
      EXPECT_EQ(find_fault(shape_of(trace), trace.routes, trace.num_tokens), std::nullopt);
    }
  }
}

// Two layers of 6 and 8 experts, ids 8 to 11 without weights, top-3 and top-2.
RoutingTrace layers_that_differ(std::vector<std::byte>& bytes, const std::vector<int>& ids) {
  bytes.clear();
  for (const int id : ids) bytes.push_back(static_cast<std::byte>(id));
  return {.name = "t",
          .routes = bytes.data(),
          .num_tokens = std::ssize(ids) / 6,
          .num_layers = 2,
          .top_k = 3,
          .num_experts = 8,
          .weightless_experts = 4,
          .experts_of_layer = {6, 8},
          .top_k_of_layer = {3, 2},
          .cu_seqlens = {0, std::ssize(ids) / 6}};
}

TEST(CountRoutes, CountsOnlyExpertsWithWeights) {
  std::vector<std::byte> bytes;
  const RoutingTrace trace = layers_that_differ(
      bytes, {5, 8, 0, 7, 11, 255, 9, 10, 8, 255, 255, 255, 0, 255, 1, 255, 3, 7, 255, 255, 255, 9, 255, 8});
  expect_valid(trace);
  for (const RouteKernel kernel : kKernels) {
    RouteCounter counter(shape_of(trace), kernel);
    std::vector<std::int64_t> counts(16);
    ASSERT_TRUE(counter.count(trace.routes, trace.num_tokens, counts.data(), 8));
    EXPECT_THAT(counts, testing::ElementsAre(2, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2));
    EXPECT_EQ(counter.uncounted(), 11);  // six rows with a route have 18 entries
  }
  check_routes(trace);
  std::vector<ExpertId> row(3);
  trace.route(1, LayerId{0}, row);
  EXPECT_THAT(row, testing::Each(kUnassigned)) << "the token has a route, but needs no expert";
  trace.route(1, LayerId{1}, row);
  EXPECT_THAT(row, testing::Each(kNoExpert));
  trace.route(0, LayerId{0}, row);
  EXPECT_THAT(row, testing::ElementsAre(ExpertId{5}, kUnassigned, ExpertId{0}));
}

TEST(CountRoutes, RefusesIdsThatALayerDoesNotHave) {
  const auto fault = [](const std::vector<int>& ids) {
    std::vector<std::byte> bytes;
    const RoutingTrace trace = layers_that_differ(bytes, ids);
    std::vector<std::int64_t> counts(16);
    const bool counted = RouteCounter(shape_of(trace)).count(trace.routes, trace.num_tokens, counts.data(), 8);
    const auto found = find_fault(shape_of(trace), trace.routes, trace.num_tokens);
    EXPECT_NE(counted, found.has_value());
    return found ? fmt::format("[{}, {}] {}", found->layer, found->entry, found->what) : "";
  };
  EXPECT_EQ(fault({5, 4, 3, 7, 6, 255}), "");
  EXPECT_EQ(fault({5, 6, 3, 7, 6, 255}), "[0, 1] expert 6, but there are 6");
  EXPECT_EQ(fault({5, 4, 12, 7, 6, 255}), "[0, 2] expert 12, but there are 6");
  EXPECT_EQ(fault({9, 4, 9, 7, 6, 255}), "[0, 2] expert 9 appears twice in a row");
  EXPECT_EQ(fault({5, 4, 3, 7, 6, 5}), "[1, 2] a token of this layer chooses only 2 experts");
}

TEST(Route, ConvertsTheRowsOfManyTokensLikeThoseOfOne) {
  for (const int top_k : {2, 8}) {  // 8 has code of its own
    for (const bool all_experts : {true, false}) {
      auto [trace, bytes] =
          make_random_trace({.type = RouteType::kU16, .lengths = {9}, .top_k = top_k, .num_experts = 8});
      auto* const entries = reinterpret_cast<std::uint16_t*>(bytes->data());
      trace.weightless_experts = 2;
      const std::size_t k = static_cast<std::size_t>(top_k);
      const auto last_row = [&](std::int64_t token) { return (static_cast<std::size_t>(token) * 3 + 1) * k; };
      std::vector<ExpertId> expected(9 * k);
      for (std::int64_t t = 0; t < 9; ++t) {
        for (std::size_t i = 0; i < k; ++i) {
          std::uint16_t& entry = entries[last_row(t) + i];
          entry = static_cast<std::uint16_t>(i);
          if (!all_experts && t == 3) entry = 0xffff;
          if (!all_experts && t == 5 && i > 0) entry = i == 1 ? 9 : 0xffff;
          const bool missing = !all_experts && t == 3;
          expected[static_cast<std::size_t>(t) * k + i] = missing     ? kNoExpert
                                                          : entry < 8 ? ExpertId{int{entry}}
                                                                      : kUnassigned;
        }
      }
      std::vector<ExpertId> all(9 * k), one(k);
      trace.rows_of(0, LayerId{1}, all);
      EXPECT_EQ(all, expected);
      for (std::int64_t t = 0; t < 9; ++t) {
        trace.route(t, LayerId{1}, one);
        EXPECT_TRUE(std::ranges::equal(one, std::span(expected).subspan(static_cast<std::size_t>(t) * k, k)));
      }
      entries[last_row(7) + 1] = 10;
      EXPECT_THROW(trace.rows_of(0, LayerId{1}, all), InputError);
    }
  }
}

TEST(Route, ThrowsOnAnIdOutOfRangeAndMarksMissingRows) {
  auto [trace, bytes] = make_random_trace({.lengths = {2}, .num_layers = 1, .num_experts = 8});
  std::vector<ExpertId> row(2);
  trace.route(1, LayerId{0}, row);
  EXPECT_THAT(row, testing::Each(kNoExpert));
  (*bytes)[1] = std::byte{9};
  EXPECT_THROW(trace.route(0, LayerId{0}, row), InputError);
}

TEST(RouteType, IsTheNarrowestTypeWhoseSentinelIsNotAnExpert) {
  EXPECT_EQ(narrowest_route_type(255), RouteType::kU8);
  EXPECT_EQ(narrowest_route_type(256), RouteType::kU16);
  EXPECT_EQ(narrowest_route_type(65'535), RouteType::kU16);
  EXPECT_EQ(narrowest_route_type(65'536), RouteType::kI32);
}

}  // namespace
}  // namespace foremoe
