#include "foremoe/rollout/row_routes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

constexpr RowShape kShape{.num_tokens = 700, .num_layers = 3, .top_k = 8, .num_experts = 64};

// Draws distinct experts for every row; every fifth token has no route in any layer.
std::vector<std::int64_t> random_routes(const RowShape& shape) {
  std::mt19937 random(7);
  std::vector<std::int64_t> experts(static_cast<std::size_t>(shape.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::vector<std::int64_t> routes;
  for (int row = 0; row < shape.num_tokens * shape.num_layers; ++row) {
    std::ranges::shuffle(experts, random);
    for (int k = 0; k < shape.top_k; ++k) {
      routes.push_back(row / shape.num_layers % 5 == 4 ? -1 : experts[static_cast<std::size_t>(k)]);
    }
  }
  return routes;
}

std::vector<std::int64_t> counted_one_by_one(const std::vector<std::int64_t>& routes, const RowShape& shape) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(shape.num_layers * shape.num_experts));
  const int top_k = shape.top_k;
  for (std::size_t i = 0; i < routes.size(); i += static_cast<std::size_t>(top_k)) {
    const std::set<std::int64_t> row(routes.begin() + static_cast<std::ptrdiff_t>(i),
                                     routes.begin() + static_cast<std::ptrdiff_t>(i) + top_k);
    const auto layer = static_cast<int>(i) / top_k % shape.num_layers;
    for (const std::int64_t e : row) {
      if (e >= 0) ++counts[static_cast<std::size_t>(layer * shape.num_experts + e)];
    }
  }
  return counts;
}

struct Counted {
  std::vector<std::int32_t> routes;
  std::vector<std::int64_t> counts;
};

template <class Id>
Counted count(const std::vector<std::int64_t>& routes, const RowShape& shape) {
  std::vector<Id> typed(routes.size());
  std::ranges::transform(routes, typed.begin(), [](std::int64_t id) { return static_cast<Id>(id); });
  Counted found{std::vector<std::int32_t>(routes.size()),
                std::vector<std::int64_t>(static_cast<std::size_t>(shape.num_layers * shape.num_experts))};
  count_rows<Id>(typed, shape, found.routes, found.counts);
  return found;
}

template <class Id>
class RowRoutes : public testing::Test {};
using Ids = testing::Types<std::uint8_t, std::uint16_t, std::int16_t, std::int64_t>;
TYPED_TEST_SUITE(RowRoutes, Ids);

TYPED_TEST(RowRoutes, HaveTheSameInt32RoutesAndCountsForEveryType) {
  const std::vector<std::int64_t> routes = random_routes(kShape);
  const Counted found = count<TypeParam>(routes, kShape);
  EXPECT_TRUE(std::ranges::equal(found.routes, routes));
  EXPECT_EQ(found.counts, counted_one_by_one(routes, kShape));
  std::vector<std::int64_t> again(found.counts.size());
  count_rows(found.routes, kShape, again);
  EXPECT_EQ(again, found.counts);
}

TEST(RowRoutesTest, TheLargestUnsignedValueMayBeAnExpert) {
  const RowShape shape{.num_tokens = 1, .num_layers = 1, .top_k = 2, .num_experts = 256};
  EXPECT_EQ(count<std::uint8_t>({255, 3}, shape).routes, (std::vector<std::int32_t>{255, 3}));
}

std::string refusal_of(std::vector<std::int64_t> routes, std::size_t place, std::int64_t id) {
  routes[place] = id;
  try {
    count<std::int64_t>(routes, kShape);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(RowRoutesTest, NamesPlaceAndValueOfTheFirstInvalidRow) {
  const std::vector<std::int64_t> routes = random_routes(kShape);
  // Tests an entry beyond the first block of tokens.
  const std::size_t place = (691 * 3 + 2) * 8 + 5;
  const std::string where = "routes[691, 2, 5]: ";
  EXPECT_EQ(refusal_of(routes, place, 64), where + "expert 64, but there are 64");
  EXPECT_EQ(refusal_of(routes, place, std::int64_t{1} << 32), where + "expert 4294967296, but there are 64");
  EXPECT_EQ(refusal_of(routes, place, -7), where + "expert -7, but there are 64");
  EXPECT_EQ(refusal_of(routes, place, -1), where + "sentinel -1 in a row that is not missing");
  EXPECT_THAT(refusal_of(routes, place, routes[place - 1]), testing::HasSubstr("appears twice in a row"));
}

TEST(RowRoutesTest, CountsARepeatedExpertOnce) {
  const RowShape shape{.num_tokens = 3, .num_layers = 2, .top_k = 3, .num_experts = 4};
  const std::vector<std::int32_t> routes{0, 0, 0, 1, 2, 1, 3, 0, 3, 1, 1, 2, 0, 1, 2, 3, 3, 3};
  std::vector<std::int64_t> counts(8);
  count_distinct<std::int32_t>(routes, shape, counts);
  EXPECT_EQ(counts, counted_one_by_one({routes.begin(), routes.end()}, shape));
  EXPECT_EQ(counts, (std::vector<std::int64_t>{3, 1, 1, 1, 0, 2, 2, 1}));
}

TEST(RowRoutesTest, RejectsMissingRowsIfEveryRowNeedsARoute) {
  const RowShape shape{.num_tokens = 1, .num_layers = 2, .top_k = 1, .num_experts = 4};
  const std::vector<std::int32_t> routes{3, -1};
  std::vector<std::int64_t> counts(8);
  EXPECT_THROW(count_distinct<std::int32_t>(routes, shape, counts), InputError);
}

}  // namespace
}  // namespace foremoe
