#pragma once

// The least largest rank load that a placement permits, by trying all sets of ranks: the oracle of tests.
//
// Problem. Divide every expert's load among the ranks that hold it so that the largest rank load is least.
// Theorem. The least largest load is ⌈max over sets S of ranks of w(S) ÷ |S|⌉, where w(S) is the load of the
//   experts held by ranks of S alone: the maximum density of an induced subgraph. No assignment can do better,
//   since w(S) must be served inside S; that one reaches it, in integers, is Hall's theorem.
// Source. FineMoE, equation 3.

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/units.h"

namespace foremoe::test {

// holders[e] has bit r set when rank r holds expert e; an expert with load has a holder. At most 20 ranks;
// O(2^ranks · ranks + experts).
inline Tokens density_lower_bound(std::span<const Tokens> expert_load, std::span<const std::uint32_t> holders,
                                  int num_ranks) {
  assert(num_ranks >= 1 && num_ranks <= 20 && expert_load.size() == holders.size());
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
    const int size = std::popcount(set);
    bound = std::max(bound, Tokens{(confined[set].value + size - 1) / size});
  }
  return bound;
}

}  // namespace foremoe::test
