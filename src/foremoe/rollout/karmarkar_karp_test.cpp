#include "foremoe/rollout/batching.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/core/random.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

std::vector<std::int64_t> sums(const std::vector<std::int64_t>& sizes, const std::vector<int>& part, int num_parts) {
  std::vector<std::int64_t> sum(static_cast<std::size_t>(num_parts), 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) sum[static_cast<std::size_t>(part[i])] += sizes[i];
  return sum;
}

// Minimum of the largest part over all assignments.
std::int64_t best(const std::vector<std::int64_t>& sizes, int num_parts) {
  std::vector<int> part(sizes.size(), 0);
  std::int64_t result = std::numeric_limits<std::int64_t>::max();
  for (;;) {
    result = std::min(result, std::ranges::max(sums(sizes, part, num_parts)));
    std::size_t i = 0;
    while (i < part.size() && ++part[i] == num_parts) part[i++] = 0;
    if (i == part.size()) return result;
  }
}

TEST(KarmarkarKarp, SplitsTheTextbookExample) {
  const std::vector<std::int64_t> sizes{8, 7, 6, 5, 4};
  EXPECT_THAT(sums(sizes, karmarkar_karp(sizes, 2), 2), testing::UnorderedElementsAre(16, 14));
  EXPECT_THAT(sums(sizes, karmarkar_karp(sizes, 3), 3), testing::UnorderedElementsAre(8, 11, 11));
}

TEST(KarmarkarKarp, IsNearTheOptimumOnSmallInstances) {
  Random random(1);
  double ours = 0;
  double optimum = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int64_t> sizes(1 + random.below(8));
    for (auto& size : sizes) size = static_cast<std::int64_t>(random.below(50));
    const int num_parts = 1 + static_cast<int>(random.below(4));
    const std::int64_t largest = std::ranges::max(sums(sizes, karmarkar_karp(sizes, num_parts), num_parts));
    const std::int64_t least = best(sizes, num_parts);
    EXPECT_GE(largest, least);
    EXPECT_LE(3 * largest, 4 * least + 3);  // 4/3 of the optimum, the guarantee of greedy placement
    ours += static_cast<double>(largest);
    optimum += static_cast<double>(least);
  }
  EXPECT_LE(ours, 1.02 * optimum);
}

TEST(KarmarkarKarp, NumbersPartsByTheirLowestItem) {
  EXPECT_THAT(karmarkar_karp(std::vector<std::int64_t>{1, 9, 1, 9}, 4), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(karmarkar_karp(std::vector<std::int64_t>{4, 4, 4, 4}, 1), ElementsAre(0, 0, 0, 0));
}

TEST(KarmarkarKarp, LeavesNoPartEmptyIfThereAreEnoughItems) {
  const std::vector<std::int64_t> zeros(7, 0);
  std::vector<int> part = karmarkar_karp(zeros, 5);
  std::ranges::sort(part);
  part.erase(std::unique(part.begin(), part.end()), part.end());
  EXPECT_THAT(part, ElementsAre(0, 1, 2, 3, 4));
}

TEST(KarmarkarKarp, AcceptsNoItems) { EXPECT_TRUE(karmarkar_karp({}, 3).empty()); }

}  // namespace
}  // namespace foremoe
