#pragma once

// The minimal largest rank load for a placement, by enumerating all sets of ranks. A test oracle.
//
// Problem. Divide every expert's load among the ranks that hold it to minimise the largest rank load.
// Theorem. The minimum is ⌈max over sets S of ranks of w(S) ÷ |S|⌉, where w(S) is the load of the experts held only by
//   ranks of S: the maximum density of an induced subgraph. No assignment has a smaller maximum, since w(S) must be
//   served inside S. By Hall's theorem, an assignment with integer quotas reaches this bound.
// Source. FineMoE, equation 3.

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/units.h"

namespace foremoe::test {

// Bit r of holders[e] is set if rank r holds expert e. Every expert with load must have a holder. At most 20 ranks;
// O(2^ranks · ranks + experts).
inline Tokens density_lower_bound(std::span<const Tokens> expert_load, std::span<const std::uint32_t> holders,
                                  int num_ranks) {
  assert(num_ranks >= 1 && num_ranks <= 20 && expert_load.size() == holders.size());
  std::vector<Tokens> confined(std::size_t{1} << num_ranks);  // [set], load of experts held only by ranks of the set
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
    const int size = std::popcount(set);
    bound = std::max(bound, Tokens{(confined[set].value + size - 1) / size});
  }
  return bound;
}

}  // namespace foremoe::test
