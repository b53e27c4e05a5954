#pragma once

// Lower bounds on the largest rank load, plainly computed: oracles for tests and for the checker, not for planning.
//
// Problem. Divide every expert's load among the ranks that hold it so that the largest rank load is least.
// Theorem. The least largest load is ⌈max over sets S of ranks of w(S) ÷ |S|⌉, where w(S) is the load of the
//   experts held by ranks of S alone: the maximum density of an induced subgraph. No assignment can do better,
//   since w(S) must be served inside S; that one reaches it, in integers, is Hall's theorem.
// Source. FineMoE, equation 3.

#include <cstdint>
#include <span>

#include "foremoe/core/units.h"

namespace foremoe {

// ⌈total ÷ ranks⌉: what no placement at all can go below.
Tokens mean_lower_bound(Tokens total, int num_ranks);

inline constexpr int kMaxDensityRanks = 20;

// The theorem by trying all sets. holders[e] has bit r set when rank r holds expert e; an expert with load has a
// holder. num_ranks ≤ kMaxDensityRanks; O(2^ranks · ranks + experts).
Tokens density_lower_bound(std::span<const Tokens> expert_load, std::span<const std::uint32_t> holders, int num_ranks);

}  // namespace foremoe
