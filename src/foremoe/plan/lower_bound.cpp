#include "foremoe/plan/lower_bound.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <vector>

namespace foremoe {

Tokens mean_lower_bound(Tokens total, int num_ranks) { return Tokens{(total.value + num_ranks - 1) / num_ranks}; }

Tokens density_lower_bound(std::span<const Tokens> expert_load, std::span<const std::uint32_t> holders, int num_ranks) {
  assert(num_ranks >= 1 && num_ranks <= kMaxDensityRanks && expert_load.size() == holders.size());
  std::vector<Tokens> confined(std::size_t{1} << num_ranks);  // [set], load of experts whose holders all are in the set
  for (std::size_t e = 0; e < holders.size(); ++e) {
    assert(holders[e] != 0 || expert_load[e] == Tokens{0});
    confined[holders[e]] += expert_load[e];
  }
  for (int r = 0; r < num_ranks; ++r) {
    const std::size_t bit = std::size_t{1} << r;
    for (std::size_t set = 0; set < confined.size(); ++set) {
      if (set & bit) confined[set] += confined[set ^ bit];
    }
  }
  Tokens bound;
  for (std::size_t set = 1; set < confined.size(); ++set) {
    bound = std::max(bound, mean_lower_bound(confined[set], std::popcount(set)));
  }
  return bound;
}

}  // namespace foremoe
