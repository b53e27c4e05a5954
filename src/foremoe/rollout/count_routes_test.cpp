#include "foremoe/rollout/count_routes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/rollout/random_traces.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

// One at a time, by route(): [layer][expert].
std::vector<std::int64_t> counted_slowly(const RoutingTrace& trace) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(trace.num_layers * trace.num_experts), 0);
  std::vector<ExpertId> row(static_cast<std::size_t>(trace.top_k));
  for (std::int64_t t = 0; t < trace.num_tokens; ++t) {
    for (int l = 0; l < trace.num_layers; ++l) {
      trace.route(t, LayerId{l}, row);
      for (const ExpertId e : row) {
        if (e != kNoExpert) ++counts[static_cast<std::size_t>(l * trace.num_experts + e.value)];
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
  const std::vector<std::int64_t> expected = counted_slowly(trace);
  for (const RouteKernel kernel : kKernels) {
    std::vector<std::int64_t> counts;
    EXPECT_TRUE(count(trace, counts, kernel));
    EXPECT_EQ(counts, expected) << "top-" << shape.top_k << ", " << shape.num_layers << " layers, " << shape.num_experts
                                << " experts";
  }
  EXPECT_EQ(find_fault(shape_of(trace), trace.routes, trace.num_tokens), std::nullopt);
}

TEST(CountRoutes, AgreesWithCountingOneByOneForEveryTypeAndShape) {
  for (const RandomTrace& shape : shapes()) expect_every_kernel_right(shape);
}

TEST(CountRoutes, AgreesWithCountingOneByOneOverManyBlocksOfTokens) {
  for (const int experts : {9, 64, 65, 128}) {
    for (const int layers : {8, 13, 16}) {
      expect_every_kernel_right(
          {.lengths = {252, 253, 1, 520}, .num_layers = layers, .top_k = 8, .num_experts = experts});
    }
  }
}

TEST(CountRoutes, AddsToWhatIsThereWithTheStrideOfTheCaller) {
  const auto trace = make_random_trace({.lengths = {9}, .num_layers = 2}).first;
  std::vector<std::int64_t> counts(2 * 20, 100);
  EXPECT_TRUE(RouteCounter(shape_of(trace)).count(trace.routes, trace.num_tokens, counts.data(), 20));
  const std::vector<std::int64_t> expected = counted_slowly(trace);
  for (std::size_t l = 0; l < 2; ++l) {
    for (std::size_t e = 0; e < 20; ++e) EXPECT_EQ(counts[l * 20 + e], 100 + (e < 8 ? expected[l * 8 + e] : 0));
  }
}

TEST(CountRoutes, CountsPastTheRangeOfItsNarrowCounters) {
  constexpr std::int64_t kTokens = 200'000;  // one expert gets them all
  const std::vector<std::byte> routes(kTokens, std::byte{3});
  std::vector<std::int64_t> counts(4, 0);
  EXPECT_TRUE(RouteCounter({.num_experts = 4}).count(routes.data(), kTokens, counts.data(), 4));
  EXPECT_THAT(counts, testing::ElementsAre(0, 0, 0, kTokens));
}

// Every entry of a small trace in turn gets an entry that makes its row malformed.
TEST(CountRoutes, FindsTheEntryThatIsWrongWhereverItIs) {
  for (const int top_k : {2, 6, 8}) {
    for (const RouteType type : {RouteType::kU8, RouteType::kU16, RouteType::kI16, RouteType::kI32}) {
      auto [trace, bytes] =
          make_random_trace({.type = type, .lengths = {4}, .num_layers = 11, .top_k = top_k, .num_experts = 20});
      const std::size_t entry_bytes = size_of(type);
      const std::size_t entries = bytes->size() / entry_bytes / 4 * 3;  // those of the missing token stay
      for (std::size_t i = 0; i < entries; ++i) {
        const std::size_t k = i % static_cast<std::size_t>(top_k);
        std::int32_t twin = 0;  // an entry of the same row
        std::memcpy(&twin, bytes->data() + (k == 0 ? i + 1 : i - 1) * entry_bytes, entry_bytes);
        for (const std::int32_t wrong : {std::int32_t{20}, std::int32_t{-1}, std::int32_t{-2}, twin}) {
          const std::vector<std::byte> saved = *bytes;
          std::memcpy(bytes->data() + i * entry_bytes, &wrong, entry_bytes);
          std::vector<std::int64_t> counts;
          for (const RouteKernel kernel : kKernels) EXPECT_FALSE(count(trace, counts, kernel));
          const auto fault = find_fault(shape_of(trace), trace.routes, trace.num_tokens);
          ASSERT_TRUE(fault.has_value());
          const std::size_t row = i / static_cast<std::size_t>(top_k);
          EXPECT_EQ(fault->token, static_cast<std::int64_t>(row / 11));
          EXPECT_EQ(fault->layer, static_cast<int>(row % 11));
          EXPECT_EQ(fault->entry, static_cast<int>(wrong == twin && k == 0 ? 1 : k));
          std::ranges::copy(saved, bytes->begin());
        }
      }
    }
  }
}

TEST(CountRoutes, SaysWhatIsWrongWithARow) {
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
  EXPECT_EQ(complaint(7, 8), "random: routed_experts[1, 1, 1]: expert 8 of 8");
  EXPECT_EQ(complaint(7, 255), "random: routed_experts[1, 1, 1]: sentinel 255 in a row that is not missing");
  const int twin = std::to_integer<int>((*bytes)[6]);
  EXPECT_THAT(complaint(7, twin), HasSubstr("routed_experts[1, 1, 1]: expert"));
  EXPECT_THAT(complaint(7, twin), HasSubstr("appears twice in a row"));
}

TEST(Route, ThrowsOnAnIdOutOfRangeAndMarksMissingRows) {
  auto [trace, bytes] = make_random_trace({.lengths = {2}, .num_layers = 1, .num_experts = 8});
  std::vector<ExpertId> row(2);
  trace.route(1, LayerId{0}, row);
  EXPECT_THAT(row, testing::Each(kNoExpert));
  (*bytes)[1] = std::byte{9};
  EXPECT_THROW(trace.route(0, LayerId{0}, row), InputError);
}

TEST(RouteType, IsTheNarrowestWhoseSentinelIsNoExpert) {
  EXPECT_EQ(narrowest_route_type(255), RouteType::kU8);
  EXPECT_EQ(narrowest_route_type(256), RouteType::kU16);
  EXPECT_EQ(narrowest_route_type(65'535), RouteType::kU16);
  EXPECT_EQ(narrowest_route_type(65'536), RouteType::kI32);
}

}  // namespace
}  // namespace foremoe
