// Compares the density bound, an oracle of other tests, with brute force.

#include "foremoe/testing/density_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "foremoe/core/random.h"

namespace foremoe::test {
namespace {

// Minimum largest rank load over all ways to split all loads.
std::int64_t best_by_trying_all(std::span<const Tokens> load, std::span<const std::uint32_t> holders,
                                std::vector<std::int64_t>& rank_load, std::size_t e = 0) {
  if (e == load.size()) return *std::ranges::max_element(rank_load);
  std::int64_t best = std::numeric_limits<std::int64_t>::max();
  const auto deal = [&](auto&& self, std::size_t r, std::int64_t left) -> void {
    if (r == rank_load.size()) {
      if (left == 0) best = std::min(best, best_by_trying_all(load, holders, rank_load, e + 1));
      return;
    }
    const std::int64_t most = holders[e] >> r & 1 ? left : 0;
    for (std::int64_t x = 0; x <= most; ++x) {
      rank_load[r] += x;
      self(self, r + 1, left - x);
      rank_load[r] -= x;
    }
  };
  deal(deal, 0, load[e].value);
  return best;
}

TEST(DensityBound, AnExpertWithOneReplicaIsServedThere) {
  const std::vector<Tokens> load{Tokens{10}, Tokens{2}};
  EXPECT_EQ(density_lower_bound(load, std::vector<std::uint32_t>{0b01, 0b10}, 2), Tokens{10});
  EXPECT_EQ(density_lower_bound(load, std::vector<std::uint32_t>{0b11, 0b10}, 2), Tokens{6});
}

TEST(DensityBound, EqualsTheOptimumOverAllSplits) {
  Random random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const int num_ranks = 1 + static_cast<int>(random.below(4));
    std::vector<Tokens> load;
    std::vector<std::uint32_t> holders;
    for (int e = 0; e < 4; ++e) {
      load.emplace_back(random.below(6));
      holders.push_back(static_cast<std::uint32_t>(1 + random.below((1u << num_ranks) - 1)));
    }
    std::vector<std::int64_t> rank_load(num_ranks);
    EXPECT_EQ(density_lower_bound(load, holders, num_ranks).value, best_by_trying_all(load, holders, rank_load));
  }
}

}  // namespace
}  // namespace foremoe::test
