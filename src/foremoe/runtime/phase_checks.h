#pragma once

// Checks before a phase starts, on this rank and between ranks.

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/phase_executor.h"

namespace foremoe {

// Collective. Throws InputError if shapes, counts, data types or homes are inconsistent, or ranks differ in loads,
// placements, schedules or versions.
void check_phase(const PhaseParts& parts, const HomeExperts& homes, std::uint64_t version, Communicator& communicator);

// Upper bound on the rows that a rank computes in any layer of any micro-step: the maximum of its homes' load, which
// fallbacks need, and of the quotas known so far.
std::int64_t most_rows_computed(const PhaseParts& parts, RankId rank);

}  // namespace foremoe
